"""Builds the packed tensors of one rank, and the batches of a Trainer's data loaders.

Owns `MicroBatch` and `MiniBatch`, which the engine runs, and `PackedBucketCollator`, the data collator that builds them
from the rows of a mini-batch, or from a plan made from row lengths. Faulty rows are found here, on the CPU, before the
first transfer of the mini-batch. `MiniBatch.error` carries the error, as only some ranks see the row and all must stop
together.

Shape suffixes: T packed tokens of a micro-batch, S its sequences, S1 = S + 1.
Labels are shifted here, once: `labels_1T[0, t]` is the target of position t.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, count, pairwise
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info
from transformers import PreTrainedTokenizerBase
from transformers.data import data_collator as stock
from transformers.trainer_utils import has_length

from hf_hotspa.data.prepare import tokenize_rows
from hf_hotspa.errors import DataError, HotspaConfigError, HotspaError, TokenRangeError, UnsupportedError, check_choice
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES, MiniBatchPlan, Pack, Speeds, plan_mini_batch
from hf_hotspa.packing.cuts import Piece
from hf_hotspa.rows.read_row import DEFAULT_RULES, IGNORED_LABEL, LABEL_COLUMNS, TOKEN_COLUMNS, Row, RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, Strategy


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One pack as tensors: one forward/backward unit of one replica."""

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, from 0 in each sequence
    # [1, T] int64, the target of each position, already shifted; -100 without a target, so always at the end of a
    # sequence
    labels: torch.Tensor
    cu_seqlens: torch.Tensor  # [S1] int32, the start of each sequence, and T
    lengths: tuple[int, ...]  # the S sequence lengths, on the host
    num_labels: int  # targets that count, on the host
    keys: tuple[tuple[int, int], ...] = ()  # the dataset row and the first token of each sequence; (-1, 0) for padding
    # further inputs of a custom loss: [1, T] with a number for each token of `input_ids` (not shifted), or [S] with one
    # for each sequence; int64 or float64
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # a 64-bit digest of tokens and labels, on which the ranks of a replica must agree (`parallel.agreement`)
    content: int = 0
    # for each sequence of a part of a pack, its tokens before the part and the whole sequence's length; empty if all
    # are whole. The [1, T] columns of a part are shifted like `labels`.
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MicroBatch":
        if self.input_ids.device == torch.device(device):
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        return self._map(lambda tensor: tensor.pin_memory())

    def padded_to(self, num_tokens: int, pad_token_id: int) -> "MicroBatch":
        """Appends one isolated sequence of padding, without labels, up to `num_tokens` tokens. Raises `DataError`: the
        micro-batch is longer."""
        pad = num_tokens - self.num_tokens
        if pad < 0:
            raise DataError(f"a micro-batch of {self.num_tokens} tokens cannot be padded to {num_tokens}")
        if pad == 0:
            return self
        row, end = self.input_ids.new_full, self.cu_seqlens.new_full((1,), num_tokens)
        positions = torch.arange(pad, dtype=self.position_ids.dtype, device=self.position_ids.device)
        return MicroBatch(
            torch.cat([self.input_ids, row((1, pad), pad_token_id)], 1),
            torch.cat([self.position_ids, positions[None]], 1),
            torch.cat([self.labels, row((1, pad), IGNORED_LABEL)], 1),
            torch.cat([self.cu_seqlens, end]),
            (*self.lengths, pad),
            self.num_labels,
            (*self.keys, (-1, 0)) if self.keys else (),
            {
                name: torch.cat([column, column.new_zeros((1, pad) if column.dim() == 2 else 1)], -1)
                for name, column in self.columns.items()
            },
            cuts=(*self.cuts, (0, pad)) if self.cuts else (),
        )

    def part(self, first: int, stop: int) -> "MicroBatch":
        """Returns the tokens `[first, stop)` as a pack of whole and partial sequences (`cuts`), with their positions
        and targets in the whole sequences."""
        if (first, stop) == (0, self.num_tokens):
            return self
        begins = [0, *accumulate(self.lengths)]
        return self.pieces(
            [
                (i, max(first - begin, 0), min(begins[i + 1], stop) - begin)
                for i, begin in enumerate(begins[:-1])
                if begin < stop and begins[i + 1] > first
            ]
        )

    def pieces(self, pieces: Sequence[Piece]) -> "MicroBatch":
        """Returns parts of sequences as a pack, with their positions and targets in the whole sequences."""
        begins, of_sequences = [0, *accumulate(self.lengths)], [i for i, _, _ in pieces]
        places = [slice(begins[i] + first, begins[i] + stop) for i, first, stop in pieces]
        lengths = tuple(stop - first for _, first, stop in pieces)
        device = self.cu_seqlens.device
        sums = torch.tensor([0, *accumulate(lengths)], dtype=self.cu_seqlens.dtype).to(device, non_blocking=True)
        index = torch.tensor(of_sequences, dtype=torch.int64).to(device, non_blocking=True)
        cuts = self.cuts or [(0, length) for length in self.lengths]

        together = all(one.stop == other.start for one, other in pairwise(places))  # then no copy: chunks live at once
        whole = slice(places[0].start, places[-1].stop) if places else slice(0)

        def taken(row: torch.Tensor) -> torch.Tensor:
            return row[:, whole] if together else torch.cat([row[:, place] for place in places], 1)

        labels = taken(self.labels)
        columns = {
            # a part's columns are already shifted
            name: taken(column if self.cuts else column.roll(-1, 1)) if column.dim() == 2 else column[index]
            for name, column in self.columns.items()
        }
        return MicroBatch(
            taken(self.input_ids),
            taken(self.position_ids),
            labels,
            sums,
            lengths,
            int((labels != IGNORED_LABEL).sum()),
            tuple(self.keys[i] for i in of_sequences) if self.keys else (),
            columns,
            cuts=tuple((cuts[i][0] + first, cuts[i][1]) for i, first, _ in pieces),
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        return replace(
            self,
            input_ids=function(self.input_ids),
            position_ids=function(self.position_ids),
            labels=function(self.labels),
            cu_seqlens=function(self.cu_seqlens),
            columns={name: function(column) for name, column in self.columns.items()},
        )


@dataclass(frozen=True, eq=False)
class PhaseBatch:
    """The micro-batches, if any, of this rank's replica in one phase."""

    bucket: Bucket
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimizer step on one rank."""

    plan: MiniBatchPlan  # the plan of the whole mini-batch, the same on every rank
    phases: tuple[PhaseBatch, ...]  # one for each phase of the plan, in the same order on every rank
    error: HotspaError | None = None  # the error of the rows, for all ranks to agree on and raise; without phases
    content: str = ""  # a digest of the tokens, if each rank reads a separate stream

    def digests(self) -> dict[str, str]:
        """Returns by name what must agree on all ranks before the first transfer."""
        return {"mini-batch (data order, seed or data set)": self.plan.digest(), "rows of the stream": self.content}

    @property
    def num_labels(self) -> int:
        """Label tokens of the mini-batch over all ranks: the N of the loss."""
        return self.plan.num_labels

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MiniBatch":
        return self._map(lambda micro_batch: micro_batch.to(device, non_blocking))

    def pin_memory(self) -> "MiniBatch":
        """Returns the mini-batch in page-locked memory (called by the DataLoader)."""
        return self._map(lambda micro_batch: micro_batch.pin_memory())

    def _map(self, function: Callable[[MicroBatch], MicroBatch]) -> "MiniBatch":
        phases = tuple(replace(p, micro_batches=tuple(map(function, p.micro_batches))) for p in self.phases)
        return replace(self, phases=phases)


def content_digest(rows: Iterable[Row]) -> str:
    """Returns a hex sha256 of rows: tokens, labels and custom loss columns."""
    content = hashlib.sha256()
    for row in rows:
        content.update(row.ids.tobytes() + (b"" if row.labels is None else row.labels.tobytes()))
        for column in row.columns.values():
            content.update(column.tobytes())
    return content.hexdigest()


class PackedBucketCollator:
    """A data collator: converts rows to the bucketed and packed mini-batch of one rank.

    As `collate_fn` of a plain torch `DataLoader` it takes the rows of one optimizer step, the same on every rank, and
    returns the input of `HotSPaEngine.forward_backward`. `HotSPaTrainer` uses it with plans from scanned lengths.

    Args:
        buckets: The engine's buckets, in the order of their phases.
        rank: Global rank. In each phase it runs the packs of replica ``strategy.coord(rank).dp``.
        vocab_size: Token ids and labels must be below it.
        quadratic_cost: See `ModelShape.quadratic_cost`; balances packs of unequal lengths.
        policy: One of `OVERLONG_POLICIES`.
        table: The scan behind the plans: a row whose length has changed since is always an error.

    Raises:
        HotspaConfigError: no bucket, or an unknown policy.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        *,
        rank: int,
        vocab_size: int,
        quadratic_cost: float = 0.0,
        policy: str = "error",
        rules: RowRules = DEFAULT_RULES,
        table: SequenceTable | None = None,
    ) -> None:
        self.buckets, self.rank, self.vocab_size = tuple(buckets), rank, vocab_size
        if not self.buckets or not all(isinstance(bucket, Bucket) for bucket in self.buckets):
            raise HotspaConfigError(
                "the collator has no buckets" if not self.buckets else f"{self.buckets[0]!r} is not a bucket",
                fix="PackedBucketCollator(parse_buckets('dp2:1024@4096,tp2:8192'), rank=..., vocab_size=...)",
            )
        check_choice("the policy for over-long sequences", policy, OVERLONG_POLICIES)
        self.quadratic_cost, self.policy, self.rules, self.table = quadratic_cost, policy, rules, table
        self._replicas: dict[Strategy, int] = {}  # this rank's, by strategy

    def __call__(self, features: Sequence[Any]) -> MiniBatch:
        """Returns the mini-batch of some rows, with any `HotspaError`, for all ranks to raise.

        Args:
            features: The rows of one optimizer step, the same on every rank: mappings with `input_ids`, and optionally
                `labels`, `attention_mask`, `position_ids` or `seq_lengths` (`hf_hotspa.rows.read_row`).
        """
        try:
            return self.of_rows([read_row(example, row, self.rules) for row, example in enumerate(features)])
        except HotspaError as error:
            return MiniBatch(MiniBatchPlan((), 0, len(features)), (), _within_batch(error, "the mini-batch"))

    def of_rows(self, rows: Sequence[Row], speeds: Speeds | None = None) -> MiniBatch:
        """Returns the mini-batch of rows that were read, with a digest of all their tokens.

        Args:
            speeds: For dividing packs over replicas; None divides evenly.

        Raises:
            HotspaError: it cannot be planned. Errors of one rank's rows are carried.
        """
        table = SequenceTable.of_rows(rows, self.rules)
        indices, cost = range(len(rows)), self.quadratic_cost
        plan = plan_mini_batch(indices, table, self.buckets, quadratic_cost=cost, policy=self.policy, speeds=speeds)
        return replace(self.of_plan(plan, dict(enumerate(rows))), content=content_digest(rows))

    def packs_of(self, plan: MiniBatchPlan) -> tuple[tuple[Pack, ...], ...]:
        """Returns the packs of this rank for each phase."""
        mine = []
        for phase in plan.phases:
            strategy = phase.bucket.strategy
            if strategy not in self._replicas:
                self._replicas[strategy] = strategy.coord(self.rank).dp
            mine.append(phase.replicas[self._replicas[strategy]])
        return tuple(mine)

    def rows_of(self, plan: MiniBatchPlan) -> tuple[int, ...]:
        """Returns the dataset rows that this rank needs, each once, in order of use."""
        packs = chain.from_iterable(self.packs_of(plan))
        return tuple(dict.fromkeys(sequence.row for pack in packs for sequence in pack.sequences))

    def of_plan(self, plan: MiniBatchPlan, rows: Mapping[int, Any]) -> MiniBatch:
        """Returns the mini-batch of an existing plan, with any `HotspaError`.

        Args:
            rows: Dataset row -> example (a mapping as for `__call__`, or a `Row`), for `rows_of(plan)`.
        """
        try:
            read, phases, of_phases = dict[int, Row](), list[PhaseBatch](), self.packs_of(plan)
            for pack in chain.from_iterable(of_phases):
                for sequence in pack.sequences:
                    if (row := sequence.row) not in read:
                        example = rows[row]
                        read[row] = example if isinstance(example, Row) else read_row(example, row, self.rules)
                        if self.table is not None:
                            self._check_scan(self.table, read[row], row)
            for phase, packs in zip(plan.phases, of_phases, strict=True):
                micro_batches = list[MicroBatch]()
                for pack in packs:
                    micro_batches.append(self._micro_batch(pack, read))
                phases.append(PhaseBatch(phase.bucket, tuple(micro_batches)))
        except HotspaError as error:
            return MiniBatch(plan, tuple(PhaseBatch(phase.bucket, ()) for phase in plan.phases), error)
        return MiniBatch(plan, tuple(phases))

    def _check_scan(self, table: SequenceTable, read: Row, row: int) -> None:
        if len(read.ids) != (scanned := int(table.lengths[row])):
            raise self._stale(row, f"it has {len(read.ids)} tokens and {scanned} were scanned")
        if len(read.ids) and read.cuts.tolist() != [begin for begin, _ in table.documents(row)[1:]]:
            raise self._stale(row, "its documents begin elsewhere")

    def _micro_batch(self, pack: Pack, rows: Mapping[int, Row]) -> MicroBatch:
        lengths = pack.lengths
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        ids_T = np.empty(num_tokens, np.int64)
        # the last token of a sequence has no target, except in `targets`
        labels_T = np.full(num_tokens, IGNORED_LABEL)
        begin, keys = 0, list[tuple[int, int]]()
        for sequence, end in zip(pack.sequences, ends.tolist(), strict=True):
            row = rows[sequence.row]
            keys.append((sequence.row, sequence.start))
            if sequence.stop > len(row.ids):
                raise self._stale(sequence.row, f"tokens up to {sequence.stop} were planned and it has {len(row.ids)}")
            ids_T[begin:end] = row.ids[sequence.start : sequence.stop]
            if row.targets is not None:
                labels_T[begin:end] = row.targets[sequence.start : sequence.stop]
            else:
                whole = row.ids if row.labels is None else row.labels
                labels_T[begin : end - 1] = whole[sequence.start + 1 : sequence.stop]
            num_labels = end - begin - 1
            if row.targets is not None or row.labels is not None:
                num_labels = int(np.count_nonzero(labels_T[begin:end] != IGNORED_LABEL))
            if num_labels != sequence.num_labels:
                raise self._stale(sequence.row, f"it has {num_labels} labels and {sequence.num_labels} were planned")
            begin = end
        # Ids first: rows without labels take targets from them, and then the error should name `input_ids`.
        for key, values_T in (("input_ids", ids_T), ("labels", np.where(labels_T == IGNORED_LABEL, 0, labels_T))):
            if int(values_T.min()) < 0 or int(values_T.max()) >= self.vocab_size:
                raise self._out_of_range(values_T, key, pack, rows)
        starts = ends - np.asarray(lengths)
        positions_T = np.arange(num_tokens) - np.repeat(starts, lengths)
        columns = dict[str, torch.Tensor]()
        content = hashlib.blake2b(ids_T.tobytes() + labels_T.tobytes(), digest_size=8)
        for name in sorted(rows[pack.sequences[0].row].columns):
            columns[name] = _packed(name, pack, rows)
            content.update(columns[name].numpy().tobytes())
        return MicroBatch(
            torch.from_numpy(ids_T)[None],
            torch.from_numpy(positions_T)[None],
            torch.from_numpy(labels_T)[None],
            torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            lengths,
            pack.num_labels,
            tuple(keys),
            columns,
            int.from_bytes(content.digest(), "little"),
        )

    def _out_of_range(
        self, values_T: NDArray[np.int64], key: str, pack: Pack, rows: Mapping[int, Row]
    ) -> TokenRangeError:
        at = int(np.flatnonzero((values_T < 0) | (values_T >= self.vocab_size))[0])
        ends = np.cumsum(pack.lengths)
        index = int(np.searchsorted(ends, at, side="right"))
        sequence, begin = pack.sequences[index], int(ends[index]) - pack.lengths[index]
        # A target is one position before its label.
        position = rows[sequence.row].first + sequence.start + at - begin + (key == "labels")
        return TokenRangeError(
            f"{key} holds {int(values_T[at])}, and the vocabulary has the ids 0 to {self.vocab_size - 1} "
            f"(size {self.vocab_size})",
            where=f"dataset row {sequence.row}, position {position}, rank {self.rank}",
            why="the embedding or the loss would read out of bounds",
            fix="tokenise with the model's own tokenizer, or resize the model's embeddings",
        )

    def _stale(self, row: int, difference: str) -> DataError:
        return DataError(
            f"the cached scan is stale: row {row} changed since its length was scanned; {difference}",
            where=f"dataset row {row}, rank {self.rank}",
            why="the mini-batch was planned from the scan, and its loss is divided by the labels counted there",
            fix="datasets must give the same row each time; remove random transforms, or delete the cached scan",
        )


