"""Checks the user's model: what replicas would silently lose raises an error by name.

Replicas are built from the model's class and config; any other change of the object (hooks, resized embeddings,
replaced layers) must be found here.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.model.model_kind import TextForward, attention_dropouts, of_text
from hf_hotspa.model.packed_layer import stored_tensors
from hf_hotspa.model.replica import build_skeleton
from hf_hotspa.model.specs import ModelDescription, dtype_name
from hf_hotspa.parallel.wrapped_model import bare_model, outer_name

_OF_A_CALL = ("use_cache", "output_router_logits", "problem_type", "_commit_hash", "transformers_version")
"""Fields that a call of a forward may override or set, or that say where a config is from."""

_OF_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
"""Fields that trainers copy from the tokenizer, on built objects."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: nn.Module, description: ModelDescription, weights: Path | None = None) -> None:
    """Compares the model with what its class builds from its config. `weights`: the folder to read its weights from;
    None if the model has them. Raises `UnsupportedError`: it has hooks, returns more than logits, has no weights, or
    has weights although they are to be read from a folder. Raises `ModelError`: it was changed after it was built."""
    check_hooks(model)
    _check_outputs(bare_model(model)[0].config)
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta and weights is None:
        raise UnsupportedError(
            f"the parameters {meta[:3]} are on the meta device",
            fix="load the model's weights before training, or name the folder that has them (hotspa_model_path)",
        )
    if weights is not None and not meta:
        raise UnsupportedError(
            f"the model has weights, and others are to be read from {str(weights)!r}",
            fix="pass only one of them: open_model returns a model without weights",
        )
    meta = [name for name, b in model.named_buffers() if b.is_meta]
    if meta:
        raise UnsupportedError(f"the buffers {meta[:3]} are on the meta device", fix="compute them, as open_model does")
    fresh = build_skeleton(description)
    packed = {spec.name for spec in description.vector.specs if spec.packed}  # compared below
    expected = {
        outer_name(description.prefix, name): tuple(p.shape)
        for name, p in fresh.named_parameters(remove_duplicate=False)
    }
    expected = {name: shape for name, shape in expected.items() if name not in packed}
    named = model.named_parameters(remove_duplicate=False)
    bare, is_of_text = bare_model(model)[0], of_text(bare_model(model)[0])
    shapes = {
        name: tuple(p.shape) for name, p in named if name not in packed and is_of_text(description.local_name(name))
    }
    if shapes != expected:
        names = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        first = names[0]
        raise ModelError(
            f"parameter {first!r} is {shapes.get(first, 'missing')} in the model and {expected.get(first, 'missing')} in a "
            f"{description.model_class.__name__} built from its config ({len(names)} differ)",
            fix="put every change into the config (vocab_size after resizing embeddings, ...) and rebuild the model",
        )
    _check_scalings(fresh, description)
    facts, expected_facts = module_facts(bare, is_of_text), module_facts(fresh, of_text(fresh))
    if attention_dropouts(bare.config) != attention_dropouts(description.config):  # turned off for this run
        facts, expected_facts = ({k: v for k, v in of.items() if "drop" not in k[1]} for of in (facts, expected_facts))
    if changes := changed_facts(facts, expected_facts, fresh):
        raise ModelError(
            f"{changes[0]} as its config makes it ({len(changes)} differ)",
            why="the model is rebuilt from its class and config for every strategy, and the change would be lost",
            fix="put it into the config, or into the __init__ of a subclass of the model, before training",
        )


Facts = dict[tuple[str, str], Any]
"""What decides a model's computation beside weights, buffers and config: values by module and attribute."""


def module_facts(model: PreTrainedModel, is_of_text: Callable[[str], bool] | None = None) -> Facts:
    """Returns the class of each module, and its attributes that are numbers, strings, functions, plain tensors, or
    tuples of these, except any that forwards do not read. `is_of_text`: selects the modules by name; all when None."""
    facts: Facts = {}
    called: str = vars(model).get("called", "")  # whose forward may be ours
    for name, module in model.named_modules():
        if is_of_text is not None and not is_of_text(name):
            continue
        cls: Any = type(module).__base__ if is_parametrized(module) else type(module)
        facts[name, _CLASS] = cls
        for key, value in vars(module).items():
            replaced = name != called and _is_method(cls, key)
            if not replaced and _is_passed_over(key):
                continue
            if isinstance(value, TextForward):  # of a replica, instead of the class's own
                continue
            if replaced:
                facts[name, key] = value
            elif (plain := _plain(value)) is not _OTHER:
                facts[name, key] = plain
    return facts


# called for every attribute in every step
@cache
def _is_method(cls: type, key: str) -> bool:
    return key != "extra_repr" and inspect.isfunction(getattr(cls, key, None))


