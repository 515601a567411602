"""Frozen weights stay what was loaded, bit for bit, whatever strategies compute in: in the store, resumed and exported."""

import pytest
import torch
from safetensors.torch import load_file

from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.costs.sizes import ModelSizes
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.training_runs import make_trainer

pytestmark = pytest.mark.gloo

FAMILY, FROZEN = "llama_gqa_bias", "model.layers.0."


def frozen_trainer(folder, world, steps):
    trainer = make_trainer(folder, world, family=FAMILY, bf16=True, max_steps=steps, save_steps=1)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return trainer


def runs(rank, world, folder):
    """Whether the frozen weights have their bits: in the store, after a run, and after one that was resumed."""
    original = {n: p.detach().clone() for n, p in tiny_model(FAMILY).named_parameters() if n.startswith(FROZEN)}
    found = []
    for steps in (1, 2):
        trainer = frozen_trainer(folder, world, steps)
        trainer.train(resume_from_checkpoint=steps > 1)
        store = {name: whole.clone() for name, whole in trainer.engine.weights()}
        found.append(all(torch.equal(store[name], value) for name, value in original.items()))
        trained = dict(trainer.model.named_parameters())
        found.append(all(torch.equal(trained[name], value) for name, value in original.items()))
        vector = trainer.engine.description.vector
        segments = {(s.dtype, s.master_dtype) for s in vector.segments if not s.trainable}
        planned = ModelSizes(trainer.engine.description.shape, "bfloat16", vector=vector).master(world).weight_bytes
        counted = next(iter(trainer.engine.phases.values())).forecast.master_weights
        held = sum(share.nbytes for share in trainer.engine.master.weights if share is not None)
        trainer.close_engine()
    return found, segments, counted == held <= planned


def test_fp32_weights_that_are_frozen_stay_fp32_in_a_bf16_run(tmp_path):
    folder = tmp_path / "run"
    for found, segments, foreseen in run_ranks(2, runs, str(folder), timeout=60):
        assert all(found)
        assert segments == {("bfloat16", "float32")}  # computed in bf16, kept in fp32
        assert foreseen
    export(folder / "checkpoint-2", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in tiny_model(FAMILY).named_parameters():
        if name.startswith(FROZEN):
            assert torch.equal(exported[name], value)
