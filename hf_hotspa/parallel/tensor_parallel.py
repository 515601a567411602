"""Tensor parallelism on plain local tensors, following the model's Hugging Face plan.

The styles of the plan become wrappers around the forward of single modules, with collectives that autograd knows.
Nothing here reduces a gradient of a parameter: what a parameter's gradient means over tp (whole, shard, or part of a
sum) is known to the gradient layout, and the gradient return adds it up. Why not the stock styles: they are wrong under
gradient accumulation for q/k norms, refuse tp above the key/value heads, gather full logits, and are 1.1-2.8 times
slower on CPU.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.parallel.adapters import base_layer
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.waiting import CLOCK

COLWISE, COLWISE_GATHER = "colwise", "colwise_gather_output"
ROWWISE, ROWWISE_SPLIT = "rowwise", "rowwise_split_input"
VOCABULARY_EMBEDDING, VOCABULARY_HEAD = "vocabulary_embedding", "vocabulary_head"
EXPERTS, IDENTITY_EXPERT, LATENT = "experts", "identity_expert", "latent"


class _CopyToShards(torch.autograd.Function):
    """Identity forward; the gradient is the sum of what the shards send back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # a clone: autograd may share this tensor with another branch, and reducing in place would corrupt that one
        grad = grad.clone(memory_format=torch.contiguous_format)
        with CLOCK.waiting:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOfShards(torch.autograd.Function):
    """Sum over the shards forward, in place; every shard receives the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        with CLOCK.waiting:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _all_gather_last(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    """Concatenates the last dim over the shards, in shard order; widths may differ, so the wire carries the widest."""
    widest = max(widths)
    padded = functional.pad(x, (0, widest - x.shape[-1])).contiguous()
    received = [torch.empty_like(padded) for _ in widths]
    with CLOCK.waiting:
        dist.all_gather(received, padded, group=tensor_group.group)
    return torch.cat(
        [received[position][..., :width] for position, width in zip(tensor_group.order, widths, strict=True)], -1
    )


class _GatherShards(torch.autograd.Function):
    """The whole last dim forward; this shard's slice of the gradient backward (its consumers are replicated)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
        ctx.start, ctx.width = sum(widths[: tensor_group.shard]), x.shape[-1]
        return _all_gather_last(x, widths, tensor_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.narrow(-1, ctx.start, ctx.width).contiguous(), None, None


def gather_shards(x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
    """The whole last dim of what the ranks of a group have shards of, for something that all of them do alike.

    Args:
        x: [..., own width].
        widths: Of the last dim on each shard, in the order of shards.
    """
    whole: Tensor = _GatherShards.apply(x, widths, tensor_group)
    return whole


class _SplitToShards(torch.autograd.Function):
    """This shard's slice of a replicated last dim forward; the gathered gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], tensor_group: TensorGroup) -> Tensor:
        ctx.widths, ctx.tensor_group = widths, tensor_group
        return x.narrow(-1, sum(widths[: tensor_group.shard]), widths[tensor_group.shard]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_gather_last(grad, ctx.widths, ctx.tensor_group), None, None


class _SharedInput:
    """Gives column-parallel modules that read the same tensor one copy of it, so that its gradient is reduced once.

    Queries, keys and values (or gate and up) get the very same input object one after the other; autograd sums their
    gradients at the shared copy and one all-reduce serves them all instead of one each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._input: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self._input is not x:
            self._input, self._copied = x, _CopyToShards.apply(x, self._group)
        return cast(Tensor, self._copied)

    def clear(self) -> None:
        """Lets go of the last tensor; called when a forward ends, so that no activation outlives its micro-batch."""
        self._input = self._copied = None


def _colwise(x: Tensor, *, forward: Callable[[Tensor], Tensor], shared: _SharedInput) -> Tensor:
    return forward(shared(x))


def _colwise_gather(
    x: Tensor,
    *,
    forward: Callable[[Tensor], Tensor],
    shared: _SharedInput,
    widths: tuple[int, ...],
    tensor_group: TensorGroup,
) -> Tensor:
    return _GatherShards.apply(forward(shared(x)), widths, tensor_group)


def _product(x: Tensor, *, linear: nn.Linear) -> Tensor:
    flexible: Callable[[Tensor], Tensor] | None = getattr(linear, "hotspa_product", None)  # of flexible_linear
    return functional.linear(x, linear.weight) if flexible is None else flexible(x)


def product_without_bias(module: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
    """What a row-parallel projection sums over the shards, and the layer whose bias is added after it.

    The adapter of a LoRA layer joins the sum of its base, whose forward loses its bias for that.
    """
    linear = cast(nn.Linear, base_layer(module))
    product = partial(_product, linear=linear)
    if linear is module:
        return product, linear
    linear.forward = product
    return module.forward, linear


def _rowwise(
    x: Tensor,
    *,
    product: Callable[[Tensor], Tensor],
    linear: nn.Linear,
    tensor_group: TensorGroup,
    split_widths: tuple[int, ...] | None = None,
) -> Tensor:
    if split_widths is not None:
        x = _SplitToShards.apply(x, split_widths, tensor_group)
    # the bias is added once, after the sum
    y = _SumOfShards.apply(product(x), tensor_group.group)
    return y if linear.bias is None else y + linear.bias


def _embedding(
    ids: Tensor,
    *,
    forward: Callable[[Tensor], Tensor],
    first_row: int,
    num_rows: int,
    sum_of: Callable[[Tensor, dist.ProcessGroup], Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    local = ids - first_row
    elsewhere = (local < 0) | (local >= num_rows)
    rows = forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
    return sum_of(rows, group)


def wrap_embedding(
    module: Any,
    widths: tuple[int, ...],
    tensor_group: TensorGroup,
    sum_of: Callable[[Tensor, dist.ProcessGroup], Tensor] = _SumOfShards.apply,
) -> None:
    """Makes an embedding look up the rows of its shard of the vocabulary, and add up what the shards find.

    Args:
        widths: Rows of each shard.
        tensor_group: The group and this rank's shard.
        sum_of: The sum over the group, for autograd.
    """
    first_row, num_rows = sum(widths[: tensor_group.shard]), widths[tensor_group.shard]
    padding = module.padding_idx
    # the padding row's gradient is zero; its local index exists on one shard only
    inside = padding is not None and first_row <= padding < first_row + num_rows
    module.padding_idx = padding - first_row if inside else None
    place: dict[str, Any] = {"first_row": first_row, "num_rows": num_rows, "group": tensor_group.group}
    module.forward = partial(_embedding, forward=module.forward, sum_of=sum_of, **place)


def _experts(*args: Any, forward: Callable[..., Tensor], group: dist.ProcessGroup, **kwargs: Any) -> Tensor:
    """Each rank runs its columns of every expert; what goes in (tokens, routing weights) is copied, the output summed."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            return _CopyToShards.apply(value, group)
        return value

    out = forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
    # a copy is summed: the family's own operations may have saved their output for the backward
    return _SumOfShards.apply(out.clone(memory_format=torch.contiguous_format), group)


def _identity_expert(x: Tensor, *, forward: Callable[[Tensor], Tensor], num_shards: int) -> Tensor:
    """An expert without weights gives the same on every rank; the sum over the ranks has to be its output once."""
    return forward(x) / num_shards


def _latent(x: Tensor, *, forward: Callable[[Tensor], Tensor], rotary_size: int, group: dist.ProcessGroup) -> Tensor:
    """The projection to the latent of keys and values and, in its last columns, to the rotary key of all heads.

    The latent goes through a column-parallel projection, which reduces its gradient; the rotary key is read by the heads
    of every rank directly, so its gradient is reduced here.
    """
    out = forward(x)
    if not (out.requires_grad and torch.is_grad_enabled()):
        return out
    latent, rotary = out.split([out.shape[-1] - rotary_size, rotary_size], dim=-1)
    return torch.cat([latent, _CopyToShards.apply(rotary, group)], dim=-1)


def apply_tensor_parallel(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    widths: Mapping[str, tuple[int, ...]],
    tensor_group: TensorGroup,
) -> Callable[[], None]:
    """Wraps the forward of every module that has a style; its parameters must be (or become) this rank's shards.

    Args:
        modules: The replica's modules by name.
        styles: A style of this file by module name; a name without a module (another stage's) is passed over.
        widths: By name of a linear layer or embedding, the size of every shard along the dim that is cut.
        tensor_group: The group and this rank's shard.

    Returns:
        A function to call after every forward, which drops cached inputs.
    """
    shared = _SharedInput(tensor_group.group)
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:
            continue
        if style == EXPERTS:
            module.forward = partial(_experts, forward=module.forward, group=tensor_group.group)
            continue
        if style == IDENTITY_EXPERT:
            num_shards = tensor_group.size
            module.forward = partial(_identity_expert, forward=module.forward, num_shards=num_shards)
            continue
        if style == LATENT:
            rotary_size = modules[name.rpartition(".")[0]].qk_rope_head_dim
            module.forward = partial(_latent, forward=module.forward, rotary_size=rotary_size, group=tensor_group.group)
            continue
        wrap: dict[str, Any] = {"forward": module.forward, "shared": shared}
        if style in (COLWISE, VOCABULARY_HEAD):
            module.forward = partial(_colwise, **wrap)
        elif style == COLWISE_GATHER:
            module.forward = partial(_colwise_gather, **wrap, widths=widths[name], tensor_group=tensor_group)
        elif style in (ROWWISE, ROWWISE_SPLIT):
            split = widths[name] if style == ROWWISE_SPLIT else None
            product, linear = product_without_bias(module)
            module.forward = partial(
                _rowwise, product=product, linear=linear, tensor_group=tensor_group, split_widths=split
            )
        elif style == VOCABULARY_EMBEDDING:
            wrap_embedding(module, widths[name], tensor_group)
        else:
            raise AssertionError(f"no wrapper for style {style!r} of {name}")
    return shared.clear


def set_local_heads(attention: nn.Module, num_heads: int, num_key_value_heads: int) -> None:
    """Tells an attention module how many heads this rank has.

    Families read the numbers from attributes or from their config; the module gets a config of its own, so that other
    layers are not changed.
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
            if name in vars(config):  # where layers differ, it is not the global value that a layer reads
                setattr(config, name, values[name])
        attention.config = config
