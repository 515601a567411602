"""The first fill of the master store: from a model that every rank holds, or from the files of a Hugging Face folder.

`open_model` and `load_weights` serve models that do not fit in one process. Each rank reads only its elements from the
safetensors files: beside its share of the store at most its part of one tensor is in memory (or the complete saved
tensors, where transformers makes one weight from several). The store then matches `from_pretrained` bit for bit. A
tensor that is missing, unexpected, of another shape or saved as a pickle raises an error by name, on every rank, before
a weight is read. `load_below_adapter` packs a base while it is read.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from hf_hotspa.engine.master import MasterShare, MasterStore
from hf_hotspa.errors import HotspaError, ModelError, UnsupportedError
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.model_check import bit_sum, weights_digest
from hf_hotspa.model.model_kind import other_half, quantized_files
from hf_hotspa.model.packed_layer import packed_layers, stored_tensors
from hf_hotspa.model.replica import to_storage
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.wrapped_model import BASE, bare_model, plain_name, saved_model

logger = logging.getLogger(__name__)

_MAX_LISTED = 3


# -- a model in memory ------------------------------------------------------------------------------------------------


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters for `MasterStore.fill`, under all of their names."""
    return dict(stored_tensors(model, remove_duplicate=False))


def fill_from_model(
    model: nn.Module, master: MasterStore, agreement: Agreement, group: dist.ProcessGroup | None
) -> tuple[str, bool]:
    """Copies each rank's share from a model that all ranks hold; from rank 0's if they differ. Collective. Returns
    `weights_digest` of this rank's model, which costs a pass over its weights; and whether all ranks had the same."""
    digest = weights_digest(model)
    tensors = whole_parameters(model)
    # compared on 52 bits, which float64 holds exactly
    digests = agreement.gather([float(int(digest[:13], 16))])
    if len(set(digests[:, 0].tolist())) == 1:
        master.fill(tensors)
        return digest, True
    if agreement.rank == 0:
        logger.warning("ranks hold different initial weights (seed?): rank 0's weights are used")
    for spec in master.vector.specs:
        tensor = tensors[spec.name].to(master.compute_device, copy=True).contiguous()
        dist.broadcast(tensor, src=0, group=group)
        master.fill({spec.name: tensor})
    return digest, False