def _packed(name: str, pack: Pack, rows: Mapping[int, Row]) -> torch.Tensor:
    parts = [rows[s.row].columns[name] for s in pack.sequences]
    other = next((s.row for s, part in zip(pack.sequences, parts, strict=True) if part.ndim != parts[0].ndim), None)
    if other is not None:
        raise _mixed(name, f"dataset rows {pack.sequences[0].row} and {other}")
    if parts[0].ndim == 0:
        return torch.from_numpy(np.stack(parts))
    cut = [part[s.start : s.stop] for s, part in zip(pack.sequences, parts, strict=True)]
    return torch.from_numpy(np.concatenate(cut))[None]


def _mixed(name: str, where: str | None = None) -> DataError:
    return DataError(
        f"the column {name!r} has a number for each token in some rows and one number in others",
        where=where,
        fix="use one of the two in all rows",
    )


# -- idle packs -------------------------------------------------------------------------------------------------------

# A replica without packs runs idle packs if ranks of other replicas exchange tokens with it (`ep`).


def idle_micro_batch(columns: Mapping[str, torch.Tensor]) -> MicroBatch:
    """Returns one token of padding with another pack's columns, whose loss and gradients are 0."""
    token = torch.zeros((1, 1), dtype=torch.int64)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    beside = {name: c.new_zeros((1, 1) if c.dim() == 2 else 1) for name, c in columns.items()}
    return MicroBatch(token, token, token + IGNORED_LABEL, ends, (1,), 0, ((-1, 0),), beside)


