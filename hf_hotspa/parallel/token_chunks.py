"""Training a pack in chunks of tokens (`+ck`), exactly: keys and values go forward, their gradients come back.

A token needs of the tokens before it nothing but the keys and values of each attention, so a sequence can be computed a
chunk at a time (Li et al., 2021, "TeraPipe"). The chunks of a chain (`packing.chunk_cuts`) run in two rounds:

1. all but the last run forward without a graph, and leave their keys and values;
2. from the last to the first, each runs forward with a graph, in which those of the chunks before are leaves, and backward
   at once: from its loss, and from its own keys and values with the gradients that later chunks have added up.

So one chunk's activations exist at a time, and no logits of more than one; what grows with a sequence are keys, values and
the sums of their gradients, in at least fp32. A chain of one chunk runs forward and backward once.

Promises: each chunk has one backward; the losses of a pack's chunks are one entry of `losses` of the stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError
from hf_hotspa.packing.chunk_cuts import Chain, cut_into_chains
from hf_hotspa.parallel.attention import Prefix


class ChunkStage(Protocol):
    """A whole model on this rank, without pipeline stages."""

    losses: list[Tensor]
    device: torch.device

    def begin_pass(self) -> None:
        """A forward or a backward pass begins."""

    def forward(
        self,
        micro_batch: MicroBatch,
        hidden: Tensor | None,
        scale: float,
        prefix: Prefix | None = None,
        with_loss: bool = True,
    ) -> Tensor:
        """The scaled loss (fp64 scalar), or the last hidden state."""


@dataclass
class _Pair:
    """Something of the keys and of the values of one attention: [1, K, S, D] each, of S tokens from a sequence's first."""

    keys: Tensor
    values: Tensor

    def both(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


@dataclass
class _CutSequence:
    """What the chunks of one sequence leave for each other.

    Args:
        num_tokens: Those in all chunks but the last.
        kept: Keys and values by attention module.
        sums: The gradients that later chunks have added to them, in fp32 or wider.
    """

    num_tokens: int
    kept: dict[nn.Module, _Pair] = field(default_factory=dict)
    sums: dict[nn.Module, _Pair] = field(default_factory=dict)

    def keep(self, module: nn.Module, first: int, key: Tensor, value: Tensor) -> None:
        """Takes the keys and values of the tokens from `first` on."""
        if module not in self.kept:
            self.kept[module] = _Pair(*(self._storage(x, x.dtype) for x in (key, value)))
        for storage, x in zip(self.kept[module].both(), (key, value), strict=True):
            storage[:, :, first : first + x.shape[2]] = x

    def add(self, module: nn.Module, is_value: bool, leaf: Tensor) -> None:
        """Adds the gradient that a leaf has got, of the tokens from the first on, and takes it from the leaf."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if module not in self.sums:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.sums[module] = _Pair(*(torch.zeros_like(x, dtype=wide) for x in self.kept[module].both()))
        self.sums[module].both()[is_value][:, :, : gradient.shape[2]] += gradient

    def _storage(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty((*x.shape[:2], self.num_tokens, x.shape[3]), dtype=dtype)


class _Carry:
    """The prefix of one chunk's forward, and what that forward leaves.

    Args:
        sequence: The sequence that the chunk's chain cuts.
        before: Its tokens in chunks before this one.
        own: Those in this one, where it goes on behind it; else 0.
        gives: Whether this forward gives its own keys and values to the chunks behind it; else they come to `roots`.

    Attributes:
        lengths: See `Prefix`.
        roots: Own keys and values with the gradients that are to be added to them.
    """

    def __init__(self, sequence: _CutSequence, before: int, own: int, gives: bool) -> None:
        self.lengths: tuple[int, ...] = (before,)
        self.roots: list[tuple[Tensor, Tensor]] = []
        self._sequence, self._own, self._gives = sequence, own, gives
        self._seen: set[nn.Module] = set()
        self._is_over = False

    def before(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Prefix`."""
        if not self._is_over:  # what runs later is a layer that is computed again
            if module in self._seen:
                raise ModelError(
                    f"{type(module).__name__} attended twice to the same tokens",
                    why="keys and values of a chunk are kept by the module",
                    fix="leave +ck out of the strategies, and report the model_type",
                )
            self._seen.add(module)
            self._leave(module, key, value)
        before = self.lengths[0]
        if not before:
            return key[:, :, :0], value[:, :, :0]
        leaves = [x[:, :, :before].detach() for x in self._sequence.kept[module].both()]
        for is_value, (leaf, own) in enumerate(zip(leaves, (key, value), strict=True)):
            if own.requires_grad:
                leaf.requires_grad_()
                if not self._is_over:
                    leaf.register_post_accumulate_grad_hook(partial(self._sequence.add, module, bool(is_value)))
        return leaves[0], leaves[1]

    def end(self) -> None:
        """The forward is over."""
        self._is_over = True

    def _leave(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        if not self._own:
            return
        before, place = self.lengths[0], slice(0, self._own)  # padding comes after it
        if self._gives:
            self._sequence.keep(module, before, key[:, :, place], value[:, :, place])
        elif module in self._sequence.sums:
            for own, total in zip((key, value), self._sequence.sums[module].both(), strict=True):
                if own.requires_grad:
                    self.roots.append((own[:, :, place], total[:, :, before : before + self._own].to(own.dtype)))


class ChunkRunner:
    """Runs the packs of one replica in chunks.

    Args:
        stage: The replica.
        most: The most tokens of a chunk.
    """

    def __init__(self, stage: ChunkStage, most: int) -> None:
        self._stage, self._most = stage, most
        self._num_losses = 0  # of the packs before

    def num_chunks(self, micro_batches: Sequence[MicroBatch]) -> int:
        """How many chunks, and backwards, some packs have."""
        return sum(len(chain) for m in micro_batches for chain in cut_into_chains(m.lengths, self._most))

    def run(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        """Forward and backward of a pack; its scaled loss, an fp64 scalar."""
        self._num_losses = len(self._stage.losses)
        chains = cut_into_chains(micro_batch.lengths, self._most)
        return self._whole([self._run_chain(micro_batch, chain, scale) for chain in chains])

    @torch.no_grad()
    def run_forward(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        """Forward only, chunks in the order of their tokens; its scaled loss, an fp64 scalar."""
        self._num_losses, losses = len(self._stage.losses), []
        for chain in cut_into_chains(micro_batch.lengths, self._most):
            sequence = _CutSequence(chain[-1][0] - chain[0][0])
            for index in range(len(chain)):
                losses.append(self._forward(micro_batch, chain, index, sequence, scale, gives=True)[0])
        return self._whole(losses)

    def _run_chain(self, micro_batch: MicroBatch, chain: Chain, scale: float) -> Tensor:
        sequence = _CutSequence(chain[-1][0] - chain[0][0])
        with torch.no_grad():
            for index in range(len(chain) - 1):
                self._forward(micro_batch, chain, index, sequence, scale, gives=True, with_loss=False)
        losses = []
        for index in reversed(range(len(chain))):
            loss, roots = self._forward(micro_batch, chain, index, sequence, scale, gives=False)
            self._stage.begin_pass()
            torch.autograd.backward([loss, *(root for root, _ in roots)], [None, *(grad for _, grad in roots)])
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _forward(
        self,
        micro_batch: MicroBatch,
        chain: Chain,
        index: int,
        sequence: _CutSequence,
        scale: float,
        *,
        gives: bool,
        with_loss: bool = True,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """What the forward of a chunk gives, and the roots that its backward has beside its loss."""
        first, stop = chain[index]
        goes_on = index + 1 < len(chain)
        self._stage.begin_pass()
        carry = _Carry(sequence, first - chain[0][0], stop - first if goes_on else 0, gives)
        out = self._stage.forward(
            micro_batch.part(first, stop), None, scale, carry if len(chain) > 1 else None, with_loss
        )
        carry.end()
        return out, carry.roots

    def _whole(self, losses: list[Tensor]) -> Tensor:
        """The loss of a pack, in the place of those that its chunks left at the stage."""
        loss = torch.stack(losses).sum()
        del self._stage.losses[self._num_losses :]
        self._stage.losses.append(loss)
        return loss
