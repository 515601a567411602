"""Passes of the engine over documents of all ranks: forward only (scoring) or trained, with their numbers to the owners.

A scoring pass leaves its last weights loaded, and graphs of some packs where a strategy can keep them: a training pass that
follows begins there. `Passes` knows what is loaded, and lets go of it when something else runs or the weights change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.evaluation import Evaluation
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.model.tape import Tape, TapedReplica
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.parallel.agreement import replica_ranks
from hf_hotspa.parallel.router_loss import RouterLoss
from hf_hotspa.report import RankMeasures, StepReport
from hf_hotspa.rows.features import RowRules
from hf_hotspa.stragglers.speeds import Speeds
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.switched.documents import Documents, Exchange, Move, last_ranks, places


@dataclass
class Seeds:
    """What drives a training pass; each is None where nothing has such a seed.

    Args:
        weights: fp64 [D], the seed of every log-probability of a document; known on every rank.
        by_probability: Whether that is multiplied by the probability of each token.
        tokens: Of this rank's documents [length, 1 or 2], by log-probability, and by entropy.
        columns: How many columns these have on all ranks; 0 for none at all.
        logits: Of this rank's documents [length, V]; taken out when they are sent.
        of_logits: The documents of all ranks that have seeds by logits.
        routers: fp64 [D, E], of each probability of a document's tokens; known on every rank.
        own: What the engine's token loss is divided by, and then multiplied by in its gradient; None for another loss.
    """

    weights: Tensor | None = None
    by_probability: bool = False
    tokens: Mapping[int, Tensor] = field(default_factory=dict)
    columns: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    of_logits: frozenset[int] = frozenset()
    routers: Tensor | None = None
    own: tuple[float, float] | None = None


@dataclass
class Numbers:
    """What a pass gave of this rank's documents.

    Attributes:
        tokens: [length, fields] of each, fp32 or wider.
        sums: The sum of the log-probabilities of each, where these were wanted alone.
        logits: [length, V] of each, where they were wanted.
        routers: fp64 [K * E + E] of each, see `Tape.router_values`.
        own: The token loss of all documents on all ranks, where it was computed.
    """

    tokens: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    routers: dict[int, Tensor] = field(default_factory=dict)
    own: float = 0.0


Chosen = tuple[tuple[Bucket, ...], Speeds | None]


class Passes:
    """Runs documents through the strategies of an engine.

    Args:
        engine: The engine; a tape is attached to it.
        columns: What its token loss reads beside tokens.

    Attributes:
        exchange: How rows and numbers travel.
        counts: Passes so far: `scoring` and `training`.
        trained: The plan and the report of each training pass since `begin_step`.
        choose: Gives, for a step and the lengths of its documents, their buckets and the speeds by which packs are divided over
            replicas; the same on all ranks. Called in a thread, too.
        facts: Gives what must be the same on all ranks when something is trained, by name.
        evaluated: The buckets for documents in eval mode without gradients.
    """

    def __init__(self, engine: HotSPaEngine, columns: tuple[str, ...] = ()) -> None:
        self.engine, self.tape = engine, Tape()
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
        self.counts = {"scoring": 0, "training": 0}
        self.trained = list[tuple[MiniBatchPlan, StepReport]]()
        self.choose: Callable[[int, Sequence[int]], Chosen] = lambda step, lengths: (engine.buckets, None)
        self.facts: Callable[[], Mapping[str, str]] = dict
        self.evaluated = engine.buckets
        engine.attach(lambda replica: TapedReplica(replica, self.tape))
        self._held: tuple[Any, Evaluation] | None = None
        self._planned: dict[tuple[int, ...], tuple[MiniBatchPlan, MiniBatch]] = {}
        self._here, self._coming = dict[int, Tensor](), dict[int, int]()

    @property
    def report(self) -> StepReport | None:
        """Of the training passes since `begin_step`; None where there was none."""
        return reduce(merged, (report for _, report in self.trained)) if self.trained else None

    @property
    def num_logits(self) -> int:
        """V."""
        return sum(self._widths(next(iter(self.engine.phases)))[1])

    @property
    def routers(self) -> RouterLoss | None:
        """What routers a replica has; None for a model without any that have a balance loss."""
        return next(iter(self.engine.phases.values())).replica.routers

    def _widths(self, strategy: Strategy) -> tuple[Strategy, tuple[int, ...]]:
        """The strategy with the engine's order of shards, and the logits that each shard has."""
        replica = self.engine.phases[strategy].replica
        return replica.mesh.strategy, replica.objective.logit_widths

    # -- plans --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Another step begins: documents are numbered anew."""
        self._planned.clear()
        self.trained = []

    def planned(
        self, documents: Documents, numbers: Iterable[int], step: int, kept: bool = True, evaluates: bool = False
    ) -> tuple[MiniBatchPlan, MiniBatch]:
        """The plan of some documents and this rank's part of it, made once in a step. Collective.

        Args:
            step: Mini-batches before this one in the run.
            kept: Whether the documents are those of the step.
            evaluates: Whether they are evaluated.
        """
        key = tuple(numbers)
        if not kept or key not in self._planned:
            made = self._plan(documents, key, step, self.exchange, evaluates)
            if not kept:
                return made
            self._planned[key] = made
        return self._planned[key]

    def prepare(self, documents: Documents, step: int, exchange: Exchange) -> tuple[MiniBatchPlan, MiniBatch]:
        """The same for all documents of a coming step, beside what runs now. Collective.

        Args:
            step: Its number.
            exchange: Over a group of its own.
        """
        return self._plan(documents, range(len(documents)), step, exchange)

    def _plan(
        self, documents: Documents, numbers: Sequence[int], step: int, exchange: Exchange, evaluates: bool = False
    ) -> tuple[MiniBatchPlan, MiniBatch]:
        lengths = [documents.lengths[number] for number in numbers]
        buckets, speeds = (self.evaluated, None) if evaluates else self.choose(step, lengths)
        plan = documents.plan(numbers, buckets, self.collator.quadratic_cost, speeds)
        return plan, documents.mini_batch(plan, self.collator, exchange)

    def adopt(self, documents: Documents, prepared: tuple[MiniBatchPlan, MiniBatch]) -> None:
        """Takes over what was prepared for the step that has begun."""
        self._planned[tuple(range(len(documents)))] = prepared

    # -- passes -------------------------------------------------------------------------------------------------------

    def score(
        self,
        documents: Documents,
        numbers: Sequence[int],
        *,
        step: int,
        training: bool,
        temperature: float = 1.0,
        fields: int = 1,
        with_logits: bool = False,
        with_routers: bool = False,
        store: MasterStore | None = None,
        of_step: bool = True,
        own: bool = False,
    ) -> Numbers:
        """A forward of some documents. Collective.

        Args:
            step: Mini-batches before this one in the run.
            training: Whether the model is in training mode.
            temperature: What logits are divided by before numbers are made of them.
            fields: How many of `parallel.scores.FIELDS` are wanted, from the first one on; 0 for none.
            store: Other weights than the engine's own.
            of_step: Whether the documents are those of the step, which will be trained: graphs are kept then.
            own: Whether the engine's token loss is wanted.
        """
        evaluates = not (of_step or training or store is not None)
        plan, mini_batch = self.planned(documents, numbers, step, of_step, evaluates)
        key = None if store is None else id(store), training, step
        if self._held is None or self._held[0] != key:
            self.let_go()
            self._held = key, self.engine.evaluation(store, training, step)
        self.tape.temperature = temperature
        self._begin(documents, plan, fields, with_logits, with_routers)
        self.tape.own = (1.0, 0.0) if own else None
        keeps = of_step and store is None and not with_routers
        try:
            with torch.autocast(self.engine.device.type, enabled=False), torch.set_grad_enabled(keeps):
                result = self._held[1].run(mini_batch, keep_graphs=keeps)
        finally:
            self.tape.end()
        if store is not None:  # what is loaded must not be trained
            self.let_go()
        self.counts["scoring"] += 1
        return replace(self._collect(documents, plan, fields), own=result.loss_sum)

    def train(
        self,
        documents: Documents,
        numbers: Sequence[int],
        seeds: Seeds,
        *,
        step: int,
        add: bool,
        training: bool = True,
        temperature: float = 1.0,
        fields: int = 0,
        sums: bool = False,
    ) -> Numbers:
        """Forward and backward of some documents with the objective that seeds say. Collective.

        Args:
            step: Mini-batches before this one in the run.
            add: Whether gradients are added to those that are there.
            training: Whether the model is in training mode.
            temperature: As of `score`.
            fields: How many numbers of each token are wanted.
            sums: Whether, in their place, the sum of the log-probabilities of each document is.
        """
        plan, mini_batch = self.planned(documents, numbers, step)
        if self._held is not None and self._held[0] != (None, training, step):
            self.let_go()
        held, self._held = self._held, None
        self.tape.temperature = temperature
        self._coming = {}
        self._begin(documents, plan, 1 if sums else fields, False, False)
        tape, sends = self.tape, list[Any]()
        try:
            self._take_seeds(documents, plan, seeds)
            if seeds.of_logits:
                sends = self._send_logit_seeds(plan, seeds)
                self._coming = self._logit_seeds_to_come(documents, plan, seeds)
                tape.logit_seeds = lambda number: self._receive_logit_seeds(documents, seeds, number)
            with torch.autocast(self.engine.device.type, enabled=False), torch.enable_grad():
                report = self.engine.forward_backward(
                    mini_batch,
                    step,
                    self.facts(),
                    add=add,
                    needs_labels=False,
                    training=training,
                    scored=held[1] if held is not None else None,
                )
            for number in list(self._coming):  # of documents so short that this rank of cp has no token of them
                self._receive_logit_seeds(documents, seeds, number)
            self.engine.agreement.wait(sends)
        finally:
            tape.end()
        self.counts["training"] += 1
        self.trained.append((plan, report))
        return replace(self._collect(documents, plan, fields, sums), own=report.loss)

    def let_go(self) -> None:
        """Lets go of the weights and graphs of the last scoring pass. Not collective."""
        if self._held is not None:
            self._held[1].close()
            self._held = None

    def _begin(
        self, documents: Documents, plan: MiniBatchPlan, fields: int, with_logits: bool, with_routers: bool
    ) -> None:
        """Lays out the tables of this rank."""
        engine, device = self.engine, self.engine.device
        offsets, total, logits = [0] * len(documents), 0, dict[int, Tensor]()
        for number, strategy, replica in places(plan):
            if engine.rank in last_ranks(strategy, replica):
                offsets[number], total = total, total + documents.lengths[number]
                if with_logits:
                    mesh, widths = self._widths(strategy)
                    width = widths[mesh.shard_index(mesh.coord(engine.rank).tp)]
                    logits[number] = torch.zeros(documents.lengths[number], width, dtype=self.wide)
        self._offsets = offsets
        router_values, routers = None, self.routers
        if with_routers and routers is not None:
            size = routers.num_experts * (routers.top_k + 1)
            router_values = torch.zeros(len(documents), size, dtype=torch.float64, device=device)
        self.tape.begin(
            offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
            fields=fields,
            values=torch.zeros(total, fields, dtype=self.wide, device=device) if fields else None,
            logits=logits if with_logits else None,
            router_values=router_values,
        )

    # -- seeds in -----------------------------------------------------------------------------------------------------

    def _take_seeds(self, documents: Documents, plan: MiniBatchPlan, seeds: Seeds) -> None:
        tape, device = self.tape, self.engine.device
        tape.own = seeds.own
        tape.weights = None if seeds.weights is None else seeds.weights.to(device)
        tape.by_probability = seeds.by_probability
        tape.router_seeds = None if seeds.routers is None else seeds.routers.to(device)
        if not seeds.columns:
            return
        moves = [
            Move(number, documents.owners[number], rank, documents.lengths[number] * seeds.columns)
            for number, strategy, replica in places(plan)
            for rank in last_ranks(strategy, replica)
        ]

        def tokens_of(number: int) -> Tensor:
            given = seeds.tokens.get(number)
            if given is None:
                return torch.zeros(documents.lengths[number] * seeds.columns, dtype=self.wide)
            return given[:, : seeds.columns].to("cpu", self.wide).reshape(-1)

        table = torch.zeros(sum(m.size for m in moves if m.target == self.engine.rank), dtype=self.wide)
        table = table.view(-1, seeds.columns)
        for move, arrived in self.exchange.deliver("seeds", moves, tokens_of, self.wide):
            begin = self._offsets[move.document]
            table[begin : begin + documents.lengths[move.document]] = arrived.view(-1, seeds.columns)
        tape.seeds = table.to(device)

    def _send_logit_seeds(self, plan: MiniBatchPlan, seeds: Seeds) -> list[Any]:
        """Starts to send each document's seeds to the ranks that have its logits, who take them when its pack begins."""
        sends, self._here = [], dict[int, Tensor]()
        for number, strategy, replica in places(plan):
            whole = seeds.logits.pop(number, None)
            if whole is None:
                continue
            mesh, widths = self._widths(strategy)
            for rank in last_ranks(strategy, replica):
                shard = mesh.shard_index(mesh.coord(rank).tp)
                part = whole[:, sum(widths[:shard]) : sum(widths[: shard + 1])].to("cpu", self.wide).contiguous()
                if rank == self.engine.rank:
                    self._here[number] = part
                elif part.numel():
                    sends.append(self.engine.agreement.start_send(part, rank, number))
                    self.exchange.sent_bytes["seeds"] += part.nbytes
        return sends

    def _logit_seeds_to_come(self, documents: Documents, plan: MiniBatchPlan, seeds: Seeds) -> dict[int, int]:
        """The documents of other ranks whose seeds this rank is sent, and the logits of each token that it has."""
        coming = dict[int, int]()
        for number, strategy, replica in places(plan):
            if number not in seeds.of_logits or documents.owners[number] == self.engine.rank:
                continue
            if self.engine.rank in last_ranks(strategy, replica):
                mesh, widths = self._widths(strategy)
                coming[number] = widths[mesh.shard_index(mesh.coord(self.engine.rank).tp)]
        return coming

    def _receive_logit_seeds(self, documents: Documents, seeds: Seeds, number: int) -> Tensor | None:
        """[length, v] of a document; None where it has none."""
        if number not in seeds.of_logits:
            return None
        if documents.owners[number] == self.engine.rank:
            return self._here.pop(number)
        part = torch.empty(documents.lengths[number], self._coming.pop(number), dtype=self.wide)
        if not part.numel():
            return part
        return self.engine.agreement.receive(part, documents.owners[number], number)

    # -- numbers out --------------------------------------------------------------------------------------------------

    def _collect(self, documents: Documents, plan: MiniBatchPlan, fields: int, sums: bool = False) -> Numbers:
        """Brings what the tape holds to the owners of the documents."""
        numbers, tape = Numbers(), self.tape
        writers = [
            Move(number, rank, documents.owners[number], 1 if sums else documents.lengths[number] * fields)
            for number, strategy, replica in places(plan)
            for rank in last_ranks(strategy, replica, writers=True)
        ]
        if tape.values is not None:
            table = tape.values.to("cpu")

            def numbers_of(number: int) -> Tensor:
                begin = self._offsets[number]
                own = table[begin : begin + documents.lengths[number]]
                return own.double().sum()[None] if sums else own.flatten()

            arrived = self.exchange.deliver("numbers", writers, numbers_of, torch.float64 if sums else self.wide)
            for (number, *_), values in arrived:
                if sums:
                    numbers.sums[number] = numbers.sums.get(number, 0.0) + float(values)
                else:
                    values = values.view(-1, fields)
                    numbers.tokens[number] = numbers.tokens[number] + values if number in numbers.tokens else values
        if tape.logits is not None:
            self._collect_logits(documents, plan, numbers)
        if tape.router_values is not None:
            self._collect_routers(documents, plan, numbers)
        tape.values = tape.logits = tape.router_values = None
        return numbers

    def _collect_logits(self, documents: Documents, plan: MiniBatchPlan, numbers: Numbers) -> None:
        """[length, V] of each document of this rank: a document and shard at a time, from the ranks that computed them."""
        engine, logits = self.engine, self.tape.logits
        assert logits is not None
        sends, num_logits = [], self.num_logits
        for number, part in logits.items():
            owner = documents.owners[number]
            if owner != engine.rank and part.numel():
                sends.append(engine.agreement.start_send(part, owner, number))
                self.exchange.sent_bytes["numbers"] += part.nbytes
        for number, strategy, replica in places(plan):
            if documents.owners[number] != engine.rank:
                continue
            whole = numbers.logits[number] = torch.zeros(documents.lengths[number], num_logits, dtype=self.wide)
            mesh, widths = self._widths(strategy)
            for rank in last_ranks(strategy, replica):
                shard = mesh.shard_index(mesh.coord(rank).tp)
                first, width = sum(widths[:shard]), widths[shard]
                if rank == engine.rank:
                    part = logits[number]
                elif width:
                    part = torch.empty(documents.lengths[number], width, dtype=self.wide)
                    engine.agreement.receive(part, rank, number)
                whole[:, first : first + width] += part
        engine.agreement.wait(sends)

    def _collect_routers(self, documents: Documents, plan: MiniBatchPlan, numbers: Numbers) -> None:
        table = self.tape.router_values
        assert table is not None
        on_host, moves = table.to("cpu"), []
        for number, strategy, replica in places(plan):
            for rank in replica_ranks(strategy, replica):
                coord = strategy.coord(rank)
                if coord.tp == coord.cp == 0:
                    moves.append(Move(number, rank, documents.owners[number], table.shape[1]))
        for move, values in self.exchange.deliver("numbers", moves, lambda n: on_host[n], torch.float64):
            before = numbers.routers.get(move.document)
            numbers.routers[move.document] = values.clone() if before is None else before + values


def merged(one: StepReport, other: StepReport) -> StepReport:
    """The report of two training passes of one optimizer step, one after the other."""
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
