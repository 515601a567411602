"""Training runs of the checkpoint tests: a tiny model, a few steps, and what is left of them on disk."""

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import STATE_FOLDER, WEIGHT, read_manifest, verify
from tests.families import tiny_model
from tests.oracle import random_rows

ROWS, MINI_BATCH = 14, 4  # four mini-batches an epoch, the last one short
STEPS = 7
STRATEGIES = {1: "dp1:60@64", 2: "dp2:16@32,tp2:60", 3: "dp3:16@32,pp3:60", 4: "dp4:16@32,dp2tp2:32,tp2pp2:60",
              8: "dp8:16@32,dp2tp2pp2:60"}  # fmt: skip


class _Losses(TrainerCallback):
    """The loss of every step, unrounded."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_step_report(self, args: Any, state: Any, control: Any, report: Any) -> None:
        self.losses[state.global_step + 1] = report.loss


def make_trainer(
    output: str, world: int, *, family: str = "qwen3_qk_norm_tied", rows: Any = None, **options: Any
) -> Any:
    """A trainer with saves after every step, unless the options say something else.

    `lora` makes it a `PeftModel`, `qlora` one of weights in 4 bits; `given` is one that is there; `cls` makes a subclass of the trainer.
    """
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    changes = options.pop("model", {})
    callbacks = options.pop("callbacks", [])
    seed = options.pop("model_seed", 0)
    cls = options.pop("cls", None)
    common = {
        "output_dir": output, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": STEPS,
        "save_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "seed": 7,
        "hotspa_mini_batch_size": MINI_BATCH, "hotspa_strategies": STRATEGIES[world], "hotspa_report": False,
    }  # fmt: skip
    lora, qlora, model = options.pop("lora", None), options.pop("qlora", None), options.pop("given", None)
    evaluated = options.pop("eval_dataset", None)
    if model is not None:
        pass
    elif qlora is not None:
        from tests.qlora import tiny_qlora

        model = tiny_qlora(family, seed=seed, model=changes, **qlora)
    elif lora is None:
        model = tiny_model(family, seed=seed, **changes)
    else:
        from tests.lora import tiny_lora

        model = tiny_lora(family, seed=seed, model=changes, **lora)
    rows = random_rows(ROWS, model.config.vocab_size, longest=60, seed=3) if rows is None else rows
    args = HotSPaTrainingArguments(**{**common, **options})
    cls = HotSPaTrainer if cls is None else cls(HotSPaTrainer)
    return cls(model=model, args=args, train_dataset=rows, eval_dataset=evaluated, callbacks=[_Losses(), *callbacks])


def train(trainer: Any, resume: Any = None) -> dict[int, float]:
    """Trains to the end; the loss of each step. Waiting for the disk is left out: it changes nothing here."""
    with patch("os.fsync"):
        trainer.train(resume_from_checkpoint=resume)
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, _Losses))
    trainer.close_engine()
    return recorder.losses


def one_run(rank: int, world: int, output: str, resume: Any, options: dict[str, Any]) -> dict[int, float]:
    return train(make_trainer(output, world, **options), resume)


def several_runs(rank: int, world: int, runs: list[tuple[str, Any, dict[str, Any]]]) -> list[dict[int, float]]:
    """The same for several runs, one after the other."""
    return [one_run(rank, world, *run) for run in runs]


def contents(path: Path) -> dict[str, str]:
    """What must be equal, byte for byte, in two runs that did the same: file -> SHA-256."""
    manifest = verify(path)
    exact = {f.name: f.sha256 for f in manifest.files if f.name.startswith(f"{STATE_FOLDER}/")}
    exact |= {f.name: f.sha256 for f in manifest.files if f.name.endswith("model.safetensors")}
    state = json.loads((path / "trainer_state.json").read_text())
    logs = [{k: v for k, v in log.items() if not k.startswith("hotspa/")} for log in state.pop("log_history")]
    for key in ("stateful_callbacks", "best_model_checkpoint"):
        state.pop(key)
    exact["trainer_state"] = hashlib.sha256(json.dumps([state, logs], sort_keys=True).encode()).hexdigest()
    return exact


def contents_of_shares(path: Path) -> dict[str, str]:
    """The same of weights and optimizer state alone, as the manifest has them."""
    return {file.name: file.sha256 for file in read_manifest(path).files if "master" in file.name}


def newest(folder: Path) -> Path:
    return checkpoints(folder)[0]


def whole_state(path: Path) -> dict[str, torch.Tensor]:
    """Every weight and every optimizer state of a checkpoint, whole; scales of blocks, and codes of several elements, are 1-D."""
    from hf_hotspa.checkpoint.tensors import ShareReader

    manifest = read_manifest(path)
    reader = ShareReader(path, manifest)
    return {
        f"{state}/{p.name}": reader.read(p, state, 0, p.numel) if "/" in stored else reader.whole(p, state)
        for p in manifest.parameters
        for state, stored in p.states.items()
    }


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert any(not name.startswith(WEIGHT) for name in found)
    return all(a.dtype == expected[n].dtype and bool((_bits(a) == _bits(expected[n])).all()) for n, a in found.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
