"""Times decoder layers one by one, where a model has layers of several kinds.

Owns `kinds_of_layers` (which layers take as long as one another, read off the whole model without weights) and
`time_layers`. A layer of each kind runs alone, forward and backward, as the engine's own replica of a stage that has
no other layer, all ranks at the same time. A model whose layers are all alike is not measured here at all: single packs
say what its layers take.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_hotspa.calibrate.measuring import Measuring
from hf_hotspa.calibrate.probe import micro_batch, probe_weights, random_block
from hf_hotspa.costs.measurements import LayerSample
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import ModelDescription, describe_model
from hf_hotspa.parallel.agreement import as_hotspa_error
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.strategy import Strategy

_PLACE = ("layer", "idx", "index", "number")
"""In the names of settings that say which layer it is, not what it computes."""
_WEIGHT = 0.02


def kinds_of_layers(model: nn.Module, description: ModelDescription) -> tuple[tuple[int, ...], ...]:
    """The indices of decoder layers, those of equal kind together, in the order in which kinds first appear.

    Layers are of one kind where their modules, the settings of these (a window, a number of heads) and the shapes of
    all parameters are equal. Models that no pipeline can cut have no kinds: nothing asks for them.

    Args:
        model: The whole model; on the meta device, if it likes.
        description: What was read from it.
    """
    shape = description.shape
    if shape.num_layers < 2 or Strategy(pp=shape.num_layers).unsupported_reason(shape) is not None:
        return ()
    layers = model.get_submodule(description.base).get_submodule(description.layers[0])
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((description.layer_kinds[index], _signature(layer)), []).append(index)
    return tuple(map(tuple, kinds.values()))


def _signature(layer: nn.Module) -> Hashable:
    modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _settings(module: nn.Module) -> Hashable:
    """What a module was built with, as far as it may decide what is computed; a factor does not."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | str | None)
        and not name.startswith("_")
        and not (type(value) is int and any(part in name for part in _PLACE))
    )


class _Layer:
    """One decoder layer on this rank, with the arguments that its model calls it with.

    Args:
        index: Which layer.
        pack: What it runs on.
    """

    def __init__(self, description: ModelDescription, index: int, pack: MicroBatch, device: torch.device) -> None:
        one_each = Strategy(pp=description.shape.num_layers)  # the stage of this index has this layer
        mesh = StrategyMesh(one_each, index, one_each.coord(index), None, None)
        options = EngineOptions(compute_dtype=description.compute_dtype)
        self._replica = Replica(description, mesh, device, {}, options)
        self._layer, self._pack = self._replica.layers[index], pack
        self._dtypes = [
            (getattr(torch, s.dtype), getattr(torch, options.gradients.accumulated(s.dtype)))
            for s in description.vector.segments
        ]
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def prepare(self) -> None:
        """Gives it weights, and finds out how it is called. `release` lets go of them."""
        replica, device = self._replica, self._replica.device
        room = [0] * len(self._dtypes)
        for slot in replica.slots:
            room[slot.segment] = max(room[slot.segment], slot.offset + slot.numel)
        weights = [
            torch.full((n,), _WEIGHT, dtype=d, device=device) for n, (d, _) in zip(room, self._dtypes, strict=True)
        ]
        gradients = [torch.zeros(n, dtype=d, device=device) for n, (_, d) in zip(room, self._dtypes, strict=True)]
        replica.bind(weights, gradients)
        block = random_block()
        with torch.no_grad():
            for parameter, _ in replica.parameters:
                parameter.copy_(probe_weights(parameter.shape, block))
        shape = replica.hidden_shape(self._pack)
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, replica.compute_dtype)
        caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = self._layer.register_forward_pre_hook(
            lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            replica.forward(self._pack, None if replica.is_first else hidden, 1.0, with_loss=False)
        handle.remove()
        (self._call,) = caught

    def run(self) -> None:
        """Forward and backward."""
        args, kwargs = self._call
        args, kwargs = tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}
        out = self._layer(*args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))

    def release(self) -> None:
        """Lets go of the weights."""
        self._call = ((), {})
        self._replica.release()


def _leaf(value: Any) -> Any:
    """The hidden state as a layer in the middle gets it: its gradient is wanted."""
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def time_layers(model: PreTrainedModel, longest: int, measuring: Measuring) -> tuple[LayerSample, ...]:
    """Seconds of a layer of each kind; the fastest counts. Collective.

    Args:
        model: The whole model, on the meta device.

    Returns:
        A sample for each kind, the same on every rank; none where all layers are of one kind.
    """
    description = describe_model(model)
    kinds = kinds_of_layers(model, description)
    if len(kinds) < 2:
        return ()
    measuring.say(f"layers of {len(kinds)} kinds, one by one")
    device, agreement = measuring.device, measuring.agreement
    pack = micro_batch((longest,), description.shape.vocab_size, device)
    # a layer in the middle where there is one: embedding and head are not to be held for it
    chosen = [kind[len(kind) // 2] for kind in kinds]
    layers = agreement.run(
        "calibration",
        lambda: [_Layer(description, index, pack, device) for index in chosen],
        otherwise=lambda failure: as_hotspa_error(failure, "calibration"),
    )
    measured = [[_seconds(layer, measuring) for layer in layers] for _ in range(measuring.rounds + 1)]
    gathered = torch.stack([agreement.gather(values) for values in measured[1:]])  # [round, rank, kind]
    seconds = (gathered.mean(1) if measuring.share < 1 else gathered.amax(1)).amin(0).tolist()
    return tuple(LayerSample(kind, (longest,), s) for kind, s in zip(kinds, seconds, strict=True))


def _seconds(layer: _Layer, measuring: Measuring) -> float:
    """Of one forward and backward on this rank, the second of two: the first finds its buffers. On a core, where ranks share
    cores (`timing.time_packs`)."""
    layer.prepare()
    measuring.timed(layer.run)
    clock, on_core = measuring.timed(layer.run)
    layer.release()
    return on_core if measuring.share < 1 else clock
