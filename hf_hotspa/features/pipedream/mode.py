"""PipeDream: the stages of a pipeline update by themselves, after every backward pass, with versions of their weights.

Asynchronous 1F1B with weight stashing (Narayanan et al., SOSP'19, section 3.3), a separate training mode
and *not* the synchronous update of everything else in this package. Stages update after every backward pass: when stage s of p
(from 0) runs a pack forward, it has run p - 1 - s fewer backward passes than a sequential optimizer would have. It
keeps those weights until the pack's backward pass, so that both use the same bits. With vertical sync all stages use
the version of the first.

* Update k of a stage (k = 0, 1, ...) uses the k-th packs of all replicas: the gradient of the mean loss over their
  label tokens. Without label tokens nothing is updated.
* Version v of its weights has seen the updates 0 to v - 1 of the mini-batch. Version 0 is the same point on all stages:
  a pipeline runs empty at the end of every mini-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from hf_hotspa.errors import HotspaConfigError, StrategyError, UnsupportedError
from hf_hotspa.packing.pipeline_order import Passes, runs_chunks
from hf_hotspa.seam import SYNCHRONOUS, Options, by_name
from hf_hotspa.strategy import Bucket, Strategy

if TYPE_CHECKING:
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.specs import ModelDescription

PIPEDREAM = "pipedream"
PIPELINE_MODES = (SYNCHRONOUS, PIPEDREAM)
"""`synchronous`: one update a mini-batch, the same on all stages. `pipedream`: one a pack and stage, delayed."""


@dataclass(frozen=True)
class PipeDream(Options):
    """How stages update in this mode. Raises `HotspaConfigError`: the norm is not a positive number."""

    vertical_sync: bool = False  # whether all stages use, for each pack, the weight version of the first stage
    # the 2-norm to which each stage by itself clips the gradient of each update; None for no clipping
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (isfinite(self.max_norm) and self.max_norm > 0):
            raise HotspaConfigError(
                f"stages clip to the norm {self.max_norm}", fix="use for example 1.0, or None for no clipping"
            )

    def delays(self, num_stages: int) -> tuple[int, ...]:
        """Returns, by stage, how many updates a full pipeline's pack misses, compared with a sequential run."""
        return tuple(num_stages - 1 - (0 if self.vertical_sync else stage) for stage in range(num_stages))

    def most_versions(self, num_stages: int, stage: int, num_packs: int | None = None) -> int:
        """Returns the most versions of its weights that a stage holds, for so many packs (None: any number)."""
        most = num_stages if self.vertical_sync else num_stages - stage
        if num_packs is None:
            return most
        # the last updates come after the last forward
        return max(1, min(most, num_packs - self.delays(num_stages)[stage]))

    def pack_versions(self, passes: Passes, stage: int) -> list[int]:
        """Returns the weight version that a stage runs each pack with, forward and backward. Never falls."""
        done, versions = 0, list[int]()
        for _, is_backward in passes.operations(0 if self.vertical_sync else stage):
            if is_backward:
                done += 1
            else:
                versions.append(done)
        return versions

    def check_engine(self, options: "EngineOptions") -> None:
        if options.overlap_load or options.overlap_return or options.offload_master:
            raise HotspaConfigError(
                "stages that update by themselves, with switches beside the computation or a master store in host memory",
                why="a stage loads its weights anew after every pack, and waits for that",
                fix="leave overlap_load, overlap_return and offload_master out, or pipedream",
            )

    def check_plan(self, buckets: Sequence[Bucket], tied: Sequence[str], schedule: str) -> None:
        check_strategies(buckets, tied, schedule)

    def check_model(self, description: "ModelDescription", buckets: Sequence[Bucket], options: "EngineOptions") -> None:
        """Rejects a tied weight, and a balance loss of routers, which needs the complete mini-batch's gradient."""
        check_strategies(buckets, [s.name for s in description.vector.specs if s.in_head], options.pipeline_schedule)
        if description.auxiliary_layers:
            raise UnsupportedError(
                f"{_NAMED} with a model whose routers have a balance loss",
                why="it covers the complete mini-batch, and stages update after every pack",
                fix=f"set output_router_logits=False in the model's config, {_BACK}",
            )
        if by_name(options.features).get("slow_devices") is not None:
            raise UnsupportedError(
                f"{_NAMED} with slow ranks that hand over columns of their products",
                why="the columns are agreed on for a complete mini-batch",
                fix=f"use hotspa_stragglers=watch, {_BACK}",
            )

    def shown(self, strategy: Strategy | None = None) -> Mapping[str, str]:
        return {"pipeline_mode": PIPEDREAM if strategy is None else self.text(strategy.pp)}

    def text(self, num_stages: int) -> str:
        """Describes the mode, for a run's log."""
        synced = ", all stages with the weights of the first" if self.vertical_sync else ""
        delays = ", ".join(map(str, self.delays(num_stages)))
        return (
            f"PipeDream: asynchronous 1F1B with weight stashing{synced}; not the synchronous update. Each stage updates after "
            f"the backward pass of every pack. Weights are behind by {delays} packs on stages 0 to {num_stages - 1} (fewer at "
            "the beginning of a mini-batch: the pipeline runs empty at its end)"
        )


_NAMED, _BACK = f"hotspa_pipeline_mode={PIPEDREAM}", f"or hotspa_pipeline_mode={SYNCHRONOUS}"


def check_strategies(buckets: Sequence[Bucket], tied: Sequence[str] = (), schedule: str = "auto") -> Strategy:
    """Returns the strategy of a pool, if its stages can update by themselves. `tied`: the weights that embedding and
    head share. Raises `StrategyError`: several strategies, no pipeline, or an incompatible option. Raises
    `UnsupportedError`: a weight on two stages, or another schedule."""
    strategy = buckets[0].strategy
    if len(buckets) > 1:
        raise StrategyError(
            f"{_NAMED} with the strategies {', '.join(str(bucket.strategy) for bucket in buckets)}",
            why="stages update by themselves and at different times, so there is no single state to switch from",
            fix=f"give one strategy with pp of at least 2, such as pp2:{buckets[-1].longest}, {_BACK}",
        )
    if strategy.pp < 2:
        raise StrategyError(
            f"{_NAMED} with the strategy {strategy}",
            why="without stages nothing is in flight",
            fix=f"use pp of at least 2, {_BACK}",
        )
    allowed = Strategy(strategy.dp, strategy.tp, strategy.pp, strategy.sp, strategy.rc)
    if strategy != allowed:
        raise StrategyError(
            f"{_NAMED} with the strategy {strategy}",
            why="only dp, tp, pp, +sp and +rc run uncut packs with weights that are kept for them",
            fix=f"use {allowed}, {_BACK}",
        )
    if not runs_chunks(schedule):
        raise UnsupportedError(
            f"{_NAMED} with the pipeline schedule {schedule}",
            why="torch's schedules do not say when a stage may update",
            fix=f"use the schedule own, {_BACK}",
        )
    if tied:
        raise UnsupportedError(
            f"{_NAMED} with the tied weight {tied[0]!r}",
            why="first and last stage both hold it, and would update it at different times to different values",
            fix=f"set tie_word_embeddings=False in the model's config, {_BACK}",
        )
    return strategy
