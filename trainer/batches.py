"""The data sets of a trainer: the input of its loaders, and the lengths of rows before training.

The loaders, the order of rows and the workers are the stock Trainer's; the collator is `RowCollator`.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle, islice
from math import ceil
from typing import Any

import datasets
import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard, skip_first_batches
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.data import data_collator as stock
from transformers.trainer_utils import has_length

from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.data import collator as collating
from hf_hotspa.data.collator import MiniBatchSampler, RowCollator, is_stock, is_stream
from hf_hotspa.data.prepare import prepare_dataset, refuse_guessed, tokenize_rows
from hf_hotspa.data.worker_processes import worker_context
from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.exchanges import set_class
from hf_hotspa.model.model_kind import has_absolute_positions, readout_of
from hf_hotspa.packing.bucketing import check_lengths
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.rope import length_borders
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.rows.read_row import TOKEN_COLUMNS, RowRules
from hf_hotspa.rows.scan import scan_dataset
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.switched.passes import FLAT_COLUMNS, ROW_COLUMNS, read_batch
from hf_hotspa.trainer.given_arguments import workers_context
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.same_run import RowOrder

logger = logging.getLogger(__name__)

_SETS_KEPT = 9
_OF_ROWS = {
    "hotspa_overlong": collating.ERROR, "hotspa_empty_rows": collating.ERROR, "hotspa_mini_batch_size": None,
}  # fmt: skip
"""Flags of rows of text, and the values without effect."""
_SAMPLED_BATCHES = 16
_MOST_ROWS = 50_000
"""Most rows of a Python data set that are read before training, at about 0.2 ms each; of a larger one, the first
batches."""


class DispatchedShard(IterableDatasetShard):  # type: ignore[misc]
    """A rank's part of a stream, which it reads itself, with the rows that `dispatch_batches` would send it: accelerate
    then completes the last batch of a pass to a multiple of the ranks, and otherwise to a full batch of each rank.
    `on_end`: called with the number of rows of the last batch: an evaluation counts no others."""

    on_end: Callable[[int], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        data, ranks, first, last = self.dataset, self.num_processes, list[Any](), 0
        if not hasattr(data, "set_epoch") and isinstance(getattr(data, "generator", None), torch.Generator):
            data.generator.manual_seed(self.epoch)
        rows, size = iter(data), self.batch_size if self.split_batches else self.batch_size * ranks
        while (batch := list(islice(rows, size))) and not (len(batch) < size and self.drop_last):
            first, last, part = first or batch[:ranks], len(batch), ceil(len(batch) / ranks)
            yield from islice(chain(batch, cycle(first)), part * self.process_index, part * (self.process_index + 1))
        if self.on_end is not None:
            self.on_end(last)


class _WholeStream(IterableDataset):  # type: ignore[misc]
    """A stream in several files as if in one. Accelerate would divide several files among ranks, which would then have
    other rows than in the stock Trainer, and different numbers of batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)


