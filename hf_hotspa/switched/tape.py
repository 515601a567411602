"""A tape instead of the loss: numbers of each token out of a pass, and their gradients into it, for a loss computed outside the
engine.

A rank's replicas share the `Tape` of a pass. While it is in `Taping`, it replaces the loss: a forward writes
`parallel.scores` of its tokens (and their logits, and sums of an auxiliary loss), and trains the linear objective

    sum over tokens of  seed_1 * log_prob + seed_2 * entropy + seeds * logits,  and what an `AuxiliaryLoss` adds,

whose gradient equals the gradient of any loss with these derivatives (chain rule).

Tokens are named by document and position; `offsets` says where a document begins in this rank's tables of the
documents that it trains. Shapes: n of their tokens, D documents of the step, V logits of a token, v logits in this
rank's shard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.head_loss import LogitLoss, LossOfLogits, Objective
from hf_hotspa.parallel.loss import TokenLoss, of_nothing, token_scores, tokens_of, vocab_parallel_log_probabilities


@dataclass
class Tape:
    """The outputs and the seeds of a pass on this rank; None if not used.

    Attributes:
        offsets: int64 [D], where a document begins in the tables; not read for other ranks' documents.
        fields: How many of the first `scores.FIELDS` are written.
        values: [n, fields], fp32 or wider. Written where tp is 0; 0 for tokens of other ranks of cp.
        weights: fp64 [D], the seed of every log-probability of a document.
        by_probability: Whether each token's probability multiplies these.
        seeds: [n, 1 or 2], additional seeds by log-probability, and by entropy.
        logits: By document [length, v] in host memory, 0 for tokens of other ranks of cp.
        logit_seeds: Returns the seeds [length, v] of a document's logits in this rank's shard, or None; called once.
        auxiliary: fp64 [D, sums of an `AuxiliaryLoss`], over a document's tokens here.
        auxiliary_seeds: fp64 [D, seeds of an `AuxiliaryLoss`].
        own: For a custom token loss, the factors of its value and of its gradient.
        at_hand: The `logit_seeds` of the running pack's documents.
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
    auxiliary: Tensor | None = None
    auxiliary_seeds: Tensor | None = None
    own: tuple[float, float] | None = None

    at_hand: dict[int, Tensor | None] = field(default_factory=dict)


@dataclass
class Taping:
    """The running pass's tape; None if the replicas have their own loss."""

    tape: Tape | None = None


class TapedReplica(Attachment, Objective):
    """The tape on one replica: replaces its loss on a last stage, and the losses of attachments.

    The value of the loss is still the scaled cross entropy, for reports and the search for non-finite values; its
    gradient comes from the seeds.
    """

    def __init__(self, replica: Replica, taping: Taping) -> None:
        self.replica, self._taping = replica, taping
        assert isinstance(replica.objective, LogitLoss)
        self._loss = replica.objective
        replica.objective = self
        for tape in replica.calls["tape"]:
            tape(taping)
        self._writes = replica.mesh.coord.tp == 0
        self._wide = torch.promote_types(replica.compute_dtype, torch.float32)

    @property
    def logit_widths(self) -> tuple[int, ...]:
        return self._loss.logit_widths

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """See `LogitLoss.of`."""
        tape, writes, loss = self._taping.tape, self._writes, self._loss
        if tape is None:
            return loss.of(micro_batch, whole, scale)
        if is_idle(whole):
            return of_nothing
        tensor, vocab_size = loss.tensor, loss.vocab_size
        first, group = (sum(loss.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        rows, starts = rows_of(micro_batch)
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
                if tape.auxiliary_seeds is None and tape.logit_seeds is None:  # nothing is trained
                    return value
                terms.append((logits[:, :1] * 0.0).sum(dtype=torch.float64))
            total = torch.stack(terms).sum()
            return total - total.detach() + value

        return objective

    def _logit_seeds(
        self, tape: Tape, seeds_of: Callable[[int], Tensor | None], micro_batch: MicroBatch
    ) -> Tensor | None:
        """[t, v], the seeds of a pack's logits; receives a document's when its first pack begins."""
        sequences = list(_sequences(micro_batch))
        here = {document for document, _, _ in sequences}
        # a document that continues in the next chunk is also in this one
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


def rows_of(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """int64 [t] each: the document of each token, -1 for padding, and where its sequence begins there."""
    keys = torch.tensor(micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths), dtype=torch.int64)
    of_tokens = keys.repeat_interleave(torch.tensor(micro_batch.lengths), 0).to(micro_batch.labels.device)
    return of_tokens[:, 0], of_tokens[:, 1]


def _write_logits(tables: dict[int, Tensor], micro_batch: MicroBatch, logits: Tensor, tokens: slice) -> None:
    """Copies logits [t, v] of a pack into the tables of their documents."""
    for document, positions, place in _sequences(micro_batch):
        first, stop = max(place.start, tokens.start), min(place.stop, tokens.stop)
        if document in tables and first < stop:
            shift = positions.start - place.start
            table = tables[document]
            table[first + shift : stop + shift] = logits[first - tokens.start : stop - tokens.start].to(table)


def _sequences(micro_batch: MicroBatch) -> Iterator[tuple[int, slice, slice]]:
    """Yields each sequence's document, positions there, and tokens in the pack, without padding."""
    ends, keys = list(accumulate(micro_batch.lengths)), micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths)
    for index, ((document, start), length) in enumerate(zip(keys, micro_batch.lengths, strict=True)):
        if document >= 0:
            first = start + (micro_batch.cuts[index][0] if micro_batch.cuts else 0)
            yield document, slice(first, first + length), slice(ends[index] - length, ends[index])
