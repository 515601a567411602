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
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, MiniBatch
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


def pieces(micro_batch: MicroBatch) -> Iterator[tuple[int, slice, slice]]:
    """Yields each sequence's document, positions there, and tokens in the pack, without padding."""
    ends, keys = list(accumulate(micro_batch.lengths)), micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths)
    for index, ((document, start), length) in enumerate(zip(keys, micro_batch.lengths, strict=True)):
        if document >= 0:
            first = start + (micro_batch.cuts[index][0] if micro_batch.cuts else 0)
            yield document, slice(first, first + length), slice(ends[index] - length, ends[index])
