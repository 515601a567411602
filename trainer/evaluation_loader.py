"""The data loader of an evaluation set: which strategy evaluates which lengths, in what order, and what an item is.

Promises that the loader's `dataset` is the user's own, and that every rank goes through the same mini-batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from hf_hotspa.errors import DataError, HotspaConfigError
from hf_hotspa.rows.features import read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.trainer.dataloader import RankRows
from hf_hotspa.trainer.rows import as_it_is
from hf_hotspa.trainer.streaming import StreamLoader

LONGEST, PER_BUCKET = "longest", "buckets"
"""Values of `hotspa_eval_strategy` beside a strategy of the pool."""


def evaluation_buckets(choice: str, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Which strategy evaluates which lengths.

    Args:
        choice: `longest`: all lengths under the strategy of the longest bucket, which fits them all; `buckets`: each
            length as it is trained; or one strategy of the pool, for all lengths up to the longest bucket.
        buckets: The buckets of the engine.

    Raises:
        HotspaConfigError: `choice` is none of these.
    """
    last = max(buckets, key=lambda bucket: bucket.longest)
    if choice == PER_BUCKET:
        return tuple(buckets)
    if choice == LONGEST:
        return (Bucket(last.strategy, last.longest, last.pack_tokens),)
    strategy = Strategy.parse(choice)
    # what the arguments ask of all strategies of the engine may be left out
    own = next((b for b in buckets if b.strategy == strategy.recomputing(b.strategy.rc).sharded(b.strategy.z)), None)
    if own is None:
        pool = ", ".join(dict.fromkeys(str(bucket.strategy) for bucket in buckets))
        raise HotspaConfigError(
            f"hotspa_eval_strategy is {choice!r}, which is not in hotspa_strategies",
            why="weights can only be loaded into strategies whose plans were made at the start",
            fix=f"use {LONGEST}, {PER_BUCKET}, or one of {pool}",
        )
    return (Bucket(own.strategy, last.longest, max(own.pack_tokens, last.longest)),)


class _WholeRows(list[int]):
    """The rows of a mini-batch whose item also holds all of them, as that of a stream does."""


class EvaluationRows(RankRows):
    """Mini-batches of an evaluation set."""

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        item: dict[str, Any] = super().__getitems__(rows)
        mini_batch = item["mini_batch"]
        if isinstance(rows, _WholeRows) and mini_batch.error is None:
            try:
                examples = self._arrow_rows(tuple(rows)) if self._arrow is not None else self._rows(tuple(rows))
                item["rows"] = {row: read_row(examples[row], row, self.collator.rules) for row in rows}
            except Exception as error:  # carried to all ranks, as what RankRows finds
                return {"mini_batch": self.collator.failed(mini_batch.plan, self._unreadable(error, tuple(rows)))}
        return item


class EvaluationSampler(Sampler[list[int]]):
    """Rows in the order of the dataset; with `grouped`, bucket by bucket, so that each strategy is loaded once. With `whole`,
    items also hold all their rows."""

    grouped = whole = False

    def __init__(
        self, table: SequenceTable, buckets: Sequence[Bucket], mini_batch_size: int, drop_last: bool = False
    ) -> None:
        kept = len(table) // mini_batch_size * mini_batch_size if drop_last else len(table)
        if not kept and len(table):
            raise DataError(
                f"the evaluation set has {len(table)} rows, fewer than a batch of {mini_batch_size}, and "
                "dataloader_drop_last is set",
                why="nothing would be evaluated",
                fix="make per_device_eval_batch_size smaller, or do not set dataloader_drop_last",
            )
        self._lengths, self._buckets, self.mini_batch_size = table.longest_of_rows[:kept], buckets, mini_batch_size

    def __len__(self) -> int:
        return sum(-(-len(group) // self.mini_batch_size) for group in self._groups())

    def _groups(self) -> list[Any]:
        if not self.grouped or len(self._buckets) < 2:
            return [np.arange(len(self._lengths))]
        edges = sorted(bucket.longest for bucket in self._buckets)
        bucket_of = np.minimum(np.searchsorted(edges, self._lengths), len(edges) - 1)
        return [np.flatnonzero(bucket_of == index) for index in range(len(edges))]

    def __iter__(self) -> Iterator[list[int]]:
        kind = _WholeRows if self.whole else list
        for group in self._groups():
            for begin in range(0, len(group), self.mini_batch_size):
                yield kind(group[begin : begin + self.mini_batch_size].tolist())


class EvaluationLoader(DataLoader[Any]):
    """Mini-batches of an evaluation set, the same on all ranks. Its `dataset` is the user's.

    Args:
        dataset: The set as the user gave it.
        rows: What makes mini-batches of it.
        options: As for torch's DataLoader.
    """

    def __init__(self, dataset: Any, rows: EvaluationRows, batch_sampler: EvaluationSampler, **options: Any) -> None:
        options["collate_fn"] = as_it_is
        self._mini_batches = DataLoader[Any](rows, batch_sampler=batch_sampler, **options)
        super().__init__(dataset, batch_sampler=batch_sampler, **options)

    def __iter__(self) -> Any:
        return iter(self._mini_batches)

    def asks_for(self, logits: bool) -> None:
        """Whether the next iteration is for logits, whose rows are looked at, or for the loss alone."""
        assert isinstance(self.batch_sampler, EvaluationSampler)
        self.batch_sampler.whole, self.batch_sampler.grouped = logits, not logits

    @property
    def total_batch_size(self) -> int:
        """Rows of a full mini-batch, over all ranks, by the name of accelerate's data loaders."""
        assert isinstance(self.batch_sampler, EvaluationSampler)
        return self.batch_sampler.mini_batch_size


def is_own_loader(loader: Any) -> bool:
    """Whether a data loader is one that `evaluation_loop` can walk through."""
    return isinstance(loader, EvaluationLoader | StreamLoader)
