"""The bitsandbytes and torchao optimizers with 8- or 4-bit states, on shares of the master store.

The libraries' own code makes the steps, but decides by the complete parameter whether a tensor is large enough to
quantize. Shares end at blocks of their parameter (`MASTER_ALIGNMENT`), so codes, scales and weights have the same bits
under every layout. Also defines how states are saved: 1-D tensors whose values each cover one or more elements.
"""

import hashlib
import importlib
import logging
import sys
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.optim import Optimizer

from hf_hotspa.engine.master import MasterShare, MasterStore
from hf_hotspa.engine.optimizer_states import Stored
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.exchanges import set_class
from hf_hotspa.features.low_bit_optimizers.terms import BLOCK, LEAST, LOW_BIT_STATES
from hf_hotspa.layout.placement import MASTER_ALIGNMENT
from hf_hotspa.model.replica import to_storage
from hf_hotspa.versions import version_of

logger = logging.getLogger(__name__)

BITSANDBYTES, TORCHAO = "bitsandbytes", "torchao"
RELEASES = {BITSANDBYTES: ">=0.50,<0.51", TORCHAO: ">=0.16,<0.19"}
"""Tested releases, as in setup.cfg. Others may move what is overridden of their classes."""
_TORCHAO_KINDS = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit")
_ELEMENTS, _SCALES, _MAPS = ("state1", "state2"), ("absmax1", "absmax2"), ("qmap1", "qmap2")
"""What bitsandbytes keeps per parameter: codes or fp32 values, the scales of blocks, and constant tables."""
FIRST_STATE = {BITSANDBYTES: {"state1", "step"}, TORCHAO: {"exp_avg", "exp_avg_sq", "step"}}
SUGGESTED = "adamw_8bit"


def _library_class(kind: type) -> type | None:
    return next((c for c in kind.__mro__ if c.__module__.partition(".")[0] in RELEASES), None)


def library_of(kind: type) -> str | None:
    """The library of an optimizer class or its bases: `bitsandbytes`, `torchao`, or None."""
    known = _library_class(kind)
    return None if known is None else known.__module__.partition(".")[0]


def library_of_optim(optim: str) -> str | None:
    """The library of a value of `--optim`; None for another one."""
    if optim not in LOW_BIT_STATES:
        return None
    return TORCHAO if "torch" in optim else BITSANDBYTES


def register_types() -> None:
    """Lets torch load torchao's tensors, if it is in use."""
    if TORCHAO in sys.modules:
        importlib.import_module("torchao.optim")


def check_installed(library: str, optim: str) -> None:
    """Raises `HotspaConfigError`, with the command that installs it, if an optimizer's library is missing or untested."""
    installed = version_of(library)
    if installed is None or installed not in SpecifierSet(RELEASES[library], prereleases=True):
        raise HotspaConfigError(
            f"the optimizer {optim!r} is one of {library}, "
            + ("which is not installed" if installed is None else f"of which {installed} is installed"),
            why=None if installed is None else "what is overridden of its classes may have moved in untested releases",
            fix=f'pip install "{library}{RELEASES[library]}"',
        )


def check(optimizer: Optimizer) -> None:
    """Raises `UnsupportedError` for an optimizer of these libraries that would depend on the layout, or is untested."""
    library, kind, attributes = library_of(type(optimizer)), type(optimizer), vars(optimizer)
    check_installed(str(library), kind.__name__)
    name = f"the optimizer {kind.__name__} of {library}"
    reason = None
    if _library_class(kind) is not kind:
        name = f"the optimizer {kind.__name__}"
        reason = f"it is derived from a class of {library}, whose code it may change"
    elif library == TORCHAO and kind.__name__ not in _TORCHAO_KINDS:
        reason = f"of torchao's, {', '.join(_TORCHAO_KINDS)} have been tried"
    elif library == TORCHAO:
        block = attributes["block_size"]
        if not isinstance(block, int) or block < 2 or MASTER_ALIGNMENT % block:
            name = f"block_size={block!r} of {name}"
            reason = f"blocks must divide the {MASTER_ALIGNMENT} elements at which shares end"
    elif getattr(attributes.get("args"), "max_unorm", 0.0):
        reason = "it scales by the norm of whole tensors, of which a rank has shares"
    if reason:
        raise UnsupportedError(
            f"{name} cannot be honoured", why=reason, fix="use optim=adamw_8bit, or AdamW8bit of the library as it is"
        )


class _OnShares:
    """Fields of the classes derived from the libraries' own."""

    wholes: Mapping[int, int]
    """Id of a share -> elements of its parameter."""
    overrides: Mapping[int, dict[str, Any]]
    """Id of a share -> the parameter's overrides in `GlobalOptimManager` of bitsandbytes."""


