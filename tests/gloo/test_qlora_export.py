"""`hf-hotspa export --merge`: the plain model of a QLoRA checkpoint, bit for bit PEFT's merge into the dequantized base."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_hotspa.cli import main
from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.qlora import EIGHT_BITS, MIXTURES, WIDE, quantized
from tests.tiny_families import tiny_model_of
from tests.training_runs import make_trainer, train

pytestmark = pytest.mark.gloo

FAMILY = "qwen3_qk_norm_tied"


def one_step(rank, world_size, folder, name, form):
    qlora = {"adapter_name": name, "quantization": EIGHT_BITS.get(form)}
    return train(make_trainer(folder, world_size, family=FAMILY, qlora=qlora, model=WIDE, max_steps=1))


def dequantized(model):
    """Of the given model, in place."""
    if type(model.hf_quantizer).__name__.startswith("Bnb"):
        return model.dequantize(torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and type(module.weight) is not torch.nn.Parameter:
            module.weight = torch.nn.Parameter(module.weight.dequantize())
    return model


@pytest.mark.parametrize(
    ("name", "inside", "form"),
    [
        ("mine", "mine", "nf4"),
        pytest.param("default", "", "nf4", marks=pytest.mark.slow),
        pytest.param("default", "", "int8", marks=pytest.mark.slow),
        pytest.param("default", "", "int8_weight_only", marks=pytest.mark.slow),
    ],
)
def test_merged_weights_are_those_of_peft(tmp_path, capsys, name, inside, form):
    run_ranks(1, one_step, str(tmp_path / "run"), name, form)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    tiny_model(FAMILY, **WIDE).save_pretrained(tmp_path / "plain")
    packed = quantized(FAMILY, model=WIDE, quantization=EIGHT_BITS.get(form))
    packed.save_pretrained(tmp_path / "packed")
    assert main(["export", checkpoint, str(tmp_path / "adapter")]) == 0
    adapted = PeftModel.from_pretrained(dequantized(packed), tmp_path / "adapter" / inside)
    factors = {name: p.detach() for name, p in adapted.named_parameters() if "lora_" in name}
    assert any(p.any() for name, p in factors.items() if "lora_B" in name)
    expected = adapted.merge_and_unload().state_dict()

    asked = ["--quantization", form, *(["--double-quantization"] if form == "nf4" else [])]
    merged = {}
    for base, options in {"plain": asked, "packed": []}.items():
        given = [
            "export",
            checkpoint,
            str(tmp_path / f"of {base}"),
            "--merge",
            "--base",
            str(tmp_path / base),
            *options,
        ]
        assert main(given) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"of {base}")
        assert {path.suffix for path in (tmp_path / f"of {base}").iterdir()} == {".json", ".safetensors"}
        assert getattr(model.config, "quantization_config", None) is None
        merged[base] = model.state_dict()
        assert merged[base].keys() == expected.keys()
        assert all(torch.equal(weight, expected[key]) for key, weight in merged[base].items()), base
    own = "model.layers.0.mlp.up_proj.weight"
    b, a = (factors[f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.default.weight"] for side in "BA")
    base = dequantized(quantized(FAMILY, model=WIDE, quantization=EIGHT_BITS.get(form))).state_dict()[own]
    assert torch.equal(merged["plain"][own], base + (b @ a) * (5 / 3))

    capsys.readouterr()
    wrong = {
        "is quantized already": ["--merge", "--base", str(tmp_path / "packed"), *asked],
        "names no base": ["--merge"],
        "cannot be loaded": ["--merge", "--base", str(tmp_path / "nowhere")],
        "go with --merge": asked,
    }
    for says, options in wrong.items():
        assert main(["export", checkpoint, str(tmp_path / "other"), *options]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def step_of_experts(rank, world_size, folder, family):
    trainer = make_trainer(
        folder, world_size, family=family, qlora={"experts": True}, model=MIXTURES[family], max_steps=1
    )
    return train(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_merged_experts_are_dequantized_ones_and_what_the_adapter_adds(tmp_path, family):
    run_ranks(1, step_of_experts, str(tmp_path / "run"), family)
    tiny_model_of(family, torch.float32, **MIXTURES[family]).save_pretrained(tmp_path / "plain")
    asked = ["--merge", "--base", str(tmp_path / "plain"), "--quantization", "nf4+experts", "--double-quantization"]
    assert main(["export", str(tmp_path / "run" / "checkpoint-1"), str(tmp_path / "merged"), *asked]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    packed = quantized(family, model=MIXTURES[family])
    names = quantize_experts(packed)
    files = load_file(tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors")
    for name in names:
        owner, _, leaf = name.rpartition(".")
        inside = ".base_layer" if leaf == "down_proj" else ""
        a, b = (files[f"base_model.model.{owner}{inside}.lora_{side}.weight"] for side in "AB")
        a, b = a.view(8, -1, a.shape[1]), b.view(len(b), -1, 8)
        plain = getattr(packed.get_submodule(owner), leaf)
        delta = torch.einsum("osx,xsi->xoi" if family != "gpt_oss" else "osx,xsi->xio", b, a) * (5 / 3)
        assert delta.any()
        assert torch.allclose(model.get_parameter(name), plain + delta, rtol=0, atol=1e-6), name
