"""In which order a forward pass comes to the embedding, the layers and the head: the borders of units.

Owns which modules lie at these borders, and the check that a family comes to its units one after the other, which `+z2`
and `+z3` rely on. The check runs the family's own forward on the meta device, with pass-throughs in the place of the
layers: no weight is touched, and a model with data gets the same answer as one without.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.layout.units import Units, name_of_unit
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.text_half import keep_text
from hf_hotspa.parallel.attention import ATTENTION, PackedSequences
from hf_hotspa.parallel.stage_input import PassThrough
from hf_hotspa.strategy import Strategy


def modules_of_units(
    model: nn.Module, layers: Sequence[nn.Module], unit_of: Callable[[nn.Parameter], int | None]
) -> Iterator[tuple[int, nn.Module]]:
    """The modules outside of layers whose call needs the weights of a unit, each with that unit.

    Args:
        layers: The decoder layers of the model.
        unit_of: The unit with which a parameter is streamed; None for one that stays.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            units = dict.fromkeys(map(unit_of, module.parameters(recurse=False)))
            yield from ((unit, module) for unit in units if unit is not None)


def order_unsupported_reason(
    model: Any, base: str, layers: tuple[str, ...], vector: ParameterVector, prefix: str = ""
) -> str | None:
    """Why the units of a model cannot come and go one after the other, or None: also where its forward does not run on
    pass-throughs, and only the first forward with data can tell.

    Args:
        model: The causal language model, without an adapter's wrapper; not changed, on any device.
        base: The name of its base model.
        layers: Names, inside the base model, of its lists of layers.
        prefix: What names in the vector have before those in the model.
    """
    family = model.config.get_text_config().model_type
    if len(layers) > 1:
        return f"the layers of {family} run in cycles, so they cannot come and go one after the other (+z2, +z3)"
    units = Units(vector)
    unit_of = {spec.name.removeprefix(prefix): unit for unit, spec in _streamed(units)}
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
    """Passes through, and has the attributes of the layer: families look some up."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


def _units_met(model: Any, base: str, layers: str, unit_of: Mapping[str, int]) -> list[int] | None:
    """The units that a forward comes to, in its order; None where it does not run."""
    met: list[int] = []

    def meet(unit: int, *_: Any) -> None:
        if met[-1:] != [unit]:
            met.append(unit)

    probe = _without_data(model)
    keep_text(probe)
    places = probe.get_submodule(base).get_submodule(layers)
    for index, layer in enumerate(places):
        places[index] = _InPlaceOfALayer(layer)
        places[index].register_forward_pre_hook(partial(meet, index))
    units = {id(parameter): unit_of.get(name) for name, parameter in probe.named_parameters()}
    for unit, module in modules_of_units(probe, list(places), lambda parameter: units[id(parameter)]):
        module.register_forward_pre_hook(partial(meet, unit))
    with torch.device("cpu"):
        pack = PackedSequences((2,), torch.tensor([0, 2], dtype=torch.int32))
    try:
        with torch.no_grad(), torch.device("meta"):
            probe(
                input_ids=torch.zeros(1, 2, dtype=torch.int64),
                position_ids=torch.arange(2)[None],
                attention_mask=torch.zeros(1, 1, 2, 2),  # one that is made already: making it looks at data
                use_cache=False,
                hotspa_pack=pack,
            )
    except Exception:  # whatever the family's code raises without data, or for the pass-throughs
        return None
    return met


def _without_data(model: Any) -> Any:
    """A copy of a model on the meta device, without hooks, and with configs of its own."""
    made: dict[int, Any] = {}

    def empty(tensor: Tensor | None) -> Any:
        if tensor is not None and id(tensor) not in made:
            bare = torch.empty_like(tensor, device="meta")
            made[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
        return None if tensor is None else made[id(tensor)]

    def own(config: Any) -> Any:
        if id(config) not in made:
            made[id(config)] = copied = copy.deepcopy(config)
            copied._attn_implementation = ATTENTION
            copied.get_text_config().output_router_logits = False  # its loss looks at what layers return
        return made[id(config)]

    def of(module: Any) -> Any:
        copied = copy.copy(module)
        copied._parameters = {name: empty(parameter) for name, parameter in module._parameters.items()}
        copied._buffers = {name: empty(buffer) for name, buffer in module._buffers.items()}
        copied._modules = {name: child if child is None else of(child) for name, child in module._modules.items()}
        copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
        if hasattr(getattr(module, "config", None), "get_text_config"):
            copied.config = own(module.config)
        return copied

    return of(model)
