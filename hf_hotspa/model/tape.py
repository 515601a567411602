"""Numbers of each token out of a pass, gradients of those numbers into it: how a loss is computed outside of the engine.

A `Tape` is of one pass, and shared by all replicas of a rank. While it is in `Taping`, it takes the place of the loss: a forward
writes `parallel.scores` of its tokens (and their logits, and sums over what routers chose), and what it trains is the linear
objective

    sum over tokens of  seed_1 * log_prob + seed_2 * entropy + seeds * logits,  and of routers  seeds * probabilities,

whose gradient is that of any loss with these derivatives (the chain rule). Without a tape the replicas have their own loss.

Tokens are named by document and position. `offsets` says where a document begins in the tables of this rank, which hold the
documents that it trains alone. Shapes: n of their tokens, D documents of the step, E experts of which K are chosen, V logits of
a token, v those of this rank's shard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.head_loss import LogitLoss, LossOfLogits, Objective
from hf_hotspa.parallel.loss import TokenLoss, of_nothing, token_scores, tokens_of, vocab_parallel_log_probabilities


@dataclass
class Tape:
    """What a pass of this rank writes, and what drives it.

    Attributes:
        temperature: Logits are divided by it.
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
        at_hand: What `logit_seeds` gave for the documents of the pack that runs.
    """

    temperature: float = 1.0
    offsets: Tensor = field(default_factory=partial(torch.zeros, 0, dtype=torch.int64))
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

    at_hand: dict[int, Tensor | None] = field(default_factory=dict)


@dataclass
class Taping:
    """The tape of the pass that runs; None where the replicas have their own loss."""

    tape: Tape | None = None


class TapedReplica(Attachment, Objective):
    """The tape on one replica: in the place of its loss on a last stage, and of its routers' balance loss.

    The value of the loss is still the scaled cross entropy, for reports and for the search of what is not finite; its
    gradient is that of the seeds.
    """

    def __init__(self, replica: Replica, taping: Taping) -> None:
        self.replica, self._taping = replica, taping
        assert isinstance(replica.objective, LogitLoss)
        self._loss = replica.objective
        replica.objective = self
        if replica.routers is not None:
            self._of_routers, replica.balance_of = replica.balance_of, self._balance_of
        self._writes = replica.mesh.coord.tp == 0
        self._wide = torch.promote_types(replica.compute_dtype, torch.float32)

    @property
    def logit_widths(self) -> tuple[int, ...]:
        return self._loss.logit_widths

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        tape, writes, loss = self._taping.tape, self._writes, self._loss
        if tape is None:
            return loss.of(micro_batch, whole, scale)
        if is_idle(whole):
            return of_nothing
        tensor, vocab_size = loss.tensor, loss.vocab_size
        first, group = (sum(loss.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        rows, starts = _rows_of(micro_batch)
        keep, documents = rows >= 0, rows.clamp(min=0)  # not of padding
        place = tape.offsets[documents] + starts + micro_batch.position_ids[0]
        labels = micro_batch.labels[0]
        logit_seeds = None if tape.logit_seeds is None else self._logit_seeds(tape, tape.logit_seeds, micro_batch)
        all_fields = tape.fields > 1 or (tape.seeds is not None and tape.seeds.shape[1] > 1)
        own = loss.own if tape.own is not None and isinstance(loss.own, TokenLoss) else None
        pack = tokens_of(micro_batch) if own is not None else None

        def objective(logits: Tensor, tokens: slice) -> Tensor:
            where, kept = place[tokens], keep[tokens]
            numbers: tuple[Tensor, ...]
            if all_fields:
                numbers = token_scores(logits, labels[tokens], first, group, vocab_size, tape.temperature)
            else:
                z = (
                    logits
                    if tape.temperature == 1.0
                    else logits.to(torch.promote_types(logits.dtype, torch.float32)) / tape.temperature
                )
                numbers = (vocab_parallel_log_probabilities(z, labels[tokens], first, group, vocab_size=vocab_size),)
            log_probs = numbers[0]
            if tape.values is not None and writes:
                written = torch.stack([*map(Tensor.detach, numbers[: tape.values.shape[1]])], 1)
                tape.values[where[kept]] = written[kept].to(tape.values)
            if tape.logits is not None:
                _write_logits(tape.logits, micro_batch, logits.detach(), tokens)
            if own is not None and tape.own is not None:
                assert pack is not None
                of_tokens = own.of(log_probs, pack, tokens, tape.own[0])
                return of_tokens * tape.own[1] + of_tokens.detach() * (1.0 - tape.own[1])
            value = log_probs.detach().sum(dtype=torch.float64) * -scale
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
            if not terms:
                if tape.router_seeds is None and tape.logit_seeds is None:  # nothing is trained
                    return value
                terms.append((logits[:, :1] * 0.0).sum(dtype=torch.float64))
            total = torch.stack(terms).sum()
            return total - total.detach() + value

        return objective

    def _logit_seeds(
        self, tape: Tape, seeds_of: Callable[[int], Tensor | None], micro_batch: MicroBatch
    ) -> Tensor | None:
        """[t, v], the seeds of the logits of a pack; those of a document come when its first pack begins."""
        sequences = list(_sequences(micro_batch))
        here = {document for document, _, _ in sequences}
        # a document goes on in the next chunk, if it does, and then it is in this one, too
        tape.at_hand = {d: tape.at_hand[d] if d in tape.at_hand else seeds_of(d) for d in here}
        if all(seeds is None for seeds in tape.at_hand.values()):
            return None
        shard = self.replica.mesh.strategy.shard_index(self.replica.mesh.coord.tp)
        of_pack = torch.zeros(micro_batch.num_tokens, self.logit_widths[shard], dtype=self._wide)
        for document, positions, tokens in sequences:
            seeds = tape.at_hand[document]
            if seeds is not None:
                of_pack[tokens] = seeds[positions]
        return of_pack.to(micro_batch.labels.device)

    def _balance_of(
        self,
        pack: MicroBatch,
        scale: float,
        tokens: Callable[[Tensor], Tensor] = lambda logits: logits,
        is_counted: bool = True,
        chunk: Any = None,
    ) -> Tensor | None:
        """In the place of `RouterLoss.of`: writes what routers chose, and has the gradient of their seeds; its value is 0."""
        tape, routers = self._taping.tape, self.replica.routers
        if tape is None:
            return self._of_routers(pack, scale, tokens, is_counted, chunk)
        assert routers is not None
        recorded = routers.recorded
        routers.clear()
        wanted = tape.router_values is not None or tape.router_seeds is not None
        if not recorded or not wanted or is_idle(pack):
            return None
        rows, _ = _rows_of(pack)
        keep, total = rows >= 0, torch.zeros((), dtype=torch.float64, device=rows.device)
        for logits in recorded:
            p = tokens(logits).softmax(-1)[: len(rows)]
            if tape.router_values is not None and self._writes and is_counted:
                chosen = torch.nn.functional.one_hot(p.topk(routers.top_k, -1).indices, routers.num_experts).flatten(1)
                both = torch.cat([chosen.double(), p.detach().double()], 1)
                tape.router_values.index_add_(0, rows[keep], both[keep])
            if tape.router_seeds is not None:
                seeds = tape.router_seeds[rows.clamp(min=0)] * keep[:, None]
                total = total + (seeds * p).sum(dtype=torch.float64)
        return total - total.detach() if tape.router_seeds is not None else None


def _rows_of(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """int64 [t] each: the document of each token, -1 for padding, and where its sequence begins in the document."""
    keys = torch.tensor(micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths), dtype=torch.int64)
    of_tokens = keys.repeat_interleave(torch.tensor(micro_batch.lengths), 0).to(micro_batch.labels.device)
    return of_tokens[:, 0], of_tokens[:, 1]


def _write_logits(tables: dict[int, Tensor], micro_batch: MicroBatch, logits: Tensor, tokens: slice) -> None:
    for document, positions, place in _sequences(micro_batch):
        first, stop = max(place.start, tokens.start), min(place.stop, tokens.stop)
        if document in tables and first < stop:
            shift = positions.start - place.start
            table = tables[document]
            table[first + shift : stop + shift] = logits[first - tokens.start : stop - tokens.start].to(table)


def _sequences(micro_batch: MicroBatch) -> Iterator[tuple[int, slice, slice]]:
    """Of each sequence that is not padding its document, its positions there, and its tokens in the pack."""
    ends, keys = list(accumulate(micro_batch.lengths)), micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths)
    for index, ((document, start), length) in enumerate(zip(keys, micro_batch.lengths, strict=True)):
        if document >= 0:
            first = start + (micro_batch.cuts[index][0] if micro_batch.cuts else 0)
            yield document, slice(first, first + length), slice(ends[index] - length, ends[index])
