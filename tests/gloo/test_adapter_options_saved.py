"""What checkpoints and exports hold of each option of PEFT's `LoraConfig`: PEFT loads it bit for bit, runs go on in another layout."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_hotspa.checkpoint.model_files import export, merge
from tests.families import tiny_model
from tests.gloo.test_adapter_options import CASES, PLAIN, SOME
from tests.gloo.test_lora_trainer import trainer_after
from tests.harness import run_ranks
from tests.lora import check_saved, tiny_lora, trained
from tests.oracle import random_rows, relative_error
from tests.training_runs import contents, make_trainer, newest, one_run, train

pytestmark = pytest.mark.gloo

MIXED = {
    "use_dora": True, "target_modules": [*SOME, "lm_head"], "modules_to_save": ["norm"], "bias": "lora_only",
    "trainable_token_indices": [3, 17, 40],
}  # fmt: skip
SAVED = {"mixed": (PLAIN, MIXED), **CASES}


def runs(rank, world, folder, family, config):
    """Train; go on from the middle; take up the end in another layout, and save the model."""
    options = {"lora": config, "max_steps": 4, "family": family, "save_steps": 2}
    first = one_run(rank, world, f"{folder}/a", None, dict(options))
    again = one_run(rank, world, f"{folder}/b", f"{folder}/a/checkpoint-2", dict(options))
    trainer = make_trainer(f"{folder}/c", world, **options, hotspa_strategies="tp2+sp:16@32,pp2:60")
    trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-4")  # no step is left
    trainer.save_model(f"{folder}/saved")
    weights = trained(trainer.model)
    trainer.close_engine()
    return first, again, weights


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "mixed" else []) for n in SAVED])
def test_peft_loads_what_is_saved_bit_for_bit(name, tmp_path):
    family, config = SAVED[name]
    per_rank = run_ranks(2, runs, str(tmp_path), family, config)
    for first, again, _ in per_rank:
        assert again == {step: loss for step, loss in first.items() if step > 2}
    last, weights = newest(tmp_path / "a"), per_rank[0][2]
    assert contents(newest(tmp_path / "b")) == contents(last)
    before = trained(tiny_lora(family, **config))
    assert before.keys() == weights.keys()
    assert all(not torch.equal(weights[n], before[n]) for n in weights), "a parameter was not trained"

    export(last, tmp_path / "exported")
    saved, exported = (load_file(tmp_path / of / "adapter_model.safetensors") for of in ("saved", "exported"))
    # of an adapted embedding or head PEFT also saves the frozen weight
    assert {n for n in saved if not n.endswith(".base_layer.weight")} == set(exported)
    assert all(torch.equal(saved[n], exported[n]) for n in exported)
    for folder in ("saved", "exported"):
        check_saved(tmp_path / folder, tiny_model(family), weights)

    tiny_model(family).save_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(tiny_model(family), tmp_path / "saved")
    expected = expected.merge_and_unload().state_dict()
    merge(last, tmp_path / "merged", base=str(tmp_path / "base"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[n], expected[n]) for n in merged)
    assert "lm_head.weight" in merged


# -- new tokens: embeddings that were resized after loading, of which both ends are trained copies -----------------------


def with_new_tokens(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 5)
    return model


def new_tokens_run(rank, world, folder):
    torch.manual_seed(4)
    ends = ["embed_tokens", "lm_head"]
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=ends, task_type="CAUSAL_LM")
    options = {"max_steps": 2, "save_steps": 1}
    runs, losses = [], []
    for output, resume in ((f"{folder}/a", None), (f"{folder}/b", f"{folder}/a/checkpoint-1")):
        torch.manual_seed(len(runs))  # other rows of new tokens in the base, which nothing reads
        model = get_peft_model(with_new_tokens(f"{folder}/base"), config)
        trainer = make_trainer(output, world, given=model, rows=random_rows(12, 168, longest=60), **options)
        losses.append(train(trainer, resume))
        trainer.save_model(f"{output}/saved")
        runs.append(trained(trainer.model))
    return losses, runs


@pytest.mark.slow
def test_new_tokens_whose_embeddings_are_copies_are_saved_and_resumed(tmp_path):
    tiny_model(PLAIN).save_pretrained(tmp_path / "base")
    (losses, (weights, again)), _ = run_ranks(2, new_tokens_run, str(tmp_path))
    assert losses[1] == {2: losses[0][2]}
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    export(newest(tmp_path / "a"), tmp_path / "exported")
    for folder in ("a/saved", "exported"):
        check_saved(tmp_path / folder, with_new_tokens(tmp_path / "base"), weights)


# -- LoRA+: groups of rates that PEFT makes ------------------------------------------------------------------------------


def loraplus(model):
    """PEFT's optimizer with other rates for lora_B and for embeddings."""
    return create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4.0, loraplus_weight_decay=0.1, loraplus_lr_embedding=3e-3
    )


def loraplus_run(rank, world_size, folder, stock):
    targets = [*SOME, "embed_tokens"]
    model = tiny_lora(PLAIN, torch.float64, target_modules=targets, modules_to_save=["norm"], bias="all")
    pool = None if stock else "dp2:16@32,tp2:32,pp2:60@64"
    given = {"optimizers": (loraplus(model), None)}
    trainer = trainer_after(model, torch.float64, folder, pool, given, max_steps=5)
    if not stock:
        trainer.close_engine()
    return trained(model)


@pytest.mark.slow
def test_the_steps_of_lora_plus_equal_those_under_the_stock_trainer(tmp_path):
    [expected] = run_ranks(1, loraplus_run, str(tmp_path / "stock"), True)
    for found in run_ranks(2, loraplus_run, str(tmp_path / "hot"), False):
        assert found.keys() == expected.keys()
        assert max(relative_error(found[n], expected[n]) for n in expected) <= 1e-9
