"""`SettingsCallback`: what a run comes to, in one block of lines before its first step."""

from dataclasses import MISSING, fields
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.report import RunFacts

_OURS = "hotspa_"
_SHOWN_ELSEWHERE = {"hotspa_strategies", "hotspa_mini_batch_size", "hotspa_overlong", "hotspa_model_path"}


class SettingsCallback(TrainerCallback):
    """Prints the settings that a run was resolved to, once, on the main process. The default of `HotSPaTrainer`."""

    def __init__(self) -> None:
        self._facts: RunFacts | None = None

    def on_run_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, run: RunFacts, **kwargs: Any
    ) -> None:
        """The engine has been started."""
        self._facts = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The number of steps is known."""
        if self._facts is not None and state.is_world_process_zero:
            tqdm.write(settings_text(self._facts, args, state.max_steps))
        self._facts = None


def settings_text(facts: RunFacts, args: Any, num_steps: int) -> str:
    """The block of lines."""
    model, machine, used = facts.model, facts.machine, facts.settings
    mode = used.get("pipeline_mode", "synchronous")  # records of earlier versions do not say it
    strategies = ", ".join(f"{b['strategy']}:{b['longest']}@{b['pack_tokens']}" for b in facts.buckets)
    if machine["device"] == "cuda":
        where = machine["device_name"]
    else:
        threads = machine["threads_a_rank"]
        where = f"{machine['device'].upper()}, {threads} thread{'s' * (threads > 1)} each"
    if (nodes := machine.get("nodes", 1)) > 1:
        where += f", on {nodes} nodes"
    rows = [
        ("model", f"{model['name']}, {model['parameters'] / 1e6:,.1f}M parameters, computed in {model['compute_dtype']}"),
        ("machine", f"{facts.world_size} process{'es' * (facts.world_size > 1)} on {where}"),
        ("strategies", strategies + (" (chosen by auto)" if facts.plan is not None else "")),
        ("mini-batch", f"{used['mini_batch_size']} rows over all processes; longer rows than the last bucket's: {used['overlong']}"),
        ("updates", "" if mode == "synchronous" else mode),
        ("training", f"{num_steps} steps, {used['optimizer']}, learning rate {used['learning_rate']:g} ({used['lr_scheduler']})"),
        ("other flags", _changed(args)),
        ("output", str(args.output_dir)),
    ]  # fmt: skip
    return "\n".join(["settings of this run", *(f"  {name:<12}{text}" for name, text in rows if text)])


def _changed(args: Any) -> str:
    """Our flags that are not at their defaults, and have no line of their own."""
    changes = []
    for field in fields(args):
        value = getattr(args, field.name)
        is_default = field.default is not MISSING and value == field.default
        if field.name.startswith(_OURS) and field.name not in _SHOWN_ELSEWHERE and not is_default:
            changes.append(f"{field.name}={value}")
    return ", ".join(changes)
