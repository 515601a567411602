"""The data of evaluations: which strategy evaluates which lengths, and the mini-batches of each set, in order.

Promises that the `dataset` of a loader is the user's own, and that every rank goes through the same mini-batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DataError, HotspaConfigError, UnsupportedError
from hf_hotspa.packing.bucketing import check_lengths
from hf_hotspa.rows.features import read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.data_sets import DataSets
from hf_hotspa.trainer.dataloader import RankRows, loader_arguments, loader_options
from hf_hotspa.trainer.rows import is_stream
from hf_hotspa.trainer.streaming import StreamLoader

LONGEST, PER_BUCKET = "longest", "buckets"
"""Values of `hotspa_eval_strategy` beside a strategy of the pool."""


def evaluation_buckets(choice: str, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Which strategy evaluates which lengths.

    Args:
        choice: `longest`: all lengths under the strategy of the longest bucket, which fits them all; `buckets`: each
            length as it is trained; or one strategy of the pool, for all lengths up to the longest bucket.

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

    def __init__(self, table: SequenceTable, buckets: Sequence[Bucket], mini_batch_size: int, drop_last: bool) -> None:
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
        options: As for `loader_options`.
    """

    def __init__(self, dataset: Any, rows: EvaluationRows, batch_sampler: EvaluationSampler, **options: Any) -> None:
        options = loader_options(**options)
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


def check_evaluation_loader(loader: Any) -> None:
    """Refuses a data loader that `evaluation_loop` cannot walk through.

    Raises:
        UnsupportedError: it is none of this trainer's.
    """
    if not isinstance(loader, EvaluationLoader | StreamLoader):
        raise UnsupportedError(
            f"get_eval_dataloader is overridden and returns a {type(loader).__name__} of its own",
            why="mini-batches are read, packed and dealt out to the ranks by super().get_eval_dataloader()",
            fix="return super().get_eval_dataloader(dataset) of the rows to evaluate",
        )


class EvaluationSets:
    """What is evaluated."""

    def __init__(self, args: HotSPaTrainingArguments, data: DataSets) -> None:
        self._args, self._data = args, data
        self._asked: Any = None  # the set that was asked for last
        self._kept: dict[int, tuple[HotSPaEngine, DataLoader[Any]]] = {}

    def loader(
        self, engine: HotSPaEngine, dataset: Any, facts: Mapping[str, str], keep: bool = False
    ) -> DataLoader[Any]:
        """The mini-batches of a set: `per_device_eval_batch_size` x processes rows each. Collective.

        Args:
            facts: What all ranks must have in common, beside the set.
            keep: Whether the loader, with its workers, is the one of the last time.

        Raises:
            HotspaError: on every rank: there is no set, it cannot be used as it is, or ranks have different ones.
        """

        def made() -> DataLoader[Any]:
            kept = self._kept.get(id(dataset))
            return kept[1] if keep and kept is not None and kept[0] is engine else self._made(engine, dataset, keep)

        loader: DataLoader[Any] = engine.agreement.run(
            "evaluation data set", made, facts=lambda _: self._data.facts(dataset) | dict(facts)
        )
        if keep and not is_stream(dataset):
            self._kept[id(dataset)] = engine, loader
        return loader

    def asked(self, dataset: Any) -> None:
        """Notes a set that `evaluate` or `predict` was called with: strategies are chosen for its lengths, too."""
        self._asked = dataset

    def tables(self, given: Any) -> list[SequenceTable]:
        """The scans of all sets that are known to be evaluated, but for streams. Collective.

        Args:
            given: The trainer's `eval_dataset`: one, several by name, or None.
        """
        sets: Iterable[Any] = given.values() if isinstance(given, dict) else [given]
        return self._data.tables([*sets, self._asked])

    def check(self, engine: HotSPaEngine, given: Any) -> None:
        """Before the first step: the rows of the evaluations to come must fit. Collective.

        Raises:
            OverlongError: they do not, and no policy says what to do.
        """
        if self._args.eval_strategy != "no" or self._args.eval_on_start:
            longest = max(bucket.longest for bucket in engine.buckets)
            for table in self.tables(given):
                check_lengths(table, longest, self._args.hotspa_overlong, self._args.hotspa_auto)

    def close(self) -> None:
        """Lets go of loaders that were kept."""
        self._kept.clear()

    def _made(self, engine: HotSPaEngine, dataset: Any, keep: bool) -> DataLoader[Any]:
        args = self._args
        if dataset is None:
            raise DataError("there is no eval_dataset", fix="pass eval_dataset to HotSPaTrainer or to evaluate()")
        buckets = evaluation_buckets(args.hotspa_eval_strategy, engine.buckets)
        size = args.eval_batch_size * args.world_size
        if is_stream(dataset):
            rows = self._data.stream(engine, dataset, buckets, size)
            return StreamLoader(rows, pin_memory=args.dataloader_pin_memory)
        tokens, table = self._data.evaluated(dataset)
        longest = max(bucket.longest for bucket in buckets)
        check_lengths(table, longest, args.hotspa_overlong, args.hotspa_auto)
        return EvaluationLoader(
            dataset,
            EvaluationRows(tokens, self._data.collator(engine, buckets, table)),
            EvaluationSampler(table, buckets, size, args.dataloader_drop_last),
            **loader_arguments(args) | {"persistent_workers": keep},
        )
