"""Models and layers inside wrappers: PEFT's models around a transformers model, its layers around a frozen layer, and its
trained copies in the place of one. Also names of parameters with a parametrization of torch."""

import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from hf_hotspa.seam import hooks

BASE = "base_layer"  # the name of the layer inside a wrapper
_REPLACED = "original_module"  # the name of a layer whose trained copy is used instead
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")


def plain_name(name: str) -> str:
    """`experts.down_proj` for `experts.parametrizations.down_proj.original`; any other name of a parameter unchanged."""
    return _PARAMETRIZED.sub(r"\1\2", name)


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is one of PEFT's wrappers."""
    peft = sys.modules.get("peft")  # an object of a package that was never imported does not exist
    return peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)


def bare_model(model: nn.Module) -> tuple[Any, str]:
    """The model inside PEFT's wrapper, or a chain of modules, or around a base alone, and its name prefix there (`outer_name`);
    any other model unchanged, and ``""``."""
    if isinstance(model, nn.Sequential) or getattr(model, "base_model", None) is model:
        models = (own for hook in hooks("describe") if (own := hook(model, None).in_chain()) is not None)
        return next(models, (model, ""))
    if not is_wrapped(model):
        return model, ""
    bare: nn.Module = model.base_model.model if hasattr(model.base_model, "peft_config") else model.base_model
    return bare, next((f"{name}." for name, module in model.named_modules() if module is bare), "")


def outer_name(prefix: str, name: str) -> str:
    """The name in the user's model of a name in the model with a prefix there; `-model.`: the user's is its module `model`."""
    return name.removeprefix(prefix[1:]) if prefix.startswith("-") else prefix + name


def inner_name(prefix: str, name: str) -> str:
    """The inverse of `outer_name`."""
    return prefix[1:] + name if prefix.startswith("-") else name.removeprefix(prefix)


def called_model(bare: nn.Module) -> Any:
    """The module that a chain calls, if a model stands for it alone; any other model unchanged."""
    return bare.get_submodule(vars(bare).get("called", ""))


def saved_model(model: nn.Module) -> tuple[Any, str]:
    """The model whose `save_pretrained` writes the weights, and its name prefix: of a chain of modules the one that it calls;
    any other model unchanged."""
    bare, prefix = bare_model(model)
    if bare is model or not isinstance(model, nn.Sequential):
        return model, ""
    called = vars(bare).get("called")
    return called_model(bare), prefix if called is None else f"{prefix}{called}."


def place_inside(module: nn.Module) -> str | None:
    """The name, in a wrapper, of the layer that it runs: the wrapped one, or its trained copy. None for another module."""
    children = module._modules
    if children.get(BASE) is not None:
        return BASE
    if children.get("token_adapter") is not None:
        return f"token_adapter.{BASE}"
    if _REPLACED in children and "modules_to_save" in children:
        wrapper: Any = module
        return next((f"modules_to_save.{name}" for name in wrapper.active_adapters), _REPLACED)
    return None


def base_layer(module: nn.Module) -> nn.Module:
    """The layer that one or several nested wrappers run; any other module unchanged."""
    return module if (place := place_inside(module)) is None else base_layer(module.get_submodule(place))


def replaced_modules(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of parameters of layers whose trained copies are used instead: no forward reads them."""
    return tuple(
        f"{name}.{_REPLACED}.".lstrip(".")
        for name, module in model.named_modules()
        if (place_inside(module) or _REPLACED).startswith("modules_to_save.")
    )


def read_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a call of a module reads by itself: its own, or of a wrapper all, except replaced ones."""
    if place_inside(module) is None:
        yield from module.parameters(recurse=False)
    else:
        yield from (p for name, p in module.named_parameters() if not name.startswith(f"{_REPLACED}."))


def plain_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module without wrappers: of a wrapped layer its base's, under the layer's name. Names are without
    parametrizations, but the tensors those that hold the values."""
    layers = {name: base_layer(child) for name, child in module.named_modules() if name}  # parents come first
    bases = {
        name: next(n for n, m in module.get_submodule(name).named_modules() if m is b) for name, b in layers.items()
    }
    for name, parameter in module.named_parameters():
        layer = next((layer for layer, base in bases.items() if base and name.startswith(f"{layer}.")), None)
        if layer is None:
            yield plain_name(name), parameter
        elif name.startswith(inside := f"{layer}.{bases[layer]}."):
            yield plain_name(f"{layer}.{name.removeprefix(inside)}"), parameter


def unwrapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by name without wrappers: a wrapped layer is replaced by its base."""
    modules: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():  # parents come first
        if not name.startswith(inside or ("\0",)):
            base = base_layer(module)
            modules[name] = base
            if base is not module:
                inside = (*inside, f"{name}.")
                modules |= {f"{name}.{inner}": child for inner, child in base.named_modules() if inner}
    return modules
