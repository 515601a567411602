"""Tensor parallelism on plain local tensors, following the model's Hugging Face plan.

The styles of the plan become wrappers around the forward of single modules, with differentiable collectives. No parameter
gradient is reduced here: the gradient layout knows whether it is whole, a shard, or part of a sum over tp, and the gradient
return adds it up. The stock styles are not used: they are wrong under gradient accumulation for q/k norms, do not support tp
above the key/value heads, gather full logits, and are 1.1-2.8 times slower on CPU.

Sequence parallelism: between the parts of a layer that tp divides (residual stream, norms and all other token-wise modules),
each rank holds only T/t of the T tokens of a pack. Tokens are gathered at the start of an attention or MLP block and before
the head (`Replica`), and summed and scattered at the end of a row-parallel projection (and after the embedding). That is the
all-reduce of plain tensor parallelism in two halves, for the same bytes (Korthikanti et al., 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2). It works for any family: a block is the module that owns the
projections the plan cuts. T is a multiple of t (`Replica.forward` pads a pack with an isolated sequence). The gradient of
every parameter outside of blocks, and of every bias of a row-parallel projection, is then a part of a sum over the group.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.parallel.collectives import CLOCK, Context, gather, scatter_sum, with_gradient
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.wrapped_model import base_layer

COLWISE, COLWISE_GATHER = "colwise", "colwise_gather_output"
ROWWISE, ROWWISE_SPLIT = "rowwise", "rowwise_split_input"
VOCABULARY_EMBEDDING, VOCABULARY_HEAD = "vocabulary_embedding", "vocabulary_head"
EXPERTS, IDENTITY_EXPERT, LATENT = "experts", "identity_expert", "latent"


def _copy_to_shards(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensor itself; its gradient is summed over the shards."""

    def summed(grad: Tensor) -> Tensor:
        # a clone: autograd may share this tensor with another branch, and reducing in place would corrupt that one
        grad = grad.clone(memory_format=torch.contiguous_format)
        with CLOCK.waiting:
            dist.all_reduce(grad, group=group)
        return grad

    return with_gradient(lambda x: x.view_as(x), summed, x)


class _SumOfShards(torch.autograd.Function):
    """Sums over the shards forward, in place; every shard receives the whole gradient."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        with CLOCK.waiting:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _all_gather_last(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    """Concatenates the last dim in shard order; widths may differ, so every rank sends the widest."""
    widest = max(widths)
    padded = functional.pad(x, (0, widest - x.shape[-1])).contiguous()
    received = [torch.empty_like(padded) for _ in widths]
    with CLOCK.waiting:
        dist.all_gather(received, padded, group=tensor_group.group)
    return torch.cat(
        [received[position][..., :width] for position, width in zip(tensor_group.order, widths, strict=True)], -1
    )


def _slice_of_shard(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    shard = tensor_group.shard
    return x.narrow(-1, sum(widths[:shard]), widths[shard]).contiguous()


def gather_shards(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    """Gathers the last dim ([..., own width]; `widths` in the order of shards) for a computation that all ranks of the group
    repeat."""
    ways = [partial(way, widths=widths, tensor_group=tensor_group) for way in (_all_gather_last, _slice_of_shard)]
    return with_gradient(*ways, x)


def _split_to_shards(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    ways = [partial(way, widths=widths, tensor_group=tensor_group) for way in (_slice_of_shard, _all_gather_last)]
    return with_gradient(*ways, x)


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _SharedInput:
    """Gives column-parallel modules with the same input one copy of it, so that its gradient is reduced once.

    Queries, keys and values (or gate and up) get the same input object one after the other; autograd sums their gradients at
    the shared copy, and one all-reduce serves them all.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._input: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not _has_gradient(x):
            return x
        if self._input is not x:
            self._input, self._copied = x, _copy_to_shards(x, self._group)
        return cast(Tensor, self._copied)

    def clear(self) -> None:
        """Releases the last tensor; called at the end of a forward, so that no activation outlives its micro-batch."""
        self._input = self._copied = None


OnTensor = Callable[[Tensor], Tensor]


def _wrapped(
    *args: Any, forward: Callable[..., Any], enter: OnTensor | None, leave: OnTensor | None, **kwargs: Any
) -> Any:
    def entered(value: object) -> object:
        return enter(value) if enter is not None and isinstance(value, Tensor) else value

    out = forward(*map(entered, args), **{name: entered(value) for name, value in kwargs.items()})
    return out if leave is None else leave(out)


