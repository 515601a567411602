"""Frozen weights that all strategies of a run have complete exist once on a rank: their bytes, steps and later changes."""

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
from tests.lora import tiny_lora, trained
from tests.oracle import random_rows
from tests.qlora import tiny_qlora
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
LENGTH = 16
MODEL = SIZES | {"vocab_size": 2048}  # as in large models, embeddings are a third of a quantized base


def adapted(kind, model=None, r=3):
    if kind == "qlora":
        return tiny_qlora(FAMILY, model=model, lora={"r": r})
    return tiny_lora(FAMILY, torch.float32, model=model, r=r)


def engine_of(model, buckets, copies, **options):
    """With one copy of the frozen weights, or with two: in the master store and in the running strategy."""
    with pytest.MonkeyPatch.context() as patch:
        if copies == 2:
            patch.setattr(switching, "held_in_place", lambda *_: frozenset())
        return make_engine(model, buckets, **options)


def peaks(rank, world_size, kind, buckets):
    """Bytes of a step without the optimizer: of PEFT alone, of the engine with one copy and with two; and the bytes of the
    model states in the memory model."""
    rows = rows_of(LENGTH, world_size)
    model = adapted(kind, MODEL, r=1)
    held = [tensor for _, tensor in stored_tensors(model)]
    with Beside(held) as allocated:
        ids = torch.tensor([rows[rank]["input_ids"]])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = [storage_bytes(held) + allocated.peak]
    for copies in (1, 2):
        engine = engine_of(adapted(kind, MODEL, r=1), buckets, copies, staging_bytes=1 << 16)
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


def several_steps(rank, world_size, cases, steps):
    """By case: whether losses, adapters and what is written back are equal bit for bit with one copy and with two."""
    found = {}
    for kind, buckets, options in cases:
        runs = []
        for copies in (1, 2):
            model = adapted(kind)
            engine = engine_of(model, buckets, copies, **options)
            optimizer = torch.optim.AdamW(engine.parameter_groups(), lr=0.01)
            losses, moved = [], 0
            for step in range(steps):
                if step == steps // 2:  # other frozen weights, as a callback or a checkpoint brings them
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            if name.endswith("norm.weight"):
                                parameter.mul_(1.5)
                    engine.master.fill({n: p.detach() for n, p in stored_tensors(model) if not p.requires_grad})
                mini_batch = make_mini_batch(engine, random_rows(6, model.config.vocab_size, longest=60, seed=step))
                if step == steps // 4:
                    with engine.evaluation() as evaluation:
                        losses.append(evaluation.run(mini_batch).loss_sum)
                report = engine.forward_backward(mini_batch)
                losses.append(report.loss)
                moved += report.frozen_bytes
                optimizer.step()
            engine.write_back(model)
            frozen = [(name, whole.clone()) for name, whole in engine.weights()]
            runs.append((losses, trained(model), dict(frozen), moved, len(engine.master.in_place)))
            engine.close()
        (a, b, c, moved, in_place), (d, e, f, before, _) = runs
        same = a == d and all(torch.equal(b[n], e[n]) for n in b) and all(torch.equal(c[n], f[n]) for n in c)
        found[kind, buckets] = same and len(set(a)) > 0.75 * steps, in_place, moved, before
    return found


MIXED = "dp2:16@32,cp2+rc:60"


def check_steps(world_size, cases, steps=20):
    for found in run_ranks(world_size, several_steps, cases, steps, timeout=280):
        for (kind, buckets), (same, in_place, moved, before) in found.items():
            assert same, (kind, buckets)
            if "z3" in buckets:
                assert (in_place, moved) == (0, before)
            elif "tp" in buckets:  # what tp does not cut is in place
                assert 0 < moved <= before
            else:
                assert in_place > 0
                assert moved == 0
                assert (before > 0) == (world_size > 1)


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_are_the_same_bit_for_bit(steps):
    check_steps(2, [("qlora", MIXED, {"overlap_load": True, "overlap_return": True})], steps)


@pytest.mark.slow
def test_steps_of_other_runs_are_the_same_bit_for_bit():
    check_steps(1, [(kind, "dp1:16@32,dp1+rc:60", {}) for kind in ("lora", "qlora")])
    check_steps(2, [("lora", MIXED, {})])
    others = ("dp4:16@32,dp2cp2:30,cp4+rc:60", "dp4+z2:60", "dp4:16@32,dp2tp2:60", "dp4:16@32,dp4+z3:60")
    check_steps(4, [(kind, buckets, {}) for kind in ("lora", "qlora") for buckets in others])
