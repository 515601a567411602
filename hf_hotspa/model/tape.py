"""Numbers of each token out of a pass, gradients of those numbers into it: how a loss is computed outside of the engine.

A `Tape` is shared by all replicas of a rank. Between `begin` and `end` it takes the place of the loss: a forward writes
`parallel.scores` of its tokens (and their logits, and sums over what routers chose), and what it trains is the linear
objective

    sum over tokens of  seed_1 * log_prob + seed_2 * entropy + seeds * logits,  and of routers  seeds * probabilities,

whose gradient is that of any loss with these derivatives (the chain rule). Outside of them the replicas have their own loss.

Tokens are named by document and position. `offsets` says where a document begins in the tables of this rank, which hold the
documents that it trains alone. Shapes: n of their tokens, D documents of the step, E experts of which K are chosen, V logits of
a token, v those of this rank's shard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.model.logit_loss import LogitLoss, LossOfLogits, Objective
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.loss import TokenLoss, of_nothing, token_scores, tokens_of


@dataclass
class Tape:
    """What a pass of this rank writes, and what drives it.

    Attributes:
        temperature: Logits are divided by it.
        is_running: Whether it is in the place of the loss.
        offsets: int64 [D], where a document begins in the tables; those of other ranks' documents are not read.
        fields: How many of `scores.FIELDS` are written, from the first one on.
        values: [n, fields], fp32 or wider; None where none are wanted. Written where tp is 0; 0 for tokens of other ranks of cp.
        weights: fp64 [D], the seed of every log-probability of a document; None where none has one.
        by_probability: Whether these are multiplied by the probability of each token.
        seeds: [n, 1 or 2], the seeds by log-probability, and by entropy, beside `weights`; None for none.
        logits: By document, where they are wanted: [length, v] in host memory, 0 for tokens of other ranks of cp.
        logit_seeds: Gives the seeds [length, v] of a document's logits in this rank's shard, or None; called once for each.
        router_values: fp64 [D, K * E + E]: how often each expert was the first, second, ... choice of a document's tokens,
            and the sums of its probabilities, over the routers here; None where they are not wanted.
        router_seeds: fp64 [D, E], the seed of each probability of a document's tokens; None for none.
        own: Where the loss is a token loss of the user's own: what its value is multiplied by, and its gradient beside.
    """

    temperature: float = 1.0
    is_running: bool = False
    offsets: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    fields: int = 1
    values: Tensor | None = None
    weights: Tensor | None = None
    by_probability: bool = False
    seeds: Tensor | None = None
    logits: dict[int, Tensor] | None = None
    logit_seeds: Callable[[int], Tensor | None] | None = None
    router_values: Tensor | None = None
    router_seeds: Tensor | None = None
    own: tuple[float, float] | None = None

    def begin(self, **of_pass: Any) -> None:
        """A pass begins, with these attributes; the others are as in a new tape."""
        fresh = Tape(self.temperature, True, **of_pass)
        self.__dict__.update(vars(fresh))

    def end(self) -> None:
        """The replicas have their own loss again; what was written stays until the next pass."""
        self.is_running, self.weights, self.seeds = False, None, None
        self.logit_seeds, self.router_seeds, self.own = None, None, None

    @property
    def trains(self) -> bool:
        """Whether anything has a seed."""
        return (
            self.weights is not None
            or self.seeds is not None
            or self.logit_seeds is not None
            or self.router_seeds is not None
        )


class TapedReplica(Attachment):
    """The tape on one replica: in the place of its loss, and of its routers' balance loss."""

    def __init__(self, replica: Replica, tape: Tape) -> None:
        self.replica, self.tape = replica, tape
        assert isinstance(replica.objective, LogitLoss)
        self._loss = replica.objective
        replica.objective = TapedLoss(self._loss, self)
        if replica.routers is not None:
            self._of_routers, replica.balance_of = replica.balance_of, self._balance_of
        self.writes = replica.mesh.coord.tp == 0
        self.shard = replica.mesh.strategy.shard_index(replica.mesh.coord.tp)
        self._pack: MicroBatch | None = None
        self._rows_of_pack = self.documents = self.place = self.keep = torch.zeros(0)
        self.pack_logits: Tensor | None = None
        self.pack_seeds: Tensor | None = None
        self._fetched: dict[int, Tensor | None] = {}
        self._num_tokens = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Logits that each tensor-parallel shard has, in the order of shards."""
        return self._loss.logit_widths

    # -- an attachment ------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        self._fetched, self._num_tokens = {}, 0

    def begin(self, micro_batch: MicroBatch, whole: MicroBatch, with_loss: bool) -> None:
        tape = self.tape
        if not tape.is_running or is_idle(whole):
            return
        self._pack, device = micro_batch, micro_batch.labels.device
        self._rows_of_pack = _rows_of(whole, device)
        if not (self.replica.is_last and with_loss):
            return
        rows, starts = _rows_of(micro_batch, device), _rows_of(micro_batch, device, 1)
        self._num_tokens += micro_batch.num_tokens
        self.keep, self.documents = rows >= 0, rows.clamp(min=0)  # not of padding
        self.place = tape.offsets[self.documents] + starts + micro_batch.position_ids[0]
        if tape.logits is not None:
            self.pack_logits = torch.zeros(micro_batch.num_tokens, self.widths[self.shard], dtype=_wide(self.replica))
        if tape.logit_seeds is not None:
            self.pack_seeds = self._seeds_of(micro_batch)

    def end(self) -> None:
        if self.pack_logits is not None and self._pack is not None:
            assert self.tape.logits is not None
            for document, positions, tokens in _sequences(self._pack):
                if document in self.tape.logits:
                    self.tape.logits[document][positions] = self.pack_logits[tokens]
        self._pack = self.pack_logits = self.pack_seeds = None

    def measures(self) -> dict[str, float]:
        return {"taped_tokens": float(self._num_tokens)}

    def _seeds_of(self, micro_batch: MicroBatch) -> Tensor | None:
        """[t, v], the seeds of the logits of a pack; those of a document come when its first pack begins."""
        assert self.tape.logit_seeds is not None
        sequences = list(_sequences(micro_batch))
        here = {document for document, _, _ in sequences}
        # a document goes on in the next chunk, if it does, and then it is in this one, too
        self._fetched = {document: seeds for document, seeds in self._fetched.items() if document in here}
        for document in here:
            if document not in self._fetched:
                self._fetched[document] = self.tape.logit_seeds(document)
        if all(seeds is None for seeds in self._fetched.values()):
            return None
        of_pack = torch.zeros(micro_batch.num_tokens, self.widths[self.shard], dtype=_wide(self.replica))
        for document, positions, tokens in sequences:
            seeds = self._fetched[document]
            if seeds is not None:
                of_pack[tokens] = seeds[positions]
        return of_pack.to(micro_batch.labels.device)

    # -- routers ------------------------------------------------------------------------------------------------------

    def _balance_of(
        self,
        lengths: Any,
        labels: Tensor,
        scale: float,
        tokens: Callable[[Tensor], Tensor] = lambda logits: logits,
        is_counted: bool = True,
        chunk: Any = None,
    ) -> Tensor | None:
        """In the place of `RouterLoss.of`: writes what routers chose, and has the gradient of their seeds; its value is 0."""
        tape, routers = self.tape, self.replica.routers
        if not tape.is_running:
            return self._of_routers(lengths, labels, scale, tokens, is_counted, chunk)
        assert routers is not None
        recorded = routers.recorded
        routers.clear()
        wanted = tape.router_values is not None or tape.router_seeds is not None
        if not recorded or not wanted or self._pack is None:
            return None
        keep, total = self._rows_of_pack >= 0, torch.zeros((), dtype=torch.float64, device=labels.device)
        for logits in recorded:
            p = tokens(logits).softmax(-1)[: len(self._rows_of_pack)]
            if tape.router_values is not None and self.writes and is_counted:
                chosen = torch.nn.functional.one_hot(p.topk(routers.top_k, -1).indices, routers.num_experts).flatten(1)
                both = torch.cat([chosen.double(), p.detach().double()], 1)
                tape.router_values.index_add_(0, self._rows_of_pack[keep], both[keep])
            if tape.router_seeds is not None:
                seeds = tape.router_seeds[self._rows_of_pack.clamp(min=0)] * keep[:, None]
                total = total + (seeds * p).sum(dtype=torch.float64)
        return total - total.detach() if tape.router_seeds is not None else None


@dataclass(frozen=True)
class TapedLoss(Objective):
    """In the place of the loss on a last stage.

    Its value is still the scaled cross entropy, for reports and for the search of what is not finite; its gradient is that of
    the seeds.
    """

    base: LogitLoss
    taped: TapedReplica

    @property
    def logit_widths(self) -> tuple[int, ...]:
        return self.base.logit_widths

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """See `LogitLoss.of`."""
        tape, taped, tensor = self.taped.tape, self.taped, self.base.tensor
        if not tape.is_running:
            return self.base.of(micro_batch, whole, scale)
        if is_idle(whole):
            return of_nothing
        first, group = (sum(self.base.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        labels, place, keep, documents = micro_batch.labels[0], taped.place, taped.keep, taped.documents
        all_fields = tape.fields > 1 or (tape.seeds is not None and tape.seeds.shape[1] > 1)
        logits_out, logit_seeds = taped.pack_logits, taped.pack_seeds
        own = self.base.own if tape.own is not None and isinstance(self.base.own, TokenLoss) else None
        pack = tokens_of(micro_batch) if own is not None else None

        def objective(logits: Tensor, tokens: slice) -> Tensor:
            where, kept = place[tokens], keep[tokens]
            numbers = token_scores(
                logits, labels[tokens], first, group, self.base.vocab_size, tape.temperature, all_fields
            )
            log_probs = numbers[0]
            if tape.values is not None and taped.writes:
                with torch.no_grad():
                    written = torch.stack(numbers[: tape.values.shape[1]], 1)
                tape.values[where[kept]] = written[kept].to(tape.values)
            if logits_out is not None:
                logits_out[tokens] = logits.detach().to(logits_out)
            if own is not None and tape.own is not None:
                assert pack is not None
                of_tokens = own.of(log_probs, pack, tokens, tape.own[0])
                factor = tape.own[1]
                return of_tokens * factor + of_tokens.detach() * (1.0 - factor)
            value = log_probs.detach().sum(dtype=torch.float64) * -scale
            if not tape.trains:
                return value
            terms = list[Tensor]()
            if tape.weights is not None:
                weighed = log_probs.exp() if tape.by_probability else log_probs  # dp = p dlog(p)
                weighed = tape.weights[documents[tokens]].to(log_probs) * kept * weighed
                terms.append(weighed.sum(dtype=torch.float64))
            if tape.seeds is not None:
                seeds = tape.seeds[where].to(log_probs) * kept[:, None]
                for index in range(seeds.shape[1]):
                    terms.append((seeds[:, index] * numbers[index]).sum(dtype=torch.float64))
            if logit_seeds is not None:
                terms.append((logit_seeds[tokens].to(log_probs) * logits).sum(dtype=torch.float64))
            if not terms:  # routers alone are trained
                terms.append((logits[:, :1] * 0.0).sum(dtype=torch.float64))
            total = torch.stack(terms).sum()
            return total - total.detach() + value

        return objective


def _wide(replica: Replica) -> torch.dtype:
    return torch.promote_types(replica.compute_dtype, torch.float32)


def _rows_of(micro_batch: MicroBatch, device: torch.device, which: int = 0) -> Tensor:
    """int64 [t]: the document of each token, -1 for padding; or with 1, where its sequence begins in the document."""
    of_sequences = torch.tensor(_keys(micro_batch), dtype=torch.int64)[:, which]
    return of_sequences.repeat_interleave(torch.tensor(micro_batch.lengths)).to(device)


def _keys(micro_batch: MicroBatch) -> tuple[tuple[int, int], ...]:
    """Of each sequence its document and where it begins there; of an idle pack, which has none, those of padding."""
    return micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths)


def _sequences(micro_batch: MicroBatch) -> Iterator[tuple[int, slice, slice]]:
    """Of each sequence that is not padding its document, its positions there, and its tokens in the pack."""
    ends = list(accumulate(micro_batch.lengths))
    for index, ((document, start), length) in enumerate(zip(_keys(micro_batch), micro_batch.lengths, strict=True)):
        if document >= 0:
            first = start + (micro_batch.cuts[index][0] if micro_batch.cuts else 0)
            yield document, slice(first, first + length), slice(ends[index] - length, ends[index])
