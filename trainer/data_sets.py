"""The data sets of a trainer: rows with token ids, and their lengths, scanned once for everybody who asks.

Owns the scans of the train set and of evaluation sets, and the rows of streams, which have none. Collective throughout:
one process of a machine scans, and the others read its cache.
"""

from collections.abc import Callable, Iterable
from typing import Any

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DataError
from hf_hotspa.rows.features import RowRules
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.stragglers.speeds import SpeedHistory
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.agreed_facts import data_facts
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.per_row import PerRow
from hf_hotspa.trainer.rows import is_stream, scanned
from hf_hotspa.trainer.streaming import StreamRows

_EVALUATED_KEPT = 8


class DataSets:
    """Data sets as their rows are read."""

    def __init__(
        self,
        args: HotSPaTrainingArguments,
        tokenizer: Callable[[], Any],
        rules: Callable[[], RowRules],
        collate: Callable[[], PerRow | None],
    ) -> None:
        self.rules = rules
        self._args, self._tokenizer, self._collate = args, tokenizer, collate
        self._train: tuple[Any, Any, SequenceTable] | None = None
        self._evaluated: dict[int, tuple[Any, Any, SequenceTable]] = {}

    def _scan(self, dataset: Any) -> tuple[Any, Any, SequenceTable]:
        return dataset, *scanned(dataset, self._tokenizer(), self._args, self.rules(), self._collate())

    def train(self, dataset: Any) -> tuple[Any, SequenceTable]:
        """The train set with token ids, and its scan.

        Raises:
            HotspaError: there is none, or it cannot be used as it is.
        """
        if dataset is None:
            raise DataError("there is no train_dataset", fix="pass train_dataset to HotSPaTrainer")
        if self._train is None or self._train[0] is not dataset:
            self._train = self._scan(dataset)
        return self._train[1:]

    def evaluated(self, dataset: Any) -> tuple[Any, SequenceTable]:
        """An evaluation set with token ids, and its scan.

        Raises:
            HotspaError: it cannot be used as it is.
        """
        if id(dataset) not in self._evaluated:
            while len(self._evaluated) >= _EVALUATED_KEPT:
                self._evaluated.pop(next(iter(self._evaluated)))
            self._evaluated[id(dataset)] = self._scan(dataset)
        return self._evaluated[id(dataset)][1:]

    def tables(self, datasets: Iterable[Any]) -> list[SequenceTable]:
        """The scans of evaluation sets, each once, without streams and None."""
        unique = {id(dataset): dataset for dataset in datasets if dataset is not None and not is_stream(dataset)}
        return [self.evaluated(dataset)[1] for dataset in unique.values()]

    def facts(self, dataset: Any) -> dict[str, str]:
        """What all ranks must have in common of an evaluation set."""
        _, tokens, table = self._evaluated.get(id(dataset), (dataset, dataset, None))
        return data_facts(tokens, table, self.rules())

    def collator(
        self, engine: HotSPaEngine, buckets: tuple[Bucket, ...], table: SequenceTable | None = None
    ) -> PackedBucketCollator:
        """Makes this rank's mini-batches of rows; of a scanned data set given its scan."""
        shape = engine.description.shape
        return PackedBucketCollator(
            buckets,
            rank=self._args.process_index,
            vocab_size=shape.vocab_size,
            quadratic_cost=shape.quadratic_cost,
            policy=self._args.hotspa_overlong,
            rules=self.rules(),
            table=table,
        )

    def stream(
        self,
        engine: HotSPaEngine,
        dataset: Any,
        buckets: tuple[Bucket, ...],
        mini_batch_size: int,
        drop_last: bool = False,
        speeds: SpeedHistory | None = None,
    ) -> StreamRows:
        """The mini-batches of a stream."""
        return StreamRows(
            dataset,
            self.collator(engine, buckets),
            mini_batch_size=mini_batch_size,
            any_rank=engine.any_rank,
            collate=self._collate(),
            drop_last=drop_last,
            tokenizer=self._tokenizer(),
            speeds=speeds,
        )