class StreamParts:
    """The parts of a stream that ranks read by themselves (`dispatch_batches=False`), which may have different sizes.

    A pass of the run is the main process's pass over its part. A rank whose part ends earlier starts it again at once,
    as in the stock Trainer, where each rank begins its next pass alone. A rank with a longer part continues at its
    place in the next pass. `apart`: whether ranks read by themselves; otherwise they read the loader's batches."""

    def __init__(self, loader: Any, args: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        reads_alike = isinstance(loader, DataLoaderDispatcher) or isinstance(dataset, DispatchedShard)
        self._world_size, self.apart = args.world_size, args.world_size > 1 and is_stream(dataset) and not reads_alike
        self._loader, self._rank, self._pass, self._epoch, self._read = loader, args.process_index, 0, 0, 0
        self._own: Iterator[Any] | None = None
        self._continues = self._is_over = False
        self._places = list[list[int]]()

    def resume(self, places: Sequence[Sequence[int]], skips: bool) -> None:
        """Resumes if as many ranks have written the checkpoint: behind each rank's last batch, or at the start of its
        pass unless `skips`."""
        if self.apart and len(places) == self._world_size:
            self._pass, read = places[self._rank]
            self._read = read * skips
            if places[self._rank] != places[0]:  # else the loop has skipped the same number of batches
                self._begin(skip_first_batches(self._loader, self._read))
                self._continues = True

    def begin(self, epoch: int) -> None:
        if not self._continues and (self._own is not None or self._is_over):
            self._pass, self._read, self._own = self._pass + 1, 0, None
        self._epoch, self._continues, self._is_over = epoch, False, False

    def read(self, iterator: Iterator[Any], number: int, agreement: Agreement) -> list[Any]:
        """The next batches of this rank: as many as the main process has, none if its pass has ended. Collective.
        `iterator`: over the loader, in this pass of the run. `number`: batches per step."""
        own, batches, failure = iterator if self._own is None else self._own, list[Any](), None
        try:
            if self._own is None and self._pass != self._epoch:
                self._set_epoch(self._loader)
            batches = list(islice(own, number))
        except Exception as error:
            failure = error
        counts = agreement.gather([-1.0 if failure is not None else float(len(batches))])[:, 0].tolist()
        if failure is not None:
            raise failure
        if min(counts) < 0:  # the rank that failed raises the error
            return batches
        wanted = int(counts[0])
        self._own = chain(batches[wanted:], own) if batches[wanted:] else own
        if not wanted:
            self._continues, self._is_over = bool(batches), not batches
            self._own = self._own if batches else None
            return []
        batches = batches[:wanted]
        self._read += len(batches)
        while len(batches) < wanted:  # this part has ended
            self._pass += 1
            own = self._begin(self._loader)
            if not (more := list(islice(own, wanted - len(batches)))):
                break
            batches, self._read = batches + more, len(more)
        return batches

    def _begin(self, loader: Any) -> Iterator[Any]:
        self._set_epoch(loader)
        self._own = own = iter(loader)
        return own

    def _set_epoch(self, loader: object) -> None:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._pass)

    def state(self) -> dict[str, Any]:
        """JSON-ready; empty if all ranks have read as much as the main process."""
        return {"parts": self._places} if any(place != self._places[0] for place in self._places) else {}

    def gather(self, agreement: Agreement, ends: bool) -> None:
        """Stores the places of all ranks, whose pass `ends` here, for `state`. Collective."""
        if self.apart:
            place = [self._pass + 1.0, 0.0] if ends else [float(self._pass), float(self._read)]
            self._places = [[int(number) for number in of_rank] for of_rank in agreement.gather(place).tolist()]


