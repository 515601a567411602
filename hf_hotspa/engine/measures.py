"""What a rank measures of a phase, and how the measures of all ranks become reports."""

import resource
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_hotspa.packing.mini_batch import MiniBatchPlan, PhasePlan
from hf_hotspa.report import PhaseEvent, PhaseMeasure, PhaseReport, RankMeasures, StepReport, SwitchEvent


class PhaseFacts(NamedTuple):
    """What every rank knows of a phase that ran.

    Attributes:
        frozen_bytes: Bytes of frozen weights that its load moved between ranks, summed over ranks.
        context: See `PhaseReport.context`.
    """

    frozen_bytes: int = 0
    context: str = ""


class Observer:
    """Who is told of the phases of a mini-batch while it runs: nobody. Others must not raise and not communicate."""

    def wants_stop(self) -> bool:
        """Whether this rank wants to stop after this mini-batch; asked when its last phase has ended."""
        return False

    def phase_begins(self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int) -> None:
        """Before the weights for phase `order[index]` of mini-batch `step` (counted from 1) are loaded."""

    def phase_ended(
        self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int, measured: PhaseMeasure
    ) -> None:
        """After its gradients were returned."""


def phase_event(
    step: int, plan: MiniBatchPlan, order: Sequence[int], index: int, measured: PhaseMeasure | None = None
) -> PhaseEvent:
    """The begin of a phase, or its end, when it was measured; arguments as for `Observer`."""
    phase = plan.phases[order[index]]
    return PhaseEvent(
        step,
        index,
        len(order),
        str(phase.bucket.strategy),
        num_packs=phase.num_packs,
        num_sequences=phase.num_sequences,
        num_tokens=phase.num_tokens,
        seconds=None if measured is None else measured._asdict(),
    )


def switch_events(step: int, strategy: str, measured: PhaseMeasure) -> list[SwitchEvent]:
    """The load and the return of a phase on this rank."""
    return [
        SwitchEvent(step, "load", strategy, measured.load_s, measured.load_busy_s, int(measured.load_bytes)),
        SwitchEvent(step, "return", strategy, measured.return_s, measured.return_busy_s, int(measured.return_bytes)),
    ]


def synchronize(device: torch.device) -> None:
    """Returns when the current stream has come so far: not the whole device, a switch may be under way in a stream of its own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def peak_memory(device: torch.device) -> int:
    """Bytes that this rank has held at most: allocated by torch on an accelerator, resident on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def step_report(
    step: int,
    loss: float,
    grad_norm: float,
    plan: MiniBatchPlan,
    order: Sequence[int],
    measures: Tensor,
    total_s: float,
    ranks: Tensor,
    facts: Sequence[PhaseFacts],
) -> StepReport:
    """The report of a mini-batch.

    Args:
        loss: Token mean over all ranks.
        grad_norm: Before clipping.
        order: The phases of the plan in the order in which they ran.
        measures: fp64 [world size, phases in that order, fields of `PhaseMeasure`].
        total_s: Wall seconds on this rank.
        ranks: fp64 [world size, 2]: seconds to the agreement, and peak memory in bytes.
        facts: Of each phase in that order.
    """
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        num_labels=plan.num_labels,
        num_rows=plan.num_rows,
        num_truncated=plan.num_truncated,
        num_split=plan.num_split,
        num_dropped=plan.num_dropped,
        num_empty=plan.num_empty,
        phases=tuple(
            _phase_report(plan.phases[index], measured, known)
            for index, measured, known in zip(order, measures.unbind(1), facts, strict=True)
        ),
        total_s=total_s,
        ranks=RankMeasures(ranks[:, 0].tolist(), ranks[:, 1].long().tolist(), measures.tolist()),
    )


def _phase_report(phase: PhasePlan, measured: Tensor, facts: PhaseFacts) -> PhaseReport:
    most = PhaseMeasure(*measured.amax(0).tolist())
    least = PhaseMeasure(*measured.amin(0).tolist())
    total = PhaseMeasure(*measured.sum(0).tolist())
    return PhaseReport(
        strategy=str(phase.bucket.strategy),
        num_packs=phase.num_packs,
        num_sequences=phase.num_sequences,
        num_tokens=phase.num_tokens,
        load_s=most.load_s,
        compute_s=most.compute_s,
        wait_s=most.wait_s,
        return_s=most.return_s,
        load_bytes=int(total.load_bytes),
        return_bytes=int(total.return_bytes),
        # the busy seconds of a rank hold its waiting for slower ones: the shortest are the switch's own
        hidden_load_s=max(0.0, least.load_busy_s - most.load_s),
        hidden_return_s=max(0.0, least.return_busy_s - most.return_s),
        capacity_tokens=sum(
            max(phase.bucket.pack_tokens, pack.num_tokens) for packs in phase.replicas for pack in packs
        ),
        busiest_tokens=max(sum(pack.num_tokens for pack in packs) for packs in phase.replicas),
        longest_tokens=max((sequence.num_tokens for sequence in phase.sequences()), default=0),
        squared_tokens=sum(sequence.num_tokens**2 for sequence in phase.sequences()),
        **facts._asdict(),
        unit_load_s=most.unit_load_s,
        unit_return_s=most.unit_return_s,
        hidden_unit_load_s=max(0.0, least.unit_load_busy_s - most.unit_load_s),
        hidden_unit_return_s=max(0.0, least.unit_return_busy_s - most.unit_return_s),
        unit_load_bytes=int(total.unit_load_bytes),
        unit_return_bytes=int(total.unit_return_bytes),
        expert_tokens=int(total.expert_tokens),
        busiest_expert_tokens=int(most.expert_tokens),
        dropped_expert_tokens=int(total.dropped_tokens),
        context_bytes=int(total.context_bytes),
    )
