"""What the engine is compared with: the plain Hugging Face model, one unpacked sequence at a time, in one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_WITH_DTYPE = (functional.softmax, torch.softmax, torch.Tensor.softmax, torch.sum, torch.Tensor.sum, torch.zeros_like)
_PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__)
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_CASTS = (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type)
_LOOKED_AT = frozenset((*_CASTS, *_WITH_DTYPE, *_PRODUCTS, *_BACKWARDS))


class _KeepDouble(TorchFunctionMode):
    """Turns the casts of fp64 tensors to fp32, which stock norms, softmax and loss make, into no-ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKED_AT:  # nearly all: every operation and attribute of a tensor comes here
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in _CASTS and args[1:] == (torch.float32,):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                if func is torch.Tensor.to:
                    return args[0]
                if func in _WITH_DTYPE:
                    kwargs = {**kwargs, "dtype": torch.float64}
        if func in _PRODUCTS and len({t.dtype for t in args[:2]}) == 2:
            args = tuple(t.double() for t in args[:2])  # `a.float() @ b.float()` of which one is kept in fp64
        if func in _BACKWARDS:
            return self._backward(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _backward(tensors: Any, gradient: Any = None, *rest: Any, grad_tensors: Any = None, **kwargs: Any) -> None:
        """Layers may be recomputed in a backward, and a mode is off while it handles a call: the engine is called here."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = gradient if gradient is not None else grad_tensors
        gradients = [given] if given is None or isinstance(given, Tensor) else list(given)
        ones = [torch.ones_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)]
        with _KeepDouble():
            _engine_run_backward(
                tuple(tensors), tuple(ones), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


@contextmanager
def exact_in_double(dtype: torch.dtype) -> Iterator[None]:
    """In fp64, keeps stock models from casting down; the same patch on both sides of a comparison. Else nothing."""
    if dtype != torch.float64:
        yield
        return
    with _KeepDouble():
        yield


def random_rows(
    num_rows: int, vocab_size: int, longest: int, seed: int = 0, masked: bool = True
) -> list[dict[str, Any]]:
    """Rows of long-tailed lengths up to `longest`; some of them, when `masked`, with labels on a part only."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for index in range(num_rows):
        length = integer(longest // 2, longest + 1) if index % 5 == 4 else integer(1, max(longest // 4, 3))
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        labels = ids.clone()
        if masked and index % 3 == 0:
            labels[: length // 2] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def reference_step(
    model: PreTrainedModel, rows: Sequence[dict[str, Any]], smoothing: float = 0.0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model: `sum(CE) / N` over all rows, each row alone; labels may be smoothed."""
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    model.zero_grad(set_to_none=True)
    total = 0.0
    with exact_in_double(model.dtype):
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            logits = model(input_ids=ids, use_cache=False).logits[0]
            options: dict[str, Any] = {"reduction": "sum", "ignore_index": -100, "label_smoothing": smoothing}
            loss = functional.cross_entropy(logits[:-1], labels[1:], **options) / num_labels
            loss.backward()
            total += loss.item()
    gradients = {
        name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return total, gradients


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected (absolute where that is nearly zero)."""
    difference = torch.linalg.vector_norm(found.double().to(expected.device) - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-9))
