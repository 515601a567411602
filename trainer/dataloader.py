"""The train dataloader: every rank walks through the same mini-batches and reads only its own rows.

Owns the order of rows and what one item of the loader is. Promises:

* The order is the one that the stock `transformers.Trainer` follows on one process (accelerate's
  `SeedableRandomSampler`, seeded with `data_seed` or `seed`, plus the epoch), and it is the same on every rank.
* An item is one whole mini-batch, ``{"mini_batch": MiniBatch}``: `mini_batch_size` rows, the last one of an epoch
  possibly fewer. The loader must not be prepared by accelerate, which would deal the mini-batches out to ranks.
* It is a torch `DataLoader` whose batch sampler yields the rows of a mini-batch. The plan is made where the rows are
  read, in the worker processes if there are any; so skipping mini-batches costs nothing, and accelerate's
  `skip_first_batches`, which the Trainer calls when it resumes, works on it as it is: it rebuilds a plain DataLoader
  around the batch sampler, whose `set_epoch` the Trainer then finds.
* With a `PhaseChooser` the batch sampler, which runs in the main process, also chooses the buckets of each mini-batch,
  one ahead of what is asked for, in a thread beside the training step. The choice for a mini-batch depends on the one
  before, so it is a chain, walked once and in order; workers only plan and read. Mini-batches that were trained before
  the iteration began (a resumed run skips them) are not chosen at all.
* What is wrong with rows comes back in `MiniBatch.error`; it is never raised on some ranks only.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import TrainingArguments

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator
from hf_hotspa.errors import DataError, HotspaConfigError, HotspaError
from hf_hotspa.packing.bucketing import check_lengths, plan_mini_batch
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.rows.arrow import arrow_view, is_plain_arrow, rows_of_columns
from hf_hotspa.rows.features import DEFAULT_RULES, RowRules
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.chooser import PhaseChooser
from hf_hotspa.stragglers.speeds import SpeedHistory, Speeds
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.older_transformers import workers_context
from hf_hotspa.trainer.rows import as_it_is, unreadable
from hf_hotspa.trainer.worker_processes import worker_context


class ChosenRows(list[int]):
    """The rows of a mini-batch, the buckets that were chosen for them (None: those of the collator), and the speeds by
    which their packs are divided."""

    def __init__(
        self, rows: Iterable[int], buckets: tuple[Bucket, ...] | None = None, speeds: Speeds | None = None
    ) -> None:
        super().__init__(rows)
        self.buckets, self.speeds = buckets, speeds

    def __reduce__(self) -> tuple[Any, ...]:  # to workers
        return ChosenRows, (list(self), self.buckets, self.speeds)


class MiniBatchSampler(Sampler[list[int]]):
    """The rows of one mini-batch after the other.

    Args:
        seed: Seed of the order; the order of epoch e depends on ``seed + e`` only. None keeps the rows in their order.
        chooser: Chooses the buckets of each mini-batch; None for those of the collator.
        row_sampler: Gives the order instead of the seed.
        speeds: By which the packs of each mini-batch are divided over replicas; None divides evenly.
    """

    def __init__(
        self,
        num_rows: int,
        mini_batch_size: int,
        *,
        seed: int | None,
        drop_last: bool = False,
        chooser: PhaseChooser | None = None,
        row_sampler: Sampler[int] | None = None,
        speeds: SpeedHistory | None = None,
    ) -> None:
        self.num_rows, self.mini_batch_size, self.drop_last = num_rows, mini_batch_size, drop_last
        self.chooser, self.speeds, self.epoch = chooser, speeds, 0
        rows = range(num_rows)
        if row_sampler is None:
            row_sampler = SequentialSampler(rows) if seed is None else SeedableRandomSampler(rows, data_seed=seed)
        self.row_sampler = row_sampler

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, hence the order, of the next iteration."""
        self.epoch = epoch
        if hasattr(self.row_sampler, "set_epoch"):
            self.row_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.mini_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if self.chooser is not None:
            return self._chosen(self.chooser)
        return self._rows() if self.speeds is None else self._divided(self.speeds)

    def _divided(self, speeds: SpeedHistory) -> Iterator[list[int]]:
        for number, rows in enumerate(self._rows(), self.epoch * len(self)):
            yield ChosenRows(rows, speeds=speeds.of(number))

    def _chosen(self, chooser: PhaseChooser) -> Iterator[list[int]]:
        """The rows with their buckets. The chain is walked by one thread, one mini-batch ahead of what is yielded."""
        begin, previous = chooser.num_trained, chooser.previous

        def choose(number: int, rows: list[int]) -> ChosenRows:
            nonlocal previous
            chosen = chooser.choose(number, rows, previous)
            previous = chosen.strategies
            return ChosenRows(rows, chosen.buckets, self.speeds.of(number) if self.speeds is not None else None)

        ahead: deque[Future[ChosenRows]] = deque()
        with ThreadPoolExecutor(1, "hotspa-chooser") as thread:
            for number, rows in enumerate(self._rows(), self.epoch * len(self)):
                if number < begin:
                    yield rows  # trained already: nobody will look at it
                    continue
                ahead.append(thread.submit(choose, number, rows))
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _rows(self) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in self.row_sampler:
            rows.append(row)
            if len(rows) == self.mini_batch_size:
                yield rows
                rows = []
        if rows and not self.drop_last:
            yield rows


