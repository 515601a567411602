"""From the last hidden state to the loss (cross entropy, or a custom one) over vocabulary shards, never all logits.

The head runs on one chunk of tokens after the other. A chunk's gradient is computed as soon as its loss is known, while its
logits still exist: nothing is computed twice, and at most one chunk's logits are alive, whatever the length of the pack.
This works because the loss is a sum over tokens with a known factor: the incoming gradient only scales the result. Hsu et al.
(2024, Liger Kernel, section 3.2) fuse head and loss in this way.

The family's own operations between head and loss (scales, soft caps, vocabulary slices) are kept: its own forward runs, with a
base model that returns the chunk.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.parallel.collectives import Context, with_gradient
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss, of_nothing, tokens_of, vocab_parallel_log_probabilities
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import gather_shards


class BaseOutput(MoeModelOutputWithPast):
    """A base model's output; None for any other field that families read."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Chunk(nn.Module):
    hidden: Tensor | None = None

    @property
    def decoder(self) -> nn.Module:
        """Some families call a part of their base model (OPT)."""
        return self

    def forward(self, *args: object, **kwargs: object) -> BaseOutput:
        return BaseOutput(last_hidden_state=self.hidden)


class Tail:
    """The part of a causal language model behind its base model, on a replica's last stage, as a function of the hidden
    state; made from the names of the base model and the language-model head."""

    def __init__(self, model: nn.Module, base: str, head: str) -> None:
        self._chunk = _Chunk()
        shell = copy.copy(model)  # shares all modules but the base model
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
    """The sum of the losses of all chunks; the forward computes the gradients, and the backward returns them."""

    @staticmethod
    def forward(
        ctx: Context,
        run: Callable[[Tensor, slice], Tensor],
        chunks: Sequence[slice],
        hidden: Tensor,
        *parameters: Tensor,
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
    def backward(ctx: Context, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        scaled = [
            None if gradient is None else gradient.mul_(grad.to(gradient.dtype))
            for gradient in (ctx.of_hidden, *ctx.sums)
        ]
        ctx.of_hidden = ctx.sums = None
        return None, None, *scaled


def chunks_of_tokens(num_tokens: int, most: int) -> list[slice]:
    """Cuts a pack into chunks of at most `most` tokens, also inside of sequences."""
    return [slice(begin, min(begin + most, num_tokens)) for begin in range(0, num_tokens, most)]


def chunks_of_sequences(lengths: Sequence[int], most: int) -> list[slice]:
    """Cuts a pack between its sequences into chunks of at most `most` tokens; a longer sequence is a separate chunk."""
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
    """The loss of a pack, one chunk of tokens after the other. Returns the sum, an fp64 scalar; its backward may run
    once. `run`: the loss of a chunk, an fp64 scalar, from its hidden states [1, t, h] and its place in the pack.
    Every rank of a tensor-parallel group calls it for the same chunks in the same order. `hidden`: [1, T, h], the
    base model's output. `parameters`: all parameters that `run` trains. `chunks`: the tokens of each chunk; each
    token is in one of them."""
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(run, chunks, hidden, *parameters)
    return torch.stack([run(hidden[:, part], part) for part in chunks]).sum()


# -- losses of logits --------------------------------------------------------------------------------------------------


LossOfLogits = Callable[[Tensor, slice], Tensor]
"""Returns the scaled loss, an fp64 scalar, of the logits [t, V] of some tokens of a micro-batch."""


class Objective(Protocol):
    """What a last stage computes from the logits of its packs."""

    @property
    def logit_widths(self) -> tuple[int, ...]:
        """Logits of each tensor-parallel shard, in the order of shards."""

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """The loss of logits of a micro-batch's tokens on this rank, of the `whole` pack, scaled by 1 / (label tokens of the
        mini-batch)."""


@dataclass(frozen=True)
class LogitLoss:
    """The loss on a last stage."""

    tensor: TensorGroup | None  # the tensor-parallel group that cuts the vocabulary; None if it is whole
    own: TokenLoss | SequenceLoss | None  # a custom loss; None for the cross entropy
    smoothing: float  # label smoothing of the cross entropy
    vocab_size: int  # logits of a token
    widths: tuple[int, ...]  # rows of the vocabulary in each shard, in the order of shards

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """The scaled loss of logits of some tokens of a micro-batch; 0 if its `whole` pack is idle."""
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
        """Logits of each tensor-parallel shard, in the order of shards: its rows, without the dropped ones."""
        widths, left = [], self.vocab_size
        for width in self.widths:
            widths.append(min(width, max(left, 0)))
            left -= width
        return tuple(widths)


@runtime_checkable
class AuxiliaryLoss(Protocol):
    """A further loss of a replica, from the inside of its layers."""

    value: Tensor  # fp64 scalar, the sum of this rank's losses in a phase
    coefficient: float  # its factor in the model's loss
    num_sums: int  # how many numbers it sums over the tokens of a document in a tape
    num_seeds: int  # how many seeds of a document their gradients have

    def of_sums(self, sums: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The loss (fp64 scalar) of so many tokens with fp64 [num_sums], and its gradient [num_seeds]."""


def carry_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    """A hidden state that carries a loss: passed on unchanged, and the loss gets the gradient 1 in the backward."""
    one = torch.ones_like(loss)
    return with_gradient(lambda hidden, _: hidden.view_as(hidden), lambda grad: (grad, one), hidden, loss)
