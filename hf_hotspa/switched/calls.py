"""One call of the switched model: what it gave to its caller's autograd, and what came back.

Shapes: B rows of L columns in the batch of a call, D documents of them, V logits of a token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.router_loss import RouterLoss
from hf_hotspa.rows.features import IGNORED_LABEL
from hf_hotspa.switched.documents import Document, Documents
from hf_hotspa.switched.passes import Numbers


class _Leaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, take: Callable[..., None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.take = take
        return tuple(value.clone() for value in values)  # callers change them in place (`loss *= ...`)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.take(*gradients)
        return None, None, *(None for _ in gradients)


def leaves(take: Callable[..., None], *values: Tensor) -> tuple[Tensor, ...]:
    """The same numbers for the caller's graph, which they enter there; `take` gets their gradients."""
    return _Leaf.apply(torch.zeros((), requires_grad=True), take, *values)


class LazyLogits(Tensor):
    """Logits that are computed when something is done with them; most callers never look at them.

    The first use is collective: one rank alone must not look.
    """

    _fetch: Callable[[], Tensor]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, fetch: Callable[[], Tensor]) -> "LazyLogits":
        lazy: LazyLogits = torch.Tensor._make_subclass(cls, torch.empty(0))
        object.__setattr__(lazy, "_fetch", fetch)
        object.__setattr__(lazy, "_whole", None)
        return lazy

    def whole(self) -> Tensor:
        """The logits, as a plain tensor."""
        whole = object.__getattribute__(self, "_whole")
        if whole is None:
            whole = object.__getattribute__(self, "_fetch")()
            object.__setattr__(self, "_whole", whole)
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(x: Any) -> Any:
            return x.whole() if isinstance(x, LazyLogits) else x

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(eq=False)
class Call:
    """A call of this rank, and what all ranks know of it.

    Attributes:
        shape: B and L.
        device: Where the caller's tensors are.
        shift: Columns that a number of each token has less than the batch: 1, or 0 for labels that are shifted already.
        documents: This rank's, in the order of `mine`.
        ranges: The numbers of each rank's documents.
        denominators: What the sum of the cross entropies of each rank is divided by.
        labels: Targets that count, of each rank.
        of_step: The documents of its step, or its own where it was called without gradients.
        version: Of the weights that it was called with.
        training: Whether in training mode.
        temperature: What logits were divided by for its numbers.
        numbers: What was computed of this rank's documents; None before.
        fields: How many numbers of each token that are: 0 for sums alone, -1 for nothing.
        with_routers, with_logits: Whether numbers have these; the same on all ranks.
        assumed: Where it was trained at once, the seeds that were assumed: a factor of the loss, or [B, L] of
            log-probabilities; None where it was not.
        factor: What the caller's backward multiplied the loss by.
        seeds: [2, B, L], the gradient by log-probability and entropy; None before a backward.
        logit_seeds: [B, L, V], the gradient by the logits.
        of_routers: The gradient by the balance loss.
        own: This call's part of the token loss of all ranks, where that is the loss.
        reads_padding: Whether a gradient by logits has come where there is no token.
        went_back: Whether a backward has come at all.
    """

    shape: tuple[int, int]
    device: torch.device
    shift: int
    documents: Sequence[Document]
    ranges: Sequence[range]
    denominators: Sequence[float]
    labels: Sequence[int]
    mine: range
    of_step: Documents
    version: int
    training: bool
    temperature: float = 1.0
    numbers: Numbers = field(default_factory=Numbers)
    fields: int = -1
    with_routers: bool = False
    with_logits: bool = False
    assumed: float | Tensor | None = None
    factor: float = 0.0
    seeds: Tensor | None = None
    logit_seeds: Tensor | None = None
    of_routers: float = 0.0
    own: float = 0.0
    reads_padding: bool = False
    went_back: bool = False
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = torch.zeros(self.shape, dtype=torch.bool)
        for document, place in self._places():
            self.mask[place] = torch.from_numpy(document.targets != IGNORED_LABEL)

    @property
    def everything(self) -> range:
        """The documents of all ranks."""
        return range(self.ranges[0].start, self.ranges[-1].stop)

    def _places(self) -> Iterator[tuple[Document, tuple[int, slice]]]:
        for document in self.documents:
            yield document, (document.row, slice(document.begin, document.begin + len(document.ids)))

    def lay_out(self, of_documents: Sequence[Tensor], dtype: torch.dtype, rest: Sequence[int] = ()) -> Tensor:
        """[B, L, *rest] of numbers [length, *rest] of each document, 0 at padding."""
        out = torch.zeros(*self.shape, *rest, dtype=dtype)
        for (_, place), values in zip(self._places(), of_documents, strict=True):
            out[place] = values.to(dtype)
        return out.to(self.device)

    def column(self, index: int, dtype: torch.dtype) -> Tensor:
        """[B, L - shift] of a field of the numbers."""
        out = self.lay_out([self.numbers.tokens[number][:, index] for number in self.mine], dtype)
        return out[:, : self.shape[1] - self.shift]

    def trained(self, numbers: Numbers, fields: int, known: "Assumed") -> None:
        """It was trained at once; takes the numbers of its documents."""
        self.numbers, self.fields = numbers, fields
        if known.by_probability and isinstance(self.assumed, Tensor):
            self.assumed = self.assumed * self.probabilities()

    def probabilities(self) -> Tensor:
        """[B, L] fp64 on the host, of each label; not 0."""
        log_probs = self.lay_out([self.numbers.tokens[number][:, 0] for number in self.mine], torch.float64)
        return log_probs.to("cpu").exp().clamp(min=torch.finfo(torch.float32).tiny)

    def balance(self, routers: RouterLoss) -> tuple[Tensor, Tensor]:
        """transformers' `load_balancing_loss_func` of this rank's batch, and its gradient by each probability of its tokens [E].

        It is E * sum over experts of (share of choices) * (mean probability); only the second has a gradient.
        """
        places = max(sum(len(document.ids) for document in self.documents) * routers.num_layers, 1)
        sums = torch.zeros(routers.top_k + 1, routers.num_experts, dtype=torch.float64)
        for number in self.mine:
            sums += self.numbers.routers[number].view_as(sums)
        of_each = sums[:-1].sum(0) / places * routers.num_experts
        return (of_each * sums[-1] / places).sum(), of_each / places

    def add_factor(self, gradient: Tensor) -> None:
        """Takes the gradient by the loss, a scalar."""
        self.went_back = True
        self.factor += float(gradient)

    def add_router_factor(self, gradient: Tensor) -> None:
        """Takes the gradient by the balance loss, a scalar."""
        self.went_back = True
        self.of_routers += float(gradient)

    def add_seeds(self, of_log_probs: Tensor, of_entropy: Tensor | None = None) -> None:
        """Takes gradients [B, L - shift]. Sums over whole rows reach places without a label, too, whose number is always 0."""
        self.went_back = True
        if self.seeds is None:
            dtype = torch.promote_types(of_log_probs.dtype, torch.float32)
            self.seeds = torch.zeros(2, *self.shape, dtype=dtype)
        width, mask = self.shape[1] - self.shift, self.mask[:, : self.shape[1] - self.shift]
        for total, gradient in zip(self.seeds, (of_log_probs, of_entropy), strict=True):
            if gradient is not None:
                total[:, :width] += gradient.to(total) * mask

    def add_logit_seeds(self, gradient: Tensor) -> None:
        """Takes a gradient [B, L, V]."""
        self.went_back = True
        padding = torch.ones(self.shape, dtype=torch.bool)
        for _, place in self._places():
            padding[place] = False
        self.reads_padding |= bool(gradient[padding.to(gradient.device)].any())
        if self.logit_seeds is None:
            self.logit_seeds = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).clone()
        else:
            self.logit_seeds += gradient

    def of_document(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of numbers [B, L, ...], those [length, ...] of each document of this rank."""
        for number, (_, place) in zip(self.mine, self._places(), strict=True):
            yield number, whole[place]

    def ratio(self, rank: int, tolerance: float, own: bool = False) -> float:
        """The seeds of the log-probabilities over those that were assumed: infinity where any number will do, NaN where they
        are no multiple.

        Args:
            own: Whether the loss is a part of that of all ranks.
        """
        if not self.labels[rank] and not own:
            return float("inf")
        if isinstance(self.assumed, float):
            return self.factor / self.assumed
        assert self.assumed is not None
        assumed = self.assumed.double()
        size = float((assumed * assumed).sum())
        if self.seeds is None or size == 0.0:
            is_zero = self.seeds is None or not bool(self.seeds[0].any())
            return (0.0 if size else float("inf")) if is_zero else float("nan")
        real = self.seeds[0].double()
        ratio = float((real * assumed).sum()) / size
        off = float((real - ratio * assumed).abs().max())
        return ratio if off <= tolerance * float(real.abs().max()) else float("nan")

    def final_seeds(self, rank: int, again: bool) -> Tensor | None:
        """[2, B, L] of what is still to be trained; None for nothing.

        Args:
            again: Whether what was trained at once counts for nothing.
        """
        seeds = self.seeds
        if self.assumed is None:
            return seeds
        if isinstance(self.assumed, float):  # what came by log-probabilities is not in the loss
            if not again or not self.labels[rank] or not self.factor:
                return seeds
            of_loss = self.mask.double() * (-self.factor / self.denominators[rank])
            of_loss = torch.stack([of_loss, torch.zeros_like(of_loss)])
            return of_loss if seeds is None else seeds + of_loss
        if seeds is None or again:
            return seeds
        return torch.stack([torch.zeros_like(seeds[1]), seeds[1]])

    def constant(self, rank: int, tolerance: float, by_probability: bool = False) -> float:
        """The seed that every log-probability has; infinity where there is none to be had, NaN where they differ.

        Args:
            by_probability: Divided by the probability of the token.
        """
        if not self.labels[rank]:
            return float("inf")
        if self.seeds is None or self.logit_seeds is not None or bool(self.seeds[1].any()):
            return float("nan")
        seeds = self.seeds[0]
        if by_probability:
            seeds = seeds / self.probabilities()
        seeds = seeds[self.mask].double()
        mean = float(seeds.mean())
        return mean if float((seeds - mean).abs().max()) <= tolerance * abs(mean) else float("nan")


@dataclass
class Assumed:
    """What the gradients of a caller's loss by its log-probabilities will be, up to a factor that all ranks have in common.

    Args:
        by_loss: The factor of the model's own loss; 0 for another loss.
        by_token: The gradient by every log-probability, or with `by_mean` that by the mean over the batch of a rank.
        by_probability: Whether it is multiplied by the probability of each token, as in dynamic fine-tuning (dft).
        given: [B, L - shift], by the caller.
    """

    by_loss: float = 0.0
    by_token: float = 0.0
    by_mean: bool = False
    by_probability: bool = False
    given: Tensor | None = None

    def of_rank(self, call: Call, rank: int) -> float:
        """The gradient by each log-probability of the documents of a rank, which have labels."""
        if self.by_loss:
            return -self.by_loss / call.denominators[rank]
        return self.by_token / call.labels[rank] if self.by_mean else self.by_token

    def scaled(self, factor: float) -> "Assumed":
        """With what the gradients of the last step really were."""
        return Assumed(0.0, self.by_token * factor, self.by_mean, self.by_probability)

    @classmethod
    def learnt(cls, both: Sequence[Tensor], calls: Sequence[Call], tolerance: float) -> "Assumed":
        """What losses of one step have in common; with nothing, gradients are not known.

        Args:
            both: fp64 [ranks, calls] of `Call.constant`, without and with probabilities.
        """
        plain, weighed = (cls._of_constants(constants, calls, tolerance) for constants in both)
        weighed.by_probability = True
        return plain if plain.by_token or not weighed.by_token else weighed

    @classmethod
    def _of_constants(cls, constants: Tensor, calls: Sequence[Call], tolerance: float) -> "Assumed":
        by_token = common(constants.flatten(), tolerance)
        if by_token is not None:
            return cls(by_token=by_token)
        labels = torch.tensor([[float(call.labels[rank]) for call in calls] for rank in range(len(constants))])
        by_mean = common((constants * labels.clamp(min=1)).flatten(), tolerance)
        return cls(by_token=by_mean or 0.0, by_mean=True)


def common(values: Tensor, tolerance: float) -> float | None:
    """What fp64 numbers have in common, infinity standing for any; None where they differ, or one is not a number."""
    values = values[~values.isinf()]
    if not len(values):
        return 1.0
    first = float(values[0])
    return first if bool(((values - first).abs() <= tolerance * abs(first)).all()) else None


# -- what is wrong with a call ----------------------------------------------------------------------------------------


def of_padding(calls: Sequence[Call], where: str) -> UnsupportedError | None:
    """For gradients by logits where a batch has no token; None without any."""
    if not any(call.reads_padding for call in calls):
        return None
    return UnsupportedError(
        "gradients by logits at padding",
        where=where,
        why="rows are packed without their padding, which has no logits here",
        fix="leave the places where attention_mask is 0 out of the loss",
    )


def logits_are_gone(where: str) -> UnsupportedError:
    """For logits that were not looked at in time."""
    return UnsupportedError(
        "logits were looked at after the step",
        where=where,
        why="the weights that they belong to are gone",
        fix="use the logits before flush and optimizer.step()",
    )


def too_many_logits(call: Call, of_token: int, most: int, where: str) -> UnsupportedError | None:
    """For logits of more than `most` bytes, with so many for each token; None for fewer."""
    size = call.shape[0] * call.shape[1] * of_token
    if size <= most:
        return None
    return UnsupportedError(
        f"the logits of {call.shape[0]} rows of {call.shape[1]} tokens take {size:,} bytes, and the limit is {most:,}",
        where=where,
        why="logits, and the gradients by them, are in host memory of the rank that has the rows",
        fix="use the loss or log-probabilities (fused_lm_head=True) in the place of logits, smaller batches, or a larger "
        "logit_bytes",
    )