class RankRows(Dataset[Any]):
    """What one rank reads of a dataset: the rows of a mini-batch in, its `MiniBatch` out.

    Its length is that of the dataset, in rows; the Trainer reports it as the number of examples.

    Args:
        collator: Has the scan of the dataset, and the buckets for rows that none were chosen for.
    """

    def __init__(self, dataset: Any, collator: PackedBucketCollator) -> None:
        self.dataset, self.collator = dataset, collator
        self._arrow: Any = arrow_view(dataset, collator.rules.columns) if is_plain_arrow(dataset) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> MiniBatch:
        """The mini-batch of a single row."""
        return self.__getitems__([row])["mini_batch"]

    def __getitems__(self, rows: list[int]) -> dict[str, MiniBatch]:
        """The mini-batch of some rows; torch's fetcher calls this with what the batch sampler yields."""
        plan = self.plan(rows)
        wanted = self.collator.rows_of(plan)
        try:
            examples = self._arrow_rows(wanted) if self._arrow is not None else self._rows(wanted)
        except Exception as error:
            return {"mini_batch": self.collator.failed(plan, self._unreadable(error, wanted))}
        return {"mini_batch": self.collator.of_plan(plan, examples)}

    def plan(self, rows: Sequence[int]) -> MiniBatchPlan:
        """The plan of a mini-batch, from the scan."""
        collator, speeds = self.collator, None
        buckets, table = collator.buckets, collator.table
        assert table is not None
        if isinstance(rows, ChosenRows):
            buckets, speeds = rows.buckets or buckets, rows.speeds
        return plan_mini_batch(
            rows, table, buckets, quadratic_cost=collator.quadratic_cost, policy=collator.policy, speeds=speeds
        )

    def _rows(self, rows: tuple[int, ...]) -> dict[int, Any]:
        return {row: self.dataset[row] for row in rows}

    def _arrow_rows(self, rows: tuple[int, ...]) -> dict[int, Any]:
        """The token columns of a `datasets.Dataset`, read in one go, as numpy arrays."""
        if not rows:
            return {}
        table = self._arrow[list(rows)]
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        return dict(zip(rows, rows_of_columns(columns, len(rows)), strict=True))

    def _unreadable(self, error: Exception, rows: tuple[int, ...]) -> HotspaError:
        shown = f"{', '.join(map(str, rows[:8]))}{', ...' if len(rows) > 8 else ''}"
        return unreadable(error, "the dataset", f"dataset rows {shown}, rank {self.collator.rank}")


def loader_options(
    *,
    num_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    multiprocessing_context: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Options of a torch `DataLoader` for items that are mini-batches, as far as workers and machine allow them."""
    return options | {
        "collate_fn": as_it_is,
        "num_workers": num_workers,
        "persistent_workers": persistent_workers and num_workers > 0,
        "pin_memory": pin_memory and torch.accelerator.is_available(),
        "multiprocessing_context": worker_context(num_workers, multiprocessing_context),
    }


def loader_arguments(args: TrainingArguments) -> dict[str, Any]:
    """What the training arguments say of data loaders, by the names of torch's."""
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "persistent_workers": args.dataloader_persistent_workers,
        "pin_memory": args.dataloader_pin_memory,
        "multiprocessing_context": workers_context(args),
    }


def planned_ahead(num_workers: int, prefetch_factor: int | None) -> int:
    """How many mini-batches behind the one in training may have been chosen already.

    torch's workers are given `prefetch_factor` (2) mini-batches each, and the sampler chooses one more.
    """
    return (num_workers * (2 if prefetch_factor is None else prefetch_factor)) + 1


