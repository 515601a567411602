"""LoRA in a plan: what is counted from a config is what the engine counts of PEFT's model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hotspa.cli import main
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.model_config import load_model, model_from
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.families import tiny_config
from tests.lora import tiny_lora
from tests.unit.test_cost_four_bits import check_sizes

BIASES = 0.04
"""What a tiny model has of biases and norms of queries and keys, which are not counted."""
LINEARS = load_model("llama2-7b").linears


@pytest.mark.parametrize("family", ["llama_gqa_bias", "qwen3_qk_norm_tied"])
@pytest.mark.parametrize(
    ("lora", "config"),
    [("3", {"r": 3}), ("r=5,targets=q_proj+v_proj+down_proj", {"r": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]})],
)  # fmt: skip
def test_an_adapter_counts_as_in_the_trainer(family: str, lora: str, config: dict[str, Any], tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    described = describe_model(tiny_lora(family, torch.bfloat16, **config), torch.bfloat16)
    model = load_model(tmp_path)
    found = ModelSizes(model.shape, tied=model.tied, added=Adapter.read(lora, model.linears))
    exact = ModelSizes(described.shape, vector=described.vector)
    check_sizes(found, exact, BIASES)
    assert found.num_parameters == pytest.approx(exact.num_parameters, rel=BIASES)
    kept, counted = found.master(1), exact.master(1)
    # the base once, in bf16; fp32 weights, gradients and optimizer state of the adapter
    assert (kept.optimizer_bytes, kept.gradient_bytes) == (counted.optimizer_bytes, counted.gradient_bytes)
    assert kept.weight_bytes == pytest.approx(counted.weight_bytes, rel=BIASES)
    assert kept.weight_bytes < 3 * found.num_parameters
    of_config, of_model = (
        MemoryModel(sizes, 1, MemoryOptions()).breakdown(Strategy(1, 1, 1), 64).total for sizes in (found, exact)
    )
    assert of_config == pytest.approx(of_model, rel=BIASES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "not an adapter.*such as 16"),
        ("r=8,target=q_proj", "not an adapter"),
        ("r=8,targets=q_proj+qkv", "'qkv', which is not counted.*all-linear, or some of q_proj[+]k_proj"),
    ],
)
def test_what_is_no_adapter(text: str, says: str) -> None:
    with pytest.raises(HotspaConfigError, match=says):
        Adapter.read(text, LINEARS)


def test_experts_have_no_layers_for_an_adapter() -> None:
    assert list(LINEARS) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    experts = model_from(
        {**tiny_config("llama_gqa_bias").to_dict(), "model_type": "mixtral", "num_local_experts": 4}, "", ""
    )
    assert list(experts.linears) == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_a_plan_with_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama2-7b", "--nodes", "1x8", "--hardware", "4090"]
    plan = ["plan", *args, "--lengths", "chat", "--longest", "8192"]
    assert main([*plan, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*plan, "--lora", "r=16,targets=q_proj+v_proj", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lora"] == {"r": 16, "targets": ["q_proj", "v_proj"]}
    assert found["trained_parameters"] == 32 * 16 * 2 * (4096 + 4096)
    assert found["seconds"] < 0.8 * whole["seconds"]
    # DDP, ZeRO-1 and ZeRO-2, FSDP; FSDP without packing, and with Liger
    assert [each["fits"] for each in whole["baselines"][:4]] == [False, False, False, True]
    assert all(each["fits"] for each in found["baselines"])
    assert main(["estimate", *args, "--lora", "16", "--strategy", "dp8", "--pack-tokens", "64"]) == 0
    assert "\nLoRA r=16 on q_proj, k_proj, " in (said := capsys.readouterr().out)
    assert "40.0M parameters are trained" in said
