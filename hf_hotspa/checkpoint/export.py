"""A checkpoint as a plain Hugging Face model: safetensors shards with their index, configs, tokenizer, model card.

Streams: one parameter after the other is put together from the ranks' shares and written, so that a model larger than
the memory can be exported. The result appears under its name when it is complete. Names are those of the model in
memory, as `save_pretrained(save_original_format=False)` writes them; of tied weights one is written, the one that
transformers keeps. A checkpoint of an adapter becomes what `PeftModel.save_pretrained` writes: one file of the trained
weights, and the adapter's config.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_hotspa.checkpoint.disk import DTYPES, Buffer, Disk, TensorRecord, directory_mode, open_inside, tensor_file
from hf_hotspa.checkpoint.manifest import BUFFERS, MODEL_FOLDER, Manifest, SavedParameter, verify
from hf_hotspa.checkpoint.tensors import ShareReader, tensor_bytes
from hf_hotspa.errors import HotspaConfigError

_CARD = """---
library_name: transformers
---

# {name}

A {model} trained with hf_hotspa {version} (not affiliated with Hugging Face), exported from step {step}.

- strategies: {strategies}
- ranks: {world}
- dtype of the weights: {dtype}
"""
_ADAPTER_CARD = """---
library_name: peft
---

# {name}

A LoRA adapter for {model}, trained with hf_hotspa {version} (not affiliated with Hugging Face), exported from step {step}.

- strategies: {strategies}
- ranks: {world}
- dtype of the weights: {dtype}
"""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names."""
_CHUNK = 16 << 20
MAX_SHARD_BYTES = 5 * 10**9


def export(
    checkpoint: Path,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    mode: int | None = None,
) -> list[Path]:
    """Writes the model of a checkpoint so that `from_pretrained` loads it (that of `PeftModel` for an adapter).

    Args:
        checkpoint: The checkpoint; it is verified first.
        target: A directory that does not exist, or is empty.
        max_shard_bytes: A file is closed before it grows beyond this; a larger parameter has a file of its own.
        dtype: Of the exported floating-point weights; that of the model which was trained when None.
        mode: The permissions of the directory; those of a new one when None, which is not for threads.

    Returns:
        The files of weights.

    Raises:
        DamagedCheckpointError: the checkpoint does not verify.
        HotspaConfigError: the target is in use, or the dtype is none.
        OSError: the disk refuses.
    """
    if dtype is not None and not (dtype in DTYPES and getattr(torch, dtype).is_floating_point):
        raise HotspaConfigError(f"dtype {dtype!r}", fix="use float32, bfloat16, float16 or float64")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HotspaConfigError(f"{str(target)!r} exists", fix="name a new or an empty directory")
    manifest = verify(checkpoint)
    disk = Disk()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}"
    disk.make_directory(beside)
    try:
        names = _write_weights(disk, ShareReader(checkpoint, manifest), manifest, beside, max_shard_bytes, dtype)
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
    return [target / name for name in names]


def adapter_name(name: str) -> str:
    """The name of an adapter's parameter in PEFT's files, which leave out what the adapter is called in the model.

    Args:
        name: As in `PeftModel.named_parameters`.
    """
    return re.sub(r"\.(lora_[AB])\.[^.]+\.(?=weight$)", r".\1.", name)


def _is_adapter(manifest: Manifest) -> bool:
    return any(file.name == f"{MODEL_FOLDER}/{ADAPTER_CONFIG}" for file in manifest.files)


def _weight_record(parameter: SavedParameter, dtype: str | None, adapter: bool) -> TensorRecord:
    name = adapter_name(parameter.name) if adapter else parameter.exported_name
    return TensorRecord(name, dtype or parameter.model_dtype, parameter.shape)


def _num_bytes(record: TensorRecord) -> int:
    size = DTYPES[record.dtype][1]
    for dim in record.shape:
        size *= dim
    return size


