"""Quantized bases in a plan: what is counted from a config is what the engine counts of the libraries' models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hotspa.cli import main
from hf_hotspa.costs.calibration import FrozenBase
from hf_hotspa.costs.cost_model import check_calibration
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.model_config import load_model
from hf_hotspa.costs.packed_linears import unpacked
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import estimate
from hf_hotspa.costs.terms import Cost, packed_weights
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.four_bit.kinds import WEIGHT_BYTES
from hf_hotspa.features.four_bit.terms import four_bits
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.calibrations import made_calibration
from tests.families import tiny_config, tiny_model
from tests.qlora import EIGHT_BITS, MIXTURES, WIDE, tiny_qlora
from tests.tiny_families import tiny_config_of

BIASES = 0.05
"""What a tiny model has of biases and norms of queries and keys, which are not counted."""
LLAMA = load_model("llama2-7b")
LORA, NF4 = Adapter.read("16", LLAMA.linears), four_bits("nf4", LLAMA.linears, {})


def check_sizes(found: ModelSizes, exact: ModelSizes, biases: float = BIASES) -> None:
    """Compares what is counted from a config with what is counted of a model."""
    assert found.num_trained == exact.num_trained
    assert found.weight_bytes == pytest.approx(exact.weight_bytes, rel=biases)
    for strategy in (Strategy(4), Strategy(4, z=3), Strategy(2, 2), Strategy(1, 2, 2), Strategy(1, 4)):
        assert unpacked(found, strategy.tp) == unpacked(exact, strategy.tp), strategy
        for mine, real in zip(found.stages(strategy), exact.stages(strategy), strict=True):
            assert mine.gradient_bytes == real.gradient_bytes, strategy
            assert mine.weight_bytes == pytest.approx(real.weight_bytes, rel=biases), strategy


@pytest.mark.parametrize(
    ("family", "wide", "kind"),
    [
        ("llama_gqa_bias", WIDE, "nf4"),
        ("qwen3_qk_norm_tied", WIDE, "nf4"),
        ("llama_gqa_bias", {}, "nf4"),
        *(("llama_gqa_bias", WIDE, kind) for kind in EIGHT_BITS),
    ],
)
def test_bytes_are_those_of_the_trainer(family: str, wide: dict[str, Any], kind: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.update(wide)
    config.save_pretrained(tmp_path)
    trained = tiny_qlora(family, torch.bfloat16, model=wide, quantization=EIGHT_BITS.get(kind))
    described = describe_model(trained, torch.bfloat16)
    assert {layer.kind for layer in described.packed.values()} == {kind}
    model = load_model(tmp_path)
    adapter, packed = Adapter.read("3", model.linears), packed_weights(kind, model)
    least = 1 / 2 if kind == "nf4" else 1.0  # a scale for each block, or row, comes to it
    assert least < packed.weight_bytes < least + 0.07
    found = ModelSizes(model.shape, tied=model.tied, added=adapter, packed=packed)
    exact = ModelSizes(described.shape, vector=described.vector)
    check_sizes(found, exact)
    if kind == "nf4":
        assert found.master(1).weight_bytes == pytest.approx(exact.master(1).weight_bytes, rel=BIASES)


@pytest.mark.parametrize("family", MIXTURES)
def test_bytes_of_experts_are_those_of_the_trainer(family: str, tmp_path: Path) -> None:
    sizes = {**MIXTURES[family], "attention_bias": False}
    config = tiny_config_of(family, **sizes)
    config.save_pretrained(tmp_path)
    lora = {"target_modules": ["q_proj", "v_proj"], "target_parameters": None}
    trained = tiny_qlora(family, torch.bfloat16, model=sizes, lora=lora, experts=True)
    described = describe_model(trained, torch.bfloat16)
    model = load_model(tmp_path)
    adapter = Adapter.read("r=3,targets=q_proj+v_proj", model.linears)
    packed = four_bits("nf4+experts", model.linears, model.experts)
    found = ModelSizes(model.shape, tied=model.tied, added=adapter, packed=packed)
    exact = ModelSizes(described.shape, vector=described.vector)
    assert found.weight_bytes == pytest.approx(exact.weight_bytes, rel=BIASES)
    for text in ("dp4", "dp4ep2", "dp4+z3", "dp2tp2", "tp2pp2", "dp2tp2ep4"):
        strategy = Strategy.parse(text)
        assert unpacked(found, strategy.tp) == unpacked(exact, strategy.tp), strategy
        for mine, real in zip(found.stages(strategy), exact.stages(strategy), strict=True):
            assert mine.weight_bytes == pytest.approx(real.weight_bytes, rel=BIASES), strategy
    assert found.master(1).weight_bytes == pytest.approx(exact.master(1).weight_bytes, rel=BIASES)


def test_a_plan_says_what_experts_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
    sizes |= {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    more = {"model_type": "gpt_oss", "vocab_size": 201088, "max_position_embeddings": 131072, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **more}))
    args = ["--model", str(tmp_path), "--nodes", "1x8", "--hardware", "h100-80g", "--lora", "16"]
    shown, weights = [], 3 * 2880 * 2880 * 32 * 24
    for kind in ("nf4", "nf4+experts", "int8"):
        words = ["--quantization", kind, "--strategy", "dp8", "--pack-tokens", "1024"]
        assert main(["estimate", *args, *words]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    plain, packed = f"{2 * weights / 2**30:.2f} GiB", f"{weights * WEIGHT_BYTES / 2**30:.2f} GiB"
    assert f"its experts stay in bfloat16, {plain}; --quantization nf4+experts: {packed}" in shown[0]
    assert f"its experts take {packed}, and {plain} in bfloat16" in shown[1]
    assert f"its experts stay in bfloat16, {plain} 1 x 8 devices" in shown[2]


def test_whole_weights_where_no_shard_ends_with_blocks() -> None:
    shares = {"query": 0.5, "key": 0.5, None: 0.5}
    by_rows, by_columns = four_bits("nf4", LLAMA.linears, {}), LLAMA.linears["down_proj"]
    assert by_rows.held_numel(shares) == by_rows.cut(shares) == by_rows.weights / 2
    # 11008 / 2 is a multiple of 64, 11008 / 8 is not
    assert four_bits("nf4", {"down_proj": by_columns}, {}).held_numel({None: 1 / 8}) == 4096 * 11008
    assert four_bits("nf4", {"down_proj": by_columns}, {}).most_at_a_time({None: 1 / 8}) == 4096 * 11008 * 9 / 8


def test_seconds_and_bytes_beside_lora_in_bf16() -> None:
    hardware = load_hardware("a800-80g")
    plain, packed = (ModelSizes(LLAMA.shape, added=LORA, packed=layers) for layers in (None, NF4))
    assert packed.num_parameters == plain.num_parameters
    assert packed.weight_bytes == plain.weight_bytes - 32 * NF4.weights * (2 - WEIGHT_BYTES)
    times = [TimeModel.analytic(sizes, hardware) for sizes in (plain, packed)]
    for tokens in (64, 8192):  # it is paid once a pack, and layer
        more = times[1].phase_seconds(Strategy(8), [[[tokens]]]) - times[0].phase_seconds(Strategy(8), [[[tokens]]])
        assert more == pytest.approx(32 * 2 * NF4.weights * (2 + WEIGHT_BYTES) / 2.039e12, rel=0.01)
    moved = [estimate([Strategy(8)], sizes, hardware.cluster(8))[Strategy(8)] for sizes in (plain, packed)]
    assert moved[1] < 0.4 * moved[0]
    totals = [MemoryModel(sizes, 1).breakdown(Strategy(rc=1), 1) for sizes in (plain, packed)]
    assert totals[1].weights < 0.35 * totals[0].weights
    most = 4096 * 11008 * 2  # of one matrix in bf16, where there are no logits
    assert totals[1].activations - totals[0].activations == pytest.approx(most - totals[0].logits)


@pytest.mark.parametrize(("kind", "bits"), [("nf4", "4.5"), ("int8_weight_only", "8.0")])
def test_the_commands(capsys: pytest.CaptureFixture[str], kind: str, bits: str) -> None:
    args = ["--model", "llama2-7b", "--nodes", "1x1", "--hardware", "4090", "--lora", "16", "--quantization", kind]
    assert main(["estimate", *args, "--strategy", "dp1+rc", "--pack-tokens", "4096"]) == 0
    assert f"frozen in {kind}, {bits} bits a weight" in capsys.readouterr().out
    assert main(["plan", *args, "--lengths", "chat", "--longest", "4096", "--mini-batch", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantization"], found["lora"]["r"]) == (kind, 16)
    alone = [word for word in args if word not in ("--lora", "16")]
    assert main(["estimate", *alone, "--strategy", "dp1", "--pack-tokens", "64"]) == 2
    assert "add --lora 16" in capsys.readouterr().err
    assert main(["calibrate", "--model", "llama2-7b", "--lora", "16"]) == 2
    assert "add --quantization nf4" in capsys.readouterr().err


def test_a_calibration_of_other_weights_is_refused() -> None:
    model = tiny_model("llama_gqa_bias")
    calibration, shape = made_calibration(model, 1, {1: Cost(b=1e-6)}), describe_model(model).shape
    known: Any = {"dtype": "float32", "nodes": 1, "devices_per_node": 1}
    check_calibration(calibration, "here", shape, **known)
    with pytest.raises(HotspaConfigError, match="frozen weights plain instead of nf4"):
        check_calibration(calibration, "here", shape, **known, base=FrozenBase("nf4", 8))
