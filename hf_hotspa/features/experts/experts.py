"""Expert parallelism (`ep`): each of N neighbouring ranks of a stage holds some whole experts, and tokens travel to them.

Every rank routes its own tokens with the family's own router, sorts the (token, expert) pairs by expert, and exchanges the
counts (the one point of a layer where the host waits). An all-to-all sends the rows to the ranks that hold their experts,
where the family's own module computes them with weight 1. A second all-to-all brings them back, where routing weights are
applied and a token's experts are added up (Lepikhin et al., 2021, "GShard", section 3.2; Fedus et al., 2022, "Switch
Transformers", section 2.2). Without a capacity (`ExpertCapacity`) no token is dropped.

If the ranks of tp hold the same tokens, each sends its share. A rank that gets no row stays in the graph: others wait for
the backward of its all-to-all.

Promises: on every rank, a module's output and its gradients to tokens and routing weights equal the family's own module with
all experts. The gradient of an expert is a part of the sum on each rank that holds it. `unsupported_reason` names models that
cannot promise that.

The capacity of experts: how many tokens of a pack an expert may compute, and what happens to the others.

A pack has T tokens, and each asks for k of E experts. An expert takes at most `ceil(factor * T * k / E)` of them (Lepikhin et
al., 2021, "GShard", section 2.2; Fedus et al., 2022, "Switch Transformers", section 2.2), the first ones in the order of the
pack. A later token gets routing weight 0 for it; its other experts compute it, and the residual connection passes it on.

Promise: what is dropped depends on the pack alone, so it is the same under every strategy that runs whole packs on one
rank, or on the ranks of tp and ep.

The balance loss of mixture-of-experts routers, defined so that it does not depend on the packing.

transformers adds `router_aux_loss_coef * load_balancing_loss_func(...)` to the loss of each micro-batch when
`output_router_logits` is set. That function is a product of two means over the tokens of the micro-batch and of all layers,
so it is not additive over micro-batches. Here the family's own function is applied to each sequence and layer alone:

    aux = coefficient * sum over sequences s of (n_s / N) * mean over router layers l of f(logits of l for s)

with n_s the label tokens of the sequence and N the label tokens of the mini-batch: a mean over sequences, weighted like the
cross entropy. It sums over packs, replicas, buckets and pipeline stages, each of which adds its own routers' part. For one
sequence and one layer it equals the loss of transformers. (DeepSeek-V3 trains with a balance loss of each sequence, Liu et al.
2024, section 2.1.2.)

With token chunks (`+ck`) each chunk leaves its router logits, and the function always sees the logits of all chunks: the last
one adds its value, and each gets the gradient to its logits at that point, so the sum is exactly the gradient of the whole
sequence (`ChunkRouters`).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.features.isolation.isolation import LayerKind
from hf_hotspa.parallel.attention import Prefix, names_in_forward
from hf_hotspa.parallel.collectives import CLOCK, gather_rows, with_gradient
from hf_hotspa.parallel.loss import IGNORE
from hf_hotspa.parallel.mesh import StrategyMesh

_signature = cache(inspect.signature)


def arguments_of(experts: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and routing weights, from a call of fused experts."""
    _, hidden, index, weights = _signature(type(experts).forward).bind(experts, *args, **kwargs).args
    return hidden, index, weights


