"""From the last hidden state to the loss (cross entropy, or the user's own) over vocabulary shards, never all logits.

The head runs on a chunk of tokens after the other, and the gradient of a chunk is computed as soon as its loss is known,
while its logits still exist: nothing is computed twice, and at most one chunk's logits are alive, whatever the length of
the pack. That is possible because the loss is a sum over tokens with a known factor: the gradient that comes back
from outside only scales what is there. Hsu et al. (2024, Liger Kernel, section 3.2) fuse head and loss in this way.

What a family does between head and loss (scales, soft caps, vocabulary slices) is kept: the family's own forward runs,
with a base model that hands out the chunk.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss, of_nothing, tokens_of, vocab_parallel_log_probabilities
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import gather_shards


class BaseOutput(MoeModelOutputWithPast):
    """What a base model gives; None for all else that families read of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Chunk(nn.Module):
    hidden: Tensor | None = None

    @property
    def decoder(self) -> nn.Module:
        """Some families call a part of their base model (OPT)."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseOutput:
        return BaseOutput(last_hidden_state=self.hidden)


class Tail:
    """What a causal language model, of a replica's last stage, does after its base model, as a function of the hidden
    state; by the names of the base model and the language-model head."""

    def __init__(self, model: nn.Module, base: str, head: str) -> None:
        self._chunk = _Chunk()
        shell = copy.copy(model)  # shares the modules, but for the base model
        shell._modules = {**model._modules, base.partition(".")[0]: self._chunk}
        self._shell = shell
        inside = {id(parameter) for parameter in model.get_submodule(base).parameters()}
        own = [p for p in model.parameters() if id(p) not in inside]
        tied = [p for p in model.get_submodule(head).parameters() if id(p) in inside]
        self.parameters: tuple[nn.Parameter, ...] = (*own, *tied)

    def __call__(self, hidden: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Logits [t, V] of [1, t, h] hidden states."""
        self._chunk.hidden = hidden
        logits: Tensor = self._shell(**inputs).logits
        self._chunk.hidden = None
        return logits.squeeze(0)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses of all chunks; their gradients are computed on the way and handed out by the backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor, slice], Tensor], chunks: Sequence[slice], hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        needs_hidden = ctx.needs_input_grad[2]
        of_hidden = torch.zeros_like(hidden) if needs_hidden else None
        sums: list[Tensor | None] = [None] * len(wanted)
        for place in chunks:
            with torch.enable_grad():
                part = hidden[:, place].detach().requires_grad_(needs_hidden)
                loss = run(part, place)
                leaves = [*([part] if needs_hidden else []), *wanted]
                gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
            total += loss.detach()
            if of_hidden is not None:
                mine = gradients.pop(0)
                if mine is not None:
                    of_hidden[:, place] = mine
            for index, mine in enumerate(gradients):
                if mine is not None:
                    wide, whole = torch.promote_types(mine.dtype, torch.float32), sums[index]
                    sums[index] = mine.to(wide, copy=True) if whole is None else whole.add_(mine)
        ctx.of_hidden = of_hidden
        ctx.sums = [sums.pop(0) if parameter.requires_grad else None for parameter in parameters]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        scaled = [
            None if gradient is None else gradient.mul_(grad.to(gradient.dtype))
            for gradient in (ctx.of_hidden, *ctx.sums)
        ]
        ctx.of_hidden = ctx.sums = None
        return None, None, *scaled


def chunks_of_tokens(num_tokens: int, most: int) -> list[slice]:
    """Cuts a pack into chunks of at most `most` tokens, wherever that falls."""
    return [slice(begin, min(begin + most, num_tokens)) for begin in range(0, num_tokens, most)]


def chunks_of_sequences(lengths: Sequence[int], most: int) -> list[slice]:
    """Cuts a pack between its sequences into chunks of at most `most` tokens; a longer sequence is one of its own."""
    chunks, begin, end = [], 0, 0
    for length in lengths:
        if end > begin and end + length - begin > most:
            chunks.append(slice(begin, end))
            begin = end
        end += length
    return [*chunks, slice(begin, end)]


def chunked_loss(
    run: Callable[[Tensor, slice], Tensor], hidden: Tensor, parameters: Sequence[nn.Parameter], chunks: Sequence[slice]
) -> Tensor:
    """The loss of a pack, one chunk of tokens after the other.

    Args:
        run: The loss of a chunk, an fp64 scalar: of its hidden states [1, t, h] and of which tokens they are. Every rank
            of a tensor-parallel group calls it for the same chunks in the same order.
        hidden: [1, T, h], what the base model gives.
        parameters: Everything that `run` trains.
        chunks: The tokens of each chunk; each token is in one of them.

    Returns:
        The sum, an fp64 scalar; its backward may run once.
    """
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(run, chunks, hidden, *parameters)
    return torch.stack([run(hidden[:, part], part) for part in chunks]).sum()


# -- what is computed of logits ----------------------------------------------------------------------------------------


LossOfLogits = Callable[[Tensor, slice], Tensor]
"""Of logits [t, V] of some tokens of a micro-batch their scaled loss, an fp64 scalar."""


class Objective(Protocol):
    """What a last stage computes of the logits of its packs."""

    @property
    def logit_widths(self) -> tuple[int, ...]:
        """Logits that each tensor-parallel shard has, in the order of shards."""

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """What makes of the logits of a micro-batch's tokens on this rank, of the whole pack, their loss, scaled by 1 /
        (label tokens of the mini-batch)."""


@dataclass(frozen=True)
class LogitLoss:
    """The loss on a last stage.

    Args:
        tensor: The tensor-parallel group, over which the vocabulary is cut; None where it is whole.
        own: A loss of the user's own; None for the cross entropy.
        smoothing: Label smoothing of the cross entropy.
        vocab_size: Logits of a token.
        widths: Rows of the vocabulary in each shard, in the order of shards.
    """

    tensor: TensorGroup | None
    own: TokenLoss | SequenceLoss | None
    smoothing: float
    vocab_size: int
    widths: tuple[int, ...]

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """What makes of the logits of some tokens of a micro-batch their scaled loss; 0 where its `whole` pack is idle."""
        tensor, own, labels = self.tensor, self.own, micro_batch.labels[0]
        if is_idle(whole):
            return of_nothing
        first_row, group = (sum(self.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        if isinstance(own, SequenceLoss):
            widths = self.logit_widths

            def of_sequences(logits: Tensor, tokens: slice) -> Tensor:
                of_all_rows = logits if tensor is None else gather_shards(logits, widths, tensor)
                return own.of(of_all_rows, micro_batch, tokens, scale)

            return of_sequences

        def log_probabilities(logits: Tensor, tokens: slice) -> Tensor:
            return vocab_parallel_log_probabilities(
                logits, labels[tokens], first_row, group, smoothing=self.smoothing, vocab_size=self.vocab_size
            )

        if own is None:
            return lambda logits, tokens: log_probabilities(logits, tokens).sum(dtype=torch.float64) * -scale
        pack = tokens_of(micro_batch)
        return lambda logits, tokens: own.of(log_probabilities(logits, tokens), pack, tokens, scale)

    @property
    def logit_widths(self) -> tuple[int, ...]:
        """Logits that each tensor-parallel shard has, in the order of shards: its rows, without those that are dropped."""
        widths, left = [], self.vocab_size
        for width in self.widths:
            widths.append(min(width, max(left, 0)))
            left -= width
        return tuple(widths)
