"""Rotary tables by the length of a row (longrope, dynamic): trained as the stock Trainer trains row by row, or refused by name."""

import copy

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, Trainer, TrainingArguments

from hf_hotspa.errors import StrategyError, UnsupportedError
from hf_hotspa.parallel.rope import length_borders, refuse_hidden_rope
from hf_hotspa.rows.read_row import RowRules, read_row
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.oracle import random_rows, reference_step
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, worst_error

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0, 1.4], "long_factor": [2.0, 5.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def model_with(rope, seen=0):
    """A tiny model that has seen a row of so many tokens: its rotary module remembers it."""
    model = tiny_model("llama_gqa_bias", rope_parameters=rope, max_position_embeddings=40)
    if seen:
        with torch.no_grad():
            model(torch.arange(seen)[None])
    return model


def losses_of(trainer):
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    ("rope", "seen", "says"), [(LONGROPE, 0, True), (LONGROPE, 30, True), (DYNAMIC, 0, False), (DYNAMIC, 60, False)]
)
def test_each_row_is_trained_as_if_alone(tmp_path, caplog, rope, seen, says):
    rows = random_rows(24, 160, longest=36, masked=False)
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
              "logging_steps": 1, "learning_rate": 1e-2, "adam_epsilon": 1e-4}  # fmt: skip
    alone = TrainingArguments(**common, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    expected = losses_of(Trainer(model=model_with(rope, seen), args=alone, train_dataset=rows))
    packed = HotSPaTrainingArguments(**common, per_device_train_batch_size=8, hotspa_strategies="dp1:40@80")
    ours = HotSPaTrainer(model=model_with(rope, seen), args=packed, train_dataset=rows)
    assert losses_of(ours) == pytest.approx(expected, rel=2e-5)
    assert ("each is trained with the factors for its length" in caplog.text) is says


def test_tables_of_each_type_of_layer():
    model = tiny_model_of("gemma3_text")
    config = copy.deepcopy(model.config)
    factors = {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config.rope_parameters = {
        "full_attention": {**LONGROPE, **factors},
        "sliding_attention": {**LONGROPE, **factors, "original_max_position_embeddings": 8},
    }
    model = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float64).train()
    rows = random_rows(9, model.config.vocab_size, longest=40)
    engine = make_engine(model, "dp1:40@400")
    error = worst_error(engine, make_mini_batch(engine, rows), *reference_step(model, rows))[0]
    engine.close()
    assert error <= 1e-11


def test_dynamic_tables_beyond_the_limit_are_refused(tmp_path):
    rows = random_rows(8, 160, longest=60)
    args = HotSPaTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", hotspa_strategies="dp1:64@128", max_steps=1
    )
    with pytest.raises(StrategyError, match="64 tokens, and the model has 40 positions"):
        HotSPaTrainer(model=model_with(DYNAMIC), args=args, train_dataset=rows).train()


@pytest.mark.parametrize("left", [False, True])
def test_padding_of_the_data_set_may_not_cross_the_border(left):
    def row(tokens, width, **more):
        mask = [1] * tokens + [0] * (width - tokens)
        return {"input_ids": [5] * width, "attention_mask": mask[::-1] if left else mask, **more}

    rules = RowRules(borders=(16,))
    for accepted in (row(10, 16), row(17, 40), row(0, 40), row(16, 16)):
        read_row(accepted, 0, rules)
    read_row(row(10, 40), 0, RowRules())
    with pytest.raises(UnsupportedError, match="10 tokens is padded to 17, and rows of more than 16") as caught:
        read_row(row(10, 17), 3, rules)
    assert caught.value.where == "dataset row 3"


def test_borders_of_configs():
    text = {"head_dim": 4, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64}
    assert length_borders(LlamaConfig(**text)) == ()
    assert length_borders(LlamaConfig(**text, rope_parameters=LONGROPE)) == (16,)
    assert length_borders(LlamaConfig(**text, rope_parameters=DYNAMIC)) == (64,)
    layered = {"full_attention": LONGROPE, "sliding_attention": DYNAMIC}
    assert length_borders(Gemma3TextConfig(**text, rope_parameters=layered)) == (16, 64)


def test_tables_that_nobody_sees_are_refused():
    config = LlamaConfig(head_dim=4, rope_parameters=LONGROPE)
    inside, outside = nn.Module(), nn.Module()
    inside.rope_type = outside.rope_type = "longrope"
    base = nn.ModuleDict({"layers": nn.ModuleList([inside])})
    with pytest.raises(UnsupportedError, match="longrope.*inside of the layers"):
        refuse_hidden_rope(config, base, ["layers."])
    with pytest.raises(UnsupportedError, match="no module of the model declares"):
        refuse_hidden_rope(config, nn.Module(), ["layers."])
    refuse_hidden_rope(config, nn.ModuleDict({"rope": outside, "layers": nn.ModuleList()}), ["layers."])
    refuse_hidden_rope(LlamaConfig(), base, ["layers."])