class Rows:
    """The data sets of a trainer.

    Lengths come from a scan, kept on disk, if a data set has random access; otherwise from the first batches of its
    loader. Collective: one process of a machine scans, and the others read its cache. `loss_columns`: columns that a
    token loss reads. `prepares`: whether rows of text are tokenised.

    Attributes:
        sampled: Whether longer rows may come than `tables` has found.
        fields: The columns of the data sets that `tables` was given, and what the first batches hold, by name.
        evaluated: The last evaluated data set; None before.
        order: The order of the training rows.
        parts: The parts of the training stream that ranks read by themselves.
        default_collator: The stock Trainer's choice if no data collator was given, else None.
        cleaned: Leaves labels out of a batch that could not be trained here; returns other batches unchanged.
    """

    def __init__(self, trainer: HasRun, loss_columns: Sequence[str] = (), prepares: bool = True) -> None:
        self._trainer, self._args, self._loss_columns = trainer, trainer.args, tuple(loss_columns)
        self._prepares = prepares
        self._known = dict[int, tuple[Any, Any, SequenceTable]]()
        self._collators = list[RowCollator]()
        self._longest: int | None = None
        self.sampled, self.evaluated, self.default_collator, self._logged = False, None, None, set[str]()
        self.fields = set[str]()
        # distributes the rows of an explicit `hotspa_mini_batch_size`, if set
        self.sampler: MiniBatchSampler | None = None
        self.parts, self.order = StreamParts(None, self._args), RowOrder()
        self.cleaned: Callable[[Any], Any] = collating.without_padded_from
        self._read: tuple[Any, bool] = None, False  # a model, and whether its own forward reads labels

    @property
    def has_own_labels(self) -> bool:
        """Whether the model's own forward reads labels, of any shape (`model.model_kind.Readout`): batches are then as in the
        class behind."""
        model = self._trainer.model
        if self._read[0] is None or self._read[0]() is not model:
            self._read = weakref.ref(model), readout_of(model) is not None
        return self._read[1]

    def take_model(self) -> None:
        """Notes what the trainer's present model reads. Raises `UnsupportedError` for flags that it cannot honour."""
        self.cleaned = _unchanged if self.has_own_labels else collating.without_padded_from
        for name, nothing in _OF_ROWS.items() if self.has_own_labels else ():
            if (value := getattr(self._args, name)) != nothing:
                raise UnsupportedError(
                    f"{name}={value!r} with a {type(bare_model(self._trainer.model)[0]).__name__}",
                    why="rows and labels are prepared and batched as by the stock Trainer, whatever the labels are",
                    fix="truncate, filter and batch rows in the data set, the collator and the stock arguments",
                )

    # -- what loaders are given ---------------------------------------------------------------------------------------

    def take_longest(self, longest: int) -> None:
        """Sets the longest sequence that is trained from now on, in tokens."""
        self._longest = longest
        for collator in self._collators:
            collator.longest = longest

    def _given_collator(self) -> Any:
        collator = getattr(self._trainer, "data_collator", None)
        if isinstance(collator, RowCollator):  # while a loader is made
            return collator.collator
        if isinstance(collator, collating.PackedBucketCollator):
            self._say("PackedBucketCollator is for custom training loops; here rows are packed: pass no data_collator")
            return None
        return None if collator is self.default_collator and not self.has_own_labels else collator

    def _tokenizer(self) -> Any:
        processing_class = getattr(self._trainer, "processing_class", None)
        is_tokenizer = (
            self._prepares and not self.has_own_labels and isinstance(processing_class, PreTrainedTokenizerBase)
        )
        return processing_class if is_tokenizer else None

    def collator(self, dataset: object, is_training: bool) -> "RowCollator":
        self.take_model()
        args, signature = self._args, self._signature()
        names, tokenizer = getattr(dataset, "column_names", None) or (), self._tokenizer()
        if tokenizer is not None and is_stream(dataset):
            refuse_guessed(dataset)
        collator = RowCollator(
            self._given_collator(), tokenizer, columns=signature if args.remove_unused_columns else None,
            loss_columns=self._loss_columns, policy=args.hotspa_overlong, skips_empty=args.hotspa_skips_empty,
            counts=is_training and (args.hotspa_overlong != collating.ERROR or args.hotspa_skips_empty),
            unsupported=self._unsupported_columns(), borders=length_borders(self._config()), longest=self._longest,
            kept=frozenset(signature) | set(collating.kept_columns(names, self._loss_columns)),
            is_plain=self.has_own_labels,
        )  # fmt: skip
        self._collators.append(collator)
        for border in collator.borders if is_training else ():
            most = self._config().get_text_config().max_position_embeddings or 0
            if border < most:  # else no longer row is trained
                self._say(
                    f"rows of up to {border} tokens have other rotary factors than longer ones, and each is trained with the "
                    "factors for its length; a padded batch of the stock Trainer has the factors of its longest row"
                )
        return collator

    @contextmanager
    def reading(self, dataset: Any, collator: RowCollator, is_training: bool) -> Iterator[Any]:
        """Inside, the settings of accelerate and of workers fit our rows. Yields the data set that a loader is made of.

        Each of several ranks reads its own part of a stream if rows are padded here, and of any data set whose rows may
        be cut or left out: one rank that reads for all needs batches of one width and size. A rank that trains alone
        trains what it reads. Workers end with their rank, not by a signal to another process."""
        args, config = self._args, self._trainer.accelerator.dataloader_config
        dispatch, several = config.dispatch_batches, self._args.world_size > 1
        has_context, chosen = hasattr(args, "dataloader_multiprocessing_context"), workers_context(args)
        changes = args.hotspa_overlong != collating.ERROR or args.hotspa_skips_empty
        pads = several and self._given_collator() is None and is_stream(dataset)
        if pads or (changes and (several or is_training)):
            if several and dispatch is not False and isinstance(dataset, datasets.IterableDataset):
                if dataset._distributed is not None:
                    raise UnsupportedError(
                        "a stream that split_dataset_by_node has divided",
                        why="rows of a stream are divided among the processes here, too, and most would be left out",
                        fix="pass the whole stream",
                    )
                dataset = _WholeStream(dataset)
            config.dispatch_batches = False
        if has_context:
            args.dataloader_multiprocessing_context = worker_context(args.dataloader_num_workers, chosen)
        removes, args.remove_unused_columns = args.remove_unused_columns, False  # the collator does, or it is done here
        is_table = isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"
        if removes and is_table:  # a transform may read any column
            dataset = dataset.select_columns([name for name in dataset.column_names if name in collator.kept])
        try:
            yield dataset
        finally:
            config.dispatch_batches, args.remove_unused_columns = dispatch, removes
            if has_context:
                args.dataloader_multiprocessing_context = chosen

    def dealt_out(self, dataset: Any, size: int, sampler_fn: Any) -> Any:
        """Returns a factory for the sampler of this rank's batches; for a stream returns `sampler_fn`. Raises
        `UnsupportedError` if the mini-batches of a stream cannot be distributed in batches of one size."""
        args = self._args
        accumulation: int = vars(args)["gradient_accumulation_steps"]
        if is_stream(dataset):
            if size % (args.world_size * accumulation):
                raise UnsupportedError(
                    f"hotspa_mini_batch_size={size} with a stream, {args.world_size} processes and "
                    f"gradient_accumulation_steps={accumulation}",
                    why="a stream is distributed in batches of one size",
                    fix=f"use a multiple of {args.world_size * accumulation}",
                )
            return sampler_fn

        def made(rows: Any) -> MiniBatchSampler:
            order = sampler_fn(rows) if sampler_fn is not None else None
            order = collating.seeded(order if order is not None else range(len(rows)), args.data_seed)
            ranks = args.process_index, args.world_size
            self.sampler = MiniBatchSampler(order, size, accumulation, *ranks, args.dataloader_drop_last)
            return self.sampler

        return made

    def of_older_release(self, loader: Any, is_training: bool) -> Any:
        """Adds batch samplers and the start method of workers to a loader of a transformers release without them. A
        stream that each rank reads because of `reading` has the rows of the stock Trainer."""
        shard: Any = getattr(loader, "dataset", None)
        if type(shard) is IterableDatasetShard and self._args.accelerator_config.dispatch_batches is not False:
            set_class(shard, DispatchedShard, "stream")
            if not is_training:  # a worker cannot say how many rows its last batch has
                getattr(loader, "base_dataloader", loader).num_workers = 0
            elif loader.num_workers > 1:
                self._say(
                    f"each process reads its part of the stream with {loader.num_workers} workers: mini-batches hold other rows than "
                    "with one process that reads for all, as in the stock Trainer with rows of one width. For its rows use "
                    "dataloader_num_workers=1, or pass a data_collator that pads to one width"
                )
            shard.on_end = None if loader.num_workers else partial(setattr, loader, "remainder")
        if collating.TAKES_BATCHES:
            return loader
        context = worker_context(loader.num_workers, loader.multiprocessing_context)
        if not (is_training and self.sampler is not None):
            getattr(loader, "base_dataloader", loader).multiprocessing_context = context
            return loader
        names = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "worker_init_fn")
        options = {name: getattr(loader, name) for name in names}
        made: Any = DataLoader(loader.dataset, batch_sampler=self.sampler, multiprocessing_context=context, **options)
        prepared = self._trainer.accelerator.prepare(made)
        dealt = prepared.batch_sampler
        if getattr(dealt, "batch_sampler", None) is self.sampler:  # accelerate would distribute them a second time
            dealt.num_processes, dealt.process_index = 1, 0
        return prepared

    def begin(self, loader: object, places: Sequence[Sequence[int]]) -> None:
        self.parts = StreamParts(loader, self._args)
        self.parts.resume(places, not self._args.ignore_data_skip)

    def _signature(self) -> list[str]:
        self._trainer._set_signature_columns_if_needed()
        return list(self._trainer._signature_columns)

    def _say(self, text: str) -> None:
        if text not in self._logged and self._args.process_index == 0:
            logger.warning("%s", text)
        self._logged.add(text)

    def _config(self) -> Any:
        return bare_model(self._trainer.model)[0].config

    def _unsupported_columns(self) -> frozenset[str]:
        return frozenset(self._signature()) - {*TOKEN_COLUMNS, "label"}

    # -- lengths ------------------------------------------------------------------------------------------------------

    def can_scan(self, dataset: object) -> bool:
        """Whether batches hold the rows of the data set unchanged, and these can be read at any time."""
        lazy = getattr(dataset, "format", None)
        is_lazy = isinstance(lazy, Mapping) and lazy.get("type") == "custom"
        has_rows = not isinstance(dataset, Mapping) and not is_stream(dataset) and has_length(dataset)
        return has_rows and not is_lazy and is_stock(self._given_collator()) and not self._takes_long(dataset)

    def _takes_long(self, dataset: Any) -> bool:
        """Whether a data set holds too many Python objects to read each before training. Not for given strategies: a
        row that is too long must raise an error before the first step."""
        is_table = isinstance(lazy := getattr(dataset, "format", None), Mapping) and "type" in lazy
        is_trained = dataset is getattr(self._trainer, "train_dataset", None)
        return self._args.hotspa_auto and is_trained and not is_table and len(dataset) > _MOST_ROWS

    def collates_for(self, loader: object) -> bool:
        return any(getattr(loader, "collate_fn", None) is collator for collator in self._collators)

    def scan(self, dataset: object) -> tuple[Any, SequenceTable]:
        """The data set, tokenised if its rows are text, and the lengths of its rows. Raises `HotspaError` if it cannot
        be used unchanged."""
        if id(dataset) not in self._known:
            while len(self._known) >= _SETS_KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[id(dataset)] = dataset, *self._scanned(dataset)
        return self._known[id(dataset)][1:]

    def _scanned(self, dataset: Any) -> tuple[Any, SequenceTable]:
        args, tokenizer, collator = self._args, self._tokenizer(), self._given_collator()
        of_ids = type(collator) is stock.DataCollatorForLanguageModeling
        rules = RowRules(
            labels_are_ids=of_ids,
            unlabelled_id=getattr(collator.tokenizer, "pad_token_id", None) if of_ids else None,
            pads_left=getattr(getattr(collator, "tokenizer", None), "padding_side", "right") == "left",
            absolute_positions=has_absolute_positions(self._config()),
            skips_empty=args.hotspa_skips_empty,
            borders=length_borders(self._config()),
            unsupported=self._unsupported_columns(),
        )
        quiet = args.disable_tqdm or args.process_index != 0
        if len(dataset) and not self.has_own_labels:
            collating.with_masks(dataset[0], 0)
        with args.main_process_first(desc="scan of the sequence lengths"):
            names = getattr(dataset, "column_names", None)
            if names and tokenizer is not None and "input_ids" not in names:
                skips = args.hotspa_skips_empty
                dataset = prepare_dataset(dataset, tokenizer, keep=self._loss_columns, skips_empty=skips)
            if self.has_own_labels:
                read = _inputs_of(dataset)
            else:
                read = _rendered(dataset, tokenizer, args.hotspa_skips_empty)
            return dataset, scan_dataset(read, rules=rules, disable_progress=quiet)

    def table(self, dataset: object, longest: int) -> SequenceTable | None:
        """The scan of a data set, all of whose rows have a bucket; None if it cannot be scanned. Raises `HotspaError`
        if rows exceed every bucket, and `hotspa_overlong` does not handle them."""
        if not self.can_scan(dataset):
            return None
        table = self.scan(dataset)[1]
        check_lengths(table, longest, self._args.hotspa_overlong, self._args.hotspa_auto)
        return table

    def tables(
        self, trained: object, evaluated: Sequence[Any], loader: object, agreement: Agreement
    ) -> list[SequenceTable]:
        """The scan that strategies are chosen for (of trained rows, if any, else of evaluated ones), then others that
        must fit. Collective. `loader`: the training data loader, if any. Raises `DataError` if there are no rows."""

        def scanned() -> list[SequenceTable]:
            sets = {id(d): d for d in (trained, *evaluated) if d is not None and self.can_scan(d)}
            return [self.scan(dataset)[1] for dataset in sets.values()]

        self.sampled = loader is not None and not (self.can_scan(trained) and self.collates_for(loader))
        self.fields = {name for d in (trained, *evaluated) for name in getattr(d, "column_names", None) or ()}
        trained = None if self.sampled else trained
        tables = agreement.run("auto strategies", scanned)
        if self.sampled:
            first, fields = lengths_of_first(loader, _SAMPLED_BATCHES, agreement, self.has_own_labels)
            tables.insert(0, first)
            self.fields |= fields
        if not tables:
            raise DataError(
                "hotspa_strategies=auto has no rows to choose strategies for",
                fix="pass train_dataset, or give hotspa_strategies",
            )
        return tables

    def example(self, dataset: Any) -> dict[str, Any] | None:
        """The columns that a token loss reads, of the first row, [L] or []; None if it cannot be read before training.
        Raises `HotspaError` if the row cannot be read, or lacks a column."""
        if not self._loss_columns or isinstance(dataset, Mapping) or is_stream(dataset) or not has_length(dataset):
            return None
        first = dataset[0] if len(dataset) else None
        collates = self._given_collator() is not None  # which may make the columns
        if not isinstance(first, Mapping) or (collates and not first.keys() >= set(self._loss_columns)):
            return None
        skips = self._args.hotspa_skips_empty
        batch = RowCollator(None, self._tokenizer(), loss_columns=self._loss_columns, skips_empty=skips)([first])
        if not len(batch["input_ids"]):
            return None
        return {name: batch[name][0] for name in self._loss_columns}

    def tokens_of(self, dataset: object) -> Any:
        """The data set for a loader, tokenised if a scan has done so."""
        known = self._known.get(id(dataset))
        return dataset if known is None else known[1]


