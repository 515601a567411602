"""Which strategies the options of a run go together with.

The engine refuses what cannot run, and searches do not offer it: both ask here. Plain data, no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.costs.divided import AUTO, GATHER, RING, ULYSSES, choose_way
from hf_hotspa.errors import HotspaError, StrategyError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import check_runs
from hf_hotspa.strategy import Bucket, Strategy

_NOT_EXACT = "they have not been made exact together"
_OWN_SCHEDULE = "leave the schedule at 'auto' (hotspa_pipeline_schedule)"


@dataclass(frozen=True)
class RunOptions:
    """What decides, beside the model, whether a strategy can run.

    Args:
        schedule: That of pipelines, one of `pipeline_order.SCHEDULES`.
        context_parallel: How ranks of cp attend, one of `costs.divided.WAYS`.
        device_type: Where ranks compute: `cpu` or `cuda`.
        flexible: Whether ranks of tp may give work away.
        expert_capacity: The capacity factor of experts; None for none.
    """

    schedule: str = "auto"
    context_parallel: str = AUTO
    device_type: str = "cuda"
    flexible: bool = False
    expert_capacity: float | None = None

    @property
    def _wants_one_shape(self) -> bool:
        """Whether pipelines want packs of one shape: torch's schedules do."""
        return self.schedule in ("1f1b", "gpipe")

    def check(self, buckets: Iterable[Bucket], shape: ModelShape) -> None:
        """Refuses what cannot run, and a capacity of experts where it would not be that of whole packs.

        Raises:
            StrategyError: a schedule or a way of cp that cannot run a strategy, or fewer tokens than there are ranks of cp.
            UnsupportedError: what does not go together with cp, with ep, or with a capacity of experts.
        """
        for bucket in buckets:
            strategy, cp = bucket.strategy, bucket.strategy.cp
            if bucket.capacity < cp:
                raise StrategyError(
                    f"bucket {bucket} has packs of {bucket.capacity} tokens, and cp{cp} divides them over {cp} ranks",
                    fix=f"use dp{cp} in the place of cp{cp}, or longer packs",
                )
            self._check(strategy, shape)

    def runs(self, strategy: Strategy, shape: ModelShape) -> bool:
        """Whether `check` lets a strategy pass, with packs that are long enough."""
        try:
            self._check(strategy, shape)
        except HotspaError:
            return False
        return True

    def _check(self, strategy: Strategy, shape: ModelShape) -> None:
        check_runs(self.schedule, strategy, self.flexible)
        if strategy.exchanges_tokens:
            self._check_divided(strategy)
        if strategy.cp > 1:
            self._check_context(strategy, shape)
        if self.expert_capacity is not None:
            self._check_capacity(strategy, shape)

    def _check_divided(self, strategy: Strategy) -> None:
        if self.flexible:
            raise UnsupportedError(
                f"strategy {strategy} beside ranks that give work away (hotspa_stragglers)",
                why=_NOT_EXACT,
                fix="use hotspa_stragglers=balance or watch",
            )
        if strategy.pp > 1 and self._wants_one_shape:
            raise UnsupportedError(
                f"the pipeline schedule {self.schedule!r} under {strategy}",
                why="it wants packs of one shape, and the rows of a pack's ranks differ by some tokens"
                if strategy.cp > 1
                else "ranks of several replicas exchange tokens, and must run their packs in one order",
                fix=_OWN_SCHEDULE,
            )

    def _check_context(self, strategy: Strategy, shape: ModelShape) -> None:
        if strategy.kg or strategy.kh:
            raise UnsupportedError(
                f"strategy {strategy}: kept graphs (+kg) or keys and values in host memory (+kh) with cp",
                why=_NOT_EXACT,
                fix=f"leave {'+kh' if strategy.kh else '+kg'} out, or use dp or tp in the place of cp",
            )
        is_ring = choose_way(strategy, shape, self.context_parallel) == RING
        if is_ring and (strategy.ck or self.device_type != "cpu"):
            raise UnsupportedError(
                f"the way {RING!r} of {strategy}" + ("" if strategy.ck else f" on {self.device_type}"),
                why="chunks would need the keys and values of those before them on the ring, too"
                if strategy.ck
                else "its blocks are computed by a kernel for CPU",
                fix=f"use {ULYSSES!r} or {GATHER!r}, or leave it at {AUTO!r}",
            )

    def _check_capacity(self, strategy: Strategy, shape: ModelShape) -> None:
        if shape.ep_unsupported_reason or not shape.num_experts:
            raise UnsupportedError(
                "a capacity of experts (hotspa_expert_capacity)",
                why=(shape.ep_unsupported_reason or f"{shape.family} has no experts").removesuffix(", so ep must be 1"),
                fix="leave hotspa_expert_capacity out",
            )
        parts = {"cp": strategy.cp > 1, "+sp": strategy.sp, "+ck": strategy.ck > 0}
        cutting = next((name for name, is_there in parts.items() if is_there), None)
        if cutting or (strategy.pp > 1 and self._wants_one_shape):
            raise UnsupportedError(
                f"a capacity of experts (hotspa_expert_capacity) under {strategy}"
                + ("" if cutting else f" with the pipeline schedule {self.schedule!r}"),
                why="which tokens are dropped is decided for a whole pack, and "
                + (f"{cutting} computes parts of packs" if cutting else "it pads packs to one shape"),
                fix=f"leave {cutting} out" if cutting else _OWN_SCHEDULE,
            )
