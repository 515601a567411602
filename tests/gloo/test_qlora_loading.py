"""A base in 4 bits that is read by slices: codes, scales and factors are those of the model that every process holds, bit for bit."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts
from hf_hotspa.features.four_bit.open_qlora import open_qlora
from hf_hotspa.model.model_check import frozen_digest
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.qlora import EIGHT_BITS, MIXTURES, WIDE
from tests.tiny_families import tiny_model_of
from tests.training_runs import contents, make_trainer
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
CASES = {
    "nf4, nested": ("llama_gqa_bias", WIDE, torch.bfloat16, NF4),
    "fp4": ("qwen3_qk_norm_tied", WIDE, torch.float32, {"bnb_4bit_quant_type": "fp4"}),
    "8 bits": ("llama_gqa_bias", WIDE, torch.bfloat16, {"load_in_4bit": False, "load_in_8bit": True}),
    "other blocks": ("llama_uneven", {}, torch.float32, NF4),
}
EXPERTS = {
    f"experts of {family}": (family, sizes, dtype, {"bnb_4bit_use_double_quant": dtype == torch.bfloat16})
    for (family, sizes), dtype in zip(MIXTURES.items(), (torch.bfloat16, torch.float32), strict=True)
}
LORA = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def engines(rank, world_size, folder, cases, buckets):
    """What differs, by case, between the engine of a model in memory and that of one that is read."""
    wrong = []
    for name in cases:
        _, _, dtype, options = (CASES | EXPERTS)[name]
        config, path = BitsAndBytesConfig(**{"load_in_4bit": True, **options}), Path(folder) / name
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)
        lora = {**LORA, "target_parameters": quantize_experts(base)} if name in EXPERTS else LORA
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        given = get_peft_model(base, LoraConfig(**lora))
        torch.manual_seed(3)
        read = open_qlora(path, LoraConfig(**lora), config, experts=name in EXPERTS)
        found = []
        for model, weights in ((given, None), (read, path)):
            engine = make_engine(model, buckets, weights)
            rows = random_rows(4, given.config.vocab_size, longest=60)
            engine.forward_backward(make_mini_batch(engine, rows))
            store = {key: view.detach().clone() for key, view in engine.master.parameters.items()}
            found.append((store, engine.full_gradients(), engine.initial.base_digest))
            engine.close()
        (kept, gradients, _), (slices, others, digest) = found
        wrong += [f"{name}: {key}" for key in kept if not torch.equal(kept[key], slices[key])]
        wrong += [f"{name}: {key}" for key in gradients or {} if not torch.equal(gradients[key], others[key])]
        wrong += [f"{name}: digest"] * (digest != frozen_digest(given))
        assert len(kept) == len(slices)
        assert len(kept) > 40
    return wrong


def test_other_configs_cannot_quantize_while_weights_are_read(tmp_path):
    tiny_model("llama_gqa_bias").save_pretrained(tmp_path)
    with pytest.raises(HotspaConfigError, match="TorchAoConfig cannot quantize while weights are read"):
        open_qlora(tmp_path, LoraConfig(**LORA), EIGHT_BITS["int8_weight_only"])


@pytest.mark.parametrize(
    ("cases", "buckets"),
    [
        (("other blocks",), "dp2:60"),  # weights in the master's dtype and whole in every strategy: they exist once
        pytest.param((*CASES, *EXPERTS), "dp2:16@32,tp2:60", marks=pytest.mark.slow),
    ],
)
def test_slices_are_those_of_the_whole(tmp_path, cases, buckets):
    for name in cases:
        family, sizes, dtype, _ = (CASES | EXPERTS)[name]
        made = tiny_model_of if name in EXPERTS else tiny_model
        model = made(family, dtype, **sizes)
        model.save_pretrained(tmp_path / name)
    for wrong in run_ranks(2, engines, str(tmp_path), cases, buckets):
        assert not wrong


def runs(rank, world_size, folder, kind):
    """Losses of a run of four steps, and of one that goes on from its second; the base in memory, or read by slices."""
    config, base = BitsAndBytesConfig(load_in_4bit=True, **NF4), f"{folder}/base"
    found = []
    for run, resume in enumerate((None, f"{folder}/{kind}0/checkpoint-2")):
        torch.manual_seed(3)
        output, options = f"{folder}/{kind}{run}", {"max_steps": 4}
        if kind == "slices":
            model = open_qlora(base, LoraConfig(**LORA), config)
            options["hotspa_model_path"] = base
        else:
            model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            model = get_peft_model(model, LoraConfig(**LORA))
        trainer = make_trainer(output, world_size, given=model, **options)
        trainer.train(resume_from_checkpoint=resume)
        trainer.evaluate(trainer.train_dataset[:8])
        trainer.save_model(f"{output}/adapter")
        if kind == "slices":
            with pytest.raises(UnsupportedError, match="read by slices"):
                trainer.materialize()
        trainer.close_engine()
        logs = trainer.state.log_history
        found.append([log[key] for log in logs for key in ("loss", "eval_loss") if key in log])
    return found


@pytest.mark.slow
def test_a_run_on_slices_is_that_on_a_model_in_memory(tmp_path):
    """Losses, evaluations, checkpoints and adapters, bit for bit."""
    tiny_model("qwen3_qk_norm_tied", **WIDE).save_pretrained(tmp_path / "base")
    for kind in ("memory", "slices"):
        (tmp_path / f"{kind}0").mkdir()
    [(kept, again), _] = run_ranks(2, runs, str(tmp_path), "memory")
    [(read, goes_on), _] = run_ranks(2, runs, str(tmp_path), "slices")
    assert len(kept) == 5
    assert kept == read
    assert again == goes_on
    for run in (0, 1):
        ours, theirs = (
            load_file(tmp_path / f"{k}{run}/adapter/adapter_model.safetensors") for k in ("slices", "memory")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    ours, theirs = (contents(tmp_path / f"{kind}0/checkpoint-4") for kind in ("slices", "memory"))
    assert ours.keys() == theirs.keys()
    # transformers counts codes otherwise than weights in `total_flos`
    assert {name for name in ours if ours[name] != theirs[name]} <= {"trainer_state"}
