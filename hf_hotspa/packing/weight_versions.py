"""PipeDream: which version of a stage's weights each pack uses, where stages update after every backward pass.

Asynchronous 1F1B with weight stashing (Narayanan et al., SOSP'19, section 3.3) is a training mode of its own and *not* the
synchronous update of everything else here: stage s of p (from 0) has run the backward passes of p - 1 - s packs less than a
sequential optimizer would have when it runs a pack forward. It keeps the weights of that moment until the pack's backward
pass, so that both use the same bits. With vertical sync all stages use the version of the first one.

Owns the rule, for the stages that run it and for the memory model that counts what they keep:

* Update k of a stage (k = 0, 1, ...) is that of the k-th packs of all replicas together: the gradient of the mean loss over
  their label tokens. Where they have none, nothing is updated.
* Version v of its weights has seen the updates 0 to v - 1 of the mini-batch. Version 0 is the same point on all stages: a
  pipeline runs empty at the end of every mini-batch.

No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hf_hotspa.errors import HotspaConfigError, StrategyError, UnsupportedError
from hf_hotspa.packing.pipeline_order import Passes, runs_chunks
from hf_hotspa.strategy import Bucket, Strategy

SYNCHRONOUS, PIPEDREAM = "synchronous", "pipedream"
PIPELINE_MODES = (SYNCHRONOUS, PIPEDREAM)
"""`synchronous`: one update a mini-batch, the same on all stages. `pipedream`: one a pack and stage, delayed."""


@dataclass(frozen=True)
class PipeDream:
    """How stages update in this mode.

    Args:
        vertical_sync: Whether all stages use, of each pack, the version that the first stage has.
        max_norm: To what 2-norm a stage scales the gradient of each of its updates down, by itself; None for not.

    Raises:
        HotspaConfigError: the norm is no positive number.
    """

    vertical_sync: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (isfinite(self.max_norm) and self.max_norm > 0):
            raise HotspaConfigError(
                f"stages clip to the norm {self.max_norm}", fix="use 1.0, say, or None for no clipping"
            )

    def delays(self, num_stages: int) -> tuple[int, ...]:
        """By stage, how many updates of this mini-batch a full pipeline's pack does not see that a sequential one would."""
        return tuple(num_stages - 1 - (0 if self.vertical_sync else stage) for stage in range(num_stages))

    def most_versions(self, num_stages: int, stage: int, num_packs: int | None = None) -> int:
        """The most versions of its weights that a stage holds at a time.

        Args:
            num_packs: Packs of the replica with most of them; None for any number.
        """
        most = num_stages if self.vertical_sync else num_stages - stage
        if num_packs is None:
            return most
        return max(
            1, min(most, num_packs - self.delays(num_stages)[stage])
        )  # the last updates come after the last forward

    def pack_versions(self, passes: Passes, stage: int) -> list[int]:
        """For each pack the version of the weights that a stage runs it with, forward and backward. Never falls."""
        done, versions = 0, list[int]()
        for _, is_backward in passes.operations(0 if self.vertical_sync else stage):
            if is_backward:
                done += 1
            else:
                versions.append(done)
        return versions

    def text(self, num_stages: int) -> str:
        """What the mode does to a run, for its log."""
        synced = ", all stages with the weights of the first" if self.vertical_sync else ""
        delays = ", ".join(map(str, self.delays(num_stages)))
        return (
            f"PipeDream: asynchronous 1F1B with weight stashing{synced}; not the synchronous update. Each stage updates after "
            f"the backward pass of every pack. Weights are behind by {delays} packs on stages 0 to {num_stages - 1} (fewer at "
            "the beginning of a mini-batch: the pipeline runs empty at its end)"
        )


def check_pipedream(buckets: Sequence[Bucket], tied: Sequence[str] = (), schedule: str = "auto") -> Strategy:
    """Refuses what stages cannot update by themselves; returns the strategy.

    Args:
        tied: The weights that embedding and head share.

    Raises:
        StrategyError: several strategies, no pipeline, or an option that does not go together with it.
        UnsupportedError: a weight on two stages, or another schedule.
    """
    strategy = buckets[0].strategy
    named = f"hotspa_pipeline_mode={PIPEDREAM}"
    back = f"or hotspa_pipeline_mode={SYNCHRONOUS}"
    if len(buckets) > 1:
        raise StrategyError(
            f"{named} with the strategies {', '.join(str(bucket.strategy) for bucket in buckets)}",
            why="stages update by themselves and at different times, so that there is no one state to switch from",
            fix=f"give one strategy with pp of at least 2, such as pp2:{buckets[-1].longest}, {back}",
        )
    if strategy.pp < 2:
        raise StrategyError(
            f"{named} with the strategy {strategy}",
            why="without stages nothing is in flight",
            fix=f"use pp of at least 2, {back}",
        )
    allowed = Strategy(strategy.dp, strategy.tp, strategy.pp, strategy.sp, strategy.rc)
    if strategy != allowed:
        raise StrategyError(
            f"{named} with the strategy {strategy}",
            why="only dp, tp, pp, +sp and +rc run whole packs with weights that are kept for them",
            fix=f"use {allowed}, {back}",
        )
    if not runs_chunks(schedule):
        raise UnsupportedError(
            f"{named} with the pipeline schedule {schedule}",
            why="torch's schedules do not say when a stage may update",
            fix=f"use the schedule own, {back}",
        )
    if tied:
        raise UnsupportedError(
            f"{named} with the tied weight {tied[0]!r}",
            why="first and last stage both hold it, and would update it at different times to different values",
            fix=f"set tie_word_embeddings=False in the model's config, {back}",
        )
    return strategy