def is_idle(micro_batch: MicroBatch) -> bool:
    """Whether a pack is only padding."""
    return bool(micro_batch.keys) and max(micro_batch.keys)[0] < 0


# -- batches of rows --------------------------------------------------------------------------------------------------

# Batches of tensors for the data loaders of a Trainer, or of a loop over a `SwitchedModel`.
#
# `RowCollator` tokenises text, reads loss masks, calls the user's collator or else pads rows itself, and cuts sequences
# above the longest bucket. `MiniBatchSampler` distributes the rows of mini-batches of a given size to ranks and
# accumulated batches, evenly or not.


try:
    from transformers.trainer_pt_utils import BatchRebalanceSampler
except ImportError:  # an older release accepts no batch sampler: see `Rows.of_older_release`
    BatchRebalanceSampler = None  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)

ERROR, TRUNCATE, SPLIT, DROP = "error", "truncate", "split", "drop"
SKIP = "skip"
EMPTY_POLICIES = (ERROR, SKIP)  # what to do with rows without anything to learn
COUNTS = "hotspa_cut_rows"  # the key, in a training batch, of the numbers of truncated, split, dropped and empty rows

is_loss_mask = re.compile(r"(?!(attention|special_tokens)_mask$)(.*_)?masks?$", re.DOTALL).match
"""Whether a column of this name is a loss mask."""
_OF_STOCK = (
    stock.DefaultDataCollator, stock.DataCollatorWithPadding, stock.DataCollatorForLanguageModeling,
    stock.DataCollatorForSeq2Seq, stock.DataCollatorWithFlattening,
)  # fmt: skip
_FUNCTIONS = (stock.default_data_collator, stock.torch_default_data_collator)


