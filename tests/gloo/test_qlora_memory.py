"""QLoRA: no more than one weight is dequantized at a time, and a run takes what the memory model says, within 5 %."""

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import hf_hotspa.calibrate.model_calibration as calibration_of
from hf_hotspa.calibrate import probe
from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
from hf_hotspa.costs.calibration import FrozenBase
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.packed_linears import unpacked
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.model.packed_layer import stored_tensors
from tests.gloo.test_fully_sharded_memory import Allocated
from tests.harness import run_ranks
from tests.qlora import EIGHT_BITS, tiny_qlora
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 512,
    "max_position_embeddings": 1024,
}  # fmt: skip
LORA = {"r": 8, "lora_alpha": 16}


class Dequantized(Allocated):
    """Also counts the bytes that are alive of weights that were dequantized, and of casts of them.

    Attributes:
        most: The most at a time.
        count: How many were made.
    """

    def __init__(self):
        super().__init__()
        self.most = self.count = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        of_codes = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.int8
        if of_codes or (func.namespace == "bitsandbytes" and "dequantize" in func.name()):
            storage = out.untyped_storage()
            self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.count += 1
            self.most = max(self.most, sum(size for _, size in self._made.values()))
        return out


def rows_of(length, count):
    return [{"input_ids": ids, "labels": ids} for n in range(count) for ids in [[n + 1] * length]]


def dequantized(rank, world_size, cases):
    """By family and strategy: the most bytes of dequantized weights at a time, how many were made in a step, and the weights of
    the largest one."""
    found = {}
    for family, strategy, config in cases:
        engine = make_engine(tiny_qlora(family, **config), f"{strategy}:24@24")
        mini_batch = make_mini_batch(engine, rows_of(24, 2 * world_size))
        with Dequantized() as counted:
            engine.forward_backward(mini_batch)
        sizes = ModelSizes(engine.description.shape, "float32", vector=engine.description.vector)
        found[family, strategy] = counted.most, counted.count, unpacked(sizes, engine.buckets[0].strategy.tp)
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", *EIGHT_BITS])
def test_one_dequantized_weight_at_a_time(form):
    config = {"model": SIZES, "lora": LORA, "quantization": EIGHT_BITS.get(form)}
    for found in run_ranks(2, dequantized, [(FAMILY, strategy, config) for strategy in ("tp2+rc", "dp2+z3")]):
        for (_, strategy), (most, count, weights) in found.items():
            assert count >= 2 * 7 * SIZES["num_hidden_layers"] / 2, strategy  # forward and backward
            assert most == 4 * weights == 4 * 256 * 768 / (2 if "tp2" in strategy else 1), strategy


def storage_bytes(tensors):
    """Of the storages of tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Beside(Allocated):
    """Counts what is made of new storages; views of those that are there are none."""

    def __init__(self, there):
        super().__init__()
        self._alive = {t.untyped_storage()._cdata: (StorageWeakRef(t.untyped_storage()), 0) for t in there}


class Tracked:
    """`PeakMemory` that counts storages: resident pages of tiny models are off by more than is asked here."""

    works = True

    def __init__(self, device):
        self._mode = Allocated()

    def start(self):
        self._mode.__enter__()

    def stop(self):
        self._mode.__exit__(None, None, None)
        return self._mode.peak


def peaks(rank, world_size, folder, lengths, form):
    """By strategy and length: bytes that a step takes, and those of the memory model; without the optimizer."""
    calibration_of.PeakMemory = probe.PeakMemory = Tracked
    given = {"model": SIZES, "lora": LORA, "quantization": EIGHT_BITS.get(form)}
    config = tiny_qlora(FAMILY, **given).config
    procedure = Procedure(1, max(lengths), max(lengths))
    calibration = calibrate(config, base=FrozenBase(form, LORA["r"]), cache=Path(folder), procedure=procedure)
    found = {}
    for strategy in dict.fromkeys((f"dp{world_size}", f"dp{world_size}+rc", f"tp{world_size}", f"dp{world_size}+z3")):
        for length in lengths:
            model = tiny_qlora(FAMILY, **given)
            engine = make_engine(model, f"{strategy}:{length}@{length}", staging_bytes=1 << 16)
            store = [share for share in engine.master.weights + engine.master.gradients if share is not None]
            mini_batch = make_mini_batch(engine, rows_of(length, world_size))
            with Beside([*store, *(tensor for _, tensor in stored_tensors(model))]) as allocated:
                engine.forward_backward(mini_batch)
            sizes = ModelSizes(engine.description.shape, "float32", vector=engine.description.vector)
            memory = calibration.memory_model(sizes, MemoryOptions(switch_bytes=2 << 16))
            (bucket,) = engine.buckets
            predicted = memory.breakdown(bucket.strategy, length, longest=length)
            states = storage_bytes(store)
            found[strategy, length] = states + allocated.peak, predicted.total - predicted.optimizer
            engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "form"), [(1, "nf4"), (2, "nf4"), (2, "int8"), (2, "int8_weight_only")])
def test_peaks_are_those_of_the_memory_model(world, form, tmp_path):
    for found in run_ranks(world, peaks, str(tmp_path), [256, 1024], form, timeout=500):
        print(*(f"{case}: {a / b:.3f}" for case, (a, b) in found.items()), sep="\n")
        off = {case: taken / predicted - 1 for case, (taken, predicted) in found.items()}
        assert all(abs(share) <= 0.05 for share in off.values()), off
