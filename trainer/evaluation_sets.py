"""The data loaders of evaluation sets: which mini-batches an evaluation runs, in the order of the data set."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DataError
from hf_hotspa.packing.bucketing import check_lengths
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.data_sets import DataSets
from hf_hotspa.trainer.dataloader import Planner
from hf_hotspa.trainer.evaluation_loader import EvaluationLoader, EvaluationRows, EvaluationSampler, evaluation_buckets
from hf_hotspa.trainer.older_transformers import workers_context
from hf_hotspa.trainer.rows import is_stream
from hf_hotspa.trainer.streaming import StreamLoader
from hf_hotspa.trainer.worker_processes import worker_context


class EvaluationSets:
    """What is evaluated.

    Args:
        data: The data sets.
    """

    def __init__(self, args: HotSPaTrainingArguments, data: DataSets) -> None:
        self._args, self._data = args, data
        self._asked: Any = None  # the set that was asked for last
        self._kept: dict[int, tuple[HotSPaEngine, DataLoader[Any]]] = {}

    def loader(
        self, engine: HotSPaEngine, dataset: Any, facts: Mapping[str, str], keep: bool = False
    ) -> DataLoader[Any]:
        """The mini-batches of a set: `per_device_eval_batch_size` x processes rows each. Collective.

        Args:
            engine: The engine that will run them.
            dataset: The set.
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
        shape, size = engine.description.shape, args.eval_batch_size * args.world_size
        if is_stream(dataset):
            rows = self._data.stream(engine, dataset, buckets, size)
            return StreamLoader(rows, pin_memory=args.dataloader_pin_memory)
        tokens, table = self._data.evaluated(dataset)
        longest = max(bucket.longest for bucket in buckets)
        check_lengths(table, longest, args.hotspa_overlong, args.hotspa_auto)
        return EvaluationLoader(
            dataset,
            EvaluationRows(
                tokens,
                Planner(table, buckets, shape.quadratic_cost, args.hotspa_overlong),
                PackedBucketCollator(
                    buckets,
                    rank=args.process_index,
                    vocab_size=shape.vocab_size,
                    rules=self._data.rules(),
                    table=table,
                ),
            ),
            EvaluationSampler(table, buckets, size, args.dataloader_drop_last),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=keep and args.dataloader_num_workers > 0,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            multiprocessing_context=worker_context(args.dataloader_num_workers, workers_context(args)),
        )
