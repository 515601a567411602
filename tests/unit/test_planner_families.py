"""`hf-hotspa plan` and the engine agree on families: which strategies are legal, and what a rank holds of the weights.

On the default config of each family, which describes a model of real size, built without weights; a sample of them in
every run. Families of latent attention are refused by the arithmetic of `plan`, by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForTokenClassification, Gemma3TextConfig, ModernBertConfig

from hf_hotspa.cli import main
from hf_hotspa.costs.data_sheet import layer_cost
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import activation_bytes
from hf_hotspa.costs.model_config import FAMILIES_FILE, load_model
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import HotspaConfigError, ModelError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy, legal_strategies
from tests.family_table import ONLY_TINY, default_config, described, facts_of, family_facts
from tests.tiny_families import planned_families

TABLE = json.loads(FAMILIES_FILE.read_text())
SAMPLE = ("llama", "olmo2", "mixtral", "granitemoe", "gpt_oss", "jais2")
"""Cut whole; gathered projections; experts that the plan cuts, and attention that it does not; no plan; uneven heads."""
WORLD = 8
NEAR = 0.01
FAR = {
    "qwen3_5_text": 0.03,  # of its layers, some have no key/value heads
    "gemma4_text": 0.9,
    "phi4_multimodal": 0.7,  # further embeddings, of which their configs' own fields tell
    "hrm_text": 2.1,  # two stacks of layers of its own names
}
"""Families where a rank's weights are further off than `NEAR`, and by how much."""
_LATENT = "cannot be counted from its config: multi-head latent attention"
_NAMES = "has no num_hidden_layers"
UNCOUNTED = {
    **dict.fromkeys(
        (
            "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text",
            "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear", "minicpm3", "youtu",
        ),
        _LATENT,
    ),
    "longcat_flash": _NAMES,
    "nemotron_h": _NAMES,
    "gemma3n_text": "intermediate_size is ",
    "phimoe": "cannot be trained: the router of phimoe draws random numbers",
}  # fmt: skip
"""What `plan` says of the others."""

EVERY = [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in planned_families()]


@pytest.mark.parametrize("family", EVERY)
def test_the_table_holds_what_the_engine_finds(family: str) -> None:
    assert family_facts(family) == facts_of(TABLE)[family], "run: python -m tests.family_table"


@pytest.mark.parametrize("family", EVERY)
def test_legal_strategies_and_weights_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    config = default_config(family)
    config.save_pretrained(tmp_path)
    if family in UNCOUNTED:
        with pytest.raises(ModelError, match=UNCOUNTED[family]):
            load_model(tmp_path)
        return
    exact, model = described(config), load_model(tmp_path)
    shape = model.shape
    legal = legal_strategies(WORLD, shape)
    assert legal == legal_strategies(WORLD, exact.shape)
    options = [Strategy(1, tp, WORLD // tp, sp=True) for tp in (2, 4, 8)]
    assert [s.unsupported_reason(shape) for s in options] == [s.unsupported_reason(exact.shape) for s in options]
    if family in ONLY_TINY:
        return
    counted, vector = ModelSizes(shape, "bfloat16", model.tied), ModelSizes(exact.shape, vector=exact.vector)
    for tp in sorted({strategy.tp for strategy in legal}):
        found, expected = (sizes.stages(Strategy(1, tp, 1))[0].weight_bytes for sizes in (counted, vector))
        assert found == pytest.approx(expected, rel=FAR.get(family, NEAR)), f"tp{tp}"


def _shape(**changes: Any) -> ModelShape:
    return ModelShape("llama", 2, 8, 8, 64, 64, 256, 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, **changes)


def test_what_is_held_whole_costs_memory_and_time_at_every_tp() -> None:
    attention, mlp = 4 * 64 * 64, 3 * 64 * 128
    ends = 2 * 256 * 64
    for changes, whole in (({}, 0), ({"whole_attention": 1.0}, attention), ({"whole_mlp": 0.5}, mlp // 2)):
        shape = _shape(**changes)
        assert shape.whole_parameters == pytest.approx(whole, abs=64)  # of the two norms, which count with the MLP
        for tp in (1, 2, 8):
            layer = whole + (attention + mlp - whole) // tp + 2 * 64
            (stage,) = ModelSizes(shape).stages(Strategy(1, tp, 1))
            assert stage.weight_bytes == 2 * (2 * layer + ends // tp + 64)
    cut, kept = _shape(), _shape(whole_attention=1.0)
    assert activation_bytes(cut, 1) == activation_bytes(kept, 1)
    assert activation_bytes(kept, 8) - activation_bytes(cut, 8) == pytest.approx(2 * 4 * 64 * (1 - 1 / 8))
    machine = load_hardware("a800-80g")
    of_cut, of_kept = (layer_cost(shape, 8, machine, "bfloat16") for shape in (cut, kept))
    assert of_kept.a == pytest.approx(8 * of_cut.a)
    assert of_kept.b > of_cut.b


def test_sequence_parallel_is_not_offered_where_the_engine_refuses_it(tmp_path: Path) -> None:
    default_config("granitemoe").save_pretrained(tmp_path)
    with pytest.raises(HotspaConfigError, match=r"cannot run \+sp.*q_proj works on whole rows") as caught:
        Setup.read(str(tmp_path), "1x8", sequence_parallel=True)
    assert "leave --sequence-parallel out" in str(caught.value)
    asked = ["--model", str(tmp_path), "--nodes", "1x8", "--strategy", "tp8+sp", "--pack-tokens", "9"]
    assert main(["estimate", *asked]) == 2
    assert Setup.read(str(tmp_path), "1x8").strategies()


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "roberta", "electra"])
def test_an_encoder_is_planned_as_the_engine_runs_it(family: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family](num_labels=3)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config)
    shape, exact = load_model(tmp_path).shape, describe_model(model).shape
    assert shape.both_ways
    assert exact.both_ways
    assert legal_strategies(WORLD, shape) == legal_strategies(WORLD, exact)
    assert shape.ck_unsupported_reason == exact.ck_unsupported_reason
    assert exact.ck_unsupported_reason is not None
    assert shape.layer_parameters == pytest.approx(exact.layer_parameters, rel=NEAR)
    assert shape.quadratic_cost == pytest.approx(exact.quadratic_cost, rel=NEAR)


def test_a_plan_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, config in (("modernbert", ModernBertConfig()), ("embeddinggemma", Gemma3TextConfig())):
        if name == "embeddinggemma":
            config.use_bidirectional_attention = True
        config.save_pretrained(tmp_path)
        for task in ("embed", "classify"):
            words = f"plan --model {tmp_path} --gpus 8xa100-80g --lengths chat --longest 8192 --task {task} --json"
            assert main(words.split()) == 0
            plan = json.loads(capsys.readouterr().out)
            assert plan["task"] == task
            assert plan["buckets"]
            assert not any("+ck" in bucket["strategy"] for bucket in plan["buckets"])
