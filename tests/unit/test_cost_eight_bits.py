"""8-bit bases in a plan: what is counted from a config is what the engine counts of the libraries' models."""

import json
from pathlib import Path

import pytest
import torch

from hf_hotspa.cli import main
from hf_hotspa.costs.model_config import load_model
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.features.eight_bit.terms import eight_bits
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.model.specs import describe_model
from tests.families import tiny_config
from tests.qlora import EIGHT_BITS, WIDE, tiny_qlora
from tests.unit.test_cost_four_bits import check_sizes


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_bytes_are_those_of_the_trainer(form: str, tmp_path: Path) -> None:
    config = tiny_config("llama_gqa_bias")
    config.update(WIDE)
    config.save_pretrained(tmp_path)
    given = tiny_qlora("llama_gqa_bias", torch.bfloat16, model=WIDE, quantization=EIGHT_BITS[form])
    described = describe_model(given, torch.bfloat16)
    assert {layer.kind for layer in described.packed.values()} == {form}
    model = load_model(tmp_path)
    adapter, packed = Adapter.read("3", model.linears), eight_bits(form, model.linears, {})
    assert 1 < packed.weight_bytes < 1.06
    found = ModelSizes(model.shape, tied=model.tied, added=adapter, packed=packed)
    exact = ModelSizes(described.shape, vector=described.vector)
    check_sizes(found, exact)


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--model",
        "llama2-7b",
        "--nodes",
        "1x1",
        "--hardware",
        "a100-80g",
        "--lora",
        "16",
        "--quantization",
        "int8",
    ]
    assert main(["estimate", *args, "--strategy", "dp1+rc", "--pack-tokens", "64"]) == 0
    assert "frozen in int8, 8.0 bits a weight" in capsys.readouterr().out
    args[-1] = "int8_weight_only"
    assert main(["plan", *args, "--lengths", "chat", "--longest", "4096", "--mini-batch", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == "int8_weight_only"
    alone = [word for word in args if word not in ("--lora", "16")]
    assert main(["estimate", *alone, "--strategy", "dp1", "--pack-tokens", "64"]) == 2
    assert "add --lora 16" in capsys.readouterr().err
