"""Checks losses before the first step: a loss that would be silently replaced by another raises an error by name.

Two questions, answered with a few random numbers:

* Is a custom loss a sum over its parts, in value and gradient (`check_own_loss`)? Otherwise it would depend on how the
  mini-batch is packed and cut.
* Is the loss that a model's forward returns the one that will be trained (`check_model_loss`)? Replicas use only the
  logits of that forward, and these must match a new model with the same weights.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hf_hotspa.errors import HotspaError, ModelError, UnsupportedError
from hf_hotspa.model.model_kind import attention_dropouts
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.packed_layer import products, stored_tensors
from hf_hotspa.model.replica import build_skeleton
from hf_hotspa.model.specs import ModelDescription, vocabulary_of_logits
from hf_hotspa.parallel.loss import IGNORE, SequenceLoss, TokenLoss, TokenSlice, WholeSequence
from hf_hotspa.parallel.wrapped_model import bare_model, unwrapped_modules

_TOLERANCE = 1e-4
"""Relative, between a loss's parts and total: fp32 arithmetic differs by less, errors by more."""
_OF_MODEL = 2e-5
"""Relative, between a model's loss and the one from its logits. Terms that people add start at about 1e-4."""
_TOKENS, _LENGTHS = 16, (9, 6)
_CUTS = ((8,), (1,), (5, 11))


def check_loss(
    model: nn.Module, description: ModelDescription, options: EngineOptions, rank: int, device: torch.device
) -> None:
    """Raises for a loss that is not a sum, and on rank 0 for one that would be silently replaced by another. `device`:
    where the loss computes: a custom loss may hold tensors. Raises `UnsupportedError`: naming the loss."""
    loss = options.loss
    if description.readout is not None:
        _check_readout(model, description, options, rank)
        return
    if isinstance(loss, SequenceLoss) and description.auxiliary_layers:
        raise UnsupportedError(
            f"the loss {loss.name} beside output_router_logits=True",
            why="where a loss is computed from logits, the stock Trainer adds no balance loss of the routers",
            fix="set config.output_router_logits = False, or use a token_loss, which it is added to",
        )
    if loss is not None:
        check_own_loss(loss, vocabulary_of_logits(description), device)
    if rank == 0 and not options.label_smoothing and (loss is None or loss.of_model):
        check_model_loss(model, description, loss if isinstance(loss, SequenceLoss) else None)


def _check_readout(model: nn.Module, description: ModelDescription, options: EngineOptions, rank: int) -> None:
    if options.loss is not None or options.label_smoothing:
        raise UnsupportedError(
            f"a custom loss, or label smoothing, of a {description.model_class.__name__}",
            why="these are of a vocabulary's log-probabilities, and it has none",
            fix="give compute_loss_func, or override compute_loss",
        )
    assert description.readout is not None
    if rank:
        return
    if any(p.is_meta for p in model.parameters()):
        _check_class(model, "it has no weights to look at", None)
    else:
        description.readout.check(model)


# -- custom losses ----------------------------------------------------------------------------------------------------


