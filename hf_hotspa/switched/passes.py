"""The documents of all ranks, and passes over them: forward only (scoring) or training. The owners get the results.

A scoring pass leaves its last weights loaded, and graphs of some packs if a strategy can keep them, for a training pass
that follows. `Passes` drops these when something else runs or the weights change.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch, MiniBatch, PackedBucketCollator, is_idle
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.evaluation import Evaluation
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import DataError, OverlongError, TokenRangeError, UnsupportedError
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.packing.bucketing import MiniBatchPlan, Speeds, plan_mini_batch
from hf_hotspa.parallel.agreement import Agreement, replica_ranks
from hf_hotspa.parallel.head_loss import AuxiliaryLoss, LogitLoss, LossOfLogits, Objective
from hf_hotspa.parallel.loss import (
    TokenLoss,
    TokenSlice,
    of_nothing,
    tokens_of,
    vocab_parallel_log_probabilities,
)
from hf_hotspa.report import RankMeasures, StepReport
from hf_hotspa.rows.read_row import DEFAULT_RULES, IGNORED_LABEL, Row, RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.switched.scores import WITH_ARG_MAX, token_scores
from hf_hotspa.switched.tape import Comparison, Factors, Tape, Taping, pieces

# -- documents --------------------------------------------------------------------------------------------------------

# A *document* is the unit of packing: a row without its padding, or one document of a row that was packed before. All
# ranks number the documents of a step identically: call by call, rank by rank, row by row. Tokens travel to the ranks
# that train them.

ROW_COLUMNS = ("input_ids", "attention_mask", "position_ids", "seq_idx", "labels", "shift_labels")
"""The tensors [batch, length] of a batch."""
FLAT_COLUMNS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")
"""Tensors [documents + 1] with the documents of a batch of one row."""

_NO_CUTS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Document(Row):
    """One document of this rank: its row in the batch, and its first column there."""

    targets: NDArray[np.int64]
    row: int
    begin: int
    side: int = 0  # tokens with `SideInputs`

    @property
    def place(self) -> tuple[int, slice]:
        """Its row in the batch, and its columns there."""
        return self.row, slice(self.begin, self.begin + len(self.ids))


def read_batch(
    batch: Mapping[str, Tensor | None], vocab_size: int, longest: int, rank: int, rules: RowRules = DEFAULT_RULES
) -> list[Document]:
    """Reads the documents of a batch, which may have no rows: any of `ROW_COLUMNS` [B, L] and `FLAT_COLUMNS`, and the
    columns [B] or [B, L] that a token loss reads. Raises `HotspaError`: a row that the plain model would train
    differently, or that no bucket takes."""
    columns, flat = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
    for name, value in batch.items():
        if value is not None:
            (flat if name in FLAT_COLUMNS else columns)[name] = value.detach().cpu().numpy()
    ids = columns["input_ids"]
    if ids.ndim != 2:
        raise DataError(f"input_ids has {ids.ndim} dimensions", fix="give a batch [rows, tokens]")
    if flat and len(ids) != 1:
        raise UnsupportedError(f"{sorted(flat)} for {len(ids)} rows", fix="give them for a batch of one row")
    for name, column in columns.items():
        if column.shape == ids.shape or (name in rules.columns and column.shape == ids.shape[:1]):
            continue
        if column.shape != (1, *ids.shape[1:]):
            raise UnsupportedError(
                f"{name} has the shape {list(column.shape)}, and input_ids {list(ids.shape)}",
                why="rows are packed again, and each token needs its own value",
                fix=f"leave {name} out, or give [rows, tokens]",
            )
        columns[name] = np.broadcast_to(column, ids.shape)
    documents: list[Document] = []
    for row in range(len(ids)):
        example = flat | dict(zip(columns, map(itemgetter(row), columns.values()), strict=True))
        documents += _documents(example, row, vocab_size, longest, f"row {row} of the batch of rank {rank}", rules)
    return documents


def _documents(
    example: dict[str, NDArray[np.int64]], row: int, vocab_size: int, longest: int, where: str, rules: RowRules
) -> Iterator[Document]:
    shifted, targets = example.pop("shift_labels", None), np.full(len(example["input_ids"]), IGNORED_LABEL, np.int64)
    if shifted is not None:
        targets[:] = shifted
        example.pop("labels", None)
    elif "labels" in example:
        targets[:-1] = example["labels"][1:]
    read = read_row(example, row, rules)
    outside, inside = targets.copy(), slice(read.first, read.first + len(read.ids))
    outside[inside] = IGNORED_LABEL
    if (outside != IGNORED_LABEL).any():
        raise UnsupportedError(
            "padding has a label",
            where=where,
            why="the plain model would be trained to predict it, or from it",
            fix="set labels to -100 wherever attention_mask is 0, and at the first token after padding",
        )
    targets = targets[inside]
    for name, values in (("input_ids", read.ids), ("labels", targets[targets != IGNORED_LABEL])):
        if len(wrong := values[(values < 0) | (values >= vocab_size)]):
            raise TokenRangeError(
                f"{name} holds {wrong[0]}, and the vocabulary has the ids 0 to {vocab_size - 1}",
                where=where,
                why="the embedding or the loss would read beyond its table",
                fix="tokenise with the model's own tokenizer, or resize the model's embeddings",
            )
    ends = [*read.cuts.tolist(), len(read.ids)]
    for first, stop in pairwise([0, *ends]):
        if stop - first > longest:
            raise OverlongError(
                f"a sequence of {stop - first} tokens is longer than the longest bucket, {longest} tokens",
                where=where,
                fix=f"let the last bucket take {stop - first} tokens, or truncate rows before they are collated",
            )
        if stop > first:
            own = dict[str, NDArray[Any]]()
            for name, column in read.columns.items():
                own[name] = np.broadcast_to(column, len(read.ids))[first:stop]
            ids, own_targets, begin = read.ids[first:stop], targets[first:stop], read.first + first
            yield Document(ids, None, _NO_CUTS, 0, len(ids), own, targets=own_targets, row=row, begin=begin)


@dataclass
class Documents:
    """What every rank knows of the documents of a step, and the tokens that this rank has."""

    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # targets that count
    owners: list[int] = field(default_factory=list)  # the ranks that have read them
    rows: dict[int, Row] = field(default_factory=dict)  # of documents that this rank has read or received
    holders: list[set[int]] = field(default_factory=list)  # which ranks have the tokens of a document
    side: list[int] = field(default_factory=list)  # tokens with `SideInputs`
    beside: dict[int, Any] = field(default_factory=dict)  # these, of documents that this rank has read or received
    moved: list["Move"] = field(default_factory=list)  # the rows that the last plan has moved
    # plans of some documents, for evaluation or not, and this rank's parts
    planned: dict[tuple[tuple[int, ...], bool], tuple[MiniBatchPlan, MiniBatch]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, facts: Sequence[NDArray[np.int64]], mine: Sequence[Document], rank: int) -> list[range]:
        """Numbers the documents of a call by rank, from each rank's `facts_of`; returns each rank's range."""
        ranges = []
        for owner, of_rank in enumerate(facts):
            begin, counts = len(self.lengths), of_rank[2:].reshape(-1, 3)
            ranges.append(range(begin, begin + len(counts)))
            self.lengths += counts[:, 0].tolist()
            self.labels += counts[:, 1].tolist()
            self.side += counts[:, 2].tolist()
            self.owners += [owner] * len(counts)
            self.holders += map(set, [[owner]] * len(counts))
        self.rows |= zip(ranges[rank], mine, strict=True)
        return ranges

    def plan(
        self,
        documents: Iterable[int],
        buckets: tuple[Bucket, ...],
        speeds: Speeds | None,
        collator: PackedBucketCollator,
        exchange: "Exchange",
    ) -> tuple[MiniBatchPlan, MiniBatch]:
        """Plans some documents, and sends tokens to ranks that lack them; returns the plan and this rank's part.
        Collective."""
        lengths, labels = np.array(self.lengths, np.int64), np.array(self.labels, np.int64)
        unmasked = np.full(len(lengths), -1, np.int64)  # nothing is cut: label positions are not needed
        table = SequenceTable(lengths, labels, unmasked, np.zeros(0, np.uint8))
        plan = plan_mini_batch(documents, table, buckets, quadratic_cost=collator.quadratic_cost, speeds=speeds)
        if exchange.world_size > 1:
            self._fetch_rows(plan, collator.rules.columns, exchange)
        return plan, collator.of_plan(plan, self.rows)

    def _fetch_rows(self, plan: MiniBatchPlan, names: Sequence[str], exchange: "Exchange") -> None:
        """A row travels as its tokens, its targets, and of each column whether it has floats, and their bits."""
        data, dtype = dict[int, Tensor](), torch.int64 if names else torch.int32
        self.moved = moves = list[Move]()
        for number, strategy, replica in places(plan):
            for rank in replica_ranks(strategy, replica):
                if rank not in self.holders[number]:
                    size = (2 + len(names)) * self.lengths[number] + len(names)
                    moves.append(Move(number, self.owners[number], rank, size))
                    self.holders[number].add(rank)
        for move in moves:
            if move.source == exchange.rank and move.document not in data:
                row = self.rows[move.document]
                columns = [np.ascontiguousarray(row.columns[name]) for name in names]
                bits = [(np.array([column.dtype.kind == "f"]), column.view(np.int64)) for column in columns]
                assert row.targets is not None
                parts = [*chain.from_iterable(bits), row.ids, row.targets]
                data[move.document] = torch.from_numpy(np.concatenate(parts)).to(dtype)
        for move, whole in exchange.deliver("rows", moves, data, dtype):
            length = self.lengths[move.document]
            numbers, own = whole.numpy().astype(np.int64), dict[str, NDArray[Any]]()
            for name, part in zip(names, np.split(numbers[: -2 * length], len(names) or 1), strict=False):
                own[name] = part[1:].view(np.float64) if part[0] else part[1:]
            ids, targets = numbers[-2 * length :].reshape(2, -1)
            self.rows[move.document] = Row(ids, None, _NO_CUTS, 0, length, own, targets=targets)


def facts_of(documents: Sequence[Document], num_items: float | None) -> list[int]:
    """Encodes a batch: the bits of its loss denominator, its number of documents, and of each its length, labels and
    tokens with `SideInputs`."""
    counts, total = list[int](), 0
    for document in documents:
        labels = int(np.count_nonzero(document.targets != IGNORED_LABEL))
        counts += (len(document.ids), labels, document.side)
        total += labels
    denominator = np.float64(total if num_items is None else num_items)
    return [int(denominator.view(np.int64)), len(documents), *counts]


def places(plan: MiniBatchPlan) -> Iterator[tuple[int, Strategy, int]]:
    for phase in plan.phases:
        for replica, packs in enumerate(phase.replicas):
            for pack in packs:
                for sequence in pack.sequences:
                    yield sequence.row, phase.bucket.strategy, replica


@lru_cache
def last_ranks(strategy: Strategy, replica: int, writers: bool = False) -> tuple[int, ...]:
    """Returns the ranks of a replica that compute logits; with `writers` only shard rank 0, which writes what all
    shards have in common."""
    ranks = []
    for rank in replica_ranks(strategy, replica):
        coord = strategy.coord(rank)
        if coord.pp == strategy.pp - 1 and not (writers and coord.tp):
            ranks.append(rank)
    return tuple(ranks)


class Move(NamedTuple):
    """A move of `size` numbers of a document between ranks; every rank lists the same moves in the same order."""

    document: int
    source: int
    target: int
    size: int


class Exchange:
    """Moves rows and numbers between ranks, over host memory. All methods are collective."""

    def __init__(self, agreement: Agreement, world_size: int) -> None:
        self.agreement, self.rank, self.world_size = agreement, agreement.rank, world_size
        # bytes that this rank has sent in this step, by report field
        self.sent = {"rows_bytes": 0, "numbers_bytes": 0, "seeds_bytes": 0}

    def facts(self, values: Sequence[int], sizes: Sequence[int] | None = None) -> list[NDArray[np.int64]]:
        """Returns every rank's numbers; `sizes` are how many each has, if all ranks know."""
        if self.world_size == 1:
            return [np.array(values, np.int64)]
        self.sent["rows_bytes"] += 8 * len(values) * (self.world_size - 1)
        return [*map(Tensor.numpy, self.agreement.vectors(torch.tensor(values, dtype=torch.int64), sizes))]

    def deliver(
        self, kind: str, moves: Sequence[Move], tensors: Mapping[int, Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[Move, Tensor]]:
        """Carries out moves; yields the moves that end here, with the data. `tensors`: the documents that this rank
        sends, 1-D in host memory and of one dtype; `kind` of bytes for `sent`: `rows`, `numbers` or `seeds`."""
        if self.world_size == 1:
            for move in moves:
                yield move, tensors[move.document]
            return
        rank = self.rank
        here = [move for move in moves if move.source == move.target == rank]
        away = [move for move in moves if move.source != move.target]
        leaving = sorted((m for m in away if m.source == rank), key=lambda m: m.target)
        coming = sorted((m for m in away if m.target == rank), key=lambda m: m.source)
        sizes, received_sizes = [0] * self.world_size, [0] * self.world_size
        for move in leaving:
            sizes[move.target] += move.size
        for move in coming:
            received_sizes[move.source] += move.size
        send = torch.cat([tensors[m.document] for m in leaving]) if leaving else torch.empty(0, dtype=dtype)
        self.sent[f"{kind}_bytes"] += send.nbytes
        received = self.agreement.all_to_all(send, sizes, received_sizes)
        for move in here:
            yield move, tensors[move.document]
        begin = 0
        for move in coming:
            yield move, received[begin : begin + move.size]
            begin += move.size


# -- passes -----------------------------------------------------------------------------------------------------------


class SideInputs(Protocol):
    """What enters passes beside tokens, such as features of images: numbers that other modules of the model object make on the
    rank that has read a row, and the gradients by them, which come back to it. As plain data: what is made is in
    `Documents.beside`. Not collective unless it says so; then only if a document has some (`Documents.side`).

    Attributes:
        names: The arguments of forward that they are made of.
        in_blocks: Whether tokens beside each other may attend in both directions.
    """

    @property
    def names(self) -> Collection[str]: ...
    @property
    def in_blocks(self) -> bool: ...

    def comes_with(self, fields: Collection[str]) -> bool:
        """Whether rows may have some, by the names of a data set's columns and of what batches hold."""

    def counted(self, given: Mapping[str, Any], documents: list[Document]) -> list[Document]:
        """The documents of a batch with their `side`. `given`: arguments by name. Raises `HotspaError`: naming the row."""

    def make(
        self, passes: "Passes", model: nn.Module, given: Mapping[str, Any], documents: Sequence[Document], trains: bool
    ) -> Sequence[object]:
        """What enters beside each document of a batch, or None. Raises `HotspaError`: the model or its strategies cannot
        do it, on one rank."""

    def fetch(self, documents: Documents, exchange: Exchange) -> None:
        """Sends it to where rows were `moved`. Collective."""

    def collect(self, documents: Documents, plan: MiniBatchPlan, exchange: Exchange) -> None:
        """Adds the gradients of a training pass up, for the ranks that have read the rows. Collective."""

    def scale(self, documents: Documents, factor: float) -> None:
        """Multiplies the gradients so far."""

    def flush(self, documents: Documents) -> None:
        """Adds the gradients to the parameters of the modules that made the inputs, on the rank that has read the rows."""


class Mode(NamedTuple):
    """How a pass runs."""

    step: int  # mini-batches before this one in the run
    training: bool
    temperature: float = 1.0  # the divisor of logits
    against: Comparison | None = None


class Wanted(NamedTuple):
    """The results of a pass: of a `Results`, what it is to have."""

    fields: int = 0  # how many of the first `scores.FIELDS` of each token; -1: not even that they are 0
    sums: bool = False  # instead of these, each document's sum of log-probabilities
    logits: bool = False
    auxiliary: bool = False
    own: bool = False  # the engine's token loss, in a scoring pass; a training pass with such a loss has it


@dataclass
class Upstream:
    """The gradients by the results that a training pass trains with; each is None if unused."""

    weights: Tensor | None = None  # fp64 [D], by every log-probability of a document; the same on every rank
    by_probability: bool = False  # whether `weights` are multiplied by the probability of each token
    # of this rank's documents [length, 1 or 2], by log-probability, and by entropy
    tokens: Mapping[int, Tensor] = field(default_factory=dict)
    columns: int = 0  # how many columns of `tokens` have numbers, on this rank or on all; 0 for none
    logits: dict[int, Tensor] = field(default_factory=dict)  # of this rank's documents [length, V]; removed when sent
    of_logits: frozenset[int] = frozenset()  # the documents of all ranks with gradients by logits
    auxiliary: Tensor | None = None  # fp64 [D, gradients], of an `AuxiliaryLoss`; the same on every rank
    # the divisor of the engine's token loss, and its gradient's factor; None for another loss
    own: tuple[float, float] | None = None


@dataclass
class Results:
    """The results of a pass for this rank's documents; see `Wanted`."""

    tokens: dict[int, Tensor] = field(default_factory=dict)  # [length, fields] of each, fp32 or wider
    sums: dict[int, float] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)  # [length, V] of each
    auxiliary: dict[int, Tensor] = field(default_factory=dict)  # fp64 [sums] of each, see `Tape.auxiliary`
    own: float = 0.0  # the token loss of all documents on all ranks


