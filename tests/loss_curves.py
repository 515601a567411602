"""Loss curves in bf16 beside fp32, of the stock Trainer and of `HotSPaTrainer` with hot-switched strategies.

`python -m tests.loss_curves [steps]` prints the table of docs/data/bf16-curves.csv: a tiny model, the same rows, order, seed and
optimizer in every run; the stock Trainer in one process, ours on four gloo ranks under three strategies.
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from tests.families import tiny_model
from tests.gloo.test_trainer import COMMON, MINI_BATCH, THREE, _LossRecorder, dataset_rows
from tests.harness import run_ranks
from tests.moves import padded

FAMILY, STEPS = "llama_gqa_bias", 200
_RUN = {**COMMON, "learning_rate": 2e-3, "report_to": "none"}


def stock_losses(rank: int, world_size: int, folder: str, steps: int, options: dict[str, Any]) -> list[float]:
    """The loss of every step of the stock Trainer. With `bf16`, it computes under autocast and keeps fp32 weights."""
    model = tiny_model(FAMILY)
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=MINI_BATCH,
        save_strategy="no",
        **{**_RUN, "max_steps": steps, **options},
    )
    trainer = _LossRecorder(
        model=model, args=args, train_dataset=dataset_rows(model.config.vocab_size), data_collator=padded
    )
    trainer.train()
    return trainer.losses


def hotspa_losses(rank: int, world_size: int, folder: str, steps: int, options: dict[str, Any]) -> list[float]:
    """The same of `HotSPaTrainer`. With `bf16`, weights and activations of the strategies are bf16."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    losses = list[float]()

    class Recorder(TrainerCallback):
        def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
            losses.append(report.loss)

    model = tiny_model(FAMILY)
    args = HotSPaTrainingArguments(
        output_dir=folder,
        hotspa_mini_batch_size=MINI_BATCH,
        hotspa_report=False,
        save_strategy="no",
        **{**_RUN, "hotspa_strategies": THREE, "max_steps": steps, **options},
    )
    rows = dataset_rows(model.config.vocab_size)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, callbacks=[Recorder()])
    trainer.train()
    trainer.close_engine()
    return losses


def differences(found: list[float], expected: list[float]) -> tuple[float, float, float]:
    """Mean, largest and signed mean difference of two curves."""
    signed = torch.tensor(found, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    return float(signed.abs().mean()), float(signed.abs().max()), float(signed.mean())


RUNS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "stock, fp32": (1, stock_losses, {}),
    "stock, bf16 (autocast)": (1, stock_losses, {"bf16": True}),
    "hot-switched, fp32": (4, hotspa_losses, {}),
    "hot-switched, bf16": (4, hotspa_losses, {"bf16": True}),
    "hot-switched, bf16, gradients moved in bf16": (4, hotspa_losses, {"bf16": True, "hotspa_grad_wire_dtype": "bf16"}),
    "hot-switched, bf16, gradients added up and moved in bf16": (
        4,
        hotspa_losses,
        {"bf16": True, "hotspa_grad_accum_dtype": "bf16"},
    ),
}
"""Name -> ranks, function, options."""


def curve(name: str, steps: int) -> list[float]:
    """The losses of one of `RUNS`."""
    ranks, function, options = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        found: list[float] = run_ranks(ranks, function, folder, steps, options, timeout=900)[0]
    return found


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    curves = {name: curve(name, steps) for name in RUNS}
    exact = curves["stock, fp32"]
    print("| run | first loss | last loss | mean difference | largest | signed mean |")
    print("|---|---|---|---|---|---|")
    for name, losses in curves.items():
        mean, most, signed = differences(losses, exact)
        print(f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {mean:.1e} | {most:.1e} | {signed:+.1e} |")


if __name__ == "__main__":
    main()