class ExpertCapacity:
    """Limits how many tokens of a pack each expert computes.

    Args:
        factor: The limit, as a multiple of an expert's share if all had equally many tokens.
        counts: Whether this rank counts drops: one rank of each stage of a replica does.

    Attributes:
        num_dropped: (Token, expert) pairs dropped in the forwards of this phase.
        is_counting: Whether drops are counted now.
    """

    def __init__(self, factor: float, counts: bool = True) -> None:
        self.factor, self.num_dropped, self.is_counting, self._counts = factor, 0, False, counts

    def bind(self) -> None:
        self.num_dropped = 0

    def begin(self, pack: object, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        self.is_counting = self._counts and not is_idle(whole)

    def end(self) -> None:
        """Stops counting: a layer that is recomputed in the backward was counted before."""
        self.is_counting = False

    def measures(self) -> dict[str, float]:
        return {"dropped_tokens": float(self.num_dropped)}

    def kept(self, index: Tensor, num_experts: int) -> Tensor:
        """Which (token, expert) pairs are computed, bool [T, k]; `index`, int64 [T, k], has the experts of each token of a
        whole pack."""
        pairs = index.reshape(-1)
        most = math.ceil(self.factor * len(pairs) / num_experts)
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs, minlength=num_experts)
        place = torch.arange(len(pairs), device=pairs.device) - (counts.cumsum(0) - counts)[pairs[order]]
        kept = torch.empty_like(pairs, dtype=torch.bool)
        kept[order] = place < most
        if self.is_counting:
            self.num_dropped += int((counts - most).clamp_min(0).sum())
        return kept.view_as(index)

    def limit(self, modules: Iterable[nn.Module]) -> None:
        """Applies the limit to modules of experts, all of whose experts are here."""
        for module in modules:
            module.forward = partial(self._run, module, module.forward)

    def _run(self, module: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = arguments_of(module, *args, **kwargs)
        return forward(hidden, index, weights * self.kept(index, int(module.num_experts)))


def is_fused(module: nn.Module) -> bool:
    """Whether a module is one of transformers' fused experts (`use_experts_implementation`)."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate", "num_experts"))


def fused_experts(modules: Mapping[str, nn.Module], layers: tuple[str, ...]) -> dict[str, int]:
    """The modules of fused experts in the layers, by name, with their numbers of experts."""
    return {
        name: int(module.num_experts)  # type: ignore[arg-type]
        for name, module in modules.items()
        if name.startswith(layers) and is_fused(module)
    }


def experts_per_token(config: PreTrainedConfig) -> int:
    """Experts that compute a token; 1 if the config has none of the usual names for it."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), 1)


def unsupported_reason(
    family: str, modules: Mapping[str, nn.Module], layers: tuple[str, ...], kinds: Sequence[LayerKind]
) -> str | None:
    """Why the experts of a model cannot be divided over ranks, or None.

    Args:
        layers: The prefixes of layer names, one for each list of layers.
        kinds: How each layer treats the sequences of a pack.
    """
    fused = fused_experts(modules, layers)
    loose = next((n for n in modules if n.startswith(layers) and n.endswith(".experts") and n not in fused), None)
    if loose is not None:
        return (
            f"{loose} of {family} ({type(modules[loose]).__name__}) is not one fused module of experts, so ep must be 1"
        )
    if not fused:
        return None  # a dense model
    if len(set(fused.values())) > 1:
        return f"the layers of {family} have {sorted(set(fused.values()))} experts, not all the same number, so ep must be 1"
    for name, count in fused.items():
        module = modules[name]
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        if len(arguments) != 3:
            return f"{name} of {family} takes {arguments}, not tokens, experts and routing weights, so ep must be 1"
        for leaf, parameter in module.named_parameters():
            if "." in leaf or not parameter.dim() or parameter.shape[0] != count:
                return f"{leaf} of {name} is not of single experts, so ep must be 1"
        if any(isinstance(child, nn.ModuleList | nn.Identity) for child in module.children()):
            return f"{name} of {family} has experts without weights, so ep must be 1"
    if any(kind.alone for kind in kinds):
        return (
            f"layers of {family} are given one sequence of a pack at a time (for a convolution, a state, linear attention"
            " or a custom mask), and ranks that exchange tokens of experts must run the same packs together, so ep must be 1"
        )
    return f"the layers of {family} run in cycles, so ep must be 1" if len(layers) > 1 else None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    with CLOCK.waiting:
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends `sent[i]` of the rows [n, ...] to rank i of a group; the gradients travel back."""
    there = partial(_exchanged, sent=sent, received=received, group=group)
    back = partial(_exchanged, sent=received, received=sent, group=group)
    return with_gradient(there, back, x)


class _Shares:
    """Divides rows that all ranks of a tensor-parallel group hold among them."""

    def __init__(self, num_rows: int, group: dist.ProcessGroup) -> None:
        size, position = dist.get_world_size(group), dist.get_rank(group)
        cuts = [num_rows * i // size for i in range(size + 1)]
        self.own = slice(cuts[position], cuts[position + 1])
        self._gather = partial(gather_rows, rows=[b - a for a, b in pairwise(cuts)], group=group)

    def own_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's share of tensors; one node gathers the whole gradients, so that ranks gather in one order."""
        needs = [tensor.requires_grad for tensor in tensors]

        def share(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(tensor[self.own].clone() for tensor in tensors)

        def whole(*gradients: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(self._gather(g) if n else None for g, n in zip(gradients, needs, strict=True))

        return with_gradient(share, whole, *tensors)

    def all_rows(self, x: Tensor) -> Tensor:
        """The rows of all ranks, for the same computation on each; the gradient is this rank's own rows."""
        return with_gradient(self._gather, lambda grad: grad[self.own].contiguous(), x)


class ExpertParallel:
    """The experts of a replica on this rank.

    Args:
        mesh: Of a strategy with ep.
        capacity: The most tokens of a pack that an expert computes; None for no limit.

    Attributes:
        num_rows: Rows that this rank's experts computed in the forwards of this phase, without idle packs.
        is_counting: Whether rows are counted now.
        is_idle: Whether this rank's own tokens are padding, which no rank counts.
    """

    def __init__(self, mesh: StrategyMesh, capacity: ExpertCapacity | None = None) -> None:
        assert mesh.experts is not None
        self._group, self._capacity = mesh.experts, capacity
        # the ranks that hold the same tokens
        self._shared = mesh.tensor.group if mesh.tensor is not None and not mesh.strategy.sp else None
        self.num_rows = 0
        self.is_counting = self.is_idle = False

    def bind(self) -> None:
        self.num_rows = 0

    def begin(self, pack: object, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        self.is_counting, self.is_idle = True, is_idle(whole)

    def end(self) -> None:
        """Stops counting: a layer that is recomputed in the backward was counted before."""
        self.is_counting = False

    def measures(self) -> dict[str, float]:
        return {"expert_tokens": float(self.num_rows)}

    def divide(self, model: nn.Module, names: Iterable[str]) -> None:
        """Makes modules of experts, whose parameters are (or become) this rank's shard, compute all experts.
        A name without a module is of another stage."""
        modules: dict[str, Any] = dict(model.named_modules())
        for module in (modules[name] for name in names if name in modules):
            module.num_experts = int(module.num_experts) // self._group.size
            module.forward = partial(self._run, module, module.forward)

    def _run(self, module: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = arguments_of(module, *args, **kwargs)
        if index.shape != weights.shape or index.dim() != 2 or index.is_floating_point():
            raise ModelError(
                f"{type(module).__name__} is given experts {tuple(index.shape)} and routing weights {tuple(weights.shape)}",
                why="ep needs the experts of each token, and a weight for each of them",
                fix="leave ep out of this model's strategies, and report the model_type",
            )
        x, num_experts = hidden.reshape(-1, hidden.shape[-1]), module.num_experts * self._group.size
        kept = None if self._capacity is None else self._capacity.kept(index, num_experts)
        shares = None
        if self._shared is not None:
            shares = _Shares(len(x), self._shared)
            x, weights = shares.own_rows(x, weights)
            index, kept = index[shares.own], None if kept is None else kept[shares.own]
        y = self._of_tokens(x, index, weights, kept, partial(_compute, module, forward), num_experts)
        return (y if shares is None else shares.all_rows(y)).view_as(hidden)

    def _of_tokens(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        kept: Tensor | None,
        local: Callable[[Tensor, Tensor], Tensor],
        num_experts: int,
    ) -> Tensor:
        """[t, h] of tokens that no other rank sends, with their experts `index` [t, k] int64 and `weights` [t, k].

        Where `kept` [t, k] is False, 0 is added instead.
        """
        size, group, top_k = self._group.size, self._group.group, index.shape[1]
        pairs = index.reshape(-1)
        order = torch.argsort(pairs, stable=True)
        if kept is not None:
            order = order[kept.reshape(-1)[order]]
        counts = torch.bincount(pairs[order], minlength=num_experts).view(size, -1)
        # beside the counts: whether these rows are of a pack, not padding
        counts_sent = torch.cat([counts, counts.new_full((size, 1), int(not self.is_idle))], 1)
        counts_received = torch.empty_like(counts_sent)
        with CLOCK.waiting:
            dist.all_to_all_single(counts_received, counts_sent, group=group)
        others = counts_received[:, :-1]
        of_packs = others.sum(1) * counts_received[:, -1]
        sent, received, counted = torch.stack([counts.sum(1), others.sum(1), of_packs]).tolist()
        if self.is_counting:
            self.num_rows += sum(counted)
        rows = _exchange(x[order // top_k], sent, received, group)
        experts = torch.arange(others.shape[1], device=x.device).repeat(size)
        out = local(rows, experts.repeat_interleave(others.reshape(-1), output_size=sum(received)))
        back = _exchange(out, received, sent, group)
        weighted = back * weights.reshape(-1)[order][:, None]
        # into the order of tokens, and summed as the family's own grouped products do
        whole = weighted.new_zeros(len(pairs), x.shape[1]).index_copy(0, order, weighted)
        return whole.view(len(x), top_k, x.shape[1]).sum(1).to(x.dtype)


def _compute(module: nn.Module, forward: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """[n, h] of rows [n, h], each by one expert of this rank."""
    if len(rows):
        return forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
    parameters = list(module.parameters())  # inputs of the node, so that the graph continues through them
    return with_gradient(lambda x, *_: x.clone(), lambda grad: (grad, *(None for _ in parameters)), rows, *parameters)


def fits_grouped_kernels(dtype: torch.dtype, shapes: Iterable[Sequence[int]]) -> bool:
    """Whether the fused kernel of experts supports a rank's shards: rows of whole 16 bytes, and not fp64. The shapes of
    experts have three dims."""
    if dtype == torch.float64:
        return False
    experts = [shape for shape in shapes if len(shape) == 3]
    return all(size * dtype.itemsize % 16 == 0 for shape in experts for size in shape[1:])


# -- the balance loss of routers ---------------------------------------------------------------------------------------


_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def router_layers(model: PreTrainedModel) -> int:
    """How many routers of a model add to its loss; 0 if none does.

    Raises:
        UnsupportedError: the family has another kind of balance loss.
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
    """How many routers would add to a model's loss if asked for their logits; 0 if none, or if the family does not use
    transformers' own function of a batch."""
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
    """The class of modules, and the output, from which the family's base model records its routers' logits."""
    for module in (model, *model.children()):
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if getattr(recorder, "target_class", None) is not None:
            return recorder
    return None


RoutersOfChunks = dict[int, tuple[list[Tensor], int]]
"""What a sequence's chunks leave, by chunk: each router's logits [tokens, E], without a graph, and the number of label
tokens."""


class ChunkRouters:
    """The routers of chunk `index` of a sequence in one forward; `is_last` if the sequence ends in it."""

    def __init__(self, sequence: RoutersOfChunks, index: int, is_last: bool) -> None:
        self.is_last = is_last
        self._sequence, self._index = sequence, index
        self._in_graph: list[Tensor] = []
        self._loss_of: Callable[[Tensor, int], Tensor] | None = None

    @property
    def num_labels(self) -> int:
        """Label tokens of the sequence, in the chunks that have run."""
        return sum(num_labels for _, num_labels in self._sequence.values())

    def leave(self, logits: Sequence[Tensor], num_labels: int, loss_of: Callable[[Tensor, int], Tensor]) -> None:
        """Stores each router's logits [tokens, E], the chunk's number of labels, and the loss as a function of a router's
        logits [T, E] and the sequence's number of labels."""
        self._sequence[self._index] = [own.detach() for own in logits], num_labels
        self._in_graph, self._loss_of = list(logits), loss_of

    def whole(self, router: int, own: Tensor) -> Tensor:
        """The sequence's logits [T, E], with `own` for this chunk."""
        parts = {**{i: logits[router] for i, (logits, _) in self._sequence.items()}, self._index: own}
        return torch.cat([parts[i] for i in sorted(parts)])

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """This chunk's logits in the graph, with the loss's gradients to them, once all chunks have run. Empty for the last
        chunk, whose loss includes them."""
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
    """What a chunk needs of earlier chunks; `routers` take part in the balance loss of the cut sequence."""

    routers: ChunkRouters


class RouterLoss:
    """The balance loss of the routers of this rank's layers.

    Args:
        num_layers: The routers of the whole model.

    Attributes:
        value: fp64 scalar, the sum since `bind`.
        coefficient: The factor on the balance loss.
        num_experts, top_k: How many experts a router has, and how many it chooses.
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
        self.value = torch.zeros((), dtype=torch.float64)

    def begin(self, *of_pack: object) -> None:
        """Begins a forward: drops what a recomputation may have recorded."""
        self.clear()

    def _record(self, index: int, output: int, module: nn.Module, args: Any, out: Any) -> None:
        logits = out[output] if isinstance(out, tuple | list) else out
        self._logits[index].append(logits.reshape(-1, logits.shape[-1]))

    @property
    def recorded(self) -> list[Tensor]:
        """The logits [t, E] of each router here in the last forward; empty if this rank has no router."""
        return [torch.cat(logits) for logits in self._logits]

    def clear(self) -> None:
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
        """The loss of the last forward; None if this rank has no router.

        Args:
            pack: The whole pack, T tokens.
            tokens: Maps the logits [t, E] of this rank's tokens to the logits [T, E] of the pack.
            is_counted: Whether this rank's value counts; else it is 0, with the same gradients.
            chunk: Set if the pack's first sequence is cut into chunks; None if all sequences are whole.

        Returns:
            fp64 scalar, with gradients to the routers; None also for a chunk that is not the last of its sequence.
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
        """A sequence's part of the loss, from the logits [T, E] of one router."""
        loss = self._function((logits,), self.num_experts, self.top_k)
        return loss.double() * (num_labels * scale * self.coefficient / self.num_layers)


def attach_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    """A hidden state that carries a loss: passed on unchanged, and the loss gets the gradient 1 in the backward."""
    one = torch.ones_like(loss)
    return with_gradient(lambda hidden, _: hidden.view_as(hidden), lambda grad: (grad, one), hidden, loss)
