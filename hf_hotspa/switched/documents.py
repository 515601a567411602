"""The rows of all ranks: each rank reads its own batch, all ranks learn every length, and tokens travel to who trains them.

A *document* is what is packed: a row of a batch without its padding, or one of the documents of a row that was packed before.
All ranks number the documents of a step alike: call by call, rank by rank, row by row.

Owns `read_batch` (a batch of tensors as documents), `Documents` (what every rank knows of all of them, and the plan of some)
and `Exchange` (what moves, and how many bytes that takes). Everything that moves is in host memory, over a group of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator
from hf_hotspa.errors import DataError, OverlongError, TokenRangeError, UnsupportedError
from hf_hotspa.packing.bucketing import plan_mini_batch
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement, replica_ranks
from hf_hotspa.rows.features import DEFAULT_RULES, IGNORED_LABEL, Row, RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.stragglers.speeds import Speeds
from hf_hotspa.strategy import Bucket, Strategy

ROW_COLUMNS = ("input_ids", "attention_mask", "position_ids", "seq_idx", "labels", "shift_labels")
"""The tensors [batch, length] of a batch that say what its rows are."""
FLAT_COLUMNS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")
"""Those [documents + 1] of a batch of one row."""

_NO_CUTS = np.zeros(0, np.int64)


class Document(NamedTuple):
    """One document of this rank.

    Attributes:
        ids: [length] int64.
        targets: [length] int64, what each token is to predict; -100 where that does not count.
        row: Its row in the batch.
        begin: Its first column there.
        columns: What a token loss reads beside: int64 or float64 [length] each, by name.
    """

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    row: int
    begin: int
    columns: Mapping[str, NDArray[Any]] = {}


def read_batch(
    batch: Mapping[str, Tensor | None], vocab_size: int, longest: int, rank: int, rules: RowRules = DEFAULT_RULES
) -> list[Document]:
    """The documents of a batch; no rows at all are a normal case.

    Args:
        batch: `ROW_COLUMNS` [B, L] and `FLAT_COLUMNS`, those that are there. `position_ids` may be [1, L].
        longest: Tokens of the longest bucket.
        rules: What the model makes of padding, and which columns [B] or [B, L] a token loss reads.

    Raises:
        HotspaError: a row that the plain model would train in another way, or that no bucket takes.
    """
    columns = {name: value.detach().cpu().numpy() for name, value in batch.items() if value is not None}
    ids = columns["input_ids"]
    if ids.ndim != 2:
        raise DataError(f"input_ids has {ids.ndim} dimensions", fix="give a batch [rows, tokens]")
    flat = {name: columns.pop(name) for name in FLAT_COLUMNS if name in columns}
    if flat and len(ids) != 1:
        raise UnsupportedError(f"{sorted(flat)} for {len(ids)} rows", fix="give them for a batch of one row")
    for name, column in columns.items():
        if name in rules.columns and column.shape == ids.shape[:1]:
            continue
        if column.shape == (1, *ids.shape[1:]) and len(ids) != 1:
            columns[name] = np.broadcast_to(column, ids.shape)
        elif column.shape != ids.shape:
            raise UnsupportedError(
                f"{name} has the shape {list(column.shape)}, and input_ids {list(ids.shape)}",
                why="rows are packed again, and each token needs a value of its own",
                fix=f"leave {name} out, or give [rows, tokens]",
            )
    documents: list[Document] = []
    for row in range(len(ids)):
        where = f"row {row} of the batch of rank {rank}"
        example = {name: column[row] for name, column in columns.items()} | flat
        documents += _documents(example, row, vocab_size, longest, where, rules)
    return documents


def _documents(
    example: dict[str, NDArray[np.int64]], row: int, vocab_size: int, longest: int, where: str, rules: RowRules
) -> Iterator[Document]:
    shifted = example.pop("shift_labels", None)
    if shifted is not None:
        example.pop("labels", None)
    read = read_row(example, row, rules)
    width, begin, end = read.width, read.first, read.first + len(read.ids)
    targets = np.full(width, IGNORED_LABEL, np.int64)
    if shifted is not None:
        targets[:] = shifted
    elif "labels" in example:
        targets[:-1] = example["labels"][1:]
    outside = np.ones(width, np.bool_)
    outside[begin:end] = False
    if (targets[outside] != IGNORED_LABEL).any():
        raise UnsupportedError(
            "padding has a label",
            where=where,
            why="the plain model would be trained to predict it, or from it",
            fix="set labels to -100 wherever attention_mask is 0, and at the first token after padding",
        )
    targets = targets[begin:end]
    wrong = [("input_ids", read.ids), ("labels", targets[targets != IGNORED_LABEL])]
    for name, values in wrong:
        if len(values) and (values.min() < 0 or values.max() >= vocab_size):
            value = values[(values < 0) | (values >= vocab_size)][0]
            raise TokenRangeError(
                f"{name} holds {value}, and the vocabulary has the ids 0 to {vocab_size - 1}",
                where=where,
                why="the embedding or the loss would read beyond its table",
                fix="tokenise with the model's own tokenizer, or resize the model's embeddings",
            )
    for first, stop in pairwise([0, *read.cuts.tolist(), len(read.ids)]):
        if stop - first > longest:
            raise OverlongError(
                f"a sequence of {stop - first} tokens is longer than the longest bucket, {longest} tokens",
                where=where,
                fix=f"let the last bucket take {stop - first} tokens, or truncate rows before they are collated",
            )
        if stop > first:
            own = {n: np.broadcast_to(c, len(read.ids))[first:stop] for n, c in read.columns.items()}
            yield Document(read.ids[first:stop], targets[first:stop], row, begin + first, own)


@dataclass
class Documents:
    """What every rank knows of the documents of a step, and the tokens of those that came here.

    Attributes:
        lengths, labels, owners: Of each document its tokens, targets that count, and the rank that read it.
        rows: The tokens of this rank's documents, and of those that it has got.
        holders: Which ranks have the tokens of a document.
    """

    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    holders: list[set[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, facts: Sequence[NDArray[np.int64]], mine: Sequence[Document], rank: int) -> list[range]:
        """Numbers the documents of a call, rank by rank.

        Args:
            facts: Of each rank [documents, 2]: length, and targets that count.
            mine: This rank's documents.

        Returns:
            The documents of each rank.
        """
        ranges = []
        for owner, of_rank in enumerate(facts):
            ranges.append(range(len(self), len(self) + len(of_rank)))
            self.lengths += of_rank[:, 0].tolist()
            self.labels += of_rank[:, 1].tolist()
            self.owners += [owner] * len(of_rank)
            self.holders += [{owner} for _ in range(len(of_rank))]
        for number, document in zip(ranges[rank], mine, strict=True):
            self.rows[number] = _row(document.ids, document.targets, document.columns)
        return ranges

    def plan(
        self, documents: Iterable[int], buckets: tuple[Bucket, ...], quadratic_cost: float, speeds: Speeds | None
    ) -> MiniBatchPlan:
        """The plan of some documents: the same on every rank. Arguments as of `plan_mini_batch`."""
        lengths, labels = np.array(self.lengths, np.int64), np.array(self.labels, np.int64)
        unmasked = np.full(len(lengths), -1, np.int64)  # nothing is cut, so nobody asks which tokens are labels
        table = SequenceTable(lengths, labels, unmasked, np.zeros(0, np.uint8))
        return plan_mini_batch(documents, table, buckets, quadratic_cost=quadratic_cost, speeds=speeds)

    def mini_batch(self, plan: MiniBatchPlan, collator: PackedBucketCollator, exchange: "Exchange") -> MiniBatch:
        """This rank's part of a plan, when tokens have travelled to whom they were missing. Collective."""
        moves = []
        for number, ranks in trainers(plan).items():
            missing = [rank for rank in ranks if rank not in self.holders[number]]
            moves += [Move(number, self.owners[number], rank, 2 * self.lengths[number]) for rank in missing]
            self.holders[number].update(missing)

        def tokens_of(number: int) -> Tensor:
            row = self.rows[number]
            assert row.targets is not None
            return torch.from_numpy(np.concatenate([row.ids, row.targets]).astype(np.int32))

        for move, tokens in exchange.deliver("rows", moves, tokens_of, torch.int32):
            ids, targets = tokens.numpy().astype(np.int64).reshape(2, -1)
            self.rows[move.document] = _row(ids, targets)
        if names := collator.rules.columns:
            of_columns = [move._replace(size=len(names) * (1 + self.lengths[move.document])) for move in moves]
            for move, bits in exchange.deliver("rows", of_columns, lambda n: _bits(self.rows[n], names), torch.int64):
                of_names = zip(names, bits.numpy().reshape(len(names), -1), strict=True)
                columns = {name: own[1:].view(np.float64) if own[0] else own[1:] for name, own in of_names}
                self.rows[move.document] = replace(self.rows[move.document], columns=columns)
        return collator.of_plan(plan, self.rows)


