"""Which strategies the options of a run support.

The engine rejects unsupported strategies and searches do not offer them; both ask here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.costs.divided import AUTO, GATHER, RING, ULYSSES, choose_way
from hf_hotspa.errors import HotspaError, StrategyError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import check_runs, wants_one_shape
from hf_hotspa.seam import Options
from hf_hotspa.strategy import Bucket, Strategy

_NOT_EXACT = "they have not been made exact together"
_OWN_SCHEDULE = "leave the schedule at 'auto' (hotspa_pipeline_schedule)"


@dataclass(frozen=True)
class RunOptions:
    """The options that decide, with the model, whether a strategy can run."""

    schedule: str = "auto"  # the pipeline schedule, one of `pipeline_order.SCHEDULES`
    context_parallel: str = AUTO  # the cp method, one of `costs.divided.WAYS`
    device_type: str = "cuda"  # `cpu` or `cuda`
    features: tuple[Options, ...] = ()  # settings of features, some of which do not run every strategy

    def check(self, buckets: Iterable[Bucket], shape: ModelShape) -> None:
        """Checks that all strategies can run. Raises `StrategyError`: a schedule or a cp method that cannot run a
        strategy, or fewer tokens than cp ranks; `UnsupportedError`: an option that cp or ep does not support; and what
        features raise."""
        for bucket in buckets:
            strategy, cp = bucket.strategy, bucket.strategy.cp
            if bucket.capacity < cp:
                raise StrategyError(
                    f"bucket {bucket} has packs of {bucket.capacity} tokens, and cp{cp} divides them over {cp} ranks",
                    fix=f"use dp{cp} instead of cp{cp}, or longer packs",
                )
            self._check(strategy, shape)

    def runs(self, strategy: Strategy, shape: ModelShape) -> bool:
        try:
            self._check(strategy, shape)
        except HotspaError:
            return False
        return True

    def keeps_sequences(self, strategy: Strategy, shape: ModelShape) -> bool:
        """Whether attention has each sequence as a whole, under a strategy that can run."""
        if strategy.cuts_packs:
            return False
        return strategy.cp == 1 or choose_way(strategy, shape, self.context_parallel) == ULYSSES

    def _check(self, strategy: Strategy, shape: ModelShape) -> None:
        check_runs(self.schedule, strategy)
        for settings in self.features:
            settings.check_strategy(strategy, shape, self.schedule)
        if strategy.exchanges_tokens:
            self._check_divided(strategy)
        if strategy.cp > 1:
            self._check_context(strategy, shape)

    def _check_divided(self, strategy: Strategy) -> None:
        if strategy.pp > 1 and wants_one_shape(self.schedule):
            raise UnsupportedError(
                f"the pipeline schedule {self.schedule!r} under {strategy}",
                why="it needs packs of one shape, and the rows of a pack's ranks differ by some tokens"
                if strategy.cp > 1
                else "ranks of several replicas exchange tokens, and must run their packs in one order",
                fix=_OWN_SCHEDULE,
            )

    def _check_context(self, strategy: Strategy, shape: ModelShape) -> None:
        if strategy.kg or strategy.kh:
            raise UnsupportedError(
                f"strategy {strategy}: kept graphs (+kg) or keys and values in host memory (+kh) with cp",
                why=_NOT_EXACT,
                fix=f"leave {'+kh' if strategy.kh else '+kg'} out, or use dp or tp instead of cp",
            )
        is_ring = choose_way(strategy, shape, self.context_parallel) == RING
        if is_ring and (strategy.ck or self.device_type != "cpu"):
            raise UnsupportedError(
                f"the cp method {RING!r} under {strategy}" + ("" if strategy.ck else f" on {self.device_type}"),
                why="chunks would also need the keys and values of earlier chunks on the ring"
                if strategy.ck
                else "its blocks are computed by a kernel for CPU",
                fix=f"use {ULYSSES!r} or {GATHER!r}, or leave it at {AUTO!r}",
            )