def is_stream(dataset: object) -> bool:
    """Whether rows have no random access; a stream may have a length."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def length_facts(loader: DataLoader) -> dict[str, str]:
    """Returns what must agree on all ranks of a data loader: with fewer batches on a rank, the others would wait."""
    return {"number of batches": str(len(loader)) if has_length(loader) else "unknown"}


def release_others(loader: DataLoader) -> None:
    """Ends the pass on the ranks that wait for a batch from this one (`dispatch_batches`), after it failed."""
    if isinstance(loader, DataLoaderDispatcher) and loader.state.process_index == 0:
        for _ in range(1 if loader.split_batches or loader._drop_last else 2):
            broadcast_object_list([None, True])


def is_stock(collator: object) -> bool:
    """Whether a data collator is None or one of transformers', whose batches hold the rows unchanged."""
    return collator is None or type(collator) in _OF_STOCK or collator in _FUNCTIONS


@dataclass(eq=False)
class RowCollator:
    """Converts rows to a batch of tensors, [B, L] each, padded on the right.

    Attributes:
        longest: Tokens of the longest trained sequence; None while unknown.
        kept: Columns of a data set that are read; empty for all.
    """

    collator: Callable[[list[Any]], Any] | None = None  # the user's; None to pad rows here
    tokenizer: PreTrainedTokenizerBase | None = None  # for rows without `input_ids`
    columns: Collection[str] | None = None  # those that the stock Trainer would keep for the model; None for all
    loss_columns: Sequence[str] = ()  # numbers of rows or tokens that a token loss reads
    policy: str = ERROR  # for sequences of more than `longest` tokens: error, truncate, split or drop
    skips_empty: bool = False  # whether to leave out null or empty rows
    counts: bool = False  # whether the batch has the numbers of changed rows (`COUNTS`)
    unsupported: frozenset[str] = frozenset()  # columns that the model would receive and that packing cannot honour
    borders: tuple[int, ...] = ()  # as in `RowRules`
    longest: int | None = None
    kept: frozenset[str] = frozenset()
    is_plain: bool = False  # whether rows are only collated: their labels may be of any kind

    def __post_init__(self) -> None:
        self._passes_masks_over = is_stock(self.collator) and not self.is_plain

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Returns the batch of some rows, on the host. Raises `DataError`: a row cannot be read. Raises
        `UnsupportedError`: information of a row on its tokens would be ignored. Raises `OverlongError`: a sequence is
        too long, and the policy is `error`."""
        rows = self._read(list(examples)) if len(examples) else []
        if not rows:
            empty = torch.zeros((0, 1), dtype=torch.int64)
            batch: Any = dict.fromkeys(("input_ids", "labels", "attention_mask"), empty)
        elif self.collator is None:
            batch = self._padded(rows)
        else:
            if self.columns is not None and isinstance(rows[0], Mapping):
                rows = [{name: row[name] for name in row if name in self.columns} for row in rows]
            batch = self.collator(rows)
        if not isinstance(batch, Mapping):
            return batch
        counts = [0, 0, 0, len(examples) - len(rows)]
        if self.policy != ERROR:
            batch = self._cut(batch, counts)
        return {**batch, COUNTS: torch.tensor(counts)} if self.counts else batch

    def _read(self, examples: list[Any]) -> list[Any]:
        """Tokenises text, applies masks that a stock collator would ignore, and leaves out empty rows if asked to."""
        if not isinstance(examples[0], Mapping):
            if self.collator is None:
                raise DataError(
                    f"a row is a {type(examples[0]).__name__} instead of a mapping",
                    fix="rows must be dictionaries with 'input_ids' and, where part of the tokens counts, 'labels'",
                )
            return examples
        if self.tokenizer is not None and "input_ids" not in examples[0]:
            try:
                rendered = tokenize_rows(examples, self.tokenizer, self.skips_empty)
            except HotspaError as error:
                raise _within_batch(error) from None
            kept = [{name: e[name] for name in self.loss_columns if name in e} for e in examples]
            if type(self.collator) is stock.DataCollatorForLanguageModeling and "labels" in rendered[0]:
                raise UnsupportedError(
                    "DataCollatorForLanguageModeling, and a dataset of conversations or completions",
                    why="the collator makes every token a label, also the tokens of prompts, which have no labels here",
                    fix="pass no data_collator, or tokenise the dataset yourself",
                )
            examples = [{**row, **own} for row, own in zip(rendered, kept, strict=True)]
        elif self._passes_masks_over:
            examples = [*map(with_masks, examples, count())]
        if not self.skips_empty:
            return examples
        return [example for example in examples if not _has_no_tokens(example)]

    def _padded(self, examples: list[Any]) -> dict[str, Tensor]:
        rules = RowRules(borders=self.borders, unsupported=self.unsupported, columns=tuple(self.loss_columns))
        if "input_ids" not in examples[0]:
            raise DataError(
                f"a row has no 'input_ids', only {sorted(map(str, examples[0]))}",
                why="rows of text need a tokenizer",
                fix="pass the tokenizer as processing_class, or tokenise the dataset",
            )
        rows, width, is_cut = list[Row](), 1, False
        try:
            for number, example in enumerate(examples):
                rows.append(row := read_row(example, number, rules))
                width, is_cut = max(width, len(row.ids)), is_cut or len(row.cuts) > 0
        except HotspaError as error:
            raise _within_batch(error) from None
        shape = len(rows), width
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, labels = np.full(shape, pad, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        mask, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for number, row in enumerate(rows):
            length = len(row.ids)
            ids[number, :length], mask[number, :length] = row.ids, 1
            labels[number, :length] = row.ids if row.labels is None else row.labels
            labels[number, row.cuts] = IGNORED_LABEL  # the first token of a document has no context
            if row.first and labels[number, 0] != IGNORED_LABEL:
                say_left_out()
            begins = np.zeros(length, np.int64)
            begins[row.cuts] = row.cuts
            positions[number, :length] = np.arange(length) - np.maximum.accumulate(begins)
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        batch["labels"] = torch.from_numpy(labels)
        if is_cut:
            batch["position_ids"] = torch.from_numpy(positions)
        for name in rules.columns:
            batch[name] = _stacked(name, [row.columns[name] for row in rows], width)
        return batch

    # -- sequences that are too long ----------------------------------------------------------------------------------

    def _cut(self, batch: Mapping[str, Any], counts: list[int]) -> dict[str, Any]:
        ids, longest, out = batch.get("input_ids"), self.longest, dict(batch)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or longest is None:
            return out
        pieces = self._pieces(batch, ids, longest, counts)
        if not any(counts[:3]):
            return out
        width = max((stop - first for _, first, stop in pieces), default=1)
        rows = [row for row, _, _ in pieces]
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == ids.shape:
                out[name] = _pieces_of(value, pieces, width, name)
            elif value.is_floating_point() and value.dim() > 1:
                raise UnsupportedError(
                    f"hotspa_overlong={self.policy} with {name} {list(value.shape)} of rows {list(ids.shape)}",
                    why="its numbers belong to neither tokens nor rows, and cannot be cut with them",
                    fix="use hotspa_overlong=error, and let the last bucket take the longest row",
                )
            elif value.dim() and len(value) == len(ids):
                out[name] = value[rows]
        return out

    def _pieces(
        self, batch: Mapping[str, Any], ids: Tensor, longest: int, counts: list[int]
    ) -> list[tuple[int, int, int]]:
        """The remaining pieces: row, first column and end column of each."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        pieces = list[tuple[int, int, int]]()
        for row in range(len(ids)):
            real = range(ids.shape[1]) if mask is None else mask[row].nonzero().flatten().tolist()
            begin, stop = (real[0], real[-1] + 1) if len(real) else (0, ids.shape[1])
            if stop - begin <= longest:
                pieces.append((row, 0, ids.shape[1]) if begin else (row, 0, stop))
                continue
            if positions is not None and bool((positions[row, begin + 1 : stop] == 0).any()):
                raise UnsupportedError(
                    f"hotspa_overlong={self.policy} with rows of several documents",
                    why="the documents of a row are separate sequences, and the whole row is longer than a bucket",
                    fix="let each row hold one document, or let the last bucket hold whole rows",
                )
            if self.policy == TRUNCATE:
                counts[0] += 1
                pieces.append((row, begin, begin + longest))
            elif self.policy == SPLIT:
                counts[1] += 1
                pieces += [(row, at, min(at + longest, stop)) for at in range(begin, stop, longest)]
            else:
                counts[2] += 1
        return pieces