@cache
def _on_shares(kind: type[Optimizer]) -> type[Optimizer]:
    """A subclass of the library's class, with its name, that decides by complete parameters what to quantize."""
    if kind.__module__.partition(".")[0] == BITSANDBYTES:

        class BitsAndBytes(kind, _OnShares):  # type: ignore[misc]
            def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
                share = id(self.param_groups[gindex]["params"][pindex])
                config = super().get_config(gindex, pindex, group) | self.overrides.get(share, {})
                if self.wholes[share] < config["min_8bit_size"]:
                    config["optim_bits"] = 32
                config["min_8bit_size"] = 0
                return dict(config)

            def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
                if p.numel():
                    super().update_step(group, p, gindex, pindex)
                else:  # GPU kernels cannot be launched on empty tensors; checkpoints need the step number
                    self.state[p]["step"] += 1

        made: Any = BitsAndBytes
    else:

        class TorchAO(kind, _OnShares):  # type: ignore[misc]
            def is_quantized(self, share: Tensor) -> bool:
                whole = self.wholes[id(share)]
                return whole >= LEAST and whole % self.block_size == 0

            def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
                if p.numel() and self.is_quantized(p):
                    return self._subclass_zeros(p.detach(), signed, self.block_size)  # type: ignore[no-any-return]
                return torch.zeros_like(p)

        made = TorchAO
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return made


def overrides_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Id of a parameter -> its bitsandbytes overrides: embeddings have 32 bits if `Trainer` makes the optimizer."""
    if library_of(type(optimizer)) != BITSANDBYTES:
        return {}
    overridden = optimizer.mng.module_weight_config_triple
    of_modules = {id(getattr(module, attribute, None)): config for module, attribute, config in overridden}
    return {**optimizer.mng.pid2config, **of_modules}


def adopt(optimizer: Optimizer, master: MasterStore, overrides: Mapping[int, dict[str, Any]] | None = None) -> None:
    """Makes an optimizer of these libraries decide by complete parameters; it has shares of the master store.
    `overrides`: id of a share -> its parameter's overrides in `GlobalOptimManager`. Raises `UnsupportedError`: the
    optimizer cannot be honoured; it is unchanged."""
    check(optimizer)
    if needs_adopting(type(optimizer)):
        kind: Any = type(optimizer)
        set_class(optimizer, _on_shares(kind), "optimizer")
        if library_of(kind) == TORCHAO and master.rank == 0:
            _report_compilation(optimizer)
    optimizer.wholes = {id(p): master.shares[name].spec.numel for name, p in master.parameters.items()}
    optimizer.overrides = {**vars(optimizer).get("overrides", {}), **(overrides or {})}
    if getattr(optimizer, "is_paged", False) and master.device.type == "cpu":
        optimizer.is_paged = False
        if master.rank == 0:
            logger.warning(
                "the states of %s are not paged: the master store is in host memory", type(optimizer).__name__
            )


def _report_compilation(optimizer: Optimizer) -> None:
    """Logs how long the first step took: torchao compiles it for every share size."""
    begun = list[float]()

    def after(*_: object) -> None:
        if len(begun) == 1:
            sizes = {p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            seconds, name = time.perf_counter() - begun[0], type(optimizer).__name__
            logger.warning(
                "%s of torchao: the first step took %.1f s, compiled for %d sizes", name, seconds, len(sizes)
            )

    optimizer.register_step_pre_hook(lambda *_: begun.append(time.perf_counter()))
    optimizer.register_step_post_hook(after)


def disown(optimizer: Optimizer) -> None:
    """Undoes `adopt`: the optimizer continues with parameters that are not shares."""
    if isinstance(optimizer, _OnShares):
        set_class(optimizer, type(optimizer).__bases__[0], "optimizer")
        del optimizer.wholes, optimizer.overrides


def needs_adopting(kind: type) -> bool:
    """Whether it is such a class without the changes of `adopt`."""
    return not issubclass(kind, _OnShares)


# -- states as they are saved -------------------------------------------------------------------------------------------


def kind_of(optimizer: Optimizer) -> str:
    """The optimizer's name in checkpoints; only the same kind can load the states."""
    library, name = library_of(type(optimizer)), type(optimizer).__name__
    attributes: Any = vars(optimizer)
    if library == TORCHAO:
        return f"{library}.{name} in blocks of {attributes['block_size']}"
    return f"{library}.{name} of {attributes['args'].optim_bits} bits"


def code_digest(optimizer: Optimizer) -> str:
    """A digest of what the codes in its states mean."""
    if library_of(type(optimizer)) == BITSANDBYTES:
        tables = list(_maps(optimizer).values())
    else:
        size = optimizer.block_size
        tables = [optimizer._subclass_zeros(torch.empty(size), signed, size).qmap for signed in (True, False)]
    numbers = torch.cat([table.detach().cpu().float() for table in tables])
    return hashlib.sha256(numbers.numpy().astype("<f4").tobytes()).hexdigest()[:16]


def _maps(optimizer: Optimizer) -> dict[str, Tensor]:
    if "dynamic" not in optimizer.name2qmap:
        optimizer.fill_qmap()
    return dict(zip(_MAPS, (optimizer.name2qmap["dynamic"], optimizer.name2qmap["udynamic"]), strict=True))


