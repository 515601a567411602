"""Pieces of the tests of the switched model: batches of each rank, losses that any model computes, and what they must give.

A loss here is a function of a model and a batch, which does not know whether the model is a plain one or a switched one. The
reference is what DDP makes of it: the gradient of the mean over ranks of each rank's loss.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import CalledModel, SwitchedModel
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows

LossOf = Callable[[Any, dict[str, Tensor]], Tensor]
Part = Callable[[int, int], object]
"""A test's function of a rank and a number of ranks."""


def in_turn(rank: int, world_size: int, parts: Sequence[Part]) -> list[object]:
    return [part(rank, world_size) for part in parts]


def run_parts(world_size: int, *parts: Part) -> None:
    """Runs the parts of tests one after the other in one world; what they return must be equal on all ranks."""
    first, *others = run_ranks(world_size, in_turn, parts)
    assert all(other == first for other in others), (first, others)


def rows_of(rank: int, model: Any, num_rows: int = 5, longest: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a rank; other ones on other ranks."""
    return random_rows(num_rows, model.config.get_text_config().vocab_size, longest, seed=1000 * seed + rank)


def batch_of(rows: Sequence[dict[str, Any]], left: bool = False) -> dict[str, Tensor]:
    """Rows padded to one length, as a collator pads them; of no rows, tensors [0, 1]."""
    width = max((len(row["input_ids"]) for row in rows), default=1)

    def padded(values: list[int], pad: int) -> list[int]:
        fill = [pad] * (width - len(values))
        return fill + values if left else values + fill

    columns = {"input_ids": 3, "labels": -100, "attention_mask": 0}
    batch = {
        name: torch.tensor(
            [padded(row.get(name, [1] * len(row["input_ids"])), pad) for row in rows], dtype=torch.int64
        ).reshape(len(rows), width)
        for name, pad in columns.items()
    }
    if left:  # the first token has nothing before it
        first = batch["attention_mask"].argmax(1)
        batch["labels"][torch.arange(len(rows)), first] = -100
    return batch


def switched(
    model: nn.Module, buckets: str, *, fields: Sequence[str] = ("log_probs", "entropy"), **options: Any
) -> SwitchedModel:
    """A switched model in training mode, whose fused head gives these fields."""
    made = SwitchedModel(model, parse_buckets(buckets), EngineOptions(**options)).train()
    made._head_fields = tuple(fields)
    return made


def scores(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[B, L - 1] log-probabilities and entropies; 0 where there is no label."""
    if isinstance(model, CalledModel):
        out = model(**batch, fused_lm_head=True)
        return out.log_probs, out.entropy
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    log_p = logits.log_softmax(-1)
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    log_probs = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return log_probs * mask, -(log_p.exp() * log_p).sum(-1) * mask


def loss_of_model(model: Any, batch: dict[str, Tensor], **more: Any) -> Tensor:
    """The model's own loss."""
    given = {} if isinstance(model, SwitchedModel) else {"use_cache": False}
    loss: Tensor = model(**batch, **given, **more).loss
    return loss


def reference(model: nn.Module, losses: Sequence[tuple[LossOf, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The gradients of the mean over ranks of what each rank's loss says of its batch."""
    model.zero_grad(set_to_none=True)
    with exact_in_double(next(model.parameters()).dtype):
        for loss, batch in losses:
            value = loss(model, batch) / len(losses)
            if value.requires_grad:
                value.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return gradients


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient; of one that should be zero (biases of keys), in units of all."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    least = 1e-6 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = [(found[name] - g).norm() / torch.maximum(g.norm(), least) for name, g in expected.items()]
    return float(torch.stack(errors).max())


def step(model: SwitchedModel, loss: LossOf, batch: dict[str, Tensor], double: bool = True) -> Tensor:
    """One rank's part of a step, up to its flush; the loss."""
    with exact_in_double(torch.float64) if double else nullcontext():
        value = loss(model, batch)
        if value.requires_grad:
            value.backward()
        model.flush()
    return value.detach()


def logits_of(model: Any, batch: dict[str, Tensor], with_loss: bool = False) -> Any:
    """[B, L, V]; with the loss before them, where that is wanted.

    Lazy ones are fetched at once: within an operation the patch for fp64 would be off.
    """
    if isinstance(model, SwitchedModel):
        out = model(**batch)
        logits = out.logits.whole()
    else:
        out = model(**batch, use_cache=False)
        logits = out.logits
    return (out.loss, logits) if with_loss else logits
