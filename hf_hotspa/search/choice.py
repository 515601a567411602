"""What a search answers: buckets, what each of them takes, and the best single strategy beside them. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.strategy import Bucket


@dataclass(frozen=True)
class Row:
    """One bucket of the answer, over the mini-batches looked at.

    Args:
        bucket: Strategy, edges and pack size.
        num_sequences: Sequences a mini-batch.
        num_tokens: Tokens a mini-batch.
        num_packs: Packs a mini-batch, over all replicas.
        compute_s: Seconds of its computation.
        switch_s: Seconds of its switch.
    """

    bucket: Bucket
    num_sequences: float
    num_tokens: float
    num_packs: float
    compute_s: float
    switch_s: float


@dataclass(frozen=True)
class Near:
    """Another plan, whose predicted seconds are near those of the chosen one.

    Args:
        seconds: Predicted mean seconds of a mini-batch, switches included.
    """

    buckets: tuple[Bucket, ...]
    seconds: float

    def __str__(self) -> str:
        return ",".join(map(str, self.buckets))


@dataclass(frozen=True)
class Choice:
    """The answer of a search.

    Args:
        seconds: Predicted mean seconds of a mini-batch, switches included.
        switch_seconds: The switches in it.
        static: The best single strategy, its packs and its lengths.
        static_seconds: Its seconds, its own switch included.
        rows: One for each bucket.
        exact: Whether all ranges of lengths were simulated, see `search`.
        num_simulated: Phases that were packed and simulated to find it.
        near: Other plans, the fastest first, as far as they were asked for.
    """

    buckets: tuple[Bucket, ...]
    seconds: float
    switch_seconds: float
    static: Bucket
    static_seconds: float
    rows: tuple[Row, ...]
    exact: bool
    num_simulated: int
    near: tuple[Near, ...] = ()

    @property
    def switches(self) -> bool:
        """Whether more than one strategy is worth it."""
        return len(self.buckets) > 1

    def with_packs_of(self, pool: Sequence[Bucket]) -> "Choice":
        """The same with packs no larger than those of a pool with its strategies."""
        most = {bucket.strategy: bucket.pack_tokens for bucket in pool}

        def smaller(bucket: Bucket) -> Bucket:
            return replace(bucket, pack_tokens=min(bucket.pack_tokens, most.get(bucket.strategy, bucket.pack_tokens)))

        rows = tuple(replace(row, bucket=smaller(row.bucket)) for row in self.rows)
        return replace(self, buckets=tuple(map(smaller, self.buckets)), static=smaller(self.static), rows=rows)

    def __str__(self) -> str:
        """What `hotspa_strategies` takes."""
        return ",".join(map(str, self.buckets))
