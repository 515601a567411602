"""The tape of a pass: instead of the loss, results of each token out of it, and upstream gradients (by these results) into it,
for a loss computed outside the engine.

A rank's replicas share the `Tape` of a pass. While it is in `Taping`, it replaces the loss: a forward writes
`parallel.scores` of its tokens (and their logits, and sums of an auxiliary loss), and trains the linear objective

    sum over tokens of upstream_1 * log_prob + upstream_2 * entropy + upstream * logits, and what an `AuxiliaryLoss` adds,

whose gradient equals the gradient of any loss with these derivatives (chain rule).

Tokens are named by document and position; `offsets` says where a document begins in this rank's tables of the
documents that it trains. Shapes: n of their tokens, D documents of the step, V logits of a token, v logits in this
rank's shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, MiniBatch, is_idle
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.head_loss import LogitLoss, LossOfLogits, Objective
from hf_hotspa.parallel.loss import (
    WITH_ARG_MAX,
    TokenLoss,
    TokenSlice,
    of_nothing,
    token_scores,
    tokens_of,
    vocab_parallel_log_probabilities,
)
from hf_hotspa.strategy import Strategy


class Comparison(Protocol):
    """What the distributions of all tokens with a label are compared with, in a pass."""

    def begin(self, mini_batch: MiniBatch, lengths: Sequence[int]) -> None:
        """A pass over a mini-batch, with documents of these lengths, is about to run. Collective."""

    def scores(
        self,
        logits: Tensor,
        strategy: Strategy,
        micro_batch: MicroBatch,
        tokens: slice,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """The comparison of the logits [t, v] of some tokens of a pack, and their entropy: [t] each, fp32 or wider, equal
        on all ranks of `group`, 0 without a label."""

    def end(self) -> None:
        """The pass is over. Not collective."""


Factors = Callable[[int, slice], Tensor | None]


@dataclass
class Tape:
    """The results and the upstream gradients of a pass on this rank; None if not used."""

    temperature: float = 1.0
    # int64 [D], where a document begins in the tables; not read for other ranks' documents
    offsets: Tensor = field(default_factory=partial(torch.zeros, 0, dtype=torch.int64))
    fields: int = 1  # how many of the first `scores.FIELDS` are written
    # [n, fields], fp32 or wider. Written where tp is 0; 0 for tokens of other ranks of cp.
    values: Tensor | None = None
    # by document [length, v] in host memory, 0 for tokens of other ranks of cp; with `factors` [1, v], the sum over them
    logits: dict[int, Tensor] | None = None
    factors: Factors = lambda document, positions: None  # see `Readout.factors`
    auxiliary: Tensor | None = None  # fp64 [D, sums of an `AuxiliaryLoss`], over a document's tokens here
    weights: Tensor | None = None  # fp64 [D], the gradient by every log-probability of a document
    by_probability: bool = False  # whether each token's probability multiplies these
    upstream: Tensor | None = None  # [n, 1 or 2], further gradients by log-probability, and by entropy
    # returns the gradients [length, v] by a document's logits in this rank's shard, or None; called once
    logit_upstream: Callable[[int], Tensor | None] | None = None
    auxiliary_upstream: Tensor | None = None  # fp64 [D, gradients of an `AuxiliaryLoss`]
    own: tuple[float, float] | None = None  # for a custom token loss, the factors of its value and of its gradient
    beside: Mapping[int, object] = field(default_factory=dict)  # by document, see `SideInputs`
    against: "Comparison | None" = None  # gives the first two scores, in the place of log-probability and entropy
    # what `logit_upstream` returned for the running pack's documents
    at_hand: dict[int, Tensor | None] = field(default_factory=dict)


@dataclass
class Taping:
    """The running pass's tape; None if the replicas have their own loss."""

    tape: Tape | None = None


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
    """In fp32 or wider."""
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


def pieces(micro_batch: MicroBatch) -> Iterator[tuple[int, slice, slice]]:
    """Yields each sequence's document, positions there, and tokens in the pack, without padding."""
    ends, keys = list(accumulate(micro_batch.lengths)), micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths)
    for index, ((document, start), length) in enumerate(zip(keys, micro_batch.lengths, strict=True)):
        if document >= 0:
            first = start + (micro_batch.cuts[index][0] if micro_batch.cuts else 0)
            yield document, slice(first, first + length), slice(ends[index] - length, ends[index])
