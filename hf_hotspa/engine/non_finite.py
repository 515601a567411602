"""What is said about a mini-batch whose loss or gradient is not finite: which parameter, strategy, pack and rows.

The search runs after the collective that found the numbers, when nothing is in flight and the weights are unchanged.
"""

from collections.abc import Mapping
from typing import NoReturn

import torch

from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.errors import NonFiniteError
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.strategy import Strategy

_ROWS_SHOWN = 8
_FIX = "lower the learning rate, clip gradients, or look for broken samples in this mini-batch"
_UNCHANGED = "the weights were not changed"
_CHANGED = (
    "packs before it in this mini-batch have changed the weights already, on each stage others; go on from a checkpoint"
)


def raise_non_finite(
    plan: MiniBatchPlan,
    phases: Mapping[Strategy, PhaseRunner],
    master: MasterStore,
    agreement: Agreement,
    loss: float,
    where: str,
    is_unchanged: bool = True,
) -> NoReturn:
    """Raises the same error on every rank. Collective.

    Args:
        phases: The runners, which still know the losses of their packs.
        is_unchanged: Whether no weight has been changed by this mini-batch.

    Raises:
        NonFiniteError: naming the first parameter whose gradient is not finite, and the first pack whose loss is not.
    """
    why = _UNCHANGED if is_unchanged else _CHANGED
    places = agreement.gather([float(number) for number in _first_bad_pack(plan, phases)])
    for phase, replica, pack in places.int().tolist():
        if phase >= 0:
            where = f"{where}, {_describe(plan, phase, replica, pack)}"
            break

    def check_gradients() -> None:
        if names := master.non_finite_parameters():
            raise NonFiniteError(
                f"the gradient of {names[0]!r} is not finite ({len(names)} parameters on this rank), the loss is {loss}",
                where=where,
                why=why,
                fix=_FIX,
            )

    agreement.run(where, check_gradients)
    raise NonFiniteError(f"the loss is {loss}", where=where, why=why, fix=_FIX)


def _first_bad_pack(plan: MiniBatchPlan, phases: Mapping[Strategy, PhaseRunner]) -> tuple[int, int, int]:
    """(phase, replica, pack) of the first pack on this rank whose loss is not finite; (-1, -1, -1) without any."""
    for index, phase in enumerate(plan.phases):
        runner = phases[phase.bucket.strategy]
        for pack, loss in enumerate(runner.replica.losses):
            if not torch.isfinite(loss):
                return index, runner.mesh.coord.dp, pack
    return -1, -1, -1


def _describe(plan: MiniBatchPlan, phase: int, replica: int, pack: int) -> str:
    packs = plan.phases[phase].replicas[replica]
    rows = list(dict.fromkeys(sequence.row for sequence in packs[pack].sequences))
    shown = ", ".join(map(str, rows[:_ROWS_SHOWN])) + (", ..." if len(rows) > _ROWS_SHOWN else "")
    strategy = plan.phases[phase].bucket.strategy
    return f"strategy {strategy}, replica {replica}, pack {pack + 1} of {len(packs)} (dataset rows {shown})"