@cache
def _is_passed_over(key: str) -> bool:
    return key.startswith("_") or key in _OF_NO_FORWARD or hasattr(PreTrainedModel, key)


def changed_facts(facts: Facts, expected: Facts, like: PreTrainedModel) -> list[str]:
    """Returns the differences from the expected facts (of `like`), as texts with module, attribute and both values.
    Ignores attributes that neither the expected facts nor the modules' classes have: no forward reads them."""
    names, modules = {name for name, _ in facts}, dict(like.named_modules())
    classes = {name: cls for (name, key), cls in expected.items() if key == _CLASS}
    texts = [f"module {name!r} is missing, and a {cls.__name__}" for name, cls in classes.items() if name not in names]
    for (name, key), value in facts.items():
        place = f"module {name or 'model'!r}"
        if name not in classes:
            texts += [f"{place} is a {value.__name__}, and not there"] if key == _CLASS else []
            continue
        wanted = expected.get((name, key), _OTHER)
        if wanted is _OTHER:
            wanted = _plain(getattr(modules[name], key, _OTHER))
        if key == _CLASS and value is not wanted:
            texts.append(f"{place} is a {value.__name__}, and a {wanted.__name__}")
        elif key != _CLASS and wanted != value and not (wanted is _OTHER and not hasattr(modules[name], key)):
            texts.append(f"{place} has {key}={_text(value)}, and {_text(wanted)}")
    gone = [(name, key) for name, key in expected.keys() - facts.keys() if name in names]
    return texts + [
        f"module {name or 'model'!r} has another kind of {key}, and {_text(wanted)}"
        for name, key in sorted(gone)
        for wanted in [expected[name, key]]
        if callable(wanted) or isinstance(wanted, bool | int | float | str)
    ]


_CLASS = "class"
_OTHER = object()
_OF_NO_FORWARD = (
    "training", "gradient_checkpointing", "max_seq_len_cached", "output_router_logits", "merged_adapters", "name_or_path",
    "vocab_size", "num_embeddings", "loss_type", "config", "extra_repr", "rope_deltas",
)  # fmt: skip
"""Attributes that change in use, that a call may override, or that follow from the weights. (`rope_deltas`: where the tokens
that follow a prompt with images stand, kept by every forward of the object for generation.)"""
_MOST_NUMBERS = 4096
_SIMPLE = frozenset((bool, int, str, type(None)))


def _plain(value: object) -> Any:
    """A value to compare and to show; `_OTHER` for other kinds of objects."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.tolist()) if not value.is_meta and value.numel() <= _MOST_NUMBERS else _OTHER
    if inspect.isroutine(value) and not inspect.ismethod(value):
        return value
    if isinstance(value, partial):
        return _plain((value.func, value.args, tuple(value.keywords.items())))
    if isinstance(value, list | tuple):
        parts = tuple(map(_plain, value))
        return _OTHER if any(part is _OTHER for part in parts) else parts
    if isinstance(value, float) and value != value:
        return "nan"
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


def _text(value: object) -> str:
    return "something else" if value is _OTHER else f"{getattr(value, '__qualname__', None) or repr(value)[:_SHOWN]}"


_SHOWN = 60


def check_same_build(model: nn.Module, description: ModelDescription, buffers: Mapping[str, Tensor]) -> None:
    """Checks that a described model's replicas compute, with this model's weights, what this model computes. `buffers`:
    the described model's, by name in its own class. Raises `ModelError`: naming what differs."""
    bare, prefix = bare_model(model)
    expected = {
        name: (spec.numel,) if spec.packed else spec.shape
        for spec in description.vector.specs
        for name in (spec.name, *spec.tied_names)
    }
    is_of_text = of_text(bare)  # the frozen rest of a multimodal model runs in the object itself
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in stored_tensors(model, remove_duplicate=False)
        if name in expected or is_of_text(name.removeprefix(prefix))
    }
    mine, others = (deciding_values(config) for config in (description.config, bare.config))
    own = dict(bare.named_buffers())
    differ = [name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)]
    differ += [f"config.{name}" for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)]
    differ += [
        n for n in own.keys() | buffers.keys() if n not in own or n not in buffers or not _same(own[n], buffers[n])
    ]
    differ += ["class"] if type(bare) is not description.model_class else []
    if differ or prefix != description.prefix:
        raise ModelError(
            f"the second model is not built like the first: {sorted(differ)[:3] or 'its adapters'} differ",
            why="it runs on the first model's replicas, with separate weights",
            fix="make a separate SwitchedModel for it: SwitchedModel(reference, buckets)",
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


def deciding_values(config: object) -> dict[str, Any]:
    """Returns the fields of a config that decide what a model computes, JSON-ready if their values are."""
    values = {}
    for name, value in vars(config).items():
        if name not in (*_OF_A_COPY, *_OF_A_CALL, *_OF_GENERATION):
            values[name] = deciding_values(value) if isinstance(value, PreTrainedConfig) else value
    return values


def check_hooks(model: nn.Module) -> None:
    """Rejects hooks on modules and parameters, which replicas do not have. Raises `UnsupportedError`: naming the module
    or parameter."""
    for name, module in model.named_modules():
        for kind in _HOOKS:
            if any(not _changes_nothing(hook) for hook in (getattr(module, kind, None) or {}).values()):
                raise UnsupportedError(
                    f"module {name or 'model'!r} has {kind.strip('_').replace('_', ' ')}",
                    why="the model is rebuilt for every strategy and hooks would be lost",
                    fix="remove the hooks before training",
                )
        if "forward" in vars(module):
            raise UnsupportedError(
                f"the forward of module {name or 'model'!r} was replaced on the object",
                why="the model is rebuilt for every strategy and the replacement would be lost",
                fix="subclass the model instead",
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"parameter {name!r} has a gradient hook",
                why="the gradients are in the master store, and parameters of the model never get any",
                fix="remove the hook; trainer.engine.full_gradients() gives the gradients of a step, on every rank",
            )


def _check_outputs(config: PreTrainedConfig) -> None:
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config.get_text_config(), name, False) or getattr(config, name, False):
            raise UnsupportedError(
                f"the model's config has {name}=True",
                why="layers are spread over stages and ranks, and a call returns the logits alone",
                fix=f"set model.config.{name} = False",
            )


