"""Runs a family's own forward on pass-throughs to learn whether it can be a later stage, and the order of its units.

A later stage gets the previous stage's hidden state as `inputs_embeds`, to which the base model must not apply
operations on embeddings (a multiplier): `take_hidden_state` turns off the known ones, and `stage_unsupported_reason`
checks that pass-throughs return their input: a family with an unknown operation raises an error instead of training
wrong.

Units (`+z2`, `+z3`) begin where a forward pass reaches the embedding, the layers and the head;
`order_unsupported_reason` checks that a family reaches them one after the other.

Weights are not read: a model on the meta device gets the same answers.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.model_kind import keep_text
from hf_hotspa.model.tensor_plan import stage_plan
from hf_hotspa.parallel.attention import ATTENTION, PackedSequences
from hf_hotspa.parallel.wrapped_model import base_layer, inner_name, place_inside, read_parameters
from hf_hotspa.plan.units import Units, name_of_unit
from hf_hotspa.strategy import Strategy

# -- later stages ------------------------------------------------------------------------------------------------------


_MULTIPLIERS = ("embedding_multiplier", "embedding_scale")
_SWITCHES = ("mup_enabled",)
_SHARED_STATE = ("num_kv_shared_layers",)


class PassThrough(nn.Module):
    """Replaces a layer or norm of another stage: returns its hidden state. Base models read the kind of a layer from it, which
    is a text."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer or self).items() if isinstance(value, str)})

    def forward(self, hidden: Tensor | None = None, *args: object, **kwargs: Tensor) -> Tensor:
        return kwargs["inputs_embeds"] if hidden is None else hidden


def take_hidden_state(base: PreTrainedModel, embeddings: tuple[str, ...]) -> None:
    """Makes a base model take `inputs_embeds` as the hidden state between layers; `embeddings` are the names of its
    modules before the layers."""
    dropouts = [name for name, child in base.named_children() if isinstance(child, nn.Dropout)]  # of the embeddings
    for name in dropouts:
        setattr(base, name, PassThrough())
    for name in embeddings:
        is_table = isinstance(base_layer(getattr(base, name)), nn.Embedding)
        setattr(base, name, None if is_table else PassThrough())
    for name in _MULTIPLIERS:
        if isinstance(getattr(base, name, None), int | float):
            setattr(base, name, 1.0)
    config = copy.deepcopy(base.config)  # shared with other modules
    for name in _SWITCHES:
        if hasattr(config, name):
            setattr(config, name, False)
    base.config = config


def stage_unsupported_reason(
    base: PreTrainedModel, layers: tuple[str, ...], embeddings: tuple[str, ...], norms: tuple[str, ...]
) -> str | None:
    """Returns why a stage cannot be the model's own class with other stages' layers passed through, or None. `base`:
    the base model; not changed, and its weights are not read. `layers`: names of its lists of layers. `embeddings`:
    names of its modules before the layers. `norms`: names of its modules after them."""
    text = base.config.get_text_config()
    family = text.model_type
    planned = stage_plan(text)
    if not planned:
        return None  # reported elsewhere: the family has no plan
    if len(layers) > 1:
        return f"the layers of {family} are {len(layers)} stacks that run in cycles, which stages cannot share"
    if unknown := [name for name in (*embeddings, *norms) if name not in planned]:
        return f"the modules {unknown} of {family} are in no stage of the family's pipeline plan"
    behind = planned[planned.index(layers[0]) :] if layers[0] in planned else []
    if late := [name for name in behind if isinstance(getattr(base, name, None), nn.Dropout)]:
        return f"the dropout {late[0]} of {family} comes after its layers, and would be treated as dropout of the embeddings"
    for name in _SHARED_STATE:
        if getattr(text, name, 0):
            return f"{family} has {name}={getattr(text, name)}: layers would share states across stages"
    try:
        hidden, out, called = _run_as_later_stage(base, layers[0], embeddings, norms)
    except Exception as error:  # any error of the family's code
        return f"{family} cannot run as a later pipeline stage: {type(error).__name__}: {error}"
    if out is not hidden and not (out.shape == hidden.shape and torch.equal(out, hidden)):
        return f"{family} changes the input of every pipeline stage as if it were an embedding"
    if sorted(called) != sorted(norms):
        return f"{family} uses {norms[0]} in another place than after its layers"
    return None


def _run_as_later_stage(
    base: PreTrainedModel, layers: str, embeddings: tuple[str, ...], norms: tuple[str, ...]
) -> tuple[Tensor, Tensor, list[str]]:
    """The input and the output of a base model of pass-throughs, and the norms that it called."""
    called: list[str] = []
    probe = copy.copy(base)
    probe._modules = dict(base._modules)
    take_hidden_state(probe, embeddings)
    probe.config._attn_implementation = ATTENTION
    for name in norms:
        setattr(probe, name, PassThrough())
        getattr(probe, name).register_forward_pre_hook(lambda *_, name=name: called.append(name))
    setattr(probe, layers, nn.ModuleList(map(PassThrough, getattr(base, layers))))
    _fill_buffers(probe)
    buffer = next((b for b in probe.buffers() if b.is_floating_point()), None)
    device = buffer.device if buffer is not None else torch.device("cpu")
    with torch.no_grad(), device:
        hidden = torch.ones(1, 2, base.config.get_text_config().hidden_size, dtype=base.dtype).cumsum(1)
        out = probe(
            inputs_embeds=hidden,
            position_ids=torch.arange(2)[None],
            attention_mask=None,
            use_cache=False,
            hotspa_pack=PackedSequences((2,), torch.tensor([0, 2], dtype=torch.int32)),
        ).last_hidden_state
    return hidden, out, called


