"""A base in 4 bits below an adapter that no process could hold: each rank reads what it owns from plain files and quantizes it.

`open_qlora` makes the model without the weights of its base; its adapter has them. Codes are those of `from_pretrained`, bit for
bit: blocks are quantized one by one. Scales that are quantized themselves depend on all scales of a weight, so that a rank reads
the weights whole, one at a time, of whose scales it owns some.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer

from hf_hotspa.engine.loading import SavedModel, open_model
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.replica import to_storage
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.adapters import bare_model, bit_sum
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.four_bit import FourBit, read_four_bit, scales_of, stored_tensors

_WRAP = 1 << 64


def open_qlora(folder: str | Path, adapter: Any, quantization: BitsAndBytesConfig) -> Any:
    """The `PeftModel` of a folder of plain weights, whose base is to be in 4 bits and has no weights yet (`hotspa_model_path`).

    The factors of the adapter are those that `get_peft_model(prepare_model_for_kbit_training(...))` draws from torch's random
    state; give all ranks the same.

    Args:
        folder: With the weights, not quantized.
        adapter: A `LoraConfig`.
        quantization: With `load_in_4bit`.

    Raises:
        HotspaError: as of `open_model`; the quantization is another one.
    """
    from peft import get_peft_model, prepare_model_for_kbit_training

    if not quantization.load_in_4bit:
        raise HotspaConfigError(
            "only 4 bits of bitsandbytes are quantized while they are read",
            fix="use BitsAndBytesConfig(load_in_4bit=True)",
        )
    model = open_model(Path(folder).expanduser())
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=None)
    model.is_loaded_in_4bit, model.hf_quantizer = True, quantizer  # PEFT asks, and the Trainer
    model.config.quantization_config = quantization
    with _staying_on_cpu():
        return get_peft_model(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), adapter)


@contextmanager
def _staying_on_cpu() -> Iterator[None]:
    """PEFT moves factors to the device of their base, which is none here."""
    kind: Any = nn.Module
    move = kind.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module if torch.device("meta") in (*args, kwargs.get("device")) else move(module, *args, **kwargs)

    kind.to = to
    try:
        yield
    finally:
        kind.to = move


@torch.no_grad()
def load_below_adapter(folder: Path, model: nn.Module, master: MasterStore, agreement: Agreement) -> str:
    """Fills this rank's share of the master store: the base from a folder, the adapter from memory. Collective.

    Args:
        model: Of `open_qlora`.

    Returns:
        What `frozen_digest` says of the same base in memory.

    Raises:
        HotspaError: on every rank; see `WeightFiles` and `SavedModel`.
    """
    bare, prefix = bare_model(model)
    layers = {f"{prefix}{name}": layer for name, layer in read_four_bit(bare).items()}
    given = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}

    def plain(name: str) -> str:
        return name.removeprefix(prefix).replace(".base_layer.", ".")

    def opened() -> SavedModel:
        config = bare.config.__class__.from_dict(
            {name: value for name, value in bare.config.to_dict().items() if name != "quantization_config"}
        )
        return SavedModel(open_model(folder, config), WeightFiles(folder))

    saved = agreement.run("loading weights", opened, lambda saved: {"files of weights": saved.files.digest()})

    def read() -> dict[str, int]:
        sums = {}
        for name, share in master.shares.items():
            if share.stop <= share.start:
                continue
            spec = replace(share.spec, name=plain(name), tied_names=tuple(map(plain, share.spec.tied_names)))
            if name in given:
                values = to_storage(given[name].detach(), spec.storage_dim)[share.start : share.stop]
            elif spec.packed is not None:
                values = _quantized(saved, spec, layers[name.rpartition(".")[0]], share.start, share.stop)
            else:
                values = saved.read(spec, share.start, share.stop)
            master.parameters[name].copy_(values)
            sums[name] = bit_sum(master.parameters[name])
        for name, buffer in saved.buffers().items():
            bare.get_buffer(name).copy_(buffer)
        return sums

    sums = agreement.run("loading weights", read)
    every = [json.loads(text) for text in agreement.texts(json.dumps(sums))]
    return _digest(model, {s.name: s for s in master.vector.specs if not s.trainable}, every)


def _digest(model: nn.Module, frozen: Mapping[str, ParameterSpec], sums: list[Mapping[str, int]]) -> str:
    """See `frozen_digest`; the sums are those of shares, by rank."""
    digest = hashlib.sha256()
    for name, tensor in stored_tensors(model):
        if name in frozen:
            total = sum(own.get(name, 0) for own in sums) % _WRAP
            total -= _WRAP if total >= _WRAP // 2 else 0
            digest.update(repr((name, tuple(tensor.shape), f"torch.{frozen[name].master_dtype}", total)).encode())
    return digest.hexdigest()


def _quantized(saved: SavedModel, spec: ParameterSpec, layer: FourBit, start: int, stop: int) -> Tensor:
    """Elements `[start, stop)` of the codes, or of the scales, of a weight in storage order."""
    from bitsandbytes.functional import quantize_4bit

    assert spec.packed is not None
    (rows, columns), block, dim = layer.shape, layer.block, spec.storage_dim
    are_scales = not spec.packed.weights
    nested = are_scales and layer.options["compress_statistics"]
    name = f"{spec.name.rpartition('.')[0]}.weight"
    by_columns = replace(spec, name=name, shape=layer.shape, packed=None, shard_dim=1)
    by_rows = replace(by_columns, shard_dim=None)
    # what is stored of one row, of one column of blocks, or of one block
    each = spec.row_size if dim is not None else 1 if are_scales else block // 2
    first, last = (0, spec.numel) if nested else (start // each, -(-stop // each))
    if nested:
        weights = saved.read(by_rows, 0, rows * columns)
    elif dim == 1:
        weights = saved.read(by_columns, first * block * rows, last * block * rows).view(-1, rows).t()
    else:
        of_one = columns if dim == 0 else block
        weights = saved.read(by_rows, first * of_one, min(last * of_one, rows * columns))
    codes, state = quantize_4bit(
        weights.to(layer.dtype).contiguous(),
        blocksize=block,
        compress_statistics=nested,
        quant_type=layer.quant_type,
    )
    made = scales_of(state) if are_scales else codes.reshape(-1)
    if dim is not None:
        per_row = rows if nested or dim == 1 else last - first
        made = to_storage(made.view(per_row, -1, *spec.shape[2:]), dim)
    begin = 0 if nested else first * each
    return made[start - begin : stop - begin]