def stored_states(optimizer: Optimizer, share: Tensor) -> tuple[dict[str, Stored], dict[str, Any]]:
    """A share's states: by name, those saved by range of elements; and those that the parameter has once."""
    stored, rest = dict[str, Stored](), dict[str, Any]()
    library, state = library_of(type(optimizer)), optimizer.state.get(share, {})
    for key, value in state.items():
        if library == BITSANDBYTES and key in _MAPS:
            continue
        if library == BITSANDBYTES and key in (*_ELEMENTS, *_SCALES):
            each = 1 if key in _ELEMENTS else BLOCK
            rows = [value] if value.dim() == 1 else value  # AdEMAMix keeps two of the first kind
            for number, row in enumerate(rows):
                stored[key if value.dim() == 1 else f"{key}.{number}"] = Stored(row, each)
        elif library == TORCHAO and isinstance(value, Tensor) and value.dim() and optimizer.is_quantized(share):
            codes = getattr(value, "codes", torch.empty(0, dtype=torch.uint8))  # no part of the parameter is here
            stored[f"{key}.codes"] = Stored(codes, _codes_in_a_byte(optimizer))
            stored[f"{key}.scale"] = Stored(getattr(value, "scale", torch.empty(0)), optimizer.block_size)
        elif isinstance(value, Tensor) and value.shape == share.shape:
            stored[key] = Stored(value)
        else:
            rest[key] = value
    return stored, rest


def _codes_in_a_byte(optimizer: Optimizer) -> int:
    return 2 if "4bit" in type(optimizer).__name__ else 1


def loaded_states(optimizer: Optimizer, share: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `stored_states`."""
    library, state = library_of(type(optimizer)), dict[str, Any]()
    for name, values in stored.items():
        key, _, part = name.partition(".")
        if library == BITSANDBYTES and part:
            state[key] = torch.stack([stored[f"{key}.{number}"] for number in range(2)])
        elif library == TORCHAO and part:
            if part == "codes" and share.numel():
                whole = optimizer._subclass_zeros(share.detach(), key == "exp_avg", optimizer.block_size)
                whole.codes.copy_(values)
                whole.scale.copy_(stored[f"{key}.scale"])
                state[key] = whole
            elif part == "codes":
                state[key] = torch.zeros_like(share)
        else:
            state[name] = values
    if library == BITSANDBYTES and any(state[key].dtype == torch.uint8 for key in _ELEMENTS if key in state):
        state |= {name: table for name, table in _maps(optimizer).items() if f"state{name[-1]}" in state}
    return state


def cut_state(optimizer: Optimizer, state: Mapping[str, Any], share: MasterShare) -> dict[str, Any]:
    """Cuts an optimizer's state of a complete parameter to a share, unless it is already cut. Raises
    `UnsupportedError`: the master store has the weight transposed, so its blocks have other elements."""
    spec, start, stop, *_ = share
    lead = (2,) if vars(optimizer).get("optimizer_name") == "ademamix" else ()
    cut = dict(state)
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.dim() or key in _MAPS:
            continue
        rows = lead if key in (_ELEMENTS[0], _SCALES[0]) else ()
        if key in _SCALES:
            if value.shape[-1] * BLOCK - (stop - start) >= BLOCK:
                cut[key] = value[..., start // BLOCK : -(-stop // BLOCK)].clone()
        elif value.shape == (*rows, stop - start) and spec.shape != value.shape[len(rows) :]:
            continue
        elif value.shape != (*rows, *spec.shape):
            raise UnsupportedError(
                f"the state {key!r} that the optimizer {type(optimizer).__name__} has of {spec.name!r} is of shape "
                f"{tuple(value.shape)}",
                fix="continue with the same model and the same optimizer",
            )
        elif hasattr(value, "codes") or value.dtype == torch.uint8:
            if spec.shard_dim not in (None, 0):
                raise UnsupportedError(
                    f"the state {key!r} that the optimizer {type(optimizer).__name__} has of {spec.name!r}",
                    why="the master store has this weight transposed, so that other elements are scaled together",
                    fix="begin with a new optimizer, or resume from a checkpoint of this Trainer's",
                )
            cut[key] = _cut_codes(optimizer, value, len(rows), start, stop)
        else:
            whole = [to_storage(part, spec.shard_dim)[start:stop] for part in (value if rows else [value])]
            cut[key] = torch.stack(whole) if rows else whole[0].clone()
    return cut


def _cut_codes(optimizer: Optimizer, value: Any, lead: int, start: int, stop: int) -> Tensor:
    if not hasattr(value, "codes"):
        return value.flatten(lead)[..., start:stop].clone()  # type: ignore[no-any-return]
    packed, empty = _codes_in_a_byte(optimizer), torch.empty(stop - start, dtype=value.dtype)
    if start == stop:
        return empty
    cut = optimizer._subclass_zeros(empty, value.signed, value.block_size)
    cut.codes.copy_(value.codes.flatten()[start // packed : stop // packed])
    cut.scale.copy_(value.scale[start // value.block_size : stop // value.block_size])
    return cut  # type: ignore[no-any-return]
