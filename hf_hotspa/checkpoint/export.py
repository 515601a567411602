"""A checkpoint as a plain Hugging Face model: safetensors shards with their index, configs, tokenizer, model card.

Streams: one parameter after the other is put together from the ranks' shares and written, so that a model larger than
the memory can be exported. The result appears under its name when it is complete. Names are those of the model in
memory, as `save_pretrained(save_original_format=False)` writes them (or, of a checkpoint that holds the model only,
those of its files); of tied weights one is written, the one that transformers keeps. A checkpoint of an adapter becomes
what `PeftModel.save_pretrained` writes: one file of the trained weights, and the adapter's config.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.checkpoint.format.disk import DTYPES, Buffer, Disk, TensorRecord, directory_mode, open_inside
from hf_hotspa.checkpoint.format.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BUFFERS,
    Manifest,
    SavedParameter,
    verify,
)
from hf_hotspa.checkpoint.model_files import MAX_SHARD_BYTES, Entries, adapter_name, named_shards, write_shards
from hf_hotspa.checkpoint.tensors import ShareReader, named_tensors, saved_tensors, tensor_bytes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.model.weight_files import WeightFiles

_CARD = """---
library_name: {library}
---

# {name}

A {what} trained with hf_hotspa {version} (not affiliated with Hugging Face), exported from step {step}.

- strategies: {strategies}
- ranks: {world}
- dtype of the weights: {dtype}
"""
_CHUNK = 16 << 20


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
        max_shard_bytes: As of `model_files`.
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
        weights = _from_masters if manifest.has_masters else _from_model_files
        entries, data = weights(checkpoint, manifest, dtype)
        shards = named_shards(entries, max_shard_bytes, manifest.is_adapter)
        write_shards(disk, beside, shards, data)
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


def _from_masters(checkpoint: Path, manifest: Manifest, dtype: str | None) -> tuple[Entries, Callable[[Any], Buffer]]:
    """The weights of a checkpoint, from the ranks' shares, and what gives their bytes."""
    reader, entries = ShareReader(checkpoint, manifest), Entries()
    for parameter in manifest.parameters:
        name = adapter_name(parameter.name) if manifest.is_adapter else parameter.exported_name
        entries.append((TensorRecord(name, dtype or parameter.model_dtype, parameter.shape), parameter))
    entries += named_tensors(saved_tensors(checkpoint, manifest, BUFFERS))

    def data(source: SavedParameter | Tensor) -> Buffer:
        if isinstance(source, Tensor):
            return tensor_bytes(source)
        return tensor_bytes(reader.whole(source).to(getattr(torch, dtype or source.model_dtype)))

    return entries, data


def _from_model_files(
    checkpoint: Path, manifest: Manifest, dtype: str | None
) -> tuple[Entries, Callable[[Any], Buffer]]:
    """The same from the model files of a checkpoint that has nothing else (`save_only_model`)."""
    files = WeightFiles(checkpoint, ADAPTER_WEIGHTS if manifest.is_adapter else None)
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
    """Configs, tokenizer and whatever else transformers has written, as it is, and a model card."""
    model, first = "model", dtype or manifest.parameters[0].model_dtype
    for name_in_checkpoint, rest in manifest.model_files():
        (folder / rest).parent.mkdir(parents=True, exist_ok=True)
        with open_inside(checkpoint, name_in_checkpoint) as file:
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
        disk.write(folder, "README.md", [card.encode()])
