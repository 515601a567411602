"""The balance loss of mixture-of-experts routers, defined so that it does not depend on the packing.

transformers adds `router_aux_loss_coef * load_balancing_loss_func(...)` to the loss of each micro-batch when
`output_router_logits` is set. That function is a product of two means over the tokens of the micro-batch and of all
layers, so it is no sum over micro-batches, and differs with their make-up. Here it is the family's own function of each
sequence and each layer alone, and

    aux = coefficient * sum over sequences s of (n_s / N) * mean over router layers l of f(logits of l for s)

with n_s the label tokens of the sequence and N those of the mini-batch: a mean over sequences, weighted like the cross
entropy. It sums over packs, replicas, buckets and pipeline stages, each of which adds what its own routers give.
For one sequence and one layer it is what transformers computes. (A balance loss of each sequence is what DeepSeek-V3
trains with, Liu et al. 2024, section 2.1.2.)

Of a sequence that is computed in chunks (`+ck`) each chunk leaves the logits of its routers, and the function is always that of
all of them: the last chunk adds its value, and each chunk has the gradient of its own logits at that point, so what is
summed is exactly the gradient of the whole (`ChunkRouters`).
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.attention import Prefix, names_in_forward
from hf_hotspa.parallel.collectives import with_gradient
from hf_hotspa.parallel.loss import IGNORE

_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def router_layers(model: PreTrainedModel) -> int:
    """How many routers of a model add to its loss; 0 where none does.

    Raises:
        UnsupportedError: the family has a balance loss of another kind.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return 0
    if _FUNCTION not in names_in_forward(model):
        return 0  # the family records its router's logits and adds nothing
    family, count = model.config.get_text_config().model_type, recordable_routers(model)
    if not count:
        raise UnsupportedError(
            f"{family} config has output_router_logits=True",
            why="the family's router loss is not defined for each sequence, so it would depend on how the mini-batch is packed",
            fix="set config.output_router_logits = False",
        )
    return count


def recordable_routers(model: PreTrainedModel) -> int:
    """How many routers would add to the loss of a model that is asked for their logits; 0 where none would, or in another
    way than by transformers' own function of a batch."""
    recorder = _recorder(model)
    if recorder is None or not hasattr(model, "router_aux_loss_coef") or _FUNCTION not in names_in_forward(model):
        return 0
    if list(inspect.signature(_function(model)).parameters) != _ARGUMENTS:
        return 0
    return sum(isinstance(module, recorder.target_class) for module in model.modules())


def _function(model: PreTrainedModel) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = inspect.unwrap(type(model).forward).__globals__[_FUNCTION]
    return function


def _recorder(model: PreTrainedModel) -> Any:
    """Where the family's base model records the logits of its routers: a class of modules, and which output."""
    for module in (model, *model.children()):
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if getattr(recorder, "target_class", None) is not None:
            return recorder
    return None


RoutersOfChunks = dict[int, tuple[list[Tensor], int]]
"""What the chunks of one sequence leave, by chunk: of each router its logits [tokens, E], without a graph, and the chunk's
label tokens."""


