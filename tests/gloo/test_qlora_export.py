"""`hf-hotspa export --merge`: the plain model of a QLoRA checkpoint, bit for bit PEFT's merge into the dequantized base."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_hotspa.cli import main
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.qlora import EIGHT_BITS, WIDE, quantized
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