def _pieces_of(value: Tensor, pieces: Sequence[tuple[int, int, int]], width: int, name: str) -> Tensor:
    fill = IGNORED_LABEL if name in ("labels", "shift_labels") else 0
    out = value.new_full((len(pieces), width), fill)
    for number, (row, first, stop) in enumerate(pieces):
        out[number, : stop - first] = value[row, first:stop]
        if name == "position_ids":
            out[number, : stop - first] -= value[row, first].item()
    return out


def _has_no_tokens(example: Mapping[str, Any]) -> bool:
    return "input_ids" in example and (example["input_ids"] is None or not len(example["input_ids"]))


def _within_batch(error: HotspaError, whole: str = "the batch") -> HotspaError:
    where = f"{error.where or 'a row'}, counted within {whole}"
    return HotspaError.from_dict({**error.to_dict(), "where": where})


def _stacked(name: str, values: Sequence[Any], width: int) -> Tensor:
    if len({value.ndim for value in values}) > 1:
        raise _mixed(name)
    if not values[0].ndim:
        return torch.from_numpy(np.stack(values))
    return torch.from_numpy(np.stack([np.pad(value, (0, width - len(value))) for value in values]))


def with_masks(example: object, row: int) -> Any:
    """Converts a row's loss masks in other columns (`completion_mask`, `assistant_masks`, ...) to `labels`. Raises
    `UnsupportedError`: a mask is not one number of 0 or 1 for each token, or the row has `label` and no `labels`."""
    if not isinstance(example, Mapping) or (ids := example.get("input_ids")) is None:
        return example
    for name in LABEL_COLUMNS:
        if example.get(name) is not None:
            return example
    masks = dict[str, Any]()
    for name, value in example.items():
        if value is not None and is_loss_mask(name):
            masks[name] = value
    if (label := example.get("label")) is not None:
        what = "one for each token" if np.ndim(label) else "one for the row"
        raise UnsupportedError(
            f"a row has 'label' ({what}), and no 'labels'",
            where=f"row {row} of a batch",
            why="a causal language model is trained on 'labels', and without them every token counts",
            fix="rename the column to 'labels', with -100 where a token does not count, or remove it",
        )
    if not masks:
        return example
    tokens = np.asarray(ids)
    labels = tokens.copy()
    for name, mask in masks.items():
        values = np.asarray(mask)
        if values.shape != tokens.shape or not np.isin(values, (0, 1)).all():
            raise UnsupportedError(
                f"the column {name!r} is not a mask of 0 and 1 with an entry for each token",
                where=f"row {row} of a batch",
                why="it would be ignored, and every token trained",
                fix=f"turn it into 'labels', with -100 where a token does not count, or remove {name!r}",
            )
        labels[values == 0] = IGNORED_LABEL
    rest = {name: value for name, value in example.items() if name not in masks}
    return {**rest, "labels": labels.tolist() if isinstance(ids, list) else labels}