def write_to_model(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights into a model's parameters. Raises `ModelError`: its parameters are on the meta device."""
    if not has_weights(model):
        raise ModelError("the model is on the meta device", fix="give its parameters memory (trainer.materialize())")
    targets = dict(model.named_parameters(remove_duplicate=False))
    packed = packed_layers(model)
    with torch.no_grad():
        for name, whole in weights:
            module, _, leaf = name.rpartition(".")
            if module in packed and (leaf == packed[module].leaf or name not in targets):
                packed[module].write(model.get_submodule(module), leaf, whole)
            else:
                targets[name].copy_(whole)


# -- a model without its weights --------------------------------------------------------------------------------------


def open_model(folder: Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Makes a folder's model without its weights: parameters on the meta device, buffers as its class computes them.
    `folder`: with a `config.json` and weights. `config`: replaces the folder's config; sets the model's dtype. Returns
    the model that `from_pretrained` makes, in the dtype of its config, or else of its weights. Raises `HotspaError`:
    the folder has no causal language model, or one that cannot be read by slices; see `WeightFiles`."""
    files = WeightFiles(folder)
    try:
        if config is None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config = deepcopy(config)
        if getattr(config, "quantization_config", None) is not None:
            raise quantized_files(folder)
        if config.dtype is None:
            known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
            config.dtype = next((known[t.dtype] for t in files.tensors.values() if t.dtype in known), torch.float32)
        # buffers are computed and small
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if idle := other_half(model):
            raise UnsupportedError(
                f"{type(model).__name__} has {len(idle)} parameters outside its language model, the first {next(iter(idle))!r}",
                where=str(folder),
                why="reading by slices supports only text models",
                fix="load the model in every process (from_pretrained), and pass it to the trainer",
            )
        generation = folder / "generation_config.json"
        if model.can_generate() and generation.is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except HotspaError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no causal language model can be made from its config: {error}",
            where=str(folder),
            fix="give a folder with the config.json of a model that transformers itself knows",
        ) from error
    model.tie_weights()  # moving to the meta device cut the ties
    _keep_in_fp32(model)
    return model


def _keep_in_fp32(model: PreTrainedModel) -> None:
    plan = model._get_dtype_plan(model.dtype)
    if plan:
        pattern = build_glob_alternation(list(plan))[0]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if pattern.search(name):
                tensor.data = tensor.data.float()


def has_weights(model: nn.Module) -> bool:
    """Whether a model is not on the meta device."""
    return not any(p.is_meta for p in model.parameters())


# -- from files to a model's names ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conversion:
    """Saved tensors from which transformers makes one or more model tensors (such as fused experts)."""

    converter: WeightConverter
    target: str
    dtype: torch.dtype
    sources: list[tuple[str, str]]
    """`(pattern of the converter, saved name)` in the order of the files."""

    def run(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name).to(self.dtype))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: tensors[0] if isinstance(tensors, list) else tensors for name, tensors in made.items()}


class SavedModel:
    """A model's weights in files: maps the tensors of a folder to the model's. Raises `ModelError`: a weight is
    missing, of another shape or not floating-point, or the files have an unexpected one. `model`: with or without
    weights; records how its names were changed, for `save_pretrained`."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles) -> None:
        self.files, self._model = files, model
        self._expected: dict[str, Tensor] = model.state_dict()
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._sources: dict[str, str | _Conversion] = {}
        self._made: tuple[_Conversion, dict[str, Tensor]] | None = None
        self._check(self._match())

    def buffers(self) -> dict[str, Tensor]:
        """The complete saved buffers by name."""
        return {
            name: self._source(name, None, 0, tensor.numel()).view(tensor.shape)
            for name, tensor in self._expected.items()
            if name not in self._parameters and name in self._sources
        }

    def read(self, spec: ParameterSpec, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of a parameter in storage order. Returns 1-D, on the CPU, in the dtype of the model.
        See `WeightFiles.read`. Raises `ModelError`: tied names were saved with different values. Raises
        `DamagedCheckpointError`: a file cannot be read."""
        name, *others = [name for name in (spec.name, *spec.tied_names) if name in self._sources]
        tensor = self._source(name, spec.shard_dim, start, stop)
        for other in others:
            if not torch.equal(tensor, self._source(other, spec.shard_dim, start, stop)):
                raise ModelError(
                    f"{other!r} and {name!r} are tied, but saved with different values",
                    where=str(self.files.folder),
                    why="training would use one of them for both",
                    fix="set tie_word_embeddings=False in its config",
                )
        return tensor

    def _match(self) -> dict[str, str]:
        model, expected, prefix = self._model, self._expected, self._model.base_model_prefix
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        conversions: dict[str, _Conversion] = {}
        unexpected: dict[str, str] = {}
        for saved in sorted(self.files.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(saved, renamings, converters, prefix, expected)
            if name not in expected and saved in expected:  # saved under the in-memory names
                name, pattern = rename_source_key(saved, [], [], prefix, expected)
            if name not in expected:
                unexpected[name] = saved
            elif pattern is None:
                self._sources.setdefault(name, saved)
            else:
                new = _Conversion(by_pattern[pattern], name, expected[name].dtype, [])
                conversions.setdefault(name, new).sources.append((pattern, saved))
        for conversion in conversions.values():
            for name in self._dry_run(conversion):
                self._sources[name] = conversion
        model._weight_conversions = [t for t in transforms if t.was_used()]
        return unexpected

    def _dry_run(self, conversion: _Conversion) -> Mapping[str, Tensor]:
        """A conversion's results without data; checks their shapes."""

        def empty(name: str) -> Tensor:
            return torch.empty(self.files.tensors[name].shape, device="meta")

        first = conversion.sources[0][1]
        try:
            made = conversion.run(self._model, empty)
        except Exception as error:  # any error of a transformers operation
            raise ModelError(
                f"{conversion.target!r} cannot be made of {first!r} and {len(conversion.sources) - 1} more: {error}",
                where=self._where(first),
            ) from error
        for name, tensor in made.items():
            self._check_shape(name, tuple(tensor.shape), first)
        return made

    def _check(self, unexpected: dict[str, str]) -> None:
        for name, source in self._sources.items():
            if isinstance(source, str):
                self._check_shape(name, self.files.tensors[source].shape, source)
        missing = set(self._expected) - set(self._sources)
        tied: dict[int, set[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), set()).add(name)
        for names in tied.values():
            if not names <= missing:
                missing -= names
        info = LoadStateDictInfo(
            missing_keys=missing - self._parameters,
            unexpected_keys=set(unexpected),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            **{f.name: set() for f in fields(LoadStateDictInfo) if f.name == "skipped_pp_keys"},  # newer releases
        )
        self._model._adjust_missing_and_unexpected_keys(info)  # the class's optional and ignored keys
        lost = sorted((missing & self._parameters) | info.missing_keys)
        if lost:
            raise ModelError(
                f"the files have no tensor for {_some(lost)} of {type(self._model).__name__}",
                where=str(self.files.folder),
                why="it would be trained from random values",
                fix="give a folder with the complete model, or a config that fits it",
            )
        if info.unexpected_keys:
            left = sorted(unexpected[name] for name in info.unexpected_keys)
            raise ModelError(
                f"{_some(left)} has no place in {type(self._model).__name__}",
                where=self._where(left[0]),
                why="part of the saved model would be lost",
                fix="give a config that fits the files, or save the model without it",
            )

    def _check_shape(self, name: str, shape: tuple[int, ...], saved: str) -> None:
        expected, dtype = self._expected.get(name), self.files.tensors[saved].dtype
        floating = dtype.startswith(("F", "BF"))
        if expected is not None and shape == expected.shape and (floating or not expected.is_floating_point()):
            return
        wanted = "missing" if expected is None else f"{dtype_name(expected.dtype)} {list(expected.shape)}"
        raise ModelError(
            f"{saved!r} is {dtype} {list(shape)}, and {name!r} of {type(self._model).__name__} is {wanted}",
            where=self._where(saved),
            fix="give the config of the saved model",
        )

    def _source(self, name: str, shard_dim: int | None, start: int, stop: int) -> Tensor:
        source = self._sources[name]
        if isinstance(source, str):
            tensor = self.files.read(source, shard_dim, start, stop)
        else:
            if self._made is None or self._made[0] is not source:
                self._made = None  # frees the old one first
                self._made = source, source.run(self._model, self.files.whole)
            tensor = to_storage(self._made[1][name], shard_dim)[start:stop]
        return tensor.to(self._expected[name].dtype)

    def _where(self, saved: str) -> str:
        return str(self.files.folder / self.files.tensors[saved].file)


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - _MAX_LISTED} more)" if len(names) > _MAX_LISTED else ""
    return ", ".join(map(repr, names[:_MAX_LISTED])) + more


@torch.no_grad()
def load_weights(folder: Path, model: nn.Module, master: MasterStore, agreement: Agreement) -> None:
    """Fills this rank's share of the master store, and the model's saved buffers, from a folder. Collective. `model`:
    from `open_model`, or a chain of modules. `master`: the store to fill, made from that model. Raises `HotspaError`: on
    every rank; see `WeightFiles` and `SavedModel`."""
    inside, prefix = saved_model(model)

    def read(saved: SavedModel, share: MasterShare) -> Tensor:
        spec = _renamed(share.spec, lambda own: own.removeprefix(prefix))
        return saved.read(spec, share.start, share.stop)

    _fill(master, agreement, lambda: SavedModel(inside, WeightFiles(folder)), inside, read)


def _fill(
    master: MasterStore,
    agreement: Agreement,
    opened: Callable[[], SavedModel],
    model: nn.Module,  # gets the saved buffers
    read: Callable[[SavedModel, MasterShare], Tensor],
) -> None:
    saved = agreement.run("loading weights", opened, lambda saved: {"files of weights": saved.files.digest()})

    def fill() -> None:
        master.frozen_version += 1
        for name, buffer in saved.buffers().items():
            model.get_buffer(name).copy_(buffer)
        for name, share in master.shares.items():
            if share.stop > share.start:
                master.parameters[name].copy_(read(saved, share))

    agreement.run("loading weights", fill)


def _renamed(spec: ParameterSpec, inside: Callable[[str], str]) -> ParameterSpec:
    return replace(spec, name=inside(spec.name), tied_names=tuple(map(inside, spec.tied_names)))


# -- a packed base ----------------------------------------------------------------------------------------------------

# A packed base below an adapter, too large for one process: each rank reads its elements from plain files and packs them.

_WRAP = 1 << 64


@torch.no_grad()
def load_below_adapter(folder: Path, model: nn.Module, master: MasterStore, agreement: Agreement) -> str:
    """Fills this rank's share of the master store: the base from a folder, the adapter from memory. Collective.
    `model`: without the weights of its base. Returns the `frozen_digest` of the same base in memory. Raises
    `HotspaError`: on every rank; see `WeightFiles` and `SavedModel`."""
    bare, prefix = bare_model(model)
    layers = {f"{prefix}{name}": layer for name, layer in packed_layers(bare).items()}
    given = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}

    def plain(name: str) -> str:
        inside = name.removeprefix(prefix).split(".")
        return plain_name(".".join(part for part in inside if part != BASE))

    def opened() -> SavedModel:
        config = bare.config.__class__.from_dict(
            {name: value for name, value in bare.config.to_dict().items() if name != "quantization_config"}
        )
        return SavedModel(open_model(folder, config), WeightFiles(folder))

    def read(saved: SavedModel, share: MasterShare) -> Tensor:
        name, spec, start, stop = share.spec.name, _renamed(share.spec, plain), share.start, share.stop
        if name in given:
            return to_storage(given[name].detach(), spec.storage_dim)[start:stop]
        if spec.packed is not None:
            return layers[name.rpartition(".")[0]].packed(spec, start, stop, saved.read)
        return saved.read(spec, start, stop)

    _fill(master, agreement, opened, bare, read)
    sums = {name: bit_sum(own) for name, own in master.parameters.items() if own.numel()}
    every = [json.loads(text) for text in agreement.texts(json.dumps(sums))]
    return _digest(model, {s.name: s for s in master.vector.specs if not s.trainable}, every)


def _digest(model: nn.Module, frozen: Mapping[str, ParameterSpec], sums: list[Mapping[str, int]]) -> str:
    """See `frozen_digest`; `sums` are of shares, by rank."""
    digest = hashlib.sha256()
    for name, tensor in stored_tensors(model):
        if name in frozen:
            total = sum(own.get(name, 0) for own in sums) % _WRAP
            total -= _WRAP if total >= _WRAP // 2 else 0
            digest.update(repr((name, tuple(tensor.shape), f"torch.{frozen[name].master_dtype}", total)).encode())
    return digest.hexdigest()
