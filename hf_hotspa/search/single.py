"""The single strategies that fit, and the predicted seconds of the best one for the rows of a mini-batch.

Switching is compared with the best single one as predicted, and with those that people know by name, by the choice's
time model and packer. No torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_hotspa.costs.memory import size
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DeviceMemoryError, HotspaError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.search.bucket_plan import Plan
from hf_hotspa.search.chooser import predict_phases
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.strategy import Bucket, Strategy


@dataclass(frozen=True)
class SingleStrategy:
    """One strategy that would train everything, with its packs balanced by `quadratic_cost`; `switch` has the load and
    return seconds of this strategy and the mini-batches' strategies."""

    bucket: Bucket
    time: TimeModel
    switch: Mapping[Strategy, float]
    quadratic_cost: float

    def seconds_by(self, plan: MiniBatchPlan) -> tuple[float, float] | None:
        """Predicts seconds for the rows of a mini-batch, including loads and returns: for this strategy alone, and for
        the phases of the plan. None if a row does not fit."""
        lengths = [sequence.num_tokens for phase in plan.phases for sequence in phase.sequences()]
        if not lengths or max(lengths) > self.bucket.capacity:
            return None
        evaluator = Evaluator([lengths], self.time, self.switch, self.quadratic_cost)
        alone = evaluator.phase(self.bucket.strategy, 0, max(lengths), self.bucket.pack_tokens).seconds
        return alone, sum(phase.seconds for phase in predict_phases(self.time, self.switch, plan))


def with_single(report: StepReport, single: SingleStrategy, plan: MiniBatchPlan) -> StepReport:
    """Adds the single strategy's predicted seconds to a report, corrected like the predictions of its phases."""
    pair = single.seconds_by(plan)
    if pair is None or report.predicted_s is None or pair[1] <= 0:
        return report
    return replace(report, single_s=pair[0] * report.predicted_s / pair[1])


def known_strategies(world_size: int) -> tuple[Strategy, ...]:
    """Returns what people run: DDP, FSDP (ZeRO-3), tensor parallelism alone, a pipeline alone."""
    return Strategy(world_size), Strategy(world_size, z=3), Strategy(tp=world_size), Strategy(pp=world_size)


def _kind(strategy: Strategy) -> tuple[int, ...]:
    """What distinguishes strategies with a name: their degrees, and for replicas alone how they are sharded. Chunked
    strategies have no name."""
    return *strategy.degrees, strategy.ck, strategy.z if strategy.dp == strategy.world_size else 0


@dataclass(frozen=True)
class Singles:
    """Single strategies to compare with."""

    # strategies that hold every row, each with its best packs; the fastest as predicted first
    fitting: tuple[Bucket, ...] = ()
    rejected: Mapping[Strategy, str] = field(default_factory=dict)  # why others do not fit
    # why a strategy in neither is not measured
    otherwise: str = "the flags or the calibration of this run leave it out"

    @classmethod
    def of(
        cls,
        strategies: Sequence[Strategy],
        plan: Callable[[Strategy], Plan],
        shape: ModelShape,
        limit_bytes: float | None,
    ) -> "Singles":
        """Checks every strategy under the limit; `plan` plans a run, or raises a `HotspaError` if none fits."""
        room = size(limit_bytes).replace(".0 ", " ") if limit_bytes is not None else "memory"
        timed: list[tuple[float, Bucket]] = []
        rejected: dict[Strategy, str] = {}
        for strategy in strategies:
            try:
                choice = plan(strategy).choice
                timed.append((choice.static_seconds, choice.static))
                if choice.static.strategy.cuts_packs:
                    rejected[strategy] = f"does not fit in {room}, but in chunks"
            except DeviceMemoryError:
                rejected[strategy] = f"does not fit in {room}"
            except HotspaError as error:
                rejected[strategy] = error.what
        for world_size in {strategy.world_size for strategy in strategies}:
            reasons = {known: known.unsupported_reason(shape) for known in known_strategies(world_size)}
            rejected |= {known: reason for known, reason in reasons.items() if reason is not None}
        return cls(tuple(bucket for _, bucket in sorted(timed, key=lambda each: each[0])), rejected)

    def rivals(self, world_size: int) -> tuple[list[Bucket], dict[str, str]]:
        """Returns the strategies to measure: the fastest of all as predicted, and the fastest of each known kind; and,
        by strategy, why a known kind is missing."""
        chosen, left_out = dict.fromkeys(self.fitting[:1]), dict[str, str]()
        for known in known_strategies(world_size):
            own = next((bucket for bucket in self.fitting if _kind(bucket.strategy) == _kind(known)), None)
            if own is not None:
                chosen[own] = None
            else:
                reasons = (why for strategy, why in self.rejected.items() if _kind(strategy) == _kind(known))
                left_out[str(known)] = next(reasons, self.otherwise)
        return list(chosen), left_out
