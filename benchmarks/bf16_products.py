"""Products of bf16 matrices on processors without instructions for them: computed in fp32 and rounded, for all sides.

Without such instructions (oneDNN needs AVX512 on x86) torch multiplies bf16 matrices in loops that nobody would train
with: 8 to 25 times slower than in fp32. `install` replaces them in this process by the products of the same numbers in
fp32, rounded to bf16 once, which is what the instructions compute, too. Blocks keep the fp32 copies small, so that they do
not count as a side's memory.
"""

import warnings
from typing import Any

import torch

ROWS, DEPTH = 512, 1024
"""Of a block that is held in fp32: rows of the left matrix, and of the right one."""
_SMALL = 1 << 18  # elements of a query, of all heads, that are held in fp32 at once
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_installed: list[Any] = []


def has_instructions() -> bool:
    """Whether torch multiplies bf16 matrices with instructions of this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def install(everywhere: bool = False) -> bool:
    """Replaces the products of this process, once; True if they are replaced.

    Args:
        everywhere: Also where the processor has instructions for them.
    """
    if has_instructions() and not everywhere:
        return False
    if not _installed:
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        library = torch.library.Library("aten", "IMPL")
        for name, replacement in _REPLACED.items():
            original = torch.library.get_kernel(name, "CPU")
            library.impl(name, _by_dtype(original, replacement), "CPU", with_keyset=True)
            _KERNELS[name] = original
        _installed.append(library)
    return True


def _by_dtype(original: Any, replacement: Any) -> Any:
    def run(keys: Any, *args: Any, **named: Any) -> Any:
        if args[0].dtype is torch.bfloat16:
            return replacement(keys, *args, **named)
        return original.call_boxed(keys, *args, **named)

    return run


# -- matrices ---------------------------------------------------------------------------------------------------------


def _mm(_: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right, None, 0.0, 1.0)


def _addmm(
    _: Any, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float = 1, alpha: float = 1
) -> Any:
    return _product(left, right, bias, beta, alpha)


def _bmm(_: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.stack([_product(one, other, None, 0.0, 1.0) for one, other in zip(left, right, strict=True)])


def _product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    """`alpha * left @ right + beta * bias`, summed in fp32."""
    (rows, depth), columns = left.shape, right.shape[1]
    result = left.new_empty(rows, columns)
    bias = None if bias is None or not beta else bias.expand(rows, columns)
    for top in range(0, rows, ROWS):
        high = slice(top, min(top + ROWS, rows))
        total = torch.zeros(high.stop - top, columns) if bias is None else bias[high].float().mul_(beta)
        for front in range(0, depth, DEPTH):
            deep = slice(front, front + DEPTH)
            torch.addmm(total, left[high, deep].float(), right[deep].float(), alpha=alpha, out=total)
        result[high] = total
    return result


# -- attention --------------------------------------------------------------------------------------------------------


def _parts(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> list[tuple[slice, slice, slice]]:
    """Heads and rows of a query that are held in fp32 at once, and heads of keys and values; rows apart only where a mask
    would be large, too."""
    heads, rows = query.shape[1], query.shape[2]
    if query.numel() <= _SMALL:
        return [(slice(0, heads), slice(0, rows), slice(0, key.shape[1]))]
    step, group = rows if mask is None else ROWS, heads // key.shape[1]
    return [
        (slice(head * group, (head + 1) * group), slice(top, min(top + step, rows)), slice(head, head + 1))
        for head in range(key.shape[1])
        for top in range(0, rows, step)
    ]


def _part_of(mask: torch.Tensor | None, heads: slice, rows: slice) -> torch.Tensor | None:
    if mask is None:
        return None
    part = mask if mask.shape[1] == 1 else mask[:, heads]  # one for all heads stays one
    return part[:, :, rows].float()


def _attention(
    keys: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    batch, heads, rows, _ = query.shape
    result = torch.empty_like(query)
    sums = torch.empty(batch, rows, heads).transpose(1, 2)
    for some, at, kv in _parts(query, key, attn_mask):
        result[:, some, at], sums[:, some, at] = _KERNELS[_ATTENTION].call_boxed(
            keys, query[:, some, at].float(), key[:, kv].float(), value[:, kv].float(), dropout_p, is_causal,
            attn_mask=_part_of(attn_mask, some, at), scale=scale,
        )  # fmt: skip
    return result, sums


def _attention_backward(
    keys: Any,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    found = tuple(each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value))
    of_key = of_value = None
    for some, at, kv in _parts(query, key, attn_mask):
        of_query, more_key, more_value = _KERNELS[_ATTENTION + "_backward"].call_boxed(
            keys, grad[:, some, at].float(), query[:, some, at].float(), key[:, kv].float(), value[:, kv].float(),
            out[:, some, at].float(), sums[:, some, at], dropout_p, is_causal,
            attn_mask=_part_of(attn_mask, some, at), scale=scale,
        )  # fmt: skip
        found[0][:, some, at] = of_query
        first = not at.start
        of_key = more_key if first else of_key + more_key
        of_value = more_value if first else of_value + more_value
        found[1][:, kv], found[2][:, kv] = of_key, of_value
    return found


_KERNELS: dict[str, Any] = {}
_REPLACED = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    _ATTENTION: _attention,
    _ATTENTION + "_backward": _attention_backward,
}
