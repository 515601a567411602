"""Expert parallelism (`ep`): each of N neighbouring ranks of a stage holds some whole experts, and tokens travel to them.

Every rank routes its own tokens with the family's own router, sorts the (token, expert) pairs by expert, and exchanges the
counts (the one point of a layer where the host waits). An all-to-all sends the rows to the ranks that hold their experts,
where the family's own module computes them with weight 1. A second all-to-all brings them back, where routing weights are
applied and a token's experts are added up (Lepikhin et al., 2021, "GShard", section 3.2; Fedus et al., 2022, "Switch
Transformers", section 2.2). Without a capacity (`ExpertCapacity`) no token is dropped.

If the ranks of tp hold the same tokens, each sends its share. A rank that gets no row stays in the graph: others wait for
the backward of its all-to-all.

Promises: on every rank, a module's output and its gradients to tokens and routing weights equal the family's own module with
all experts. The gradient of an expert is a part of the sum on each rank that holds it. `ModelShape.ep_unsupported_reason` says
why a model cannot promise that.

The capacity of experts: how many tokens of a pack an expert may compute, and what happens to the others.

A pack has T tokens, and each asks for k of E experts. An expert takes at most `ceil(factor * T * k / E)` of them (Lepikhin et
al., 2021, "GShard", section 2.2; Fedus et al., 2022, "Switch Transformers", section 2.2), the first ones in the order of the
pack. A later token gets routing weight 0 for it; its other experts compute it, and the residual connection passes it on.

Promise: what is dropped depends on the pack alone, so it is the same under every strategy that runs whole packs on one
rank, or on the ranks of tp and ep.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.errors import ModelError
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.model.tensor_plan import arguments_of
from hf_hotspa.parallel.collectives import CLOCK, gather_rows, with_gradient
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.parallel.wrapped_model import base_layer


class ExpertCapacity(Attachment):
    """Limits how many tokens of a pack each expert computes.

    Args:
        factor: The limit, as a multiple of an expert's share if all had equally many tokens.
        counts: Whether this rank counts drops: one rank of each stage of a replica does.
        names: The modules of experts to limit, all of whose experts are here; `ExpertParallel` limits others.

    Attributes:
        num_dropped: (Token, expert) pairs dropped in the forwards of this phase.
        is_counting: Whether drops are counted now.
    """

    def __init__(self, factor: float, counts: bool = True, names: Iterable[str] = ()) -> None:
        self.factor, self.num_dropped, self.is_counting, self._counts = factor, 0, False, counts
        self._names = names

    def divided(self, replica: Replica) -> None:
        modules = dict(replica.model.named_modules())  # without the modules of other stages
        for module in (base_layer(modules[name]) for name in self._names if name in modules):
            module.forward = partial(self._run, module, module.forward)

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

    def _run(self, module: nn.Module, forward: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        hidden, index, weights = arguments_of(module, *args, **kwargs)
        return forward(hidden, index, weights * self.kept(index, int(module.num_experts)))


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


class ExpertParallel(Attachment):
    """The experts of a replica on this rank. `mesh`: of a strategy with ep. `capacity`: the most tokens of a pack that
    an expert computes; None for no limit.

    Attributes:
        is_counting: Whether rows are counted now.
        is_idle: Whether this rank's own tokens are padding, which no rank counts.
    """

    def __init__(self, mesh: StrategyMesh, capacity: ExpertCapacity | None = None) -> None:
        assert mesh.experts is not None
        self._group, self._capacity = mesh.experts, capacity
        # the ranks that hold the same tokens
        self._shared = mesh.tensor.group if mesh.tensor is not None and not mesh.strategy.sp else None
        self.num_rows = 0  # rows that this rank's experts computed in the forwards of this phase, without idle packs
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

    def _run(self, module: nn.Module, forward: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
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
