"""Loss curves in bf16 beside fp32, of the stock Trainer and of `HotSPaTrainer` with hot-switched strategies.

`python -m tests.loss_curves [steps]` prints the table of docs/data/bf16-curves.csv: a tiny model, the same rows, order, seed and
optimizer in every run; the stock Trainer in one process, ours on four gloo ranks under three strategies.
"""

import sys
import tempfile
from typing import Any

import torch

from tests.gloo.test_trainer import THREE, dataset_rows, hotspa_run, stock_run
from tests.harness import run_ranks

FAMILY, STEPS = "llama_gqa_bias", 200
_RUN = {"learning_rate": 2e-3}
"""With `bf16` the stock Trainer computes under autocast and keeps fp32 weights; ours has weights and activations of the
strategies in bf16."""


def differences(found: list[float], expected: list[float]) -> tuple[float, float, float]:
    """Mean, largest and signed mean difference of two curves."""
    signed = torch.tensor(found, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    return float(signed.abs().mean()), float(signed.abs().max()), float(signed.mean())


RUNS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "stock, fp32": (1, stock_run, {}),
    "stock, bf16 (autocast)": (1, stock_run, {"bf16": True}),
    "hot-switched, fp32": (4, hotspa_run, {}),
    "hot-switched, bf16": (4, hotspa_run, {"bf16": True}),
    "hot-switched, bf16, gradients moved in bf16": (4, hotspa_run, {"bf16": True, "hotspa_grad_wire_dtype": "bf16"}),
    "hot-switched, bf16, gradients added up and moved in bf16": (
        4, hotspa_run, {"bf16": True, "hotspa_grad_accum_dtype": "bf16"},
    ),
}  # fmt: skip
"""Name -> ranks, function, options."""


def curve(name: str, steps: int) -> list[float]:
    """The losses of one of `RUNS`."""
    ranks, run, options = RUNS[name]
    given = (THREE, steps) if run is hotspa_run else (steps, dataset_rows(163))
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = run_ranks(ranks, run, FAMILY, torch.float32, folder, *given, _RUN | options, timeout=900)[
            0
        ][0]
    return losses


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