class MiniBatchLoader(DataLoader[dict[str, MiniBatch]]):
    """The train dataloader of one rank.

    Args:
        dataset: Any map-style dataset that `scan_dataset` accepts.
        table: Its scan.
        buckets: The buckets, in the order in which their phases run.
        mini_batch_size: Rows of one optimizer step, over all ranks.
        rank: Global rank.
        vocab_size: Token ids must be below it.
        quadratic_cost: See `ModelShape.quadratic_cost`.
        policy: One of `OVERLONG_POLICIES`.
        rules: What rows are read by.
        seed: `data_seed` of the training arguments, or `seed` where that is None.
        shuffle: False keeps the rows in the order of the dataset.
        row_sampler: Gives the order, and perhaps other rows than each once, instead of seed and shuffle.
        drop_last: Leave out a last mini-batch that is not full.
        chooser: Chooses the buckets of each mini-batch among those of its pool; `buckets` are then used for none but
            mini-batches that were trained before. Its `delay` must be `planned_ahead` of this loader, or more.
        speeds: By which the packs of each mini-batch are divided over replicas, with the same condition; None divides
            evenly.
        options: As for torch's DataLoader: `num_workers` and all that goes with it. Memory is pinned, and workers are
            kept, only where there are such.

    Raises:
        HotspaConfigError: the mini-batch size is not positive, or the policy is unknown.
        OverlongError: under the policy `error`, some row is longer than the longest bucket.
        DataError: the table is not of this dataset, or no mini-batch is left.
    """

    dataset: RankRows

    def __init__(
        self,
        dataset: Any,
        table: SequenceTable,
        buckets: tuple[Bucket, ...],
        *,
        mini_batch_size: int,
        rank: int,
        vocab_size: int,
        quadratic_cost: float = 0.0,
        policy: str = "error",
        rules: RowRules = DEFAULT_RULES,
        seed: int = 42,
        shuffle: bool = True,
        row_sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        chooser: PhaseChooser | None = None,
        speeds: SpeedHistory | None = None,
        **options: Any,
    ) -> None:
        if mini_batch_size < 1:
            raise HotspaConfigError(f"a mini-batch of {mini_batch_size} sequences", fix="use at least one")
        if len(table) != len(dataset):
            raise DataError(
                f"the scan has {len(table)} rows and the dataset {len(dataset)}", fix="scan this dataset again"
            )
        if drop_last and len(dataset) < mini_batch_size:
            raise DataError(
                f"{len(dataset)} rows do not fill one mini-batch of {mini_batch_size}, and the last one is dropped",
                fix="make the mini-batch smaller, or do not set dataloader_drop_last",
            )
        check_lengths(table, max(b.longest for b in buckets), policy)
        self.table = table
        collator = PackedBucketCollator(
            buckets,
            rank=rank,
            vocab_size=vocab_size,
            quadratic_cost=quadratic_cost,
            policy=policy,
            rules=rules,
            table=table,
        )
        num_rows = len(dataset) if row_sampler is None else len(row_sampler)  # type: ignore[arg-type]
        sampler = MiniBatchSampler(
            num_rows,
            mini_batch_size,
            seed=seed if shuffle else None,
            drop_last=drop_last,
            chooser=chooser,
            row_sampler=row_sampler,
            speeds=speeds,
        )
        needed = planned_ahead(options.get("num_workers", 0), options.get("prefetch_factor"))
        for name, source in (("chooser", chooser), ("speeds", speeds)):
            if source is not None and source.delay < needed:
                raise HotspaConfigError(
                    f"the delay of the {name} is {source.delay} mini-batches", fix=f"use {needed} or more"
                )
        super().__init__(RankRows(dataset, collator), batch_sampler=sampler, **loader_options(**options))

    @property
    def mini_batch_size(self) -> int:
        """Rows of a full mini-batch."""
        return self.batch_sampler.mini_batch_size

    @property
    def total_batch_size(self) -> int:
        """The same, by the name of accelerate's data loaders."""
        return self.mini_batch_size

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole dataset, as scanned."""
        return self.table.num_tokens

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, hence the order, of the next iteration (called by the Trainer)."""
        self.batch_sampler.set_epoch(epoch)

    def plans(self, epoch: int = 0) -> Iterator[MiniBatchPlan]:
        """The plans of an epoch without reading a row; iterating does not disturb the loader."""
        sampler = self.batch_sampler
        fresh = MiniBatchSampler(
            sampler.num_rows,
            sampler.mini_batch_size,
            seed=None,
            drop_last=sampler.drop_last,
            chooser=sampler.chooser,
            row_sampler=copy(sampler.row_sampler),
            speeds=sampler.speeds,
        )
        fresh.set_epoch(epoch)
        yield from map(self.dataset.plan, fresh)
