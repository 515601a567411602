"""Quantized bases: which forms are trained below an adapter, and how the others are refused."""

import pytest
import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, PerTensor
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.packed_layer import packed_layers
from hf_hotspa.model.specs import describe_model
from tests.qlora import EIGHT_BITS, quantized, tiny_qlora

QUANTIZED = {
    "bitsandbytes, 4 bits": (BitsAndBytesConfig(load_in_4bit=True), "get_peft_model", ""),
    "bitsandbytes, 8 bits": (BitsAndBytesConfig(load_in_8bit=True), "get_peft_model", ""),
    "by rows": (TorchAoConfig(Int8WeightOnlyConfig()), "get_peft_model", ""),
    "by tensor": (TorchAoConfig(Int8WeightOnlyConfig(granularity=PerTensor())), "ORIGINAL", "torchao"),
    "activations": (TorchAoConfig(Int8DynamicActivationInt8WeightConfig()), "ORIGINAL", "torchao"),
}


@pytest.mark.parametrize("form", QUANTIZED)
def test_packed_weights_need_an_adapter_and_a_known_form(form):
    config, fix, with_adapter = QUANTIZED[form]
    model = quantized("llama_gqa_bias", quantization=config)
    with pytest.raises(UnsupportedError, match="the weights are quantized") as caught:
        describe_model(model)
    assert fix in caught.value.fix
    model = tiny_qlora("llama_gqa_bias", quantization=config)
    if with_adapter:
        with pytest.raises(UnsupportedError, match=rf"quantized \({with_adapter}\)"):
            describe_model(model)
    else:
        assert describe_model(model).packed


def test_weights_that_are_quantized_in_every_forward_are_refused():
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)
    with pytest.raises(UnsupportedError, match="in 16 bits"):
        describe_model(tiny_qlora("llama_gqa_bias", quantization=config))


@pytest.mark.parametrize("form", EIGHT_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_training_are_the_library_s_bit_for_bit(form, dtype):
    model = quantized("llama_gqa_bias", dtype, quantization=EIGHT_BITS[form])
    name, layer = next(iter(packed_layers(model).items()))
    own, holder = model.get_submodule(name).train(), torch.nn.Sequential(torch.nn.Identity())
    layer.put(holder, "0")
    [module] = holder
    codes, scales = dict(layer.stored(own, name)).values()
    module.weight = torch.nn.Parameter(codes.view(layer.shape).clone(), requires_grad=False)
    module.scales = torch.nn.Parameter(scales.clone(), requires_grad=False)
    own.bias = module.bias = None
    layer.product(module.train())
    sides = []
    for side in (own, module):
        x = torch.linspace(-3, 3, 5 * layer.shape[1], dtype=dtype).view(5, -1).requires_grad_()
        out = side(x)
        out.backward(torch.cos(out.detach()))
        sides.append((out, x.grad))
    assert sides[0][0].any()
    assert all(torch.equal(one, other) for one, other in zip(*sides, strict=True))