class _Mapped:
    """The rows of a list or a torch data set, each as a function makes it."""

    def __init__(self, dataset: Any, made: Callable[[Any], Any]) -> None:
        self._dataset, self._made = dataset, made

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._made(self._dataset[row])


def _rendered(dataset: Any, tokenizer: Any, skips_empty: bool) -> Any:
    """Rows of text as tokens; other data sets unchanged."""
    if tokenizer is None or getattr(dataset, "column_names", None) or not len(dataset):
        return dataset
    is_text = isinstance(first := dataset[0], Mapping) and "input_ids" not in first
    return _Mapped(dataset, lambda row: tokenize_rows([row], tokenizer, skips_empty)[0]) if is_text else dataset


def _inputs_of(dataset: Any) -> Any:
    """Rows without labels, which may be of any shape."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select_columns([name for name in dataset.column_names if name in _INPUTS])
    return _Mapped(dataset, lambda row: {name: value for name, value in row.items() if name in _INPUTS})


_INPUTS = ("input_ids", "attention_mask", "position_ids")


def _unchanged(batch: object) -> object:
    return batch


def lengths_of_first(
    loader: Any, batches: int, agreement: Agreement, has_own_labels: bool = False
) -> tuple[SequenceTable, set[str]]:
    """The lengths of the rows of a loader's first batches, of all ranks, and the names of what these hold. Collective.

    The loader is iterated once more when training begins; the random generators are restored. Raises `HotspaError` on
    every rank if a batch cannot be read, or the loader can be iterated only once."""
    state, fields = random_state(), set[str]()

    def read() -> list[int]:
        if iter(loader) is loader or _is_spent(loader):
            raise UnsupportedError(
                "hotspa_strategies=auto with a data set that can be read only once",
                why="strategies are chosen for the lengths of its first rows, which would be lost",
                fix="give hotspa_strategies, or a data set that begins anew with each iter()",
            )
        lengths = list[int]()
        for batch in islice(loader, batches):
            read = batch if has_own_labels else collating.without_padded_from(batch)
            fields.update(read)
            known = _INPUTS if has_own_labels else (*ROW_COLUMNS, *FLAT_COLUMNS)
            names = [name for name in known if isinstance(read.get(name), Tensor)]
            columns = {name: read[name] for name in names}
            lengths += [len(document.ids) for document in read_batch(columns, _ANY, _ANY, agreement.rank)]
        return lengths

    try:
        mine = agreement.run("auto strategies", read)
    finally:
        set_random_state(state, "the first batches")
    lengths = torch.cat(agreement.vectors(torch.tensor(mine, dtype=torch.int64)))
    names = chain.from_iterable(text.split() for text in agreement.texts(" ".join(sorted(fields))))
    return SequenceTable.from_lengths(lengths.numpy()), set(names)


_ANY = 1 << 40


def _is_spent(loader: object) -> bool:
    dataset: Any = getattr(loader, "dataset", None)
    while isinstance(getattr(dataset, "dataset", None), IterableDataset):
        dataset = dataset.dataset
    return isinstance(dataset, Iterator)
