"""LoRA adapters: which are refused and how, how they are laid out, and what their names are in files."""

from dataclasses import dataclass, replace

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.config import BdLoraConfig
from transformers import BitsAndBytesConfig

from hf_hotspa import open_qlora
from hf_hotspa.checkpoint.model_files import adapter_name
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.features.lora.adapters import read_adapters
from hf_hotspa.model.model_check import check_model, frozen_digest
from hf_hotspa.model.model_kind import INPUTS, unwrap
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from tests.families import MIXTURE, tiny_model
from tests.lora import FAMILIES, tiny_lora

LINEAR = ["q_proj", "o_proj"]


def config(**changes):
    return LoraConfig(**{"r": 2, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **changes})


def adapted(**changes):
    return get_peft_model(tiny_model("llama_gqa_bias"), config(**changes))


REFUSED = {
    "modules_to_save": {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]},
    "layer_replication": {"layer_replication": [[0, 4], [2, 4]]},
    "the head 'lm_head' has lora_dropout=0.1": {"target_modules": ["lm_head"], "lora_dropout": 0.1},
    "MiCALinearVariant": {"init_lora_weights": "mica"},
    "BdLoraLinearVariant": {"use_bdlora": BdLoraConfig(target_modules_bd_b=LINEAR, nblocks=2)},
    "trainable_token_indices has 'model.embed_tokens'": {
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": [3],
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name):
    model = adapted(**REFUSED[name])
    with pytest.raises(UnsupportedError, match=name) as caught:
        describe_model(model)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    "option",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_adapters_that_are_made_of_weights_are_refused_where_there_are_none(option):
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        open_qlora("nowhere", config(**option), BitsAndBytesConfig(load_in_4bit=True))


def test_other_tuners_are_refused_by_name():
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match="IA3"):
        describe_model(get_peft_model(tiny_model("llama_gqa_bias"), ia3))
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
        describe_model(get_peft_model(tiny_model("llama_gqa_bias"), prompts))
    mixed = get_peft_model(tiny_model("llama_gqa_bias"), config(), mixed=True)
    with pytest.raises(UnsupportedError, match="PeftMixedModel"):
        describe_model(mixed)
    with pytest.raises(UnsupportedError, match="get_peft_model"):
        describe_model(inject_adapter_in_model(config(), tiny_model("llama_gqa_bias")))


def test_adapters_that_would_not_be_trained_are_refused():
    model = adapted()
    model.add_adapter("second", config())
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedError, match=r"\['default', 'second'\] act together"):
        describe_model(model)
    model.set_adapter("second")
    model.set_requires_grad("default")
    with pytest.raises(UnsupportedError, match="the adapter 'default' requires gradients, and 'second' acts"):
        describe_model(model)
    model = adapted()
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="merged"):
        describe_model(model)
    model = adapted()
    model.base_model.disable_adapter_layers()
    with pytest.raises(UnsupportedError, match="disabled"):
        describe_model(model)
    with pytest.raises(UnsupportedError, match="is_trainable=True"):
        describe_model(adapted(inference_mode=True))


@pytest.mark.parametrize(
    ("config", "method", "fix"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq", "from_pretrained(ORIGINAL, dtype=torch.bfloat16)"),
        ({"quant_method": "mxfp4"}, "mxfp4", "Mxfp4Config(dequantize=True)"),
        ({"quant_method": "fp8"}, "fp8", "FineGrainedFP8Config(dequantize=True)"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors", "CompressedTensorsConfig(dequantize=True)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits", "load_in_8bit=True"),
    ],
)
def test_quantized_weights_are_refused_by_method(config, method, fix):
    for model in (tiny_model("llama_gqa_bias"), adapted()):
        model.config.quantization_config = config
        with pytest.raises(UnsupportedError, match=rf"\({method}\)") as caught:
            describe_model(model)
        assert fix in caught.value.fix


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_peft_rebuilds_alike_is_accepted(family):
    model = tiny_lora(family, torch.bfloat16, use_rslora=True, alpha_pattern={"o_proj": 7, "qkv_proj": 3})
    description = describe_model(model)
    check_model(model, description)
    names = {name for name, _ in model.named_parameters()}
    assert {spec.name for spec in description.vector.specs} == names
    assert {s.name for s in description.vector.specs if s.trainable} == {n for n in names if ".lora_" in n}
    # the strategies of the base model are those of the adapted one
    assert description.shape == describe_model(tiny_model(family)).shape
    assert description.styles == describe_model(tiny_model(family)).styles


def test_a_changed_factor_is_refused():
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.set_scale("default", 3.0)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj"):
        check_model(model, describe_model(model))


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"]}


def test_adapters_of_fused_experts_change_no_strategy_but_ep():
    model = tiny_lora(MIXTURE, target_modules=["q_proj"], **EXPERTS)
    description = describe_model(model)
    check_model(model, description)
    plain = describe_model(tiny_model(MIXTURE))
    assert "target_parameters" in description.shape.ep_unsupported_reason
    assert replace(description.shape, ep_unsupported_reason=None) == plain.shape
    assert (description.styles, description.experts) == (plain.styles, plain.experts)


@pytest.mark.parametrize(
    ("family", "parameter", "module"),
    [("llama_gqa_bias", "q_proj.weight", "Linear"), ("gpt_oss", "experts.down_proj_bias", "GptOssExperts")],
)
def test_adapters_of_other_parameters_are_refused(family, parameter, module):
    model = tiny_lora(family, torch.float64, target_modules=["k_proj"], target_parameters=[parameter])
    with pytest.raises(UnsupportedError, match=f"target_parameters has .* a {module}:"):
        describe_model(model)


def test_names():
    model = tiny_lora("llama_gqa_bias")
    bare, prefix, adapters = unwrap(model)
    assert is_wrapped(model)
    assert (bare, prefix) == (model.get_base_model(), "base_model.model.")
    up = "model.layers.0.mlp.up_proj"
    assert adapters.beside(f"{up}.lora_A.default.weight") == (f"{up}.weight", INPUTS)
    assert adapters.beside(f"{up}.lora_B.other.weight")[1] is None
    assert adapters.beside(f"{up}.base_layer.weight") == (f"{up}.weight", None)
    assert adapters.beside("model.norm.weight") == ("model.norm.weight", None)
    plain = tiny_model("llama_gqa_bias")
    assert bare_model(plain) == (plain, "")
    assert read_adapters(plain) is None
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(tiny_lora("llama_gqa_bias", bias="all"))
    trained = [n for n, p in tiny_lora("llama_gqa_bias", bias="all").named_parameters() if p.requires_grad]
    assert sorted(map(adapter_name, trained)) == sorted(saved)


def test_the_digest_of_the_base_sees_every_frozen_weight_and_no_other():
    model = tiny_lora("llama_gqa_bias")
    before = frozen_digest(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert frozen_digest(model) == before
    with torch.no_grad():
        model.get_parameter("base_model.model.model.norm.weight")[3] += 1e-3
    assert frozen_digest(model) != before


@dataclass
class Wider(LoraConfig):
    """A front end's own class, such as ms-swift's."""

    more: str | None = None


def test_a_config_that_derives_from_pefts_is_read_as_pefts() -> None:
    model = get_peft_model(tiny_model("llama_gqa_bias"), Wider(r=2, target_modules=["q_proj"], more="x"))
    added = read_adapters(model)
    assert added is not None
    assert type(added.configs["default"]) is LoraConfig
    assert not hasattr(added.configs["default"], "more")
    assert added.configs["default"].r == 2
