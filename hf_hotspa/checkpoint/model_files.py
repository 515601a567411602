"""The weights of a model as files for `from_pretrained` (PEFT's, for an adapter), written as they are gathered.

Names are those that `save_pretrained` writes: weights that transformers fuses from several (fused experts) are split
again, and of tied weights only the one that transformers keeps is written. At most one weight has to be in memory.

`export` writes a checkpoint as a plain Hugging Face model: safetensors shards with their index, configs, tokenizer,
model card. It joins and writes one parameter at a time, so the model may be larger than the memory. The result appears
under its name when it is complete. Names are the names in memory, as `save_pretrained(save_original_format=False)`
writes them (or the names in the files of a checkpoint without shares). An adapter's checkpoint becomes what
`PeftModel.save_pretrained` writes: one file of the trained weights, and the adapter's config.

`merge` merges an adapter into its base with PEFT and writes a plain Hugging Face model. A packed base is dequantized
first, as transformers does it (`PreTrainedModel.dequantize`), and `B A` is added to the result: the weights that the
adapter was trained beside, not the original ones. The complete model is in memory, on the CPU.
"""

import copy
import itertools
import json
import logging
import math
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_hotspa.checkpoint.format.disk import (
    DTYPES,
    Buffer,
    Disk,
    FileRecord,
    TensorRecord,
    directory_mode,
    open_inside,
    tensor_file,
)
from hf_hotspa.checkpoint.format.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUFFERS,
    Manifest,
    SavedParameter,
    read_manifest,
    verify,
)
from hf_hotspa.checkpoint.tensors import ShareReader, named_tensors, saved_tensors, tensor_bytes
from hf_hotspa.costs.terms import form_of
from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.wrapped_model import bare_model, saved_model

logger = logging.getLogger(__name__)


MAX_SHARD_BYTES = 5 * 10**9  # a file is closed before it grows beyond this; a larger tensor has a file to itself

Weights = Iterable[tuple[str, Tensor]]
"""Every weight, complete, by its name in memory, in the order of the vector; each is valid until the next one."""

Entries = list[tuple[TensorRecord, Any]]  # tensors in the order of writing, each with a source of its bytes
Shards = list[tuple[str, Entries]]  # the files of a model: name and tensors


_IN_PEFT_FILES = (
    (r"\.(lora_[AB])\.[^.]+\.(?=weight$|bias$)", r".\1."),
    (r"\.(lora_embedding_[AB]|trainable_tokens_delta)\.[^.]+$", r".\1"),
    (r"\.lora_magnitude_vector\.[^.]+\.weight$", ".lora_magnitude_vector"),
    (r"\.modules_to_save\.[^.]+\.", "."),
)


def adapter_name(name: str) -> str:
    """Returns the name in PEFT's files, without the adapter's name, of a name in `PeftModel.named_parameters`."""
    for pattern, replacement in _IN_PEFT_FILES:
        name = re.sub(pattern, replacement, name)
    return name


def adapter_names(name: str, tied: Sequence[str]) -> list[str]:
    """Returns all names in PEFT's files of a parameter that has several in memory: a trained copy is saved for each."""
    return [adapter_name(each) for each in (name, *tied) if each == name or ".modules_to_save." in each]


def acting(model: Any) -> str:
    """The name of the adapter of a `PeftModel` that is trained: of several the one that acts."""
    names = list(model.peft_config)
    return str(names[0] if len(names) == 1 else next(iter(model.active_adapters)))


def folder_of(name: str) -> str:
    """Where `save_pretrained` of a `PeftModel` puts an adapter: `""`, or `name/` for one with another name than
    `default`."""
    return "" if name == "default" else f"{name}/"


