"""Families: what docs/families.md says of them is so. Two in every run; all, under every strategy, are the slow test."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.family_page import outcome
from tests.family_sweep import CHUNKED, RESULTS, of_four_ranks, sweep_on_rank
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.tiny_families import tiny_model_of

pytestmark = pytest.mark.gloo

ROWS = json.loads(RESULTS.read_text())["families"]
# latent attention and experts that are cut, gathered projections; positions counted from ids, and a bias of the head with
# two names
SAMPLE = ("deepseek_v2", "roberta")
SOME = ("dp2tp2", "tp4", "tp2pp2", "cp4", "dp4+rc+z3", "dp4ep4")
"""Strategies of every run."""


@pytest.mark.parametrize(
    ("family", "few"), [*((f, True) for f in SAMPLE), *(pytest.param(f, False, marks=pytest.mark.slow) for f in ROWS)]
)
def test_a_family_is_as_its_row_says(family, few):
    row = ROWS[family]
    strategies = [s for s in of_four_ranks(row["mixture"]) if not few or s in SOME]
    found = run_ranks(4, sweep_on_rank, family, strategies, timeout=300)[0]
    found |= run_ranks(1, sweep_on_rank, family, CHUNKED, timeout=300)[0]
    assert {name: outcome(result) for name, result in found.items()} == {
        name: outcome(result) for name, result in row["strategies"].items() if not few or name in found
    }
    assert "wrong" not in map(outcome, found.values())


def _trainer(output, seed, steps, family="deepseek_v3"):
    args = HotSPaTrainingArguments(
        output_dir=output, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=steps, save_steps=1, seed=7,
        hotspa_mini_batch_size=4, hotspa_strategies="dp1:60@64", hotspa_report=False,
    )  # fmt: skip
    model = tiny_model_of(family, torch.float32, seed)
    return HotSPaTrainer(model=model, args=args, train_dataset=random_rows(8, 163, longest=60))


def test_router_biases_come_back_from_a_checkpoint_and_are_exported(tmp_path):
    """They are buffers: not trained, but part of the model; a resumed run may begin from another one."""
    first = _trainer(str(tmp_path / "run"), seed=0, steps=1)
    first.train()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = first.model.get_buffer(name).clone()
    first.close_engine()
    second = _trainer(str(tmp_path / "run"), seed=5, steps=2)
    assert not torch.equal(second.model.get_buffer(name), expected)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(second.model.get_buffer(name), expected)
    for runner in second.engine.phases.values():
        assert torch.equal(runner.replica.model.get_buffer(name), expected)
    second.close_engine()
    export(tmp_path / "run" / "checkpoint-2", tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(loaded.get_buffer(name), expected)


def test_a_bias_of_two_names_is_trained_and_saved_as_transformers_saves_it(tmp_path):
    first = _trainer(str(tmp_path / "run"), seed=0, steps=1, family="roberta")
    before = first.model.lm_head.bias.detach().clone()
    first.train()
    expected = {name: p.detach().clone() for name, p in first.model.named_parameters(remove_duplicate=False)}
    assert torch.equal(expected["lm_head.bias"], expected["lm_head.decoder.bias"])
    assert not torch.equal(expected["lm_head.bias"], before)
    first.close_engine()
    folder = tmp_path / "run" / "checkpoint-1"
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    stock = AutoModelForCausalLM.from_config(loaded.config)
    stock.save_pretrained(tmp_path / "stock")
    with (
        safe_open(folder / "model.safetensors", "pt") as ours,
        safe_open(tmp_path / "stock/model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters(remove_duplicate=False))
    assert loaded.lm_head.bias is loaded.lm_head.decoder.bias
    second = _trainer(str(tmp_path / "run"), seed=5, steps=2, family="roberta")
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 2
    second.close_engine()