def _row(ids: NDArray[np.int64], targets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]] | None = None) -> Row:
    return Row(ids, None, _NO_CUTS, 0, len(ids), columns or {}, targets=targets)


def _bits(row: Row, names: Sequence[str]) -> Tensor:
    """The columns of a row, each behind a number that says whether it is of floats."""
    parts = []
    for name in names:
        column = np.ascontiguousarray(row.columns[name])
        parts += [np.array([column.dtype.kind == "f"], np.int64), column.view(np.int64)]
    return torch.from_numpy(np.concatenate(parts))


def places(plan: MiniBatchPlan) -> Iterator[tuple[int, Strategy, int]]:
    """Of every document the strategy and the replica that train it."""
    for phase in plan.phases:
        for replica, packs in enumerate(phase.replicas):
            for pack in packs:
                for sequence in pack.sequences:
                    yield sequence.row, phase.bucket.strategy, replica


def trainers(plan: MiniBatchPlan) -> dict[int, list[int]]:
    """Of every document the ranks that train it."""
    return {number: replica_ranks(strategy, replica) for number, strategy, replica in places(plan)}


def last_ranks(strategy: Strategy, replica: int, writers: bool = False) -> list[int]:
    """The ranks of a replica that compute logits: of all shards and rows of a pack, or those of shard rank 0 alone, which
    write what all shards have in common."""
    ranks = []
    for rank in replica_ranks(strategy, replica):
        coord = strategy.coord(rank)
        if coord.pp == strategy.pp - 1 and not (writers and coord.tp):
            ranks.append(rank)
    return ranks


