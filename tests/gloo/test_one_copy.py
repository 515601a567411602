"""Frozen weights that all strategies of a run have complete exist once on a rank: their bytes."""

import pytest
import torch

import hf_hotspa.engine.switching as switching
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.model.packed_layer import stored_tensors
from tests.gloo.test_qlora_memory import SIZES, Beside, rows_of, storage_bytes
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.qlora import tiny_qlora
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
LENGTH = 16
MODEL = SIZES | {"vocab_size": 2048}  # as in large models, embeddings are a third of a quantized base


def adapted(kind):
    return tiny_qlora(FAMILY, model=MODEL, lora={"r": 1}) if kind == "qlora" else tiny_lora(FAMILY, model=MODEL, r=1)


def peaks(rank, world_size, kind, buckets):
    """Bytes of a step without the optimizer: of PEFT alone, of the engine with one copy and with two; and the bytes of the
    model states in the memory model."""
    rows = rows_of(LENGTH, world_size)
    model = adapted(kind)
    held = [tensor for _, tensor in stored_tensors(model)]
    with Beside(held) as allocated:
        ids = torch.tensor([rows[rank]["input_ids"]])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = [storage_bytes(held) + allocated.peak]
    for copies in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if copies == 2:  # in the master store, and in the running strategy
                patch.setattr(switching, "held_in_place", lambda *_: frozenset())
            engine = make_engine(adapted(kind), buckets, staging_bytes=1 << 16)
        store = [own for own in engine.master.weights + engine.master.gradients if own is not None]
        with Beside(store) as allocated:
            engine.forward_backward(make_mini_batch(engine, rows))
        found.append(storage_bytes(store) + allocated.peak)
        sizes = ModelSizes(engine.description.shape, "float32", vector=engine.description.vector)
        cost = CostModel.of_hardware(load_hardware("a800"), sizes, MemoryOptions(), world_size)
        need = cost.rank_bytes(engine.buckets)[0]
        forecast = engine.phases[engine.buckets[0].strategy].forecast
        found.append((forecast.master_weights + forecast.weights, need.master_weights + need.weights))
        engine.close()
    return found


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_one_process_takes_no_more_than_peft_alone(kind):
    for alone, once, forecast, twice, _ in run_ranks(1, peaks, kind, f"dp1:{LENGTH}@{LENGTH}"):
        print(f"{kind}: {once / alone:.3f} of PEFT alone, before {twice / alone:.3f}")
        assert once <= 1.05 * alone
        assert twice >= 1.3 * alone
        assert forecast[0] == pytest.approx(forecast[1], rel=1e-3)
