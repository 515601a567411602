"""The single strategies that fit: which they are, and what the best of them would take for the rows of a mini-batch.

What switching is compared with, whoever chose the strategies. The time model and the packer are those of the choice
itself. No torch.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaError
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.search.chooser import predict_phases
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.search.plan import Plan
from hf_hotspa.strategy import Bucket, Strategy


@dataclass(frozen=True)
class SingleStrategy:
    """One strategy that would train everything.

    Args:
        bucket: The strategy, its longest sequence and its packs.
        switch: Load and return seconds of it, and of the strategies of the mini-batches.
        quadratic_cost: See `ModelShape.quadratic_cost`.
    """

    bucket: Bucket
    time: TimeModel
    switch: Mapping[Strategy, float]
    quadratic_cost: float

    def seconds_by(self, plan: MiniBatchPlan) -> tuple[float, float] | None:
        """Predicted seconds for the rows of a mini-batch, loads and returns included, by this time model: of this strategy
        alone, and of the phases of the plan. None where a row does not fit."""
        lengths = [sequence.num_tokens for phase in plan.phases for sequence in phase.sequences()]
        if not lengths or max(lengths) > self.bucket.capacity:
            return None
        evaluator = Evaluator([lengths], self.time, self.switch, self.quadratic_cost)
        alone = evaluator.phase(self.bucket.strategy, 0, max(lengths), self.bucket.pack_tokens).seconds
        return alone, sum(phase.seconds for phase in predict_phases(self.time, self.switch, plan))


def with_single(report: StepReport, single: SingleStrategy, plan: MiniBatchPlan) -> StepReport:
    """The report of a mini-batch with what the single strategy would have taken, corrected as its phases' predictions are."""
    pair = single.seconds_by(plan)
    if pair is None or report.predicted_s is None or pair[1] <= 0:
        return report
    return replace(report, single_s=pair[0] * report.predicted_s / pair[1])


def fitting(strategies: Iterable[Strategy], plan: Callable[[Strategy], Plan]) -> list[Bucket]:
    """The single strategies that hold every row, each with the packs that suit it best; the fastest as predicted first.

    Args:
        plan: Plans a run under one of them; raises a `HotspaError` where it does not fit.
    """
    timed = []
    for strategy in strategies:
        with suppress(HotspaError):
            choice = plan(strategy).choice
            timed.append((choice.static_seconds, choice.static))
    return [bucket for _, bucket in sorted(timed, key=lambda each: each[0])]