class Move(NamedTuple):
    """So many numbers of a document go from a rank to another; every rank lists the same moves in the same order."""

    document: int
    source: int
    target: int
    size: int


class Exchange:
    """Moves rows and numbers between ranks. All methods are collective.

    Args:
        agreement: Over a group of all ranks that nothing else uses at the same time.

    Attributes:
        sent_bytes: Bytes that this rank has sent to others: `rows`, `numbers`, `seeds`.
    """

    def __init__(self, agreement: Agreement, world_size: int) -> None:
        self.agreement, self.rank, self._world_size = agreement, agreement.rank, world_size
        self.sent_bytes = {"rows": 0, "numbers": 0, "seeds": 0}

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent since `forget`, as fields of a report."""
        return {f"{kind}_bytes": number for kind, number in self.sent_bytes.items()}

    def forget(self) -> None:
        """Counts from 0 again."""
        self.sent_bytes = dict.fromkeys(self.sent_bytes, 0)

    def facts(self, values: Sequence[int], sizes: Sequence[int] | None = None) -> list[NDArray[np.int64]]:
        """Every rank's numbers, as many as it has; `sizes` are how many each has, where all ranks know."""
        self.sent_bytes["rows"] += 8 * len(values) * (self._world_size - 1)
        return [part.numpy() for part in self.agreement.vectors(torch.tensor(values, dtype=torch.int64), sizes)]

    def deliver(
        self, kind: str, moves: Sequence[Move], tensor_of: Callable[[int], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[Move, Tensor]]:
        """Carries out moves; yields those that end here, with what arrived.

        Args:
            kind: What the bytes are counted as.
            tensor_of: Of a document that this rank sends, 1-D in host memory and of this dtype.
        """
        if self._world_size == 1:
            for move in moves:
                yield move, tensor_of(move.document)
            return
        rank = self.rank
        here = [move for move in moves if move.source == move.target == rank]
        away = [move for move in moves if move.source != move.target]
        leaving = sorted((m for m in away if m.source == rank), key=lambda m: m.target)
        coming = sorted((m for m in away if m.target == rank), key=lambda m: m.source)
        tensors = {move.document: tensor_of(move.document) for move in {m.document: m for m in leaving}.values()}
        sizes, received_sizes = [0] * self._world_size, [0] * self._world_size
        for move in leaving:
            sizes[move.target] += move.size
        for move in coming:
            received_sizes[move.source] += move.size
        send = torch.cat([tensors[m.document] for m in leaving]) if leaving else torch.empty(0, dtype=dtype)
        self.sent_bytes[kind] += send.nbytes
        received = self.agreement.all_to_all(send, sizes, received_sizes)
        for move in here:
            yield move, tensor_of(move.document)
        begin = 0
        for move in coming:
            yield move, received[begin : begin + move.size]
            begin += move.size
