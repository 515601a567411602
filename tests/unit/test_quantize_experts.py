"""Experts in 4 bits: codes of `quantize_experts` are bitsandbytes', PEFT's forwards are corrected, and what cannot be is an error."""

import logging
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import BitsAndBytesConfig

from hf_hotspa import quantize_experts
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.features.four_bit.feature import attach
from hf_hotspa.features.four_bit.four_bit_experts import plain_experts
from hf_hotspa.model.model_check import check_model
from hf_hotspa.model.packed_layer import packed_layers, stored_tensors
from hf_hotspa.model.specs import describe_model
from tests.families import MIXTURE, tiny_model
from tests.qlora import EIGHT_BITS, MIXTURES, tiny_qlora
from tests.tiny_families import tiny_model_of

QWEN, GPT = MIXTURES
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def mixture(family: str = QWEN, **sizes: Any) -> Any:
    return tiny_model_of(family, torch.float32, **{**MIXTURES[family], **sizes})


@pytest.mark.parametrize("family", MIXTURES)
def test_codes_are_those_of_single_experts(family: str) -> None:
    model, plain = mixture(family), mixture(family)
    names = quantize_experts(model, NF4)
    assert len(names) == 2 * 4
    stored = dict(stored_tensors(model))
    for name in names:
        owner, _, leaf = name.rpartition(".")
        codes, scales = (stored[f"{owner}.parametrizations.{leaf}.{each}"] for each in ("original", "absmax"))
        experts = plain.get_parameter(name).detach()
        alone = [quantize_4bit(expert.contiguous(), blocksize=64, quant_type="nf4") for expert in experts]
        assert torch.equal(codes, torch.cat([one.reshape(-1) for one, _ in alone]))
        # quantized scales are rounded
        assert torch.allclose(scales, torch.cat([state.absmax for _, state in alone]), rtol=0.05)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    check_model(adapted, describe_model(adapted))


def test_parameters_of_the_user_are_known() -> None:
    model = mixture()
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            replace_parameter_4bit(module, "down_proj", quant_type="fp4", blocksize=128)
    experts = [layer for name, layer in packed_layers(model).items() if "experts" in name]
    assert [(layer.shape, layer.block, layer.kind) for layer in experts] == [((8, 128, 128), 128, "fp4+experts")] * 4
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert describe_model(adapted).shape.expert_parameters == describe_model(mixture()).shape.expert_parameters


def test_peft_is_corrected() -> None:
    """Both of two nested adapters have an effect, in every forward."""
    model, plain = (tiny_qlora(QWEN, model=MIXTURES[QWEN], experts=True) for _ in range(2))
    describe_model(model)
    ids = torch.arange(3, 20)[None]
    losses = [model(input_ids=ids, labels=ids).loss for _ in range(3)]
    assert len({float(loss) for loss in losses}) == 1
    losses[-1].backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.any() for p in trained.values())
    with model.disable_adapter():
        without = model(input_ids=ids, labels=ids).loss
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    assert float(without) == pytest.approx(float(plain(input_ids=ids, labels=ids).loss), rel=1e-6)
    assert float(without) != pytest.approx(float(losses[0]), rel=1e-4)


def test_what_cannot_be() -> None:
    unfit = tiny_model_of(QWEN, torch.float32)
    with pytest.raises(ModelError, match=r"\[8, 64, 24\] are not of complete blocks of 64"):
        quantize_experts(unfit, NF4)
    assert len(plain_experts(unfit)) == 2 * 4  # none is changed
    with pytest.raises(ModelError, match="has no 4-bit quantization"):
        quantize_experts(mixture())
    adapted = get_peft_model(mixture(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="inside a wrapper"):
        quantize_experts(adapted, NF4)
    assert quantize_experts(tiny_model("llama_gqa_bias"), NF4) == ()
    halved = mixture()
    register_parametrization(halved.model.layers[0].mlp.experts, "down_proj", nn.Identity())
    with pytest.raises(UnsupportedError, match=r"experts\.down_proj' has a parametrization \(Identity\)"):
        describe_model(halved)


class OnRank:
    """Of a replica, what the hook reads."""

    def __init__(self, rank: int) -> None:
        self.mesh = self
        self.rank = rank


@pytest.mark.parametrize("form", ["4 bits", "8 bits"])
def test_one_warning_with_the_bytes(caplog: pytest.LogCaptureFixture, form: str) -> None:
    lora = {"target_modules": ["q_proj"]}
    given = EIGHT_BITS["int8"] if form == "8 bits" else None
    description = describe_model(tiny_qlora(MIXTURE, torch.bfloat16, lora=lora, quantization=given), torch.bfloat16)
    quantized_too = describe_model(tiny_qlora(QWEN, model=MIXTURES[QWEN], experts=True, lora=lora))
    replicas: list[Any] = [OnRank(1), OnRank(0), OnRank(0)]
    with caplog.at_level(logging.WARNING):
        for replica in replicas:
            for each in (description, quantized_too):
                assert attach(replica, each, None) == ()  # type: ignore[arg-type]
    [record] = caplog.records
    weights = sum(spec.numel for spec in description.vector.specs if spec.experts)
    assert record.message.startswith(f"the base is in {form}, but its experts stay in bfloat16")
    assert f"experts stay in bfloat16: {2 * weights / 2**30:,.2f} GiB of 8 parameters" in record.message