def wrap(
    module: nn.Module,
    enter: OnTensor | None = None,
    leave: OnTensor | None = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """Makes a module apply `enter` to every input tensor, and `leave` to the output of its forward, or of `forward`."""
    module.forward = partial(_wrapped, forward=forward or module.forward, enter=enter, leave=leave)


def plain_product(x: Tensor, *, linear: nn.Linear) -> Tensor:
    """`x W^T` of a linear layer, without its bias; an attachment may have replaced the product."""
    own: OnTensor | None = getattr(linear, "hotspa_product", None)  # of an attachment
    return functional.linear(x, linear.weight) if own is None else own(x)


def _whole_product(y: Tensor, *, linear: nn.Linear, sum_of: OnTensor) -> Tensor:
    y = sum_of(y)
    return y if linear.bias is None else y + linear.bias  # added once, after the sum


def wrap_rowwise(module: nn.Module, sum_of: OnTensor, enter: OnTensor | None = None) -> None:
    """Makes a row-parallel projection add up its products over the shards.

    What a wrapper adds joins the sum of its base, whose forward then omits the bias. `sum_of`: the differentiable
    sum over the group. `enter`: applied to its input.
    """
    linear = cast(nn.Linear, base_layer(module))
    product: Callable[..., Any] = partial(plain_product, linear=linear)
    if linear is not module:
        linear.forward = product
        product = module.forward
    wrap(module, enter, partial(_whole_product, linear=linear, sum_of=sum_of), product)


def _embedding(ids: Tensor, *, forward: OnTensor, first_row: int, num_rows: int, sum_of: OnTensor) -> Tensor:
    local = ids - first_row
    elsewhere = (local < 0) | (local >= num_rows)
    return sum_of(forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))


def wrap_embedding(module: Any, widths: tuple[int, ...], shard: int, sum_of: OnTensor) -> None:
    """Makes an embedding look up the rows of its shard of the vocabulary (`widths`: of each shard), and add up the shards'
    results with the differentiable `sum_of`."""
    first_row, num_rows = sum(widths[:shard]), widths[shard]
    table: Any = base_layer(module)
    padding = table.padding_idx
    # the padding row's gradient is zero; its local index exists on one shard only
    inside = padding is not None and first_row <= padding < first_row + num_rows
    table.padding_idx = padding - first_row if inside else None
    place = {"first_row": first_row, "num_rows": num_rows}
    module.forward = partial(_embedding, forward=module.forward, sum_of=sum_of, **place)


def _latent(out: Tensor, *, rotary_size: int, group: dist.ProcessGroup) -> Tensor:
    """The latent of keys and values and, in the last columns, the rotary key of all heads.

    The latent enters a column-parallel projection, which reduces its gradient; the heads of every rank read the rotary key
    directly, so its gradient is reduced here.
    """
    if not _has_gradient(out):
        return out
    latent, rotary = out.split([out.shape[-1] - rotary_size, rotary_size], dim=-1)
    return torch.cat([latent, _copy_to_shards(rotary, group)], dim=-1)


def _wrap_experts(experts: nn.Module, size: int, enter: OnTensor, leave: OnTensor) -> None:
    """Makes experts whose outputs are summed over the shards also add this rank's share of their bias."""
    base = base_layer(experts)
    if getattr(base, "down_proj_bias", None) is not None:
        experts.forward = partial(_with_share_of_bias, base, experts.forward, size)
    wrap(experts, enter, leave)


def _with_share_of_bias(
    module: nn.Module, forward: Callable[..., Tensor], size: int, *args: Any, **kwargs: Any
) -> Tensor:
    bias = module._parameters.pop("down_proj_bias")
    assert bias is not None
    module.__dict__["down_proj_bias"] = bias / size
    try:
        return forward(*args, **kwargs)
    finally:
        del module.__dict__["down_proj_bias"]
        module.register_parameter("down_proj_bias", bias)