Chosen = tuple[tuple[Bucket, ...], Speeds | None]
Trained = tuple[MiniBatchPlan, StepReport]


@dataclass(eq=False)
class TrainedStep:
    """The training passes of a step of the optimizer."""

    documents: Documents = field(default_factory=Documents)
    has_gradients: bool = False  # whether a training pass has run
    gradient_version: int = -1  # of the gradients after it; later changes are the caller's
    passes: list[Trained] = field(default_factory=list)  # the plan and the report of each training pass


class Passes:
    """Runs documents through the strategies of an engine. `columns`: what the engine's token loss reads beside tokens.
    `drop`: called on all ranks if a pass fails."""

    def __init__(self, engine: HotSPaEngine, columns: tuple[str, ...], drop: Callable[[], None]) -> None:
        self.engine, self._device, self._drop = engine, engine.device, drop
        self.tape, self.taping = Tape(), Taping()
        self.wide = torch.promote_types(engine.description.compute_dtype, torch.float32)
        self.exchange = Exchange(engine.agreement, engine.world_size)
        shape = engine.description.shape
        self.collator = PackedBucketCollator(
            engine.buckets,
            rank=engine.rank,
            vocab_size=shape.vocab_size,
            quadratic_cost=shape.quadratic_cost,
            rules=RowRules(columns=columns),
        )
        self.counts = {"scoring": 0, "training": 0}  # passes so far
        # maps a step and the lengths of its documents to their buckets and the speeds by which packs are divided over
        # replicas; the same on all ranks. None: the engine's buckets and equal speeds.
        self.choose: Callable[[int, Sequence[int]], Chosen] | None = None
        # returns what must be equal on all ranks in training, by name
        self.facts: Callable[[], Mapping[str, str]] = dict
        self.evaluated = engine.buckets  # the buckets in eval mode without gradients
        engine.attach(lambda replica: TapedReplica(replica, self.taping))
        readout = engine.description.readout
        self.factors: Factors = readout.factors if readout is not None else lambda length, positions: None
        self.pools = self.factors(1, slice(0, 1)) is not None  # whether logits are of documents, not of tokens
        # of a replica, if it has such a loss
        self.auxiliary: AuxiliaryLoss | None = next(iter(engine.phases.values())).replica.auxiliary
        self.side = cast(SideInputs | None, engine.description.side_inputs)
        self._scored: tuple[tuple[int | None, bool, int], Evaluation] | None = None
        self._here, self._coming = dict[int, Tensor](), dict[int, int]()

    @property
    def num_logits(self) -> int:
        return sum(next(iter(self.engine.phases.values())).replica.head.objective.logit_widths)

    def _rows(self, documents: Documents, number: int) -> int:
        """The rows of a document's table of logits."""
        return 1 if self.pools else documents.lengths[number]

    def _columns_of(self, strategy: Strategy, rank: int, gives: bool = False) -> slice:
        """The columns of logits on a rank. If they are not cut, all ranks of tp have the same, of which one rank
        `gives` them, or (`+sp`) each has its own tokens'."""
        if self.engine.description.readout is not None:
            return slice(0, 0 if gives and strategy.coord(rank).tp and not strategy.sp else self.num_logits)
        replica = self.engine.phases[strategy].replica
        mesh, widths = replica.mesh.strategy, replica.head.objective.logit_widths  # with the engine's order of shards
        shard = mesh.shard_index(mesh.coord(rank).tp)
        return slice(sum(widths[:shard]), sum(widths[: shard + 1]))

    def planned(
        self, documents: Documents, some: Sequence[int], step: int, evaluates: bool = False
    ) -> tuple[MiniBatchPlan, MiniBatch]:
        """Plans some documents once; returns the plan and this rank's part. Collective."""
        key = tuple(some), evaluates
        if key not in documents.planned:
            buckets, speeds = self.evaluated if evaluates else self.engine.buckets, None
            if self.choose is not None and not evaluates:
                buckets, speeds = self.choose(step, [*map(documents.lengths.__getitem__, some)])
            documents.planned[key] = documents.plan(key[0], buckets, speeds, self.collator, self.exchange)
            if self.side is not None and any(map(documents.side.__getitem__, some)):
                self.side.fetch(documents, self.exchange)
        return documents.planned[key]

    # -- passes -------------------------------------------------------------------------------------------------------

    def score(
        self,
        documents: Documents,
        some: Sequence[int],
        mode: Mode,
        wanted: Wanted,
        *,
        store: MasterStore | None = None,  # weights to use instead of the engine's
        of_step: bool = True,  # whether the documents will be trained in this step: then graphs are kept
    ) -> Results:
        """Runs a forward of some documents. Collective."""
        evaluates = not (of_step or mode.training or store is not None)
        keeps = of_step and store is None and not wanted.auxiliary
        key = None if store is None else id(store), mode.training, mode.step
        try:
            plan, mini_batch = self.planned(documents, some, mode.step, evaluates)
            if self._scored is None or self._scored[0] != key:
                self.let_go()
                self._scored = key, self.engine.evaluation(store, mode.training, mode.step)
            if mode.against is not None:
                mode.against.begin(mini_batch, documents.lengths)
            self._begin(documents, plan, mode, wanted, Upstream(own=(1.0, 0.0) if wanted.own else None))
            with torch.autocast(self._device.type, enabled=False), torch.set_grad_enabled(keeps):
                result = self._scored[1].run(mini_batch, keep_graphs=keeps)
            if store is not None:  # the loaded weights must not be trained
                self.let_go()
            self.counts["scoring"] += 1
            return replace(self._collect(documents, plan, wanted), own=result.loss_sum)
        except BaseException:
            self._drop()
            raise
        finally:
            self.taping.tape = None
            if mode.against is not None:
                mode.against.end()

    def train(self, step: TrainedStep, some: Sequence[int], mode: Mode, wanted: Wanted, upstream: Upstream) -> Results:
        """Trains some documents of a step with upstream gradients; adds to its gradients. Collective."""
        documents, sends = step.documents, list[dist.Work]()
        try:
            plan, mini_batch = self.planned(documents, some, mode.step)
            if self._scored is not None and self._scored[0] != (None, mode.training, mode.step):
                self.let_go()
            kept_scoring, self._scored = self._scored, None
            self._coming = {}
            if mode.against is not None:
                mode.against.begin(mini_batch, documents.lengths)
            self._begin(documents, plan, mode, wanted, upstream)
            if upstream.of_logits:
                sends = self._send_logit_upstream(plan, upstream)
                self.tape.logit_upstream = lambda number: self._receive_logit_upstream(documents, upstream, number)
            with torch.autocast(self._device.type, enabled=False), torch.enable_grad():
                facts = self.facts() if self.engine.world_size > 1 else None
                scored = kept_scoring[1] if kept_scoring is not None else None
                report = self.engine.forward_backward(
                    mini_batch, mode.step, facts, add=step.has_gradients, needs_labels=False, training=mode.training,
                    scored=scored,
                )  # fmt: skip
            if self.side is not None and any(map(documents.side.__getitem__, some)):
                self.side.collect(documents, plan, self.exchange)
            for number in list(self._coming):  # documents too short to have tokens on this rank of cp
                self._receive_logit_upstream(documents, upstream, number)
            if sends:
                self.engine.agreement.wait(sends)
            self.counts["training"] += 1
            step.passes.append((plan, report))
            step.has_gradients, step.gradient_version = True, self.engine.master.gradient_version
            return replace(self._collect(documents, plan, wanted), own=report.loss)
        except BaseException:
            self._drop()
            raise
        finally:
            self.taping.tape = None
            if mode.against is not None:
                mode.against.end()

    def let_go(self) -> None:
        """Drops the weights and graphs of the last scoring pass. Not collective."""
        if self._scored is not None:
            self._scored[1].close()
            self._scored = None

    def _begin(self, documents: Documents, plan: MiniBatchPlan, mode: Mode, wanted: Wanted, upstream: Upstream) -> None:
        """Makes the tape of a pass. Collective."""
        engine, device = self.engine, self._device
        offsets, total, logits = [0] * len(documents.lengths), 0, dict[int, Tensor]()
        for number, strategy, replica in places(plan):
            if engine.rank in last_ranks(strategy, replica):
                offsets[number], total = total, total + documents.lengths[number]
                columns = self._columns_of(strategy, engine.rank, gives=True) if wanted.logits else slice(0, 0)
                if columns.stop > columns.start:
                    shape = self._rows(documents, number), columns.stop - columns.start
                    logits[number] = torch.zeros(shape, dtype=self.wide)
        self._offsets, fields, auxiliary = offsets, 1 if wanted.sums else wanted.fields, None
        if wanted.auxiliary and self.auxiliary is not None:
            auxiliary = torch.zeros(len(offsets), self.auxiliary.num_sums, dtype=torch.float64, device=device)
        tokens = self._token_upstream(documents, plan, upstream) if upstream.columns else None
        self.taping.tape = self.tape = Tape(
            temperature=mode.temperature,
            offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
            fields=fields,
            values=torch.zeros(total, fields, dtype=self.wide, device=device) if fields else None,
            logits=logits if wanted.logits else None,
            factors=lambda number, positions: self.factors(documents.lengths[number], positions),
            auxiliary=auxiliary,
            weights=None if upstream.weights is None else upstream.weights.to(device),
            by_probability=upstream.by_probability,
            upstream=tokens,
            auxiliary_upstream=None if upstream.auxiliary is None else upstream.auxiliary.to(device),
            own=upstream.own,
            beside=documents.beside,
            against=mode.against,
        )

    # -- upstream gradients in ----------------------------------------------------------------------------------------

    def _token_upstream(self, documents: Documents, plan: MiniBatchPlan, upstream: Upstream) -> Tensor:
        """Receives [n, 1 or 2] for the tokens whose logits this rank has, from the owners of the documents."""
        moves, tokens, size = list[Move](), dict[int, Tensor](), 0
        for number, strategy, replica in places(plan):
            length, owner = documents.lengths[number], documents.owners[number]
            for rank in last_ranks(strategy, replica):
                moves.append(Move(number, owner, rank, length * upstream.columns))
                size += length if rank == self.engine.rank else 0
            if owner == self.engine.rank:
                given = upstream.tokens.get(number)
                own = torch.zeros(length, upstream.columns) if given is None else given[:, : upstream.columns]
                tokens[number] = own.to("cpu", self.wide).reshape(-1)
        table = torch.zeros(size, upstream.columns, dtype=self.wide)
        for move, arrived in self.exchange.deliver("seeds", moves, tokens, self.wide):
            begin = self._offsets[move.document]
            table[begin : begin + documents.lengths[move.document]] = arrived.view(-1, upstream.columns)
        return table.to(self._device)

    def _send_logit_upstream(self, plan: MiniBatchPlan, upstream: Upstream) -> list[dist.Work]:
        """Starts to send each document's gradients to the ranks with its logits; they receive them with its pack."""
        sends, self._here, own = list[dist.Work](), dict[int, Tensor](), self.engine.rank
        for number, strategy, replica in places(plan):
            if number not in upstream.of_logits:
                continue
            whole = upstream.logits.pop(number, None)
            for rank in last_ranks(strategy, replica):
                columns = self._columns_of(strategy, rank)
                if whole is None:
                    if rank == own:
                        self._coming[number] = columns.stop - columns.start
                    continue
                part = whole[:, columns].to("cpu", self.wide).contiguous()
                if rank == own:
                    self._here[number] = part
                elif part.numel():
                    sends.append(self.engine.agreement.start_send(part, rank, number))
                    self.exchange.sent["seeds_bytes"] += part.nbytes
        return sends

    def _receive_logit_upstream(self, documents: Documents, upstream: Upstream, number: int) -> Tensor | None:
        if number not in upstream.of_logits:
            return None
        if documents.owners[number] == self.engine.rank:
            return self._here.pop(number)
        part = torch.empty(self._rows(documents, number), self._coming.pop(number), dtype=self.wide)
        if not part.numel():
            return part
        return self.engine.agreement.receive(part, documents.owners[number], number)

    # -- results out --------------------------------------------------------------------------------------------------

    def _collect(self, documents: Documents, plan: MiniBatchPlan, wanted: Wanted) -> Results:
        results, tape = Results(), self.tape
        if tape.values is not None:
            table, moves, written = tape.values.to("cpu"), list[Move](), dict[int, Tensor]()
            for number, strategy, replica in places(plan):
                length = documents.lengths[number]
                for rank in last_ranks(strategy, replica, writers=True):
                    size = 1 if wanted.sums else length * wanted.fields
                    moves.append(Move(number, rank, documents.owners[number], size))
                    if rank == self.engine.rank:
                        own = table[self._offsets[number] : self._offsets[number] + length]
                        written[number] = own.double().sum()[None] if wanted.sums else own.flatten()
            arrived = self.exchange.deliver("numbers", moves, written, torch.float64 if wanted.sums else self.wide)
            for (number, *_), values in arrived:
                if wanted.sums:
                    results.sums[number] = results.sums.get(number, 0.0) + float(values)
                else:
                    _add(results.tokens, number, values.view(-1, wanted.fields))
        if tape.logits is not None:
            self._collect_logits(documents, plan, tape.logits, results)
        if tape.auxiliary is not None:
            self._collect_auxiliary(documents, plan, tape.auxiliary, results)
        self.tape = Tape()
        return results

    def _collect_logits(
        self, documents: Documents, plan: MiniBatchPlan, logits: Mapping[int, Tensor], results: Results
    ) -> None:
        engine, sends, num_logits = self.engine, list[dist.Work](), self.num_logits
        for number, part in logits.items():
            owner = documents.owners[number]
            if owner != engine.rank:
                sends.append(engine.agreement.start_send(part, owner, number))
                self.exchange.sent["numbers_bytes"] += part.nbytes
        for number, strategy, replica in places(plan):
            if documents.owners[number] != engine.rank:
                continue
            rows = self._rows(documents, number)
            whole = results.logits[number] = torch.zeros(rows, num_logits, dtype=self.wide)
            for rank in last_ranks(strategy, replica):
                columns = self._columns_of(strategy, rank, gives=True)
                if columns.stop == columns.start:
                    continue
                part = torch.empty(len(whole), columns.stop - columns.start, dtype=self.wide)
                if rank == engine.rank:
                    part = logits[number]
                else:
                    engine.agreement.receive(part, rank, number)
                whole[:, columns] += part
        engine.agreement.wait(sends)

    def _collect_auxiliary(self, documents: Documents, plan: MiniBatchPlan, table: Tensor, results: Results) -> None:
        rows, moves = dict(enumerate(table.to("cpu"))), list[Move]()
        for number, strategy, replica in places(plan):
            for rank in replica_ranks(strategy, replica):
                coord = strategy.coord(rank)
                if coord.tp == coord.cp == 0:
                    moves.append(Move(number, rank, documents.owners[number], table.shape[1]))
        for move, values in self.exchange.deliver("numbers", moves, rows, torch.float64):
            _add(results.auxiliary, move.document, values)