class ChunkRouters:
    """The routers of one chunk in one forward, beside those of the other chunks of its sequence.

    Args:
        index: The chunk's place among them.
        is_last: Whether the sequence ends in it.
    """

    def __init__(self, sequence: RoutersOfChunks, index: int, is_last: bool) -> None:
        self.is_last = is_last
        self._sequence, self._index = sequence, index
        self._in_graph: list[Tensor] = []
        self._loss_of: Callable[[Tensor, int], Tensor] | None = None

    @property
    def num_labels(self) -> int:
        """Of the sequence, as far as its chunks have run."""
        return sum(num_labels for _, num_labels in self._sequence.values())

    def leave(self, logits: Sequence[Tensor], num_labels: int, loss_of: Callable[[Tensor, int], Tensor]) -> None:
        """Takes what the forward gave.

        Args:
            logits: Of each router [tokens, E].
            num_labels: The chunk's.
            loss_of: The loss of the logits [T, E] of a router for a sequence with so many label tokens.
        """
        self._sequence[self._index] = [own.detach() for own in logits], num_labels
        self._in_graph, self._loss_of = list(logits), loss_of

    def whole(self, router: int, own: Tensor) -> Tensor:
        """[T, E] of the sequence, in which this chunk's are `own`."""
        parts = {**{i: logits[router] for i, (logits, _) in self._sequence.items()}, self._index: own}
        return torch.cat([parts[i] for i in sorted(parts)])

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Own logits in the graph, with the gradients of the loss to them; when all chunks have run. Nothing for the last
        chunk, whose loss has them."""
        if self.is_last or self._loss_of is None or not self.num_labels:
            return []
        roots = []
        for router, logits in enumerate(self._in_graph):
            if logits.requires_grad:
                with torch.enable_grad():
                    own = logits.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(self._loss_of(self.whole(router, own), self.num_labels), own)
                roots.append((logits, gradient))
        return roots


class ChunkPrefix(Prefix, Protocol):
    """What a chunk needs of those before it.

    Attributes:
        routers: Takes part in the balance loss of the sequence that is cut.
    """

    routers: ChunkRouters


class RouterLoss:
    """The balance loss of the routers of this rank's layers.

    Args:
        num_layers: The routers of the whole model.

    Attributes:
        value: fp64 scalar, what was added since `bind`.
        coefficient: What the balance loss is multiplied by.
        num_experts, top_k: How many a router has, and chooses of them.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        recorder = _recorder(model)
        self._function = _function(model)
        self.num_layers = num_layers
        self.coefficient = float(model.router_aux_loss_coef)
        self.num_experts, self.top_k = int(model.num_experts), int(model.num_experts_per_tok)
        routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        self._logits: list[list[Tensor]] = [[] for _ in routers]
        for index, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, index, recorder.index))
        self.value = torch.zeros((), dtype=torch.float64)

    def bind(self) -> None:
        """A phase begins."""
        self.value = torch.zeros((), dtype=torch.float64)

    def begin(self, *of_pack: object) -> None:
        """A forward begins: drops what a recomputation may have recorded."""
        self.clear()

    def _record(self, index: int, output: int, module: nn.Module, args: Any, out: Any) -> None:
        logits = out[output] if isinstance(out, tuple | list) else out
        self._logits[index].append(logits.reshape(-1, logits.shape[-1]))

    @property
    def recorded(self) -> list[Tensor]:
        """Of each router here its logits [t, E] in the forward that has just run; none where this rank has no router."""
        return [torch.cat(logits) for logits in self._logits]

    def clear(self) -> None:
        """Drops what is recorded."""
        for logits in self._logits:
            logits.clear()

    def of(
        self,
        pack: MicroBatch,
        scale: float,
        tokens: Callable[[Tensor], Tensor] = lambda logits: logits,
        is_counted: bool = True,
        chunk: ChunkRouters | None = None,
    ) -> Tensor | None:
        """The loss of the forward that has just run; None where this rank has no router.

        Args:
            pack: The whole pack, T tokens.
            tokens: Of the logits [t, E] of the tokens that are here, those of the pack [T, E].
            is_counted: Whether this rank's value counts; else it is 0, with the same gradients.
            chunk: Where the first sequence is a part of one; None where all are whole.

        Returns:
            fp64 scalar, with gradients to the routers; None, too, for a chunk behind which its sequence goes on.
        """
        if not self._logits:
            return None
        labels, lengths = pack.labels[0], list(pack.lengths)
        counts = [int((own != IGNORE).sum()) for own in labels.split(lengths)]
        of_routers = [tokens(logits).split(lengths) for logits in self.recorded]
        self.clear()
        loss_of = partial(self._loss_of, scale)
        if chunk is not None:
            chunk.leave([own[0] for own in of_routers], counts[0], loss_of)
            if not chunk.is_last:
                return None
            of_routers = [(chunk.whole(router, own), *others) for router, (own, *others) in enumerate(of_routers)]
            counts[0] = chunk.num_labels
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for of_sequences in of_routers:
            for own, count in zip(of_sequences, counts, strict=True):
                if count:
                    total = total + loss_of(own, count)
        if not is_counted:
            total = total - total.detach()
        self.value = self.value.to(total.device) + total.detach()
        return total

    def _loss_of(self, scale: float, logits: Tensor, num_labels: int) -> Tensor:
        """The part in the loss of a sequence with so many label tokens, from the logits [T, E] of one router."""
        loss = self._function((logits,), self.num_experts, self.top_k)
        return loss.double() * (num_labels * scale * self.coefficient / self.num_layers)


def attach_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    """A hidden state that carries a loss: passed on as it is, and the loss gets the gradient 1 in the backward."""
    one = torch.ones_like(loss)
    return with_gradient(lambda hidden, _: hidden.view_as(hidden), lambda grad: (grad, one), hidden, loss)
