"""The model that an adapter's checkpoint makes of its base: PEFT's own merge, written as a plain Hugging Face model.

A base in 4 bits is dequantized first, as transformers does it (`PreTrainedModel.dequantize`), and `B A` is added to what that
gives: to the weights that the adapter was trained beside, not to those that were quantized once. The whole model is in memory,
on the CPU.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hf_hotspa.checkpoint.format.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_manifest
from hf_hotspa.checkpoint.model_files import MAX_SHARD_BYTES, export
from hf_hotspa.errors import HotspaConfigError


def merge(
    checkpoint: Path,
    target: Path,
    *,
    base: str | None = None,
    quantization: str | None = None,
    double: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
) -> list[Path]:
    """Writes base and adapter as one plain model.

    Args:
        checkpoint: Of an adapter; it is verified first.
        target: A directory that does not exist, or is empty.
        base: A folder or a name on the hub; that of the adapter's config when None.
        quantization: In what the base was loaded, `nf4` or `fp4`; None where it was not quantized, or its folder is.
        double: Whether its scales were quantized, too.
        max_shard_bytes: Of a file of weights.
        dtype: In which the base is loaded, dequantized and merged; that of its config when None.

    Returns:
        The files of weights.

    Raises:
        DamagedCheckpointError: the checkpoint does not verify.
        HotspaConfigError: it holds no adapter, the base cannot be loaded or is quantized otherwise, or the target is in use.
        OSError: the disk refuses.
    """
    if not read_manifest(checkpoint).is_adapter:
        raise HotspaConfigError(
            f"{str(checkpoint)!r} holds a whole model, and no adapter to be merged", fix="leave --merge out"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        adapter, merged = Path(folder) / "adapter", Path(folder) / "merged"
        export(checkpoint, adapter)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise HotspaConfigError(f"{str(target)!r} exists", fix="name a new or an empty directory")
        name = base or json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        model = _merged(_loaded(name, quantization, double, dtype), adapter)
        model.save_pretrained(merged, max_shard_size=max_shard_bytes)
        for file in adapter.iterdir():  # the tokenizer, and the like
            if file.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md"):
                shutil.move(file, merged / file.name)
        if target.exists():
            target.rmdir()
        merged.rename(target)
    return sorted(target.glob("*.safetensors"))


def _loaded(name: str | None, quantization: str | None, double: bool, dtype: str | None) -> Any:
    """The base in plain weights, those of its codes where it is in 4 bits."""
    if name in (None, "", "None"):  # PEFT writes the name of a model without one so
        raise HotspaConfigError("the adapter's config names no base model", fix="add --base FOLDER_OR_NAME")
    try:
        config = AutoConfig.from_pretrained(name)
        is_packed = getattr(config, "quantization_config", None) is not None
        if is_packed and quantization is not None:
            raise HotspaConfigError(f"{name!r} is quantized already", fix="leave --quantization out")
        kind = getattr(torch, dtype) if dtype is not None else config.dtype or torch.float32
        options = {"dtype": kind, "device_map": {"": "cpu"}}
        if quantization is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_use_double_quant=double
            )
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, HotspaConfigError):
            raise
        raise HotspaConfigError(
            f"the base model cannot be loaded: {error}", where=name, fix="add --base FOLDER_OR_NAME of the base model"
        ) from error
    if not is_packed and quantization is None:
        return model
    model = model.dequantize(kind)
    # reading codes has no way back in transformers 5.23, and plain weights need none
    packs = [
        c for c in model._weight_conversions if any("4bit" in type(op).__name__ for op in getattr(c, "operations", ()))
    ]
    model._weight_conversions = [c for c in model._weight_conversions if c not in packs]
    return model


def _merged(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter).merge_and_unload()