def _add(table: dict[int, Tensor], number: int, values: Tensor) -> None:
    """Adds what several ranks know of a document."""
    table[number] = table[number] + values if number in table else values.clone()


def merged(one: StepReport, other: StepReport) -> StepReport:
    total = max(one.num_labels + other.num_labels, 1)
    ranks = None
    if one.ranks is not None and other.ranks is not None:
        phases = [mine + more for mine, more in zip(one.ranks.phases, other.ranks.phases, strict=True)]
        ranks = RankMeasures(one.ranks.agree_s, other.ranks.memory_bytes, phases)
    counts = ("num_labels", "num_rows", "num_truncated", "num_split", "num_dropped", "num_empty")
    return replace(
        other,
        loss=(one.loss * one.num_labels + other.loss * other.num_labels) / total,
        phases=one.phases + other.phases,
        total_s=one.total_s + other.total_s,
        ranks=ranks,
        **{name: getattr(one, name) + getattr(other, name) for name in counts},
    )


# -- the tape on a replica ---------------------------------------------------------------------------------------------


class _Pack(NamedTuple):
    """A pack of t tokens in a pass."""

    tape: Tape
    micro_batch: MicroBatch
    scale: float
    keep: Tensor  # bool [t], not of padding
    documents: Tensor  # int64 [t]
    place: Tensor  # int64 [t], in the tables
    tokens: TokenSlice | None  # for a custom token loss
    of_logits: Tensor | None  # [t, v], the gradients by its logits