def without_padded_from(batch: object) -> Any:
    """Removes labels of first tokens after padding on the left, which only padding would predict. `batch`: tensors [B,
    L]; other values, and batches without such labels, are returned unchanged."""
    if not isinstance(batch, Mapping) or batch.get("shift_labels") is not None:
        return batch
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if not (isinstance(labels, Tensor) and isinstance(mask, Tensor)):
        return batch
    if labels.dim() != 2 or labels.shape != mask.shape or not labels.numel():
        return batch
    first = (mask != 0).int().argmax(1, keepdim=True)
    left_out = (first > 0) & (labels.gather(1, first) != IGNORED_LABEL)
    if not bool(left_out.any()):
        return batch
    masked: Any = copy(batch)
    masked["labels"] = labels.scatter(1, first, labels.gather(1, first).masked_fill(left_out, IGNORED_LABEL))
    return masked


@lru_cache
def say_left_out() -> None:
    """Warns, once and on rank 0, that labels of first tokens after left padding are left out."""
    worker = get_worker_info()
    if os.environ.get("RANK", "0") == "0" and (worker is None or worker.id == 0):
        logger.warning(
            "Rows are padded on the left, and the first token after the padding has a label: it is left out, also from "
            "the mean. The stock Trainer would train it from the padding."
        )