def _fill_buffers(probe: PreTrainedModel) -> None:
    """Fills the meta buffers of a nearly empty base model on the CPU, as its class initializes them."""
    with torch.no_grad(), torch.device("cpu"):  # the caller may be on meta
        for name, buffer in probe._buffers.items():
            if buffer is not None and buffer.is_meta:
                probe._buffers = {**probe._buffers, name: torch.zeros_like(buffer, device="cpu")}
        for name, child in probe._modules.items():
            if child is not None and any(tensor.is_meta for tensor in child.buffers()):
                filled = copy.deepcopy(child).to_empty(device="cpu")
                for tensor in filled.buffers():
                    tensor.zero_()
                for module in filled.modules():
                    probe._init_weights(module)
                probe._modules[name] = filled


# -- the order of units ------------------------------------------------------------------------------------------------


def modules_of_units(
    model: nn.Module, layers: Sequence[nn.Module], unit_of: Callable[[nn.Parameter], int | None]
) -> Iterator[tuple[int, nn.Module]]:
    """Yields the modules outside the decoder layers whose call needs the weights of a unit, with the unit; `unit_of`
    maps a parameter to its unit, None if it stays loaded."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():  # parents come first
        if id(module) not in inside:
            if place_inside(module) is not None:  # a wrapper may read the weights without a call of the modules inside
                inside |= set(map(id, module.modules()))
            units = dict.fromkeys(map(unit_of, read_parameters(module)))
            yield from ((unit, module) for unit in units if unit is not None)


def order_unsupported_reason(
    model: Any, base: str, layers: tuple[str, ...], vector: ParameterVector, prefix: str = ""
) -> str | None:
    """Returns why a model's units cannot come and go one after the other, or None: also if its forward does not run on
    pass-throughs, when only the first forward with data can tell. `model`: the causal language model, without a
    wrapper; not changed, on any device. `base`: the name of its base model. `layers`: names, inside the base model,
    of its lists of layers. `prefix`: of names in the vector, before the names in the model."""
    family = model.config.get_text_config().model_type
    if len(layers) > 1:
        return f"the layers of {family} run in cycles, so they cannot come and go one after the other (+z2, +z3)"
    units = Units(vector)
    unit_of = {inner_name(prefix, spec.name): unit for unit, spec in _streamed(units)}
    met, expected = _units_met(model, base, layers[0], unit_of), list(units.of_stage(Strategy(), 0))
    if met is None or met == expected:
        return None
    at = next(i for i, unit in enumerate([*expected, None]) if i >= len(met) or met[i] != unit)
    came, planned = (_called(order[at]) if at < len(order) else "the end" for order in (met, expected))
    return f"in the forward of {family} {came} comes where {planned} is to come, and +z2 and +z3 go in order"


def _called(unit: int) -> str:
    return name_of_unit(unit) if unit >= 0 else f"the {name_of_unit(unit)}"


def _streamed(units: Units) -> Iterator[tuple[int, Any]]:
    vector = units.vector
    for unit, segments in units.segments.items():
        yield from ((unit, spec) for s in segments for spec in vector.specs_of(vector.segments[s]))


class _InPlaceOfALayer(PassThrough):
    """Has the attributes of the layer: families read some."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


def _units_met(model: Any, base: str, layers: str, unit_of: Mapping[str, int]) -> list[int] | None:
    """The units that a forward reaches, in order; None if it does not run."""
    met: list[int] = []

    def meet(unit: int, *_: object) -> None:
        if met[-1:] != [unit]:
            met.append(unit)

    probe = _without_data(model)
    keep_text(probe)
    places = probe.get_submodule(base).get_submodule(layers)
    for index, layer in enumerate(places):
        places[index] = _InPlaceOfALayer(layer)
        places[index].register_forward_pre_hook(partial(meet, index))
    named = probe.named_parameters(remove_duplicate=False)
    units = {id(parameter): unit_of[name] for name, parameter in named if name in unit_of}
    for unit, module in modules_of_units(probe, list(places), lambda parameter: units.get(id(parameter))):
        module.register_forward_pre_hook(partial(meet, unit))
    with torch.device("cpu"):
        pack = PackedSequences((2,), torch.tensor([0, 2], dtype=torch.int32))
    try:
        with torch.no_grad(), torch.device("meta"):
            probe(
                input_ids=torch.zeros(1, 2, dtype=torch.int64),
                position_ids=torch.arange(2)[None],
                attention_mask=torch.zeros(1, 1, 2, 2),  # a ready mask: making one reads data
                use_cache=False,
                hotspa_pack=pack,
            )
    except Exception:  # any error of the family's code without data, or on pass-throughs
        return None
    return met


def _without_data(model: Any) -> Any:
    """Copies a model to the meta device, without hooks, with separate configs."""
    made: dict[int, Any] = {}

    def empty(tensor: Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in made:
            bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # of any class of tensors
            made[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
        return None if tensor is None else made[id(tensor)]

    def own(config: PreTrainedConfig) -> Any:
        if id(config) not in made:
            made[id(config)] = copied = copy.deepcopy(config)
            copied._attn_implementation = ATTENTION
            copied.get_text_config().output_router_logits = False  # its loss reads what layers return
        return made[id(config)]

    def of(module: Any) -> Any:
        copied = object.__new__(type(module))  # `copy.copy` fails for parametrized ones
        copied.__dict__.update(module.__dict__)
        copied._parameters = {name: empty(parameter) for name, parameter in module._parameters.items()}
        copied._buffers = {name: empty(buffer) for name, buffer in module._buffers.items()}
        copied._modules = {name: child if child is None else of(child) for name, child in module._modules.items()}
        copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
        if hasattr(getattr(module, "config", None), "get_text_config"):
            copied.config = own(module.config)
        return copied

    return of(model)
