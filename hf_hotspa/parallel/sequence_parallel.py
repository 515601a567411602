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

import torch.distributed as dist
from torch import Tensor, nn

from hf_hotspa.parallel.collectives import gather, scatter_sum, with_gradient
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import (
    COLWISE,
    EXPERTS,
    LATENT,
    ROWWISE,
    VOCABULARY_EMBEDDING,
    wrap,
    wrap_embedding,
    wrap_rowwise,
)

SHARDED = frozenset({COLWISE, ROWWISE})
"""The styles of projections that a block may have."""
_LOCAL = frozenset({EXPERTS, LATENT})
"""Styles whose parameters have a gradient that is a part of the sum on each rank, whatever gathers its input."""


def _of_row(
    collective: Callable[[Tensor, dist.ProcessGroup], Tensor], group: dist.ProcessGroup
) -> Callable[[Tensor], Tensor]:
    """A collective for the tokens of a row [1, T, ...], or of what a mixture of experts has made of it [T, ...]."""
    return lambda x: collective(x[0], group)[None] if x.dim() == 3 else collective(x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tokens.

    Args:
        x: [1, T/t, h] or [T/t, h], this rank's.
        group: The tensor-parallel group, of t ranks.

    Returns:
        [1, T, h] or [T, h], for column-parallel consumers: their gradients are summed over the group.
    """
    return with_gradient(_of_row(gather, group), _of_row(scatter_sum, group), x)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum; the inverse of `gather_tokens`."""
    return with_gradient(_of_row(scatter_sum, group), _of_row(gather, group), x)


def same_tokens(x: Tensor, group: dist.ProcessGroup | None, num_tokens: int) -> Tensor:
    """[T/t, ...] of this rank's tokens as [T, ...] without padding, for something that every rank computes alike.

    Args:
        group: The tensor-parallel group, of t ranks; None where this rank has all tokens.
        num_tokens: T but for the padding.
    """
    if group is not None:
        size, index = dist.get_world_size(group), dist.get_rank(group)
        x = with_gradient(partial(gather, group=group), lambda grad: grad.chunk(size)[index], x)
    return x[:num_tokens]


def _block(*args: Any, forward: Callable[..., Any], enter: Callable[[Tensor], Tensor], **kwargs: Any) -> Any:
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = enter(kwargs["hidden_states"])
    else:
        args = (enter(args[0]), *args[1:])
    return forward(*args, **kwargs)


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

    Arguments as for `apply_tensor_parallel`.
    """
    enter = partial(gather_tokens, group=tensor_group.group)
    leave = partial(_scatter_sum, group=tensor_group.group)
    for name in sorted(blocks_of(styles)):
        if name in modules:
            modules[name].forward = partial(_block, forward=modules[name].forward, enter=enter)
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:
            continue
        if style == ROWWISE:
            wrap_rowwise(module, leave)
        elif style == EXPERTS:  # each rank runs its columns of every expert on the tokens of all
            wrap(module, enter, leave)
        elif style == VOCABULARY_EMBEDDING:
            wrap_embedding(module, widths[name], tensor_group.shard, leave)
