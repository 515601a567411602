"""Tensors in and out of a checkpoint: each rank writes its share of the master store and reads its own slices.

A share holds the weights, bit for bit, and every optimizer state with one value for each weight; a state kept once for
a parameter (`step`) goes into `state.json`. Beside a frozen base it holds the trained weights only: the base model is not
copied into every checkpoint.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_hotspa.checkpoint.format.disk import Buffer, TensorRecord, check_name, tensor_file
from hf_hotspa.checkpoint.format.manifest import (
    WEIGHT,
    Manifest,
    SavedParameter,
    SavedSegment,
    num_values,
    rank_tensors,
    stored_as,
)
from hf_hotspa.engine.master import MasterStore, bare_optimizer
from hf_hotspa.engine.optimizer_states import Stored, states_of
from hf_hotspa.errors import DamagedCheckpointError, ResumeError, UnsupportedError
from hf_hotspa.layout.placement import master_layout
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector, build_vector
from hf_hotspa.model.replica import from_storage, to_storage
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.parallel.agreement import Agreement, any_flag, packed_flags
from hf_hotspa.versions import version_of

HERE_AND_NOW = ("foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, not what: the present run's apply."""
CPU_ADAM = "CpuAdamW"  # DeepSpeed's AdamW for a master store in host memory (`trainer/cpu_adam.py`), by its class name
_SAME_STATE = {"AdamW", CPU_ADAM}  # optimizers that can load one another's state


