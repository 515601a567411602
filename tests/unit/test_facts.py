"""What is known of a run: its command without secrets, its data, the peak of its card, and the operations of its model."""

import sys

import pytest
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_hotspa.data.prepare import load_source
from hf_hotspa.model.specs import describe_model
from hf_hotspa.trainer.run_facts import command_line, data_name, model_flops, peak_of_card

PYTHON = "/home/ada/.venv/bin/python"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([PYTHON, "-u", "my train.py", "--bf16"], "python -u 'my train.py' --bf16"),
        ([PYTHON, "/home/ada/.venv/bin/hf-hotspa", "train", "--model", "m"], "hf-hotspa train --model m"),
        (
            [PYTHON, "t.py", "--hub_token=geheim", "--wandb-api-key", "x"],
            "python t.py --hub_token=*** --wandb-api-key ***",
        ),
        ([PYTHON, "t.py", "hf_AbCdEfGhIjKlMnOpQr"], "python t.py ***"),
        ([PYTHON, "t.py", "--max_new_tokens", "7"], "python t.py --max_new_tokens 7"),
    ],
)
def test_a_command_is_shown_as_it_is_typed_and_without_secrets(words, shown):
    assert command_line(words) == shown


def test_a_long_command_is_cut_and_a_notebook_is_called_so(monkeypatch):
    assert len(command_line([PYTHON, "-c", "x = 1; " * 1000])) < 1100
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert command_line([PYTHON, "-m", "ipykernel_launcher", "-f", "k.json"]) == "a notebook"


def test_data_have_the_name_of_their_file(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert data_name(load_source(str(file))) == "chats.jsonl, 2 rows"
    assert data_name([1, 2, 3]) == "list, 3 rows"
    assert data_name(iter(())) == "tuple_iterator"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("AMD Instinct MI300X", 1307.4e12),
        ("Tesla T4", None),  # no bfloat16
        ("Some card", None),
    ],
)
def test_the_peak_of_a_card_by_the_name_of_its_driver(name, peak):
    assert peak_of_card(name, "bfloat16") == peak
    assert peak_of_card(name, "float32") is None


def test_operations_of_a_model_by_hand():
    """6 a weight and token in all products, 12 s^2 a layer and head dimension in attention, of which causality leaves half."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=32, **shape))
    products = 3 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 32 * 16
    norms = 3 * 2 * 16  # counted with their layers, for nearly nothing
    found = model_flops(describe_model(model).shape, model, 1e15)
    assert found.token == 6 * (products + norms)
    assert found.square == 3 * 12 * 16 / 2
    model.requires_grad_(False)
    assert model_flops(describe_model(model).shape, model, 1e15).token == 4 * (products + norms)
    assert found.utilization(1000, 20_000, 2.0) == (found.token * 1000 + found.square * 20_000) / 2e15


def test_layers_that_see_a_window_have_no_squares():
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        vocab_size=32,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    assert config.layer_types.count("full_attention") == 1
    assert model_flops(describe_model(model).shape, model, 1.0).square == 6 * 16


def test_tokens_that_see_both_sides_compare_twice_as_many_pairs():
    config = BertConfig(num_hidden_layers=3, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_labels=5)
    model = BertForTokenClassification(config)
    products = 3 * (4 * (16 * 16 + 16) + 2 * 16 * 24 + 16 + 24 + 2 * 2 * 16) + 5 * 16  # with biases and norms
    found = model_flops(describe_model(model).shape, model, 1.0)
    assert found.square == 3 * 12 * 16
    assert found.token == 6 * products