def check_own_loss(loss: TokenLoss | SequenceLoss, vocab_size: int, device: torch.device) -> None:
    """Calls a loss with random numbers, in all and in parts. Raises `UnsupportedError`: it fails, gives no scalar with
    a gradient, varies between calls, or is not a sum of its parts."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if isinstance(loss, TokenLoss):
            _check_token_loss(loss, vocab_size, generator, device)
        else:
            _check_sequence_loss(loss, vocab_size, generator, device)


def _check_token_loss(loss: TokenLoss, vocab_size: int, generator: torch.Generator, device: torch.device) -> None:
    log_probs = (-6 * torch.rand(_TOKENS, dtype=torch.float64, generator=generator) - 0.01).to(device)
    whole = TokenSlice(
        log_probs.requires_grad_(),
        torch.randint(vocab_size, (_TOKENS,), generator=generator).to(device),
        torch.tensor([3] * 7 + [0] * (_TOKENS - 7), device=device),
        torch.tensor([*range(1, 8), *range(1, _TOKENS - 6)], device=device),
        {name: _column(loss, name, _TOKENS, generator).to(device) for name in loss.columns},
    )

    def value_of(part: slice) -> tuple[Tensor, Tensor]:
        value = _called(loss, lambda: loss.function(whole[part]))
        return value.detach(), torch.autograd.grad(value, log_probs)[0]

    value, gradient = value_of(slice(None))
    _same(loss, (value, gradient), value_of(slice(None)), "it is not the same when it is called again", _SAME)
    for cuts in _CUTS:
        parts = [value_of(slice(a, b)) for a, b in zip((0, *cuts), (*cuts, _TOKENS), strict=True)]
        _same(
            loss,
            (value, gradient),
            (
                sum((v for v, _ in parts), torch.zeros_like(value)),
                sum((g for _, g in parts), torch.zeros_like(gradient)),
            ),
            f"its value on {_TOKENS} tokens is not the sum of its values on slices of them",
            "return the sum over the tokens, such as (weight * log_probs).sum(): it is divided by the label tokens of the "
            "mini-batch afterwards. A loss that needs whole sequences can be a compute_loss_func",
        )


_SAME = "leave out what is random or changes from call to call (put your own models into eval mode)"


def _check_sequence_loss(loss: SequenceLoss, vocab_size: int, generator: torch.Generator, device: torch.device) -> None:
    sequences = [_random_sequence(loss, length, vocab_size, generator, device) for length in _LENGTHS]
    num_items = torch.tensor(sum(int((s.labels != IGNORE).sum()) for s in sequences), device=device)

    def value_of(sequence: WholeSequence, count: Tensor = num_items) -> tuple[Tensor, Tensor]:
        value = _called(loss, lambda: loss.function(sequence, count))
        return value.detach(), torch.autograd.grad(value, sequence.logits)[0]

    alone = [value_of(sequence) for sequence in sequences]
    must_equal = partial(_same, loss, alone[0])
    must_equal(value_of(sequences[0]), "it is not the same when it is called again", _SAME)
    twice = value_of(sequences[0], 2 * num_items)
    must_equal(
        (2 * twice[0], 2 * twice[1]),
        "it is not divided by num_items_in_batch: with twice the items it is not half as large",
        "return the sum over all label tokens divided by num_items_in_batch, the label tokens of the whole mini-batch",
    )
    first = sequences[0].labels.clone()
    first[:, 0] = sequences[0].input_ids[:, 0]
    must_equal(
        value_of(replace(sequences[0], labels=first)),
        "the label of the first token counts in it",
        "shift logits and labels: logits[..., :-1, :] belong to labels[..., 1:]",
    )
    both = _batch(sequences)
    value, gradient = value_of(both)
    gradients = torch.zeros_like(gradient)
    for index, (sequence, (_, of_sequence)) in enumerate(zip(sequences, alone, strict=True)):
        gradients[index, : sequence.logits.shape[1]] = of_sequence[0]
    _same(
        loss,
        (value, gradient),
        (alone[0][0] + alone[1][0], gradients),
        "its value on two sequences is not the sum of its values on each",
        "sum over sequences and divide by num_items_in_batch; terms that compare the sequences of a batch cannot be exact here",
    )


def _random_sequence(
    loss: SequenceLoss, length: int, vocab_size: int, generator: torch.Generator, device: torch.device
) -> WholeSequence:
    logits = torch.randn(1, length, vocab_size, dtype=torch.float64, generator=generator).to(device)
    ids = torch.randint(vocab_size, (1, length), generator=generator).to(device)
    labels = ids.clone()
    labels[:, :2] = IGNORE
    columns = {}
    for name in loss.columns:
        value = _column(loss, name, length, generator).to(device)
        columns[name] = value[:1] if _is_per_row(loss, name) else value[None]
    return WholeSequence(logits.requires_grad_(), ids, labels, torch.ones_like(ids), 0, columns)


def _batch(sequences: list[WholeSequence]) -> WholeSequence:
    padded = partial(pad_sequence, batch_first=True)

    def all_of(name: str, value: float) -> Tensor:
        return padded([getattr(sequence, name)[0] for sequence in sequences], padding_value=value)

    columns = {}
    for name, first in sequences[0].columns.items():
        parts = [sequence.columns[name] for sequence in sequences]
        columns[name] = torch.cat(parts) if first.dim() == 1 else padded([part[0] for part in parts])
    logits = all_of("logits", 0.5).detach().requires_grad_()
    others = all_of("input_ids", 0), all_of("labels", IGNORE), all_of("attention_mask", 0)
    return WholeSequence(logits, *others, 0, columns)


def _is_per_row(loss: TokenLoss | SequenceLoss, name: str) -> bool:
    return loss.example is not None and np.ndim(loss.example[name]) == 0


def _column(loss: TokenLoss | SequenceLoss, name: str, length: int, generator: torch.Generator) -> Tensor:
    if loss.example is None:
        return torch.rand(length, dtype=torch.float64, generator=generator) + 0.5
    return torch.from_numpy(np.resize(np.asarray(loss.example[name]), length).copy())


def _called(loss: TokenLoss | SequenceLoss, call: Callable[[], Any]) -> Tensor:
    """Checks that the loss is a finite scalar with a gradient."""
    try:
        with torch.enable_grad():
            value = call()
    except HotspaError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise _unsupported(
            loss,
            f"it fails on a small example: {type(error).__name__}: {error}",
            f"{last.filename}:{last.lineno}",
            "it is called only with what the page on losses lists; name the columns it reads in loss_columns",
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise _unsupported(loss, f"it gives {shape}", None, "return a scalar tensor")
    if not value.requires_grad or not bool(torch.isfinite(value)):
        what = "has no gradient" if not value.requires_grad else f"is {value.item()}"
        raise _unsupported(
            loss, f"its value on a small example {what}", None, "compute it from the log-probabilities or logits"
        )
    return value.reshape(())


def _same(
    loss: TokenLoss | SequenceLoss, actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str, fix: str
) -> None:
    for a, b in zip(actual, expected, strict=True):
        if not bool((a - b).norm() <= _TOLERANCE * torch.maximum(a.norm(), b.norm())):
            raise _unsupported(loss, what, None, fix)


def _unsupported(loss: TokenLoss | SequenceLoss, what: str, where: str | None, fix: str) -> UnsupportedError:
    return UnsupportedError(
        f"the loss {loss.name} cannot be honoured: {what}",
        where=where,
        why="a mini-batch is packed and spread over ranks, so its loss must be a sum over tokens or sequences",
        fix=fix,
    )


# -- the loss of a model ----------------------------------------------------------------------------------------------


def check_model_loss(model: nn.Module, description: ModelDescription, loss: SequenceLoss | None = None) -> None:
    """Compares a model's loss for a few tokens with the one computed from its logits.

    A model without weights cannot be called: its class and its loss must come from transformers. `model`: called once,
    without gradient; unchanged. `loss`: trained on its logits; by default the cross entropy, and the balance loss of
    routers. Raises `UnsupportedError`: they differ.
    """
    if any(p.is_meta for p in model.parameters()):
        _check_class(model, "it has no weights to look at", loss)
        return
    ids = torch.arange(3, 11)[None].clamp(max=description.shape.vocab_size - 1)
    ids = ids.to(next(model.parameters()).device)
    labels = ids.clone()
    labels[:, 3] = IGNORE
    try:
        out = _one_forward(model, ids, labels, loss is not None)
    except Exception as error:
        _check_class(model, f"it fails on {ids.shape[1]} tokens: {type(error).__name__}: {error}", loss)
        return
    logits, own = out.get("logits"), out.get("loss")
    if own is None or logits is None:
        raise _replaced(model, "returns no loss and logits for rows with labels")
    _check_logits(model, description, ids, labels, logits)
    expected = _expected(logits, ids, labels, loss)
    if loss is None and description.auxiliary_layers and out.get("aux_loss") is not None:
        expected = expected + float(bare_model(model)[0].router_aux_loss_coef) * out["aux_loss"].double()
    own, expected = float(own), float(expected)
    tolerance = _OF_MODEL if out["loss"].dtype in (torch.float32, torch.float64) else 1e-2
    same = abs(own - expected) <= tolerance * abs(expected) or (math.isnan(own) and math.isnan(expected))
    if not same:  # training finds and names non-finite weights
        raise _replaced(model, f"is {own:.6g} for a row of {ids.shape[1]} tokens where its logits give {expected:.6g}")


def _check_logits(model: nn.Module, description: ModelDescription, ids: Tensor, labels: Tensor, logits: Tensor) -> None:
    """Raises `ModelError` if the logits differ from a fresh model's: one that the class builds from its config, as
    replicas are, with the same weights."""
    bare = bare_model(model)[0]
    if attention_dropouts(bare.config) != attention_dropouts(description.config):
        return  # turned off for this run
    fresh = build_skeleton(description)
    products(unwrapped_modules(fresh), description.packed)
    tensors = chain(stored_tensors(bare, remove_duplicate=False), bare.named_buffers(remove_duplicate=False))
    state = {name: tensor.detach() for name, tensor in tensors}
    try:
        fresh.set_attn_implementation(bare.config._attn_implementation)
        rebuilt = _one_forward(fresh, ids, labels, False, state)["logits"]
    except Exception:  # it cannot be called like this; modules and attributes are already compared
        return
    # logits of a packed base are often fp32, and its products in 16 bits
    dtypes = {logits.dtype, *(layer.compute_dtype or logits.dtype for layer in description.packed.values())}
    apart, wide = float((rebuilt - logits).abs().max()), dtypes <= {torch.float32, torch.float64}
    if apart > (_TOLERANCE if wide else 5e-2) * float(logits.abs().max()):
        raise ModelError(
            f"{type(bare).__name__} computes other logits than a model that its class builds from its config with the same "
            f"weights: {apart:.2g} apart for {ids.shape[1]} tokens",
            why="the model is rebuilt from its class and config for every strategy, so what was changed on the object is lost",
            fix="put the change into the config, or into the __init__ of a subclass of the model, before training",
        )


def _expected(logits: Tensor, ids: Tensor, labels: Tensor, loss: SequenceLoss | None) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if loss is None:
        targets = labels[0, 1:].to(logits.device)
        return functional.cross_entropy(logits[0, :-1], targets, ignore_index=IGNORE)
    sequence = WholeSequence(logits, ids, labels, torch.ones_like(ids), 0, {})
    return loss.function(sequence, (labels[:, 1:] != IGNORE).sum())


@torch.no_grad()
def _one_forward(
    model: nn.Module, ids: Tensor, labels: Tensor, counted: bool, state: dict[str, Tensor] | None = None
) -> Mapping[str, Any]:
    """One call in training mode; restores modes and random state. `state`: replaces the model's parameters and buffers."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [ids.device] if ids.device.type == "cuda" else []
    model.train()
    try:
        with torch.random.fork_rng(devices=devices):
            items = {"num_items_in_batch": (labels[:, 1:] != IGNORE).sum()} if counted else {}
            given = {"input_ids": ids, "labels": labels, "use_cache": False, "return_dict": True, **items}
            outputs: Mapping[str, Any] = model(**given) if state is None else functional_call(model, state, (), given)
        return outputs
    finally:
        for module, mode in modes:
            module.training = mode


def _check_class(model: nn.Module, why: str, loss: SequenceLoss | None) -> None:
    """Raises if the model's forward, or without `loss` its loss function, does not come from transformers."""
    bare = bare_model(model)[0]
    forward = inspect.unwrap(type(bare).forward)
    own = [
        f"{function.__module__}.{function.__qualname__}"
        for function in (forward, *((bare.loss_function,) if loss is None else ()))
        if not str(getattr(function, "__module__", "")).startswith("transformers.")
    ]
    if own:
        raise _replaced(model, f"comes from {' and '.join(own)} and cannot be compared with the cross entropy: {why}")


def _replaced(model: nn.Module, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the loss that {type(bare_model(model)[0]).__name__} returns cannot be honoured: it {what}",
        why="only the logits of its forward are taken, and the token mean of their cross entropy is trained",
        fix="leave the loss of the model as it is, and give yours as token_loss or compute_loss_func",
    )
