"""What the dtypes of gradients cost: bytes, and distance from the fp64 gradient, in packed and hot-switched mini-batches.

`python -m tests.gradient_errors` prints the table of docs/exactness.md: a tiny model whose weights are bf16 numbers, one
mini-batch in three phases, on four gloo ranks, for every pair of `hotspa_grad_accum_dtype` and `hotspa_grad_wire_dtype`,
computed in fp32 and in bf16. The reference is the plain model on unpacked sequences in fp64, with the same weights.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_hotspa.layout.vector import BF16, FP32, GradientDtypes
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows, reference_step
from tests.worlds import make_engine, make_mini_batch

FAMILY = "llama_gqa_bias"
BUCKETS = "dp4:8@16,dp2tp2:24@32,tp2pp2:60@64"
EVERY = tuple(GradientDtypes(accumulation, wire) for accumulation in (FP32, BF16) for wire in (FP32, BF16))


@dataclass(frozen=True)
class Cost:
    """What one pair of dtypes costs.

    Args:
        error: Norm of the difference of all gradients from fp64 over the norm of these.
        packs: The most packs that a replica adds up in a phase.
        return_bytes: Bytes that gradients moved between ranks, summed over ranks and phases.
        arena_bytes: Bytes of this rank's buffer for the gradients of strategies.
        forecast_bytes: What the engine said of that beforehand.
        loss: The loss.
    """

    error: float
    packs: int
    return_bytes: int
    arena_bytes: int
    forecast_bytes: int
    loss: float


def costs_on_rank(
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    choices: Sequence[GradientDtypes],
    num_rows: int,
    buckets: str = BUCKETS,
) -> list[Cost]:
    """The costs of these choices, each in an engine of its own. The same mini-batch, the same weights."""
    model = tiny_model(FAMILY).bfloat16().float()  # numbers that bf16 holds: what remains is the computation
    rows = random_rows(num_rows, model.config.vocab_size, longest=60)
    _, expected = reference_step(copy.deepcopy(model).double(), rows)
    whole = torch.cat([g.flatten() for g in expected.values()])
    found = []
    for gradients in choices:
        engine = make_engine(model, buckets, compute_dtype=dtype, gradients=gradients)
        mini_batch = make_mini_batch(engine, rows)
        report = engine.forward_backward(mini_batch)
        got = engine.full_gradients()
        difference = torch.cat([got[name].double().flatten() for name in expected]) - whole
        found.append(
            Cost(
                float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(whole)),
                max(len(packs) for phase in mini_batch.plan.phases for packs in phase.replicas),
                sum(phase.return_bytes + phase.unit_return_bytes for phase in report.phases),
                engine._switching.arenas.gradients.num_bytes,
                engine._switching.forecast.gradients,
                report.loss,
            )
        )
        engine.close()
    return found


def main() -> None:
    print("| accumulated in | moved in | bytes of buffers | bytes moved | error, computed in fp32 | in bf16 |")
    print("|---|---|---|---|---|---|")
    in_fp32, in_bf16 = (
        run_ranks(4, costs_on_rank, dtype, EVERY, 400, timeout=600)[0] for dtype in (torch.float32, torch.bfloat16)
    )
    for gradients, exact, rounded in zip(EVERY, in_fp32, in_bf16, strict=True):
        sizes = f"{rounded.arena_bytes:,} | {rounded.return_bytes:,}"
        print(f"| {gradients.accumulation} | {gradients.wire} | {sizes} | {exact.error:.1e} | {rounded.error:.3e} |")
    print(f"\nup to {in_fp32[0].packs} packs of a phase on a replica")


if __name__ == "__main__":
    main()
