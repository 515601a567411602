"""What the engine is compared with: the plain Hugging Face model, one unpacked sequence at a time, in one process."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

_WITH_DTYPE = ((Tensor, "softmax"), (Tensor, "sum"), (torch, "softmax"), (torch, "sum"), (torch, "zeros_like"))
_PRODUCTS = ("matmul", "__matmul__")
_CASTS = ("float", "to", "type")


def _cast(real: Any, name: str) -> Any:
    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is torch.float64:
            asked = args[0] if len(args) == 1 else kwargs.get("dtype")
            if name == "float" or asked is torch.float32:
                return self
        return real(self, *args, **kwargs)

    return cast


def _with_dtype(real: Any) -> Any:
    def reduced(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is torch.float32 and args and args[0].dtype is torch.float64:
            kwargs["dtype"] = torch.float64
        return real(*args, **kwargs)

    return reduced


def _product(real: Any) -> Any:
    def product(self: Tensor, other: Tensor) -> Any:
        if self.dtype is not other.dtype:  # `a.float() @ b.float()` of which one is kept in fp64
            self, other = self.double(), other.double()
        return real(self, other)

    return product


@contextmanager
def exact_in_double(dtype: torch.dtype) -> Iterator[None]:
    """In fp64, turns the casts of fp64 tensors to fp32, which stock norms, softmax and loss make, into no-ops; the same on
    both sides of a comparison. Else nothing. Functions are replaced: a `TorchFunctionMode` sees each operation and
    attribute, which takes longer than the operations of tiny models."""
    if dtype != torch.float64 or "to" in vars(Tensor):  # inside of another one the functions are replaced already
        yield
        return
    with ExitStack() as stack:
        for place, name, new in (
            *((Tensor, name, _cast(getattr(Tensor, name), name)) for name in _CASTS),
            *((Tensor, name, _product(getattr(Tensor, name))) for name in _PRODUCTS),
            *((place, name, _with_dtype(getattr(place, name))) for place, name in _WITH_DTYPE),
        ):
            stack.enter_context(patch.object(place, name, new))
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