def _write_weights(
    disk: Disk, reader: ShareReader, manifest: Manifest, folder: Path, max_shard_bytes: int, dtype: str | None
) -> list[str]:
    """The weights of a checkpoint; returns the names of the files."""
    adapter = _is_adapter(manifest)
    entries: list[tuple[TensorRecord, Any]] = [(_weight_record(p, dtype, adapter), p) for p in manifest.parameters]
    has_buffers = any(file.name == BUFFERS for file in manifest.files)
    if has_buffers:
        with safe_open(reader.folder / BUFFERS, framework="pt", device="cpu") as buffers:
            found = {name: buffers.get_tensor(name) for name in buffers.keys()}  # noqa: SIM118
        entries += [
            (TensorRecord(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor)
            for name, tensor in found.items()
        ]

    def data(source: SavedParameter | Tensor) -> Buffer:
        if isinstance(source, Tensor):
            return tensor_bytes(source)
        return tensor_bytes(reader.whole(source).to(getattr(torch, dtype or source.model_dtype)))

    if adapter:  # PEFT reads one file
        disk.write(folder, ADAPTER_WEIGHTS, tensor_file(entries, data))
        return [ADAPTER_WEIGHTS]
    return write_shards(disk, folder, entries, data, max_shard_bytes)


def write_shards(
    disk: Disk,
    folder: Path,
    entries: list[tuple[TensorRecord, Any]],
    data: Callable[[Any], Buffer],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Writes tensors as Hugging Face's safetensors files, with an index where there are several.

    Args:
        disk: Writes.
        folder: Where.
        entries: The tensors in the order of writing, each with anything that `data` understands.
        data: As of `tensor_file`; called once for each tensor, in order.
        max_shard_bytes: See `export`.

    Returns:
        The names of the files of tensors.
    """
    shards = list(_shards(entries, max_shard_bytes))
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        disk.write(folder, name, tensor_file(shard, data))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_num_bytes(record) for record, _ in entries)},
            "weight_map": {r.name: name for name, shard in zip(names, shards, strict=True) for r, _ in shard},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        disk.write(folder, "model.safetensors.index.json", [text.encode()])
    return names


def _shards(entries: list[tuple[TensorRecord, Any]], limit: int) -> Iterator[list[tuple[TensorRecord, Any]]]:
    shard: list[tuple[TensorRecord, Any]] = []
    size = 0
    for entry in entries:
        more = _num_bytes(entry[0])
        if shard and size + more > limit:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += more
    yield shard


def _write_others(disk: Disk, checkpoint: Path, manifest: Manifest, folder: Path, name: str, dtype: str | None) -> None:
    """Configs, tokenizer and whatever else transformers has written, as it is, and a model card."""
    model, first = "model", dtype or manifest.parameters[0].model_dtype
    for record in manifest.files:
        top, _, rest = record.name.partition("/")
        if top != MODEL_FOLDER or not rest:
            continue
        (folder / rest).parent.mkdir(parents=True, exist_ok=True)
        with open_inside(checkpoint, record.name) as file:
            if rest == ADAPTER_CONFIG:
                model = str(
                    json.loads(file.read()).get("base_model_name_or_path") or "the model that it was trained on"
                )
                file.seek(0)
            if rest != "config.json":
                disk.write(folder, rest, iter(lambda file=file: file.read(_CHUNK), b""))  # type: ignore[misc]
                continue
            config = json.loads(file.read())
        model = str((config.get("architectures") or [model])[0])
        disk.write(folder, rest, [(json.dumps({**config, "dtype": first}, indent=2) + "\n").encode()])
    if not (folder / "README.md").exists():
        card = (_ADAPTER_CARD if _is_adapter(manifest) else _CARD).format(
            name=name,
            model=model,
            version=manifest.versions.get("hf-hotspa", ""),
            step=manifest.step,
            strategies=manifest.strategies,
            world=manifest.world_size,
            dtype=first,
        )
        disk.write(folder, "README.md", [card.encode()])
