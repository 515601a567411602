"""`PhaseProgressCallback`: progress within a long step, phase by phase, on the main process.

`SettingsCallback`: the resolved settings of a run, in one block of lines before its first step.
"""

import sys
import time
from dataclasses import MISSING, fields
from html import escape
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerState

from hf_hotspa.errors import printable
from hf_hotspa.report import PhaseEvent, RunFacts


class PhaseProgressCallback(TrainerCallback):
    """Shows one line for the current mini-batch: the running phase, its packs and tokens, and how many phases are done.

    A bar below the Trainer's in a terminal, a line of text in a notebook, nothing in a pipe. Short steps show nothing:
    the line appears in the first step, and after a step that took longer than `delay_s`. `HotSPaTrainer` adds this
    callback if somebody watches and `disable_tqdm` is not set.

    Args:
        delay_s: Seconds that a step must take for the next one to have a line.
        disable: True for never, False for always; None: no line in a pipe.
    """

    def __init__(self, delay_s: float = 2.0, disable: bool | None = None) -> None:
        self.delay_s, self.disable = delay_s, disable
        self._line: _Bar | _NotebookLine | None = None
        self._notebook_line: _NotebookLine | None = None
        self._began = 0.0
        self._last_s = float("inf")  # the first step warms up, and is long

    def on_phase_begin(
        self, args: object, state: TrainerState, control: object, phase: PhaseEvent, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero or (not is_watched() if self.disable is None else self.disable):
            return
        if phase.index == 0:
            self._close()  # the line of an abandoned mini-batch
            self._began = time.perf_counter()
            if self._last_s > self.delay_s:
                if in_notebook():  # one line per training, because each needs space in the output of the cell
                    self._line = self._notebook_line = self._notebook_line or _NotebookLine()
                    self._notebook_line.num_phases = phase.num_phases
                else:
                    self._line = _Bar(phase.num_phases)
        if self._line is not None:
            counts = f"{phase.num_packs} packs, {phase.num_tokens} tokens"
            self._line.show(phase.index, f"step {phase.step}: {phase.strategy}, {counts}")

    def on_phase_end(
        self, args: object, state: TrainerState, control: object, phase: PhaseEvent, **kwargs: object
    ) -> None:
        if phase.index + 1 == phase.num_phases:
            self._last_s = time.perf_counter() - self._began
            self._close()

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._close()
        self._notebook_line = None

    def _close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def is_watched() -> bool:
    """Whether somebody sees the output: standard error is a terminal, or the process runs a notebook."""
    return sys.stderr.isatty() or in_notebook()


class _Bar:
    def __init__(self, num_phases: int) -> None:
        self._bar = tqdm(total=num_phases, unit="phase", leave=False, position=1, dynamic_ncols=True)

    def show(self, num_done: int, text: str) -> None:
        self._bar.n = num_done
        self._bar.set_description_str(text)

    def close(self) -> None:
        self._bar.close()


class _NotebookLine:
    """One line of text in the output of a cell, changed in place. Needs no widgets."""

    num_phases = 0

    def __init__(self) -> None:
        from IPython.display import display  # available in every kernel

        self._handle = display(_Text(""), display_id=True)

    def show(self, num_done: int, text: str) -> None:
        self._update(f"{text} (phase {num_done + 1} of {self.num_phases})")

    def close(self) -> None:
        self._update("")

    def _update(self, text: str) -> None:
        if self._handle is not None:
            self._handle.update(_Text(text))


class _Text:
    """Text that a notebook shows in small type, and everything else as plain text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<small>{escape(self._text)}</small>"


# -- the settings of a run --------------------------------------------------------------------------------------------


_OURS = "hotspa_"
_SHOWN_ELSEWHERE = {"hotspa_strategies", "hotspa_mini_batch_size", "hotspa_overlong", "hotspa_model_path"}


class SettingsCallback(TrainerCallback):
    """Prints the resolved settings of a run once, on the main process. The default of `HotSPaTrainer`."""

    def __init__(self) -> None:
        self._facts: RunFacts | None = None

    def on_run_begin(
        self, args: object, state: TrainerState, control: object, *, run: RunFacts, **kwargs: object
    ) -> None:
        """Called when the engine has started."""
        self._facts = run

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Called when the number of steps is known."""
        if self._facts is not None and state.is_world_process_zero:
            tqdm.write(printable(settings_text(self._facts, args, state.max_steps)))
        self._facts = None


def settings_text(facts: RunFacts, args: Any, num_steps: int) -> str:
    model, machine, used = facts.model, facts.machine, facts.settings
    mode = used.get("pipeline_mode", "synchronous")  # missing in records of earlier versions
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
    changes = []
    for field in fields(args):
        value = getattr(args, field.name)
        is_default = field.default is not MISSING and value == field.default
        if field.name.startswith(_OURS) and field.name not in _SHOWN_ELSEWHERE and not is_default:
            changes.append(f"{field.name}={value}")
    return ", ".join(changes)