def kept_columns(names: Collection[str], loss_columns: Sequence[str]) -> list[str]:
    """Returns the columns that the collator reads beside the model's inputs."""
    if "input_ids" not in names:
        return list(names)
    return [n for n in names if n in TOKEN_COLUMNS or n in loss_columns or n == "label" or is_loss_mask(n)]


TAKES_BATCHES = BatchRebalanceSampler is not None  # whether this release of transformers accepts a batch sampler
_BatchesOfRanks: Any = BatchRebalanceSampler or Sampler


@dataclass(eq=False)
class MiniBatchSampler(_BatchesOfRanks):
    """Yields the rows of each batch of this rank, for a mini-batch size that ranks and accumulation need not divide.

    A mini-batch has consecutive rows of the order, on any number of ranks; a batch may be empty. An incomplete
    mini-batch, at the end, is cut into batches where a complete one is, as by the stock Trainer, so that a mean over
    batches has as many. As a `BatchRebalanceSampler` by type, the stock Trainer does not distribute its batches again.
    """

    sampler: Sampler[int]  # the order of rows
    size: int  # rows of a mini-batch
    parts: int  # accumulated batches
    rank: int
    world_size: int
    drop_last: bool = False  # leaves out an incomplete batch of all ranks together
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.size)
        return full * self.parts + len(self._cuts(rest))

    def __iter__(self) -> Iterator[list[int]]:
        rows = list[int]()
        for row in self.sampler:
            rows.append(int(row))
            if len(rows) == self.size:
                yield from self._batches(rows)
                rows = []
        yield from self._batches(rows)

    def _cuts(self, rows: int) -> list[tuple[int, int]]:
        """The batches of all ranks together, as ranges of a mini-batch's rows."""
        edges = [self.size * part // self.parts for part in range(self.parts + 1)]
        cuts = [(start, min(stop, rows)) for start, stop in pairwise(edges) if start < rows]
        return [(start, stop) for start, stop in cuts if not self.drop_last or (start, stop) in pairwise(edges)]

    def _batches(self, rows: list[int]) -> Iterator[list[int]]:
        for start, stop in self._cuts(len(rows)):
            edges = [start + (stop - start) * rank // self.world_size for rank in (self.rank, self.rank + 1)]
            yield rows[slice(*edges)]


def seeded(sampler: Sampler[int], data_seed: int | None) -> Sampler[int]:
    """Returns a random sampler seeded as accelerate would seed it; other samplers unchanged."""
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
