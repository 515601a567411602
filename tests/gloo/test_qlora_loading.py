"""A base in 4 bits that is read by slices: codes, scales and factors are those of the model that every process holds, bit for bit."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_hotspa.engine.packed_loading import open_qlora
from hf_hotspa.parallel.adapters import frozen_digest
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.qlora import WIDE
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

CASES = {
    "nf4, nested": (
        "llama_gqa_bias",
        WIDE,
        torch.bfloat16,
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "fp4": ("qwen3_qk_norm_tied", WIDE, torch.float32, {"bnb_4bit_quant_type": "fp4"}),
    "other blocks": (
        "llama_uneven",
        {},
        torch.float32,
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
}
LORA = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def engines(rank, world_size, folder):
    """What differs, by case, between the engine of a model in memory and that of one that is read."""
    wrong = []
    for name, (_, _, dtype, options) in CASES.items():
        config, path = BitsAndBytesConfig(load_in_4bit=True, **options), Path(folder) / name
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        given = get_peft_model(base, LoraConfig(**LORA))
        torch.manual_seed(3)
        read = open_qlora(path, LoraConfig(**LORA), config)
        buckets, found = f"dp{world_size}:16@32,tp{world_size}:60", []
        for model, weights in ((given, None), (read, path)):
            engine = make_engine(model, buckets, weights)
            rows = random_rows(4, given.config.vocab_size, longest=60)
            engine.forward_backward(make_mini_batch(engine, rows))
            store = {key: view.detach().clone() for key, view in engine.master.parameters.items()}
            found.append((store, engine.full_gradients(), engine.base_digest))
            engine.close()
        (kept, gradients, _), (slices, others, digest) = found
        wrong += [f"{name}: {key}" for key in kept if not torch.equal(kept[key], slices[key])]
        wrong += [f"{name}: {key}" for key in gradients or {} if not torch.equal(gradients[key], others[key])]
        wrong += [f"{name}: digest"] * (digest != frozen_digest(given))
        assert len(kept) == len(slices)
        assert len(kept) > 40
    return wrong


@pytest.mark.slow
def test_slices_are_those_of_the_whole(tmp_path):
    for name, (family, sizes, dtype, _) in CASES.items():
        model = tiny_model(family, dtype, **sizes)
        model.save_pretrained(tmp_path / name)
    for wrong in run_ranks(2, engines, str(tmp_path)):
        assert not wrong