def names_in_groups(optimizer: Optimizer, master: MasterStore) -> list[list[str]]:
    """Returns the parameter names of each group of a torch optimizer on the master store, in its order."""
    names = {id(parameter): name for name, parameter in master.parameters.items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def tensor_bytes(tensor: Tensor) -> Buffer:
    """Returns the bytes of a tensor, as safetensors stores them; no copy for a contiguous one on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def versions() -> dict[str, str]:
    return {name: version_of(name) or "" for name in ("hf-hotspa", "torch", "transformers")}


# ------------------------------------------------------------------------------------------------ out


@dataclass
class Share:
    """What a rank writes: 1-D tensors by name, and the optimizer's other states."""

    tensors: list[tuple[TensorRecord, Tensor]] = field(default_factory=list)  # in the order of the file
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state -> value, JSON-ready
    # parameter -> state -> stored dtype, as in `SavedParameter.states`
    states: dict[str, dict[str, str]] = field(default_factory=dict)

    def copy(self) -> "Share":
        """Returns a copy whose tensors are in host memory, where later steps do not change them."""
        copied = [(record, tensor.detach().to("cpu", copy=True)) for record, tensor in self.tensors]
        return Share(copied, self.scalars, self.states)

    def file(self) -> Iterator[Buffer]:
        """Yields the safetensors file, piece by piece."""
        return tensor_file(self.tensors, tensor_bytes)


def named_tensors(tensors: Mapping[str, Tensor]) -> list[tuple[TensorRecord, Tensor]]:
    """Returns tensors in the form that `tensor_file` takes."""
    return [(TensorRecord(n, dtype_name(t.dtype), tuple(t.shape)), t) for n, t in tensors.items()]


def saved_vector(vector: ParameterVector, adapted: bool) -> ParameterVector:
    """Returns the parameters that checkpoints of a model hold: all of them, or beside a frozen base the trained ones."""
    if not adapted:
        return vector
    trained = [spec for spec in vector.specs if spec.trainable]
    return build_vector(trained, vector.layer_costs, vector.head_cost).with_measured(vector.measured)


def drop_unstepped(master: MasterStore, optimizer: Optimizer, agreement: Agreement) -> None:
    """Drops states of parameters that no gradient ever reached. If stages step by themselves, a rank has an empty state
    for all parameters of other stages, even if their own stage has none. Collective."""
    state = bare_optimizer(optimizer).state
    parameters = [master.parameters[name] for name in master.trained]
    stepped = packed_flags(p.numel() > 0 and p in state for p in parameters)
    for parameter, is_stepped in zip(parameters, any_flag(agreement.gather(stepped), len(parameters)), strict=True):
        if not is_stepped:
            state.pop(parameter, None)


def share_of(master: MasterStore, optimizer: Optimizer | None, vector: ParameterVector) -> Share:
    """Returns this rank's share, as views of the master store and the optimizer's tensors. `optimizer`: None to leave
    it out. `vector`: what is saved (`saved_vector`). Raises `UnsupportedError`: the optimizer has a state that belongs
    neither to one weight nor to one parameter."""
    share = Share()
    bare = bare_optimizer(optimizer) if optimizer is not None else None
    for name in (spec.name for spec in vector.specs):
        parameter = master.parameters[name]
        states, rest = states_of(type(bare)).stored_states(bare, parameter) if bare is not None else ({}, {})
        for key, value in rest.items():
            share.scalars.setdefault(name, {})[key] = _scalar_to_json(value, f"{key} of {name}")
        share.states[name] = {}
        for key, (values, each) in {WEIGHT: Stored(parameter), **dict(sorted(states.items()))}.items():
            dtype = dtype_name(values.dtype)
            share.states[name][key] = dtype if each == 1 else f"{dtype}/{each}"
            if parameter.numel():
                share.tensors.append((TensorRecord(f"{key}/{name}", dtype, tuple(values.shape)), values))
    return share


def _scalar_to_json(value: object, name: str) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(
        f"the optimizer state {name} ({type(value).__name__}) cannot be saved",
        why="it belongs neither to single weights nor to a complete parameter",
        fix="use one of torch's elementwise optimizers",
    )


def _scalar_from_json(value: object) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    return value


def state_to_json(value: object) -> Any:
    """Returns the state of a scheduler for JSON; rates that are tensors, as some optimizers require, are marked so."""
    if isinstance(value, Tensor):
        return _scalar_to_json(value, "a tensor")
    if isinstance(value, list | tuple):
        return [state_to_json(part) for part in value]
    return {key: state_to_json(part) for key, part in value.items()} if isinstance(value, dict) else value


def state_from_json(value: object) -> Any:
    """The inverse of `state_to_json`."""
    if isinstance(value, list):
        return [state_from_json(part) for part in value]
    if isinstance(value, dict) and value.keys() != {"dtype", "value"}:
        return {key: state_from_json(part) for key, part in value.items()}
    return _scalar_from_json(value)


def optimizer_to_json(optimizer: Optimizer, share: Share) -> dict[str, Any]:
    """Returns class, hyperparameters of the groups, and the states that are not tensors."""
    bare = bare_optimizer(optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in bare.param_groups]
    for group in groups:
        for key, value in group.items():
            group[key] = _scalar_to_json(value, key) if not isinstance(value, tuple | list) else list(value)
    of_kind = states_of(type(bare))
    saved = {"class": of_kind.kind_of(bare), "groups": groups, "scalars": share.scalars}
    return saved if (digest := of_kind.code_digest(bare)) is None else {**saved, "codes": digest}


def saved_segments(vector: ParameterVector, master: MasterStore) -> tuple[SavedSegment, ...]:
    """Returns how the ranks divide the vector, for the manifest: as the master store divides each segment."""
    segments, sizes = [], master_layout(vector, master.world_size, master.by_stage).sizes
    for segment in vector.segments:
        cuts = itertools.accumulate((of_rank[segment.index] for of_rank in sizes), initial=0)
        segments.append(SavedSegment(segment.start, segment.stop, tuple(cuts)))
    return tuple(segments)


def saved_parameters(
    vector: ParameterVector,
    states: Mapping[str, dict[str, str]],
    dtypes: Mapping[str, str],
    exported: set[str],
    prefix: str = "",
) -> tuple[SavedParameter, ...]:
    """Returns the parameters for the manifest: `states` of a `Share`, model dtypes, names that transformers saves, without
    their `prefix` in a chain of modules."""
    return tuple(
        SavedParameter(
            spec.name,
            spec.shape,
            spec.shard_dim,
            vector.segment_of(spec).index,
            spec.offset,
            spec.trainable,
            dtypes[spec.name],
            spec.tied_names,
            next(
                (own for name in (spec.name, *spec.tied_names) if (own := name.removeprefix(prefix)) in exported),
                spec.name,
            ),
            states[spec.name],
        )
        for spec in vector.specs
    )


# ------------------------------------------------------------------------------------------------ in


class ShareReader:
    """Reads ranges of parameters from all ranks' shares in a verified checkpoint, and nothing else."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[int, Any] = {}

    def read(self, parameter: SavedParameter, state: str, start: int, stop: int) -> Tensor:
        """Reads elements `[start, stop)` of a state of a parameter, in the storage order of the checkpoint. Returns
        1-D, on the CPU, in the saved dtype. If a value stands for several elements: the blocks that begin in the range,
        which must begin with one. Raises `DamagedCheckpointError`: a file does not hold what the manifest says."""
        dtype, each = stored_as(parameter.states[state])
        tensor = torch.empty(num_values(start, stop, each), dtype=getattr(torch, dtype))
        name = f"{state}/{parameter.name}"
        for rank, first, last in self.manifest.holders(parameter, start, stop):
            low, high = self.manifest.share(parameter, rank)
            at, size = num_values(low, first, each), num_values(first, last, each)
            try:
                saved = self._file(rank).get_slice(name)
                good = saved.get_shape() == [num_values(low, high, each)]
                values = saved[at : at + size] if good else None
            except (SafetensorError, OSError) as error:
                raise self._damaged(rank, f"{name!r} cannot be read: {error}") from error
            if values is None or values.dtype != tensor.dtype:
                raise self._damaged(rank, f"{name!r} is not what the manifest says")
            here = num_values(start, first, each)
            tensor[here : here + size] = values
        return tensor

    def read_as(self, parameter: SavedParameter, state: str, shard_dim: int | None, start: int, stop: int) -> Tensor:
        """Reads the same in another storage order; if they differ, the complete parameter is in memory for a moment."""
        if parameter.shard_dim == shard_dim:
            return self.read(parameter, state, start, stop)
        if state != WEIGHT and any(stored_as(stored)[1] > 1 for stored in parameter.states.values()):
            raise ResumeError(
                f"the state {state!r} of {parameter.name!r} has scales for blocks of elements, which have another order here",
                where=str(self.folder),
                fix="resume with the version of hf_hotspa that wrote the checkpoint, or with save_only_model begin anew",
            )
        return to_storage(self.whole(parameter, state), shard_dim)[start:stop]

    def whole(self, parameter: SavedParameter, state: str = WEIGHT) -> Tensor:
        flat = self.read(parameter, state, 0, parameter.numel)
        return from_storage(flat, parameter.shape, parameter.shard_dim)

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / self._name(rank), framework="pt", device="cpu")
        return self._files[rank]

    def _name(self, rank: int) -> str:
        return check_name(self.manifest.located(rank_tensors(rank, self.manifest.world_size)), str(self.folder))

    def _damaged(self, rank: int, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._name(rank)!r}: {what}", where=str(self.folder))


def check_model(manifest: Manifest, vector: ParameterVector, where: str) -> None:
    """Raises `ResumeError`, naming the first difference, if the model is not the saved one."""
    saved = {p.name: _described(p, p.states[WEIGHT]) for p in manifest.parameters}
    own = {spec.name: _described(spec, spec.master_dtype) for spec in vector.specs}
    for name in [*own, *saved]:
        present, wanted = (side.get(name, "missing") for side in (saved, own))
        if present != wanted:
            raise ResumeError(
                f"parameter {name!r} is {present} in the checkpoint and {wanted} in the model",
                where=where,
                why="a run resumes only with the model that it was saved with",
                fix="build the model from the config.json of the checkpoint, with the same dtype and frozen parts",
            )


def _described(parameter: SavedParameter | ParameterSpec, dtype: str) -> str:
    """All that a checkpoint and the model that resumes from it must share, with the dtype of the master store."""
    tied = f", tied to {', '.join(sorted(parameter.tied_names))}" if parameter.tied_names else ""
    return f"{dtype} {list(parameter.shape)}{'' if parameter.trainable else ', frozen'}{tied}"


@torch.no_grad()
def restore(
    folder: Path, manifest: Manifest, master: MasterStore, optimizer: Optimizer | None, saved: Mapping[str, Any] | None
) -> None:
    """Fills this rank's share of the master store, and the states of its optimizer (None for the weights only; `saved` is
    from `optimizer_to_json`), from a verified checkpoint of any layout. Raises `ResumeError`: it is another optimizer.
    Raises `DamagedCheckpointError`: a file does not hold what the manifest says."""
    bare = bare_optimizer(optimizer) if optimizer is not None else None
    if bare is not None:
        assert saved is not None
        _check_kind(bare, saved, str(folder))
    reader = ShareReader(folder, manifest)
    states: dict[str, dict[str, Any]] = {}
    for name, of_name in ((parameter.name, parameter) for parameter in manifest.parameters):
        parameter, (spec, start, stop, *_) = master.parameters[name], master.shares[name]
        if not spec.trainable:
            master.frozen_version += 1
        parameter.copy_(reader.read_as(of_name, WEIGHT, spec.shard_dim, start, stop))
        if bare is not None:
            keys = of_name.states.keys() - {WEIGHT}
            read = {key: reader.read_as(of_name, key, spec.shard_dim, start, stop) for key in sorted(keys)}
            states[name] = states_of(type(bare)).loaded_states(bare, parameter, read)
    if bare is not None and saved is not None:
        load_optimizer(bare, master, states, saved, str(folder))


def saved_tensors(folder: Path, manifest: Manifest, name: str) -> dict[str, Tensor]:
    """Returns all tensors of a file of a checkpoint; none if it has no such file. Raises `DamagedCheckpointError`: the
    file cannot be read."""
    name = manifest.located(name)
    if not any(file.name == name for file in manifest.files):
        return {}
    try:
        with safe_open(folder / name, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{name!r}: {error}", where=str(folder)) from error


@torch.no_grad()
def copy_buffers(saved: Mapping[str, Tensor], models: Iterable[nn.Module]) -> None:
    """Copies buffers (such as router biases) by name into models, or into parts of them."""
    for model in models:
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def load_optimizer(
    optimizer: Optimizer, master: MasterStore, states: dict[str, dict[str, Any]], saved: Mapping[str, Any], where: str
) -> None:
    """Loads states into an optimizer. `states`: parameter -> state -> this rank's share. `saved`: from
    `optimizer_to_json`. Raises `ResumeError`: it is another optimizer."""
    _check_kind(optimizer, saved, where)
    current, own = optimizer.state_dict(), states_of(type(optimizer)).kind_of(optimizer)
    groups = []
    for group, kept in zip(current["param_groups"], saved["groups"], strict=True):
        restored = {key: _scalar_from_json(value) for key, value in kept.items() if key not in HERE_AND_NOW}
        if saved["class"] != own:  # settings that only the other one has stay at their defaults
            restored = {key: value for key, value in restored.items() if key in group}
        for key, value in restored.items():
            if isinstance(group.get(key), tuple):
                restored[key] = tuple(value)
        groups.append({**group, **restored})
    by_index = {}
    for names, described in zip(names_in_groups(optimizer, master), current["param_groups"], strict=True):
        for name, index in zip(names, described["params"], strict=True):
            scalars = saved["scalars"].get(name, {})
            entry = {**states.get(name, {}), **{key: _scalar_from_json(value) for key, value in scalars.items()}}
            if entry:
                by_index[index] = entry
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def _check_kind(optimizer: Optimizer, saved: Mapping[str, Any], where: str) -> None:
    of_kind, num_groups = states_of(type(optimizer)), len(optimizer.param_groups)
    own = of_kind.kind_of(optimizer)
    same = saved["class"] == own or {saved["class"], own} == _SAME_STATE
    if not same or len(saved["groups"]) != num_groups:
        raise ResumeError(
            f"the checkpoint holds the state of {saved['class']} with {len(saved['groups'])} parameter groups, and the "
            f"run has {own} with {num_groups}",
            where=where,
            fix="resume with the same optim",
        )
    if saved.get("codes", digest := of_kind.code_digest(optimizer)) != digest:
        raise ResumeError(
            f"the codes of the states of {own} stood for other values when the checkpoint was written",
            where=where,
            fix="resume with the release of the library that it was written with",
        )