def apply_tensor_parallel(
    modules: Mapping[str, nn.Module],
    # a style of this file by module name; names without a module (of other stages) are skipped
    styles: Mapping[str, str],
    # by name of a linear layer or embedding, the size of every shard along the cut dim
    widths: Mapping[str, tuple[int, ...]],
    tensor_group: TensorGroup,  # the group and this rank's shard
) -> Callable[[], None]:
    """Wraps the forward of every module that has a style; its parameters must be (or become) this rank's shards.
    Returns a function to call after every forward; it drops cached inputs."""
    group, size = tensor_group.group, tensor_group.size
    shared = _SharedInput(group)

    def sum_of(x: Tensor) -> Tensor:
        return _SumOfShards.apply(x, group)

    def copied(x: Tensor) -> Tensor:
        return _copy_to_shards(x, group) if _has_gradient(x) else x

    def sum_of_experts(x: Tensor) -> Tensor:
        # sums a copy: the family's own operations may have saved their output for the backward
        return sum_of(x.clone(memory_format=torch.contiguous_format))

    def latent(name: str) -> OnTensor:
        rotary_size = modules[name.rpartition(".")[0]].qk_rope_head_dim
        return partial(_latent, rotary_size=rotary_size, group=group)

    def placed(move: Callable[..., Tensor], name: str) -> OnTensor:
        return partial(move, widths=widths[name], tensor_group=tensor_group)

    wrappers: dict[str, Callable[[str, nn.Module], None]] = {
        EXPERTS: lambda _, module: _wrap_experts(module, size, copied, sum_of_experts),
        # an expert without weights, whose output is equal on every rank and must appear once in the sum
        IDENTITY_EXPERT: lambda _, module: wrap(module, leave=lambda x: x / size),
        LATENT: lambda name, module: wrap(module, leave=latent(name)),
        COLWISE: lambda _, module: wrap(module, shared),
        VOCABULARY_HEAD: lambda _, module: wrap(module, shared),
        COLWISE_GATHER: lambda name, module: wrap(module, shared, placed(gather_shards, name)),
        ROWWISE: lambda _, module: wrap_rowwise(module, sum_of),
        ROWWISE_SPLIT: lambda name, module: wrap_rowwise(module, sum_of, placed(_split_to_shards, name)),
        VOCABULARY_EMBEDDING: lambda name, m: wrap_embedding(m, widths[name], tensor_group.shard, sum_of),
    }
    for name, style in styles.items():
        if name in modules:
            wrappers[style](name, modules[name])
    return shared.clear


def set_local_heads(attention: nn.Module, num_heads: int, num_key_value_heads: int) -> None:
    """Sets how many heads of an attention module this rank has.

    Families read the numbers from attributes or a config; the module gets its own, so that other layers do not change.
    """
    values = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "num_key_value_groups": num_heads // num_key_value_heads,
    }
    for name, value in values.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    config = getattr(attention, "config", None)
    if config is not None:
        config = copy.copy(config)
        for name in ("num_attention_heads", "num_key_value_heads"):
            if name in vars(config):  # where layers differ, a layer does not read the global value
                setattr(config, name, values[name])
        attention.config = config


SHARDED = frozenset({COLWISE, ROWWISE})  # the styles of projections that a block may have
_LOCAL = frozenset({EXPERTS, LATENT})
"""Styles whose parameter gradients are parts of the sum on each rank, whatever gathers the input."""


def _on_tokens(
    collective: Callable[[Tensor, dist.ProcessGroup], Tensor], group: dist.ProcessGroup
) -> Callable[[Tensor], Tensor]:
    """Applies a collective to a row [1, T, ...], or to the tokens [T, ...] of a mixture of experts."""
    return lambda x: collective(x[0], group)[None] if x.dim() == 3 else collective(x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tokens. `x`: [1, T/t, h] or [T/t, h], this rank's. `group`: the tensor-parallel group, of t ranks.
    Returns [1, T, h] or [T, h], for column-parallel consumers: their gradients are summed over the group."""
    return with_gradient(_on_tokens(gather, group), _on_tokens(scatter_sum, group), x)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(_on_tokens(scatter_sum, group), _on_tokens(gather, group), x)


def same_tokens(x: Tensor, group: dist.ProcessGroup | None, num_tokens: int) -> Tensor:
    """Gathers this rank's tokens [T/t, ...] to [T, ...] without padding, for a computation that all t ranks of the
    tensor-parallel group repeat; `group` is None if this rank has all tokens."""
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
    """The modules that gather their input: owners of projections which tp cuts."""
    return frozenset(name.rpartition(".")[0] for name, style in styles.items() if style in SHARDED)


def sequence_parallel_refusal(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    own: set[str],
    layers: tuple[str, ...],
    experts: set[str],
) -> str | None:
    """Why a model cannot be sequence parallel, or None. `own` are parameters that are cut, or whose gradient is a part
    of a sum on each shard (q/k norms); `layers` are prefixes of layer names; `experts` are fused."""
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
    """Wraps the forwards of blocks, row-parallel projections, cut experts, and the embedding. Arguments as for
    `apply_tensor_parallel`."""
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
        elif style == EXPERTS:  # each rank runs its columns of every expert on all tokens
            _wrap_experts(module, tensor_group.size, enter, leave)
        elif style == VOCABULARY_EMBEDDING:
            wrap_embedding(module, widths[name], tensor_group.shard, leave)
