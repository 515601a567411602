"""From rows to the packed tensors of one rank.

Owns `MicroBatch` and `MiniBatch`, what the engine runs, and `PackedBucketCollator`, the data collator which builds them:
of the rows of a mini-batch, or of a plan that was made from their lengths before they were read. Everything that
can be wrong with the contents of a row is found here, on the CPU, before the first transfer of the mini-batch; it is
carried in `MiniBatch.error` and not raised, because only some ranks see the row and all must stop together.

Legend of the shape suffixes: T packed tokens of a micro-batch, S its sequences, S1 = S + 1.
Labels are shifted here, once: `labels_1T[0, t]` is the target of position t, so nothing downstream shifts again.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_hotspa.errors import DataError, HotspaConfigError, HotspaError, TokenRangeError, check_choice
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES, MiniBatchPlan, Pack, plan_mini_batch
from hf_hotspa.packing.context_cuts import Piece
from hf_hotspa.rows.features import DEFAULT_RULES, IGNORED_LABEL, Row, RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.stragglers.speeds import Speeds
from hf_hotspa.strategy import Bucket, Strategy


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One pack as tensors: one forward/backward unit of one replica.

    Args:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64, from 0 in each sequence.
        labels: [1, T] int64, the target of each position, already shifted; -100 where there is none, so always at the
            last position of a sequence.
        cu_seqlens: [S1] int32, where each sequence begins, and T at the end.
        lengths: The S sequence lengths, on the host.
        num_labels: Targets that count, on the host (no device is asked).
        keys: For each sequence the dataset row and the first token it was taken from; (-1, 0) for padding.
        columns: What a loss of the user's own reads beside, by name: [1, T] with a number for each token of
            `input_ids` (not shifted), or [S] with one for each sequence; int64 or float64.
        cuts: Of a part of a pack, for each sequence its tokens before the part and those of the whole sequence; empty
            where all are whole. The [1, T] columns of a part are shifted as `labels` are.
        content: A digest of tokens and labels, of 64 bits: the ranks of a replica must have the same (see `parallel.agreement`).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]
    num_labels: int
    keys: tuple[tuple[int, int], ...] = ()
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    content: int = 0
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MicroBatch":
        """The same micro-batch on a device."""
        if self.input_ids.device == torch.device(device):
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        """The same micro-batch in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def padded_to(self, num_tokens: int, pad_token_id: int) -> "MicroBatch":
        """Appends one sequence of padding, isolated like any other and without labels, up to `num_tokens` tokens.

        Raises:
            DataError: the micro-batch is longer than that.
        """
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
        """The tokens `[first, stop)`: a pack of whole sequences and of parts of them, see `cuts`.

        Positions and targets are those of the whole sequences.
        """
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
        """Parts of sequences, one after the other, as a pack of its own; there may be several of one, or none at all.

        Positions and targets are those of the whole sequences.
        """
        begins, of_sequences = [0, *accumulate(self.lengths)], [i for i, _, _ in pieces]
        places = [slice(begins[i] + first, begins[i] + stop) for i, first, stop in pieces]
        lengths = tuple(stop - first for _, first, stop in pieces)
        device = self.cu_seqlens.device
        sums = torch.tensor([0, *accumulate(lengths)], dtype=self.cu_seqlens.dtype).to(device, non_blocking=True)
        index = torch.tensor(of_sequences, dtype=torch.int64).to(device, non_blocking=True)
        cuts = self.cuts or [(0, length) for length in self.lengths]

        together = all(one.stop == other.start for one, other in pairwise(places))  # no copy: all chunks live at once
        whole = slice(places[0].start, places[-1].stop) if places else slice(0)

        def taken(row: torch.Tensor) -> torch.Tensor:
            return row[:, whole] if together else torch.cat([row[:, place] for place in places], 1)

        labels = taken(self.labels)
        columns = {
            # those of a part are shifted already
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
    """What this rank's replica runs in one phase; no micro-batch at all is a normal case."""

    bucket: Bucket
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimizer step as one rank sees it.

    Args:
        plan: The plan of the whole mini-batch, the same on every rank.
        phases: One for each phase of the plan, on every rank, in the same order.
        error: What was found wrong while the rows were read, to be agreed on and raised by all ranks; the phases are
            empty then.
        content: A digest of the tokens, where ranks read them from streams of their own.
    """

    plan: MiniBatchPlan
    phases: tuple[PhaseBatch, ...]
    error: HotspaError | None = None
    content: str = ""

    def digests(self) -> dict[str, str]:
        """What must be the same on all ranks before the first transfer, by name."""
        return {"mini-batch (data order, seed or data set)": self.plan.digest(), "rows of the stream": self.content}

    @property
    def num_labels(self) -> int:
        """Label tokens of the whole mini-batch, over all ranks: the N of the loss."""
        return self.plan.num_labels

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MiniBatch":
        """The same mini-batch on a device."""
        return self._map(lambda micro_batch: micro_batch.to(device, non_blocking))

    def pin_memory(self) -> "MiniBatch":
        """The same mini-batch in page-locked memory (called by the DataLoader)."""
        return self._map(lambda micro_batch: micro_batch.pin_memory())

    def _map(self, function: Callable[[MicroBatch], MicroBatch]) -> "MiniBatch":
        phases = tuple(replace(p, micro_batches=tuple(map(function, p.micro_batches))) for p in self.phases)
        return replace(self, phases=phases)


def content_digest(rows: Iterable[Row]) -> str:
    """Hex sha256 over the tokens and labels of rows, and over what a loss of the user's own reads beside."""
    content = hashlib.sha256()
    for row in rows:
        content.update(row.ids.tobytes() + (b"" if row.labels is None else row.labels.tobytes()))
        for column in row.columns.values():
            content.update(column.tobytes())
    return content.hexdigest()


class PackedBucketCollator:
    """A data collator: rows in, the bucketed and packed mini-batch of one rank out.

    As `collate_fn` of a plain torch `DataLoader` it takes the rows of one optimizer step, which must be the same on every
    rank, and gives what `HotSPaEngine.forward_backward` takes. `HotSPaTrainer` uses the same class, on plans that it makes
    from a scan of the lengths before any row is read.

    Args:
        buckets: The buckets, in the order in which their phases run; those of the engine.
        rank: Global rank. In each phase it runs the packs of replica ``strategy.coord(rank).dp``.
        vocab_size: Token ids and labels must be below it.
        quadratic_cost: See `ModelShape.quadratic_cost`; balances packs of unequal lengths.
        policy: One of `OVERLONG_POLICIES`, for sequences above the longest bucket.
        rules: What rows are read by.
        table: The scan that plans were made from; with it, a row whose length is no longer the scanned one is
            refused even where the planned slice would still fit.

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
                "the collator has no buckets" if not self.buckets else f"{self.buckets[0]!r} is no bucket",
                fix="PackedBucketCollator(parse_buckets('dp2:1024@4096,tp2:8192'), rank=..., vocab_size=...)",
            )
        check_choice("the policy for over-long sequences", policy, OVERLONG_POLICIES)
        self.quadratic_cost, self.policy, self.rules, self.table = quadratic_cost, policy, rules, table
        self._replicas: dict[Strategy, int] = {}  # this rank's, by strategy

    def __call__(self, features: Sequence[Any]) -> MiniBatch:
        """The mini-batch of some rows; an error of this family is carried in it, for all ranks to raise.

        Args:
            features: The rows of one optimizer step, the same on every rank: mappings with `input_ids`, and perhaps
                `labels`, `attention_mask`, `position_ids` or `seq_lengths` (`hf_hotspa.rows.features`).
        """
        try:
            return self.of_rows([read_row(example, row, self.rules) for row, example in enumerate(features)])
        except HotspaError as error:
            data = error.to_dict()
            data["where"] = f"{data['where'] or 'a row'}, counted within the mini-batch"
            return MiniBatch(MiniBatchPlan((), 0, len(features)), (), HotspaError.from_dict(data))

    def of_rows(self, rows: Sequence[Row], speeds: Speeds | None = None) -> MiniBatch:
        """The mini-batch of rows that have been read, with a digest of all their tokens.

        Args:
            speeds: By which packs are divided over replicas; evenly when None.

        Raises:
            HotspaError: it cannot be planned. What is wrong with the rows of one rank only is carried.
        """
        table = SequenceTable.of_rows(rows, self.rules)
        indices, cost = range(len(rows)), self.quadratic_cost
        plan = plan_mini_batch(indices, table, self.buckets, quadratic_cost=cost, policy=self.policy, speeds=speeds)
        return replace(self.of_plan(plan, dict(enumerate(rows))), content=content_digest(rows))

    def packs_of(self, plan: MiniBatchPlan) -> tuple[tuple[Pack, ...], ...]:
        """The packs that this rank runs, for each phase."""
        mine = []
        for phase in plan.phases:
            strategy = phase.bucket.strategy
            if strategy not in self._replicas:
                self._replicas[strategy] = strategy.coord(self.rank).dp
            mine.append(phase.replicas[self._replicas[strategy]])
        return tuple(mine)

    def rows_of(self, plan: MiniBatchPlan) -> tuple[int, ...]:
        """The dataset rows that this rank needs, each once, in the order of use."""
        rows = dict[int, None]()
        for packs in self.packs_of(plan):
            for pack in packs:
                for sequence in pack.sequences:
                    rows[sequence.row] = None
        return tuple(rows)

    def of_plan(self, plan: MiniBatchPlan, rows: Mapping[int, Any]) -> MiniBatch:
        """The mini-batch of a plan that was made before; an error of this family is carried in it.

        Args:
            rows: Dataset row -> example (a mapping as for `__call__`, or a `Row`), for `rows_of(plan)`.
        """
        try:
            read, phases = {row: self._read(rows[row], row) for row in self.rows_of(plan)}, list[PhaseBatch]()
            for phase, packs in zip(plan.phases, self.packs_of(plan), strict=True):
                phases.append(PhaseBatch(phase.bucket, tuple([self._micro_batch(pack, read) for pack in packs])))
        except HotspaError as error:
            return self.failed(plan, error)
        return MiniBatch(plan, tuple(phases))

    def failed(self, plan: MiniBatchPlan, error: HotspaError) -> MiniBatch:
        """A mini-batch that carries an error."""
        return MiniBatch(plan, tuple(PhaseBatch(phase.bucket, ()) for phase in plan.phases), error)

    def _read(self, example: Any, row: int) -> Row:
        parsed = example if isinstance(example, Row) else read_row(example, row, self.rules)
        if self.table is not None:
            if len(parsed.ids) != int(self.table.lengths[row]):
                scanned = int(self.table.lengths[row])
                raise self._stale(row, f"it has {len(parsed.ids)} tokens and {scanned} were scanned")
            if len(parsed.ids) and parsed.cuts.tolist() != [begin for begin, _ in self.table.documents(row)[1:]]:
                raise self._stale(row, "its documents begin elsewhere")
        return parsed

    def _micro_batch(self, pack: Pack, rows: Mapping[int, Row]) -> MicroBatch:
        lengths = pack.lengths
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        ids_T = np.empty(num_tokens, np.int64)
        labels_T = np.empty(num_tokens, np.int64)
        begin, keys = 0, list[tuple[int, int]]()
        for sequence, end in zip(pack.sequences, ends.tolist(), strict=True):
            row = rows[sequence.row]
            keys.append((sequence.row, sequence.start))
            if sequence.stop > len(row.ids):
                raise self._stale(sequence.row, f"tokens up to {sequence.stop} were planned and it has {len(row.ids)}")
            ids_T[begin:end] = row.ids[sequence.start : sequence.stop]
            labels_T[begin:end], num_labels = row.targets_of(sequence.start, sequence.stop)
            if num_labels != sequence.num_labels:
                raise self._stale(sequence.row, f"it has {num_labels} labels and {sequence.num_labels} were planned")
            begin = end
        # Ids first: without labels of their own, rows take their targets from them, and the id is the better name.
        self._check_range(ids_T, "input_ids", pack, rows)
        self._check_range(np.where(labels_T == IGNORED_LABEL, 0, labels_T), "labels", pack, rows)
        starts = ends - np.asarray(lengths)
        positions_T = np.arange(num_tokens) - np.repeat(starts, lengths)
        columns, contents = dict[str, torch.Tensor](), [ids_T, labels_T]
        for name in rows[pack.sequences[0].row].columns:
            columns[name] = _packed(name, pack, rows)
        for name in sorted(columns):
            contents.append(columns[name].numpy())
        return MicroBatch(
            torch.from_numpy(ids_T)[None],
            torch.from_numpy(positions_T)[None],
            torch.from_numpy(labels_T)[None],
            torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            lengths,
            pack.num_labels,
            tuple(keys),
            columns,
            _content_word(*contents),
        )

    def _check_range(self, values_T: NDArray[np.int64], key: str, pack: Pack, rows: Mapping[int, Row]) -> None:
        if int(values_T.min()) >= 0 and int(values_T.max()) < self.vocab_size:
            return
        at = int(np.flatnonzero((values_T < 0) | (values_T >= self.vocab_size))[0])
        begin = 0
        for sequence in pack.sequences:
            if at < begin + sequence.num_tokens:
                break
            begin += sequence.num_tokens
        # A target stands one position before the label it was made from.
        position = rows[sequence.row].first + sequence.start + at - begin + (key == "labels")
        raise TokenRangeError(
            f"{key} holds {int(values_T[at])}, and the vocabulary has the ids 0 to {self.vocab_size - 1} "
            f"(size {self.vocab_size})",
            where=f"dataset row {sequence.row}, position {position}, rank {self.rank}",
            why="the embedding or the loss would read beyond its table",
            fix="tokenise with the model's own tokenizer, or resize the model's embeddings",
        )

    def _stale(self, row: int, difference: str) -> DataError:
        return DataError(
            f"the cached scan is stale: row {row} changed since its length was scanned; {difference}",
            where=f"dataset row {row}, rank {self.rank}",
            why="the mini-batch was planned from the scan, and its loss divided by the labels counted there",
            fix="datasets must give the same row each time; remove random transforms, or delete the cached scan",
        )


def _content_word(*arrays: NDArray[Any]) -> int:
    """A digest of 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _packed(name: str, pack: Pack, rows: Mapping[int, Row]) -> torch.Tensor:
    """A column of a pack as `MicroBatch.columns` has it."""
    parts = [rows[s.row].columns[name] for s in pack.sequences]
    other = next((s.row for s, part in zip(pack.sequences, parts, strict=True) if part.ndim != parts[0].ndim), None)
    if other is not None:
        raise DataError(
            f"the column {name!r} has a number for each token in some rows and one number in others",
            where=f"dataset rows {pack.sequences[0].row} and {other}",
            fix="give every row the one or the other",
        )
    if parts[0].ndim == 0:
        return torch.from_numpy(np.stack(parts))
    cut = [part[s.start : s.stop] for s, part in zip(pack.sequences, parts, strict=True)]
    return torch.from_numpy(np.concatenate(cut))[None]


# -- idle packs -------------------------------------------------------------------------------------------------------

# Idle packs: what a replica runs that has no pack left, where ranks of others exchange tokens with it (`ep`).


def idle_micro_batch(columns: Mapping[str, torch.Tensor]) -> MicroBatch:
    """One token of padding: its loss, and its part of every gradient, is 0.

    Args:
        columns: Those of another pack, for their names and dtypes.
    """
    token = torch.zeros((1, 1), dtype=torch.int64)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    beside = {name: c.new_zeros((1, 1) if c.dim() == 2 else 1) for name, c in columns.items()}
    return MicroBatch(token, token, token + IGNORED_LABEL, ends, (1,), 0, ((-1, 0),), beside)


def is_idle(micro_batch: MicroBatch) -> bool:
    """Whether a pack is nothing but padding."""
    return bool(micro_batch.keys) and all(row < 0 for row, _ in micro_batch.keys)
