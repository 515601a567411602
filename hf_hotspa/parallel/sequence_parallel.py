"""Sequence parallelism: between the parts of a layer that tp divides, each rank holds only its share of the tokens.

The residual stream, the norms and everything else that works token by token runs on T/t of the T tokens of a pack. The
tokens are gathered where an attention or MLP block begins and before the head (`Replica`), and summed and scattered where a
row-parallel projection ends (and after the embedding): the all-reduce of plain tensor parallelism in two halves, for
the same bytes (Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2). Nothing here needs to know a family: a block is the module that owns the projections the plan cuts.

Promise: T is a multiple of t (`Replica.forward` pads a pack with an isolated sequence). Every parameter outside of
blocks, and every bias of a row-parallel projection, has a gradient that is a part of a sum over the tp group; the
gradient layout adds it up.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import (
    COLWISE,
    EXPERTS,
    LATENT,
    ROWWISE,
    VOCABULARY_EMBEDDING,
    product_without_bias,
    wrap_embedding,
)
from hf_hotspa.parallel.waiting import CLOCK

SHARDED = frozenset({COLWISE, ROWWISE})
"""The styles of projections that a block may have."""
_LOCAL = frozenset({EXPERTS, LATENT})
"""Styles whose parameters have a gradient that is a part of the sum on each rank, whatever gathers its input."""

# torch before 2.13 has these collectives under their older names only
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T/t, ...] or [T/t, ...] on every rank to those of T tokens, in the order of the group's ranks."""
    rows = _rows(x)
    whole = x.new_empty(rows.shape[0] * dist.get_world_size(group), *rows.shape[1:])
    with CLOCK.waiting:
        all_gather(whole, rows, group=group)
    return whole[None] if x.dim() == 3 else whole


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T, ...] or [T, ...] on every rank to this rank's T/t tokens of their sum."""
    rows = _rows(x)
    mine = x.new_empty(rows.shape[0] // dist.get_world_size(group), *rows.shape[1:])
    with CLOCK.waiting:
        _reduce_scatter(mine, rows, group=group)
    return mine[None] if x.dim() == 3 else mine


def _rows(x: Tensor) -> Tensor:
    """The tokens of a row, or of what a mixture of experts has made of it, along the first dim."""
    return (x[0] if x.dim() == 3 else x).contiguous()


class _GatherTokens(torch.autograd.Function):
    """All tokens forward; backward the sum of all ranks' gradients, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _scatter_sum(grad, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    """This rank's tokens of the sum forward; backward the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather(grad, ctx.group), None


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tokens.

    Args:
        x: [1, T/t, h] or [T/t, h], this rank's.
        group: The tensor-parallel group, of t ranks.

    Returns:
        [1, T, h] or [T, h], for column-parallel consumers: their gradients are summed over the group.
    """
    return _GatherTokens.apply(x, group)


class _SameTokens(_GatherTokens):
    """All tokens forward; backward this rank's of a gradient that every rank has alike."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def same_tokens(x: Tensor, group: dist.ProcessGroup | None, num_tokens: int) -> Tensor:
    """[T/t, ...] of this rank's tokens as [T, ...] without padding, for something that every rank computes alike.

    Args:
        group: The tensor-parallel group, of t ranks; None where this rank has all tokens.
        num_tokens: T but for the padding.
    """
    same: Tensor = x if group is None else _SameTokens.apply(x, group)
    return same[:num_tokens]


def _block(*args: Any, forward: Callable[..., Any], group: dist.ProcessGroup, **kwargs: Any) -> Any:
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = gather_tokens(kwargs["hidden_states"], group)
    else:
        args = (gather_tokens(args[0], group), *args[1:])
    return forward(*args, **kwargs)


def _experts(*args: Any, forward: Callable[..., Tensor], group: dist.ProcessGroup, **kwargs: Any) -> Tensor:
    """Each rank runs its columns of every expert on the tokens of all: what goes in (tokens, experts, routing weights)."""

    def gathered(value: Any) -> Any:
        return gather_tokens(value, group) if isinstance(value, Tensor) else value

    out = forward(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
    mine: Tensor = _ScatterSum.apply(out, group)
    return mine


def _rowwise(x: Tensor, *, product: Callable[[Tensor], Tensor], linear: nn.Linear, group: dist.ProcessGroup) -> Tensor:
    y = _ScatterSum.apply(product(x), group)
    return y if linear.bias is None else y + linear.bias


def blocks_of(styles: Mapping[str, str]) -> frozenset[str]:
    """The modules that gather their input: those that own projections which tp cuts."""
    return frozenset(name.rpartition(".")[0] for name, style in styles.items() if style in SHARDED)


def unsupported_reason(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    own: set[str],
    layers: tuple[str, ...],
    experts: set[str],
) -> str | None:
    """Why a model cannot be sequence parallel, or None.

    Args:
        modules: Its modules by name.
        own: Parameters that are cut, or whose gradient is a part of a sum on each shard (q/k norms).
        layers: What the names of layers begin with.
        experts: The modules of fused experts.
    """
    blocks = blocks_of(styles)
    mixtures = tuple(f"{name.rpartition('.')[0]}." for name in experts)
    latents = {name.rpartition(".")[0] for name, style in styles.items() if style == LATENT}
    for name, module in modules.items():
        if not name.startswith(layers) or not any(True for _ in module.parameters(recurse=False)):
            continue
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        style = styles.get(name)
        if style is not None and style not in SHARDED and style not in _LOCAL:
            return f"{name} is not cut into shards that work alone ({style}), so it cannot be sequence parallel"
        is_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if block is None and is_matrix and not name.startswith(mixtures):
            return f"{name} works on whole rows and is not cut by tp, so it cannot be sequence parallel"
        parameters = {f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}
        if block is not None and style not in SHARDED and block not in latents and not parameters <= own:
            return f"{name} inside of {block} is not cut by tp, so its gradient would not be exact under +sp"
    nested = [inner for inner in {*blocks, *experts} for outer in blocks if inner.startswith(f"{outer}.")]
    if nested:
        return f"{nested[0]} is inside of another module that gathers its input under +sp"
    return None


def apply_sequence_parallel(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    widths: Mapping[str, tuple[int, ...]],
    tensor_group: TensorGroup,
) -> None:
    """Wraps the forward of every block, row-parallel projection, module of cut experts, and embedding.

    Args:
        modules: The replica's modules by name; those of other stages are missing.
        styles: Tensor-parallel style by module name.
        widths: By module name, the size of every shard along the dim that is cut.
        tensor_group: The group and this rank's shard.
    """
    group = tensor_group.group
    for name in sorted(blocks_of(styles)):
        if name in modules:
            modules[name].forward = partial(_block, forward=modules[name].forward, group=group)
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:
            continue
        if style == ROWWISE:
            product, linear = product_without_bias(module)
            module.forward = partial(_rowwise, product=product, linear=linear, group=group)
        elif style == EXPERTS:
            module.forward = partial(_experts, forward=module.forward, group=group)
        elif style == VOCABULARY_EMBEDDING:
            wrap_embedding(module, widths[name], tensor_group, _ScatterSum.apply)