def _check_scalings(fresh: nn.Module, description: ModelDescription) -> None:
    if (added := description.added) is None:
        return
    for name, own, scaling in ((name, *each) for name, factors in added.scalings.items() for each in factors.items()):
        expected = float(fresh.get_submodule(name).scaling[own])
        if scaling != expected:
            raise ModelError(
                f"the LoRA layer {name!r} scales by {scaling}, and by {expected} as its config makes it",
                why="the model is rebuilt for every strategy and the change would be lost",
                fix="set r and lora_alpha (or rank_pattern and alpha_pattern) in the LoraConfig",
            )


_OF_LIBRARIES = ("transformers.utils.output_capturing", "bitsandbytes.nn.parametrize")
"""Modules whose hooks change no result: they record outputs, and keep what a parametrization computed during a forward."""


def _changes_nothing(hook: object) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__module__", None) in _OF_LIBRARIES


_OF_A_COPY = ("_name_or_path", "architectures", "dtype", "torch_dtype")
"""Fields of a config that decide nothing: ranks may have separate copies, and saving, on the main process alone, fills
in the others. Weight dtypes are compared with the parameters."""


def model_facts(model: nn.Module) -> dict[str, str]:
    """Returns what must be equal on all ranks beside parameters and layouts: config values, buffers."""
    model = bare_model(model)[0]
    config = model.config.to_dict()
    facts = {
        f"{key} of the model's config": json.dumps(value, sort_keys=True, default=str)
        for key, value in config.items()
        if key not in _OF_A_COPY
    }
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = (
            f"{dtype_name(buffer.dtype)} {list(buffer.shape)} with the sum of bits {bit_sum(buffer)}"
        )
    return facts


def weights_digest(model: nn.Module) -> str:
    """Digests all parameters' bits and places, to find ranks that built their model from different seeds, and changed
    weights. Zeros on meta."""
    sums = [(name, _placed_bits(tensor)) for name, tensor in stored_tensors(model)]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def _placed_bits(tensor: Tensor) -> tuple[int, ...]:
    """Sums the bits of rows and of columns, each times its number: swapped values change the sums."""
    if tensor.is_meta or not tensor.numel():
        return (0,)
    integers = (
        tensor.contiguous().view(INTEGERS[tensor.element_size()]).reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    )
    sums = [integers.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return tuple(int((s * torch.arange(1, len(s) + 1, device=s.device)).sum()) for s in sums)


def frozen_digest(model: nn.Module, trained: Collection[str] | None = None) -> str:
    """SHA-256 over names, shapes, dtypes and bit sums of the frozen parameters: distinguishes base models. `trained`: the
    names of the others; None: those that require gradients.

    Names are as in `stored_tensors`. Bits are summed as integers, as in `model_check.weights_digest`.
    """
    digest = hashlib.sha256()
    if trained is None:
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name, tensor in stored_tensors(model, without=trained):
        facts = name, tuple(tensor.shape), str(tensor.dtype), bit_sum(tensor)
        digest.update(repr(facts).encode())
    return digest.hexdigest()


INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""The integer type for a number of bytes."""


def bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bits as integers of its element size, modulo 2^64; 0 on the meta device."""
    if tensor.is_meta or not tensor.numel():
        return 0
    return int(tensor.contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