def save_config(model: Any, folder: Path) -> None:
    """Writes `adapter_config.json` and the card of a `PeftModel` into an existing folder, as its `save_pretrained`
    does; of the adapters beside the trained one, which are frozen, the weights, too."""
    model.create_or_update_model_card(str(folder))
    bare, _ = bare_model(model)
    for name, given in model.peft_config.items():
        config, inside = copy.deepcopy(given), folder / folder_of(name)
        inside.mkdir(exist_ok=True)
        config.base_model_name_or_path = config.base_model_name_or_path or bare.__dict__.get("name_or_path") or None
        config.inference_mode = True
        mapping = {"base_model_class": type(bare).__name__, "parent_library": type(bare).__module__}
        config.save_pretrained(str(inside), auto_mapping_dict=mapping if config.task_type is None else None)
        if name != acting(model):
            frozen = {adapter_name(n): p.detach().contiguous() for n, p in weights_of(model, name).items()}
            save_file(frozen, inside / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def weights_of(model: Any, name: str) -> dict[str, Tensor]:
    own = re.compile(rf"\.lora_[AB]\.{re.escape(name)}\.weight$")
    return {name: parameter for name, parameter in model.named_parameters() if own.search(name)}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns what `save_pretrained` saves of a transformers model, by names in memory: each tied weight once."""
    state: dict[str, Tensor] = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    return state


class ModelWeights:
    """The weight files of a model, planned without its weights. `shards`: each tensor with its name in its file, and the
    name in memory of its source weight."""

    def __init__(
        self,
        # a transformers model, with weights or on the meta device; a chain around one; or a `PeftModel`, if `adapted`
        model: nn.Module,
        # in the order in which they are gathered; of an adapter the trained ones
        parameters: Sequence[ParameterSpec | SavedParameter],
        adapted: bool,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        (self._model, self._prefix), self._adapted = saved_model(model), adapted
        if adapted:
            named = dict(model.named_parameters())
            state: dict[str, Tensor] = {spec.name: named[spec.name] for spec in parameters}
        else:
            state = saved_state(self._model)
        weights = [self._inside(name) for spec in parameters for name in (spec.name, *spec.tied_names)]
        self._tied = {spec.name: spec.tied_names for spec in parameters}
        self._buffers = {name: state[name] for name in sorted(state.keys() - set(weights))}
        names = [*(name for name in weights if name in state), *self._buffers]
        empty = {name: torch.empty_like(state[name], device="meta") for name in names}
        self._dtypes = {name: tensor.dtype for name, tensor in empty.items()}
        self._converts = not adapted and self._is_convertible(empty)
        entries = [
            (record, (record.name, name))
            for name in names
            for record, _ in named_tensors(self._saved(name, empty[name]))
        ]
        self.shards = named_shards(
            entries, max_shard_bytes, f"{folder_of(acting(model))}{ADAPTER_WEIGHTS}" if adapted else None
        )

    def write(
        self, disk: Disk, folder: Path, weights: Weights | dict[str, Tensor], part: int = 0, parts: int = 1
    ) -> list[FileRecord]:
        """Writes every `parts`-th file, from number `part` on, from weights or the result of `hold`: the ranks share
        the work. The first part also writes the index."""
        stream = iter(weights.items() if isinstance(weights, dict) else self._made(weights, self.shards[part::parts]))

        def data(names: tuple[str, str]) -> Buffer:
            return tensor_bytes(next(tensor for name, tensor in stream if name == names[0]))

        return write_shards(disk, folder, self.shards, data, part, parts)

    def hold(self, weights: Weights, part: int = 0, parts: int = 1) -> dict[str, Tensor]:
        """Copies what `write` needs for its files to host memory, where later steps do not change it."""
        made = self._made(weights, self.shards[part::parts])
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in made}

    def differing(self, files: WeightFiles, weights: Weights) -> str | None:
        """Returns the saved name of the first tensor that differs in any bit from what `write` writes, or None.
        `weights`: the expected weights, including buffers, in the model's dtypes."""
        sources = {source for _, entries in self.shards for _, (_, source) in entries}
        missing = files.tensors.keys() ^ {record.name for _, entries in self.shards for record, _ in entries}
        for name, weight in ((self._inside(of_all), weight) for of_all, weight in weights):
            if name not in sources:
                continue
            sources.remove(name)
            for saved, tensor in self._saved(name, weight).items():
                if saved in missing or not _same_bits(files.whole(saved), tensor):
                    return saved
        return min(missing | sources, default=None)

    def _made(self, weights: Weights, shards: Shards) -> Iterator[tuple[str, Tensor]]:
        names = [names for _, entries in shards for _, names in entries]
        wanted, sources = {saved for saved, _ in names}, {source for _, source in names}
        inside = ((self._inside(name), tensor) for name, tensor in weights)
        for name, tensor in itertools.chain(inside, self._buffers.items()):
            if name in sources:
                made = self._saved(name, tensor.to(self._dtypes[name]))
                yield from ((saved, weight) for saved, weight in made.items() if saved in wanted)

    def _inside(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if self._adapted:
            return dict.fromkeys(adapter_names(name, self._tied[name]), tensor)
        return dict(revert_weight_conversion(self._model, {name: tensor})) if self._converts else {name: tensor}

    def _is_convertible(self, empty: dict[str, Tensor]) -> bool:
        """Whether any name changes, and each weight converts by itself. Otherwise (saved tensors that are split in
        memory) the names in memory stay: `from_pretrained` reads those, too."""
        try:
            whole = revert_weight_conversion(self._model, dict(empty))
            if whole.keys() == empty.keys():
                return False
            single = [revert_weight_conversion(self._model, {name: tensor}) for name, tensor in empty.items()]
        except Exception:  # whatever an operation of transformers raises when a part is missing
            return False
        converted = [(name, tensor.shape) for made in single for name, tensor in made.items()]
        return sorted(converted) == sorted((name, tensor.shape) for name, tensor in whole.items())


def check_rewritten(folder: Path, manifest: Manifest, model: nn.Module, failure: DamagedCheckpointError) -> None:
    """Checks that weight files written by another program hold the same weights as the ranks' shares. Raises
    `DamagedCheckpointError`: they do not, or (`failure`) cannot be compared. All other files match the manifest; `model`
    is like the saved one, for its names only."""
    reader = ShareReader(folder, manifest)
    weights = (
        (p.exported_name, reader.whole(p).to(getattr(torch, p.model_dtype))) for p in manifest.parameters
    )  # one at a time
    buffers = saved_tensors(folder, manifest, BUFFERS)
    try:
        files = WeightFiles(folder, manifest.adapter_weights)
        expected = ModelWeights(model, manifest.parameters, manifest.is_adapter)
        other = expected.differing(files, itertools.chain(weights, buffers.items()))
    except Exception as error:  # such as a model with other names, or an unreadable file
        raise failure from error
    if other is not None:
        raise DamagedCheckpointError(
            f"{failure.what}, and {other!r} in the files of weights is not as it was saved",
            where=str(folder),
            why="weights may be in different files than before, but must have the saved values",
            fix="start a new run with weights that were changed on purpose: from_pretrained, and no resume_from_checkpoint",
        )
    logger.info("%s: another program has written the files of weights; they hold the same", folder)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def named_shards(entries: Entries, limit: int = MAX_SHARD_BYTES, only: str | None = None) -> Shards:
    """Returns name and tensors of each file of a model, in order, or of the one file of an adapter (`only`); for `limit`
    see `MAX_SHARD_BYTES`."""
    if only is not None:
        return [(only, entries)]
    shards: list[Entries] = [[]]
    size = 0
    for entry in entries:
        more = _num_bytes(entry[0])
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += more
    if len(shards) == 1:
        return [("model.safetensors", shards[0])]
    return [(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", shard) for i, shard in enumerate(shards)]


def write_shards(
    disk: Disk, folder: Path, shards: Shards, data: Callable[[Any], Buffer], part: int = 0, parts: int = 1
) -> list[FileRecord]:
    """Writes every `parts`-th file of a model; the first part also writes the index if there are several files. `data`:
    as in `tensor_file`; called once for each tensor, in order."""
    records = []
    for name, entries in shards[part::parts]:
        inside = (folder / name).parent
        inside.mkdir(exist_ok=True)  # of an adapter with a name
        records.append(disk.write(folder, name, tensor_file(entries, data)))
        if inside != folder:
            disk.sync_directory(inside)
    if part == 0 and len(shards) > 1:
        tensors = [(record, name) for name, entries in shards for record, _ in entries]
        index = {
            "metadata": {"total_size": sum(_num_bytes(record) for record, _ in tensors)},
            "weight_map": {record.name: name for record, name in tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        records.append(disk.write(folder, "model.safetensors.index.json", [text.encode()]))
    return records


def _num_bytes(record: TensorRecord) -> int:
    return DTYPES[record.dtype][1] * math.prod(record.shape)


_CARD = """---
library_name: {library}
---

# {name}

A {what} trained with hf_hotspa {version} (not affiliated with Hugging Face), exported from step {step}.

- strategies: {strategies}
- ranks: {world}
- dtype of the weights: {dtype}
"""
_CARD_FILE = "README.md"
_CHUNK = 16 << 20


def export(
    checkpoint: Path,  # verified first
    target: Path,  # new, or empty
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,  # of the exported floating-point weights; None for the trained model's
    mode: int | None = None,  # the permissions of the directory; None for the default, which is not for threads
) -> list[Path]:
    """Writes the model of a checkpoint for `from_pretrained` (`PeftModel.from_pretrained` for an adapter). Raises
    `DamagedCheckpointError`: the checkpoint does not verify. Raises `HotspaConfigError`: the target is in use, or the
    dtype is not a floating-point dtype. Raises `OSError`: the disk fails."""
    if dtype is not None and not (dtype in DTYPES and getattr(torch, dtype).is_floating_point):
        raise HotspaConfigError(f"dtype {dtype!r}", fix="use float32, bfloat16, float16 or float64")
    _check_unused(target)
    manifest = verify(checkpoint)
    disk = Disk()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}"
    disk.make_directory(beside)
    try:
        own = manifest.adapter_weights
        if manifest.has_masters:
            entries, data = _from_masters(checkpoint, manifest, dtype)
        else:
            entries, data = _from_model_files(checkpoint, own, dtype)
        shards = named_shards(entries, max_shard_bytes, own)
        write_shards(disk, beside, shards, data)
        for other in manifest.frozen_adapters():
            entries, data = _from_model_files(checkpoint, other, dtype)
            write_shards(disk, beside, [(other, entries)], data)
        _write_others(disk, checkpoint, manifest, beside, target.name, dtype)
        beside.chmod(directory_mode() if mode is None else mode)
        disk.sync_directory(beside)
        if target.exists():
            target.rmdir()
        disk.rename(beside, target)
        disk.sync_directory(target.parent)
    except BaseException:
        if beside.exists():
            disk.remove(beside)
        raise
    return [target / name for name, _ in shards]


def _check_unused(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HotspaConfigError(f"{str(target)!r} exists", fix="name a new or an empty directory")


def _from_masters(checkpoint: Path, manifest: Manifest, dtype: str | None) -> tuple[Entries, Callable[[Any], Buffer]]:
    reader, entries = ShareReader(checkpoint, manifest), Entries()
    for parameter in manifest.parameters:
        names = [parameter.exported_name]
        if manifest.is_adapter:
            names = adapter_names(parameter.name, parameter.tied_names)
        kind = dtype or parameter.model_dtype
        entries += [(TensorRecord(name, kind, parameter.shape), parameter) for name in names]
    entries += named_tensors(saved_tensors(checkpoint, manifest, BUFFERS))

    def data(source: SavedParameter | Tensor) -> Buffer:
        if isinstance(source, Tensor):
            return tensor_bytes(source)
        return tensor_bytes(reader.whole(source).to(getattr(torch, dtype or source.model_dtype)))

    return entries, data


def _from_model_files(checkpoint: Path, only: str | None, dtype: str | None) -> tuple[Entries, Callable[[Any], Buffer]]:
    files = WeightFiles(checkpoint, only)
    kinds, entries = {kind: name for name, (kind, _) in DTYPES.items()}, Entries()
    for name, saved in files.tensors.items():
        own = kinds[saved.dtype]
        kept = dtype is None or not getattr(torch, own).is_floating_point
        entries.append((TensorRecord(name, own if kept else str(dtype), saved.shape), name))

    def data(name: str) -> Buffer:
        tensor = files.whole(name)
        return tensor_bytes(tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor)

    return entries, data


def _write_others(disk: Disk, checkpoint: Path, manifest: Manifest, folder: Path, name: str, dtype: str | None) -> None:
    model, first = "model", dtype or manifest.parameters[0].model_dtype
    for name_in_checkpoint, rest in manifest.model_files():
        if rest == _CARD_FILE:  # PEFT's, which says less
            continue
        (folder / rest).parent.mkdir(parents=True, exist_ok=True)
        with open_inside(checkpoint, name_in_checkpoint) as file:
            if rest.endswith(ADAPTER_CONFIG):
                of_base = json.loads(file.read()).get("base_model_name_or_path")
                model = str(of_base or "the model that it was trained on")
                file.seek(0)
            if rest != "config.json":
                disk.write(folder, rest, iter(lambda file=file: file.read(_CHUNK), b""))  # type: ignore[misc]
                continue
            config = json.loads(file.read())
        model = str((config.get("architectures") or [model])[0])
        disk.write(folder, rest, [(json.dumps({**config, "dtype": first}, indent=2) + "\n").encode()])
    card = _CARD.format(
        library="peft" if manifest.is_adapter else "transformers",
        name=name,
        what=f"LoRA adapter for {model}," if manifest.is_adapter else model,
        version=manifest.versions.get("hf-hotspa", ""),
        step=manifest.step,
        strategies=manifest.strategies,
        world=manifest.world_size,
        dtype=first,
    )
    disk.write(folder, _CARD_FILE, [card.encode()])


# -- merging an adapter into its base ---------------------------------------------------------------------------------


def merge(
    checkpoint: Path,  # of an adapter; verified first
    target: Path,  # new, or empty
    *,
    base: str | None = None,  # a folder or a name on the hub; None for the adapter config's
    # how the base was quantized at load (`--quantization`); None if it was not, or if its folder is
    quantization: str | None = None,
    double: bool = False,  # whether its scales were quantized, too
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,  # in which the base is loaded, dequantized and merged; None for its config's
) -> list[Path]:
    """Writes base and adapter as one plain model. Raises `DamagedCheckpointError`: the checkpoint does not verify.
    Raises `HotspaConfigError`: it holds no adapter, the base cannot be loaded or is quantized otherwise, or the target
    is in use. Raises `OSError`: the disk fails."""
    weights = read_manifest(checkpoint).adapter_weights
    if weights is None:
        raise HotspaConfigError(
            f"{str(checkpoint)!r} holds a complete model, not an adapter to merge", fix="leave --merge out"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        files, merged = Path(folder) / "adapter", Path(folder) / "merged"
        export(checkpoint, files)
        adapter = (files / weights).parent
        _check_unused(target)
        name = base or json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        model = _loaded(name, quantization, double, dtype)
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, adapter)
        if quantization is not None:
            form_of(quantization).plain(adapted)
        model = adapted.merge_and_unload()
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        if None not in ends and ends[0].weight is not ends[1].weight:  # one of tied weights was trained alone
            model.config.tie_word_embeddings = False
        model.save_pretrained(merged, max_shard_size=max_shard_bytes)
        for file in files.iterdir():  # such as the tokenizer
            is_adapter = (file / ADAPTER_CONFIG).is_file()
            if file.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, _CARD_FILE) and not is_adapter:
                shutil.move(file, merged / file.name)
        if target.exists():
            target.rmdir()
        merged.rename(target)
    return sorted(target.glob("*.safetensors"))


def _dequantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return model.dequantize(dtype)
    except NotImplementedError:  # transformers leaves it to weights of a library's class
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if type(weight) is not torch.nn.Parameter:
                    setattr(module, name, torch.nn.Parameter(weight.dequantize().to(dtype)))
        model.hf_quantizer.remove_quantization_config(model)
        return model


def _loaded(name: str | None, quantization: str | None, double: bool, dtype: str | None) -> Any:
    """The base in plain weights, dequantized if it is packed."""
    if name in (None, "", "None"):  # PEFT writes "None" for a model without a name
        raise HotspaConfigError("the adapter's config names no base model", fix="add --base FOLDER_OR_NAME")
    try:
        config = AutoConfig.from_pretrained(name)
        is_packed = getattr(config, "quantization_config", None) is not None
        if is_packed and quantization is not None:
            raise HotspaConfigError(f"{name!r} is quantized already", fix="leave --quantization out")
        kind = getattr(torch, dtype) if dtype is not None else config.dtype or torch.float32
        options = {"dtype": kind, "device_map": {"": "cpu"}}
        if quantization is not None:
            options["quantization_config"] = form_of(quantization).config(quantization, double)
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, HotspaConfigError):
            raise
        raise HotspaConfigError(
            f"the base model cannot be loaded: {error}", where=name, fix="add --base FOLDER_OR_NAME of the base model"
        ) from error
    if not is_packed and quantization is None:
        return model
    if quantization is not None:
        form_of(quantization).complete(model, quantization, double)
    model = _dequantized(model, kind)
    # transformers 5.23 cannot revert the reading of codes, and plain weights do not need it
    model._weight_conversions = [
        c
        for c in model._weight_conversions
        if not any(type(op).__module__.startswith("transformers.integrations.") for op in getattr(c, "operations", ()))
    ]
    return model