class TapedReplica(Attachment, Objective):
    """The tape on one replica: replaces its loss on a last stage, and the losses of attachments.

    The value of the loss is still the scaled cross entropy, for reports and the search for non-finite values; its
    gradient comes from the upstream gradients.
    """

    def __init__(self, replica: Replica, taping: Taping) -> None:
        self._mesh, self._taping = replica.mesh, taping
        assert isinstance(replica.head.objective, LogitLoss)
        self._loss = replica.head.objective
        replica.head.objective = self
        for tape in replica.calls["tape"]:
            tape(taping)

    @property
    def logit_widths(self) -> tuple[int, ...]:
        return self._loss.logit_widths

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """See `LogitLoss.of`."""
        tape = self._taping.tape
        if tape is None:
            return self._loss.of(micro_batch, whole, scale)
        if is_idle(whole):
            return of_nothing
        rows, starts = rows_of(micro_batch)
        documents, of_logits = rows.clamp(min=0), None
        place = tape.offsets[documents] + starts + micro_batch.position_ids[0]
        if tape.logit_upstream is not None:
            of_logits = self._logit_upstream(tape, tape.logit_upstream, micro_batch)
        tokens = tokens_of(micro_batch) if tape.own is not None else None
        pack = _Pack(tape, micro_batch, scale, rows >= 0, documents, place, tokens, of_logits)
        return partial(self._objective, pack)

    def _objective(self, pack: _Pack, logits: Tensor, tokens: slice) -> Tensor:
        tape, loss, kept, place = pack.tape, self._loss, pack.keep[tokens], pack.place[tokens]
        labels, tensor, terms = pack.micro_batch.labels[0][tokens], loss.tensor, list[Tensor]()
        first, group = (sum(loss.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        scores: tuple[Tensor, ...]
        if tape.against is not None:
            scores = tape.against.scores(logits, self._mesh.strategy, pack.micro_batch, tokens, group)
        elif tape.fields > 1 or (tape.upstream is not None and tape.upstream.shape[1] > 1):
            scores = token_scores(
                logits, labels, first, group, loss.vocab_size, tape.temperature, tape.fields == WITH_ARG_MAX
            )
        else:
            z = logits if tape.temperature == 1.0 else widened(logits) / tape.temperature
            scores = (vocab_parallel_log_probabilities(z, labels, first, group, vocab_size=loss.vocab_size),)
        if tape.values is not None and self._mesh.coord.tp == 0:
            written = torch.stack([*map(Tensor.detach, scores[: tape.fields])], 1)
            tape.values[place[kept]] = written[kept].to(tape.values)
        if tape.logits is not None:
            _write_logits(tape.logits, pack.micro_batch, logits.detach(), tokens, tape.factors)
        log_probs = scores[0]
        if tape.own is not None and pack.tokens is not None and isinstance(loss.own, TokenLoss):
            of_value, of_gradient = tape.own
            of_tokens = loss.own.of(log_probs, pack.tokens, tokens, of_value)
            return of_tokens * of_gradient + of_tokens.detach() * (1.0 - of_gradient)
        value = log_probs.detach().sum(dtype=torch.float64) * (-pack.scale if tape.against is None else pack.scale)
        if tape.weights is not None:
            weighed = log_probs.exp() if tape.by_probability else log_probs  # dp = p dlog(p)
            terms.append(tape.weights[pack.documents[tokens]].to(log_probs) * kept * weighed)
        if tape.upstream is not None:
            upstream = tape.upstream[place].to(log_probs) * kept[:, None]
            terms += map(torch.mul, upstream.unbind(1), scores)
        if pack.of_logits is not None:
            terms.append(pack.of_logits[tokens].to(log_probs) * logits)
        if not terms and tape.auxiliary_upstream is None and tape.logit_upstream is None:  # nothing is trained
            return value
        total = sum(map(partial(torch.sum, dtype=torch.float64), terms or [logits[:, :1] * 0.0]), value.new_zeros(()))
        return total - total.detach() + value

    def _logit_upstream(
        self, tape: Tape, upstream_of: Callable[[int], Tensor | None], micro_batch: MicroBatch
    ) -> Tensor | None:
        """[t, v], of a pack's logits; receives a document's when its first pack begins."""
        sequences = list(pieces(micro_batch))
        here = {document for document, _, _ in sequences}
        # a document that continues in the next chunk is also in this one
        tape.at_hand = {d: tape.at_hand[d] if d in tape.at_hand else upstream_of(d) for d in here}
        given = {document: upstream for document, upstream in tape.at_hand.items() if upstream is not None}
        if not given:
            return None
        is_cut = self._loss.tensor is not None
        width = self._loss.logit_widths[self._mesh.strategy.shard_index(self._mesh.coord.tp) if is_cut else 0]
        of_pack = torch.zeros(micro_batch.num_tokens, width, dtype=next(iter(given.values())).dtype)
        for document, positions, tokens in sequences:
            if document in given:
                of_pack[tokens] = _of_tokens(given[document], positions, tape.factors(document, positions))
        return of_pack.to(micro_batch.labels.device)


def widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def rows_of(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """int64 [t] each: the document of each token, -1 for padding, and where its sequence begins there."""
    keys = torch.tensor(micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths), dtype=torch.int64)
    of_tokens = keys.repeat_interleave(torch.tensor(micro_batch.lengths), 0).to(micro_batch.labels.device)
    return of_tokens[:, 0], of_tokens[:, 1]


def _of_tokens(gradients: Tensor, positions: slice, factors: Tensor | None) -> Tensor:
    """[t, v] of some tokens of a document, from the gradients of all its tokens, or of their sum [1, v]."""
    return gradients[positions] if factors is None else factors.to(gradients)[:, None] * gradients


def _write_logits(
    tables: dict[int, Tensor], micro_batch: MicroBatch, logits: Tensor, tokens: slice, of: Factors
) -> None:
    """Copies logits [t, v] of a pack into the tables of their documents, or adds them up there."""
    for document, positions, place in pieces(micro_batch):
        first, stop = max(place.start, tokens.start), min(place.stop, tokens.stop)
        if document in tables and first < stop:
            shift = positions.start - place.start
            table, part = tables[document], logits[first - tokens.start : stop - tokens.start]
            if (factors := of(document, slice(first + shift, stop + shift))) is None:
                table[first + shift : stop + shift] = part.to(table)
            else:
                table += (factors.to(part.device, table.dtype)[:, None] * part.to(table.dtype)).sum(0).to(table)
