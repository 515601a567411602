"""The run of transformers' own Trainer tests: what it counts as passing, as refused, and as neither."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.layers import ROOT

TESTS = """
import pytest
from transformers import Trainer, TrainingArguments

from .helpers import get_regression_trainer, rows, tiny


def test_trains(tmp_path):
    trainer = Trainer(tiny(), TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none"), train_dataset=rows())
    assert trainer.train().global_step == 2


def test_refused(tmp_path):
    Trainer(tiny(), TrainingArguments(str(tmp_path), optim="adafactor", use_cpu=True, report_to="none"), train_dataset=rows())


def test_looks_into_the_stock_trainer(tmp_path):
    assert Trainer.__module__ == "transformers.trainer"


def test_fails_with_both():
    raise KeyError


def test_toy(tmp_path):
    trainer = get_regression_trainer(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none")
    assert trainer.train().global_step == 1
"""
HELPERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                        num_attention_heads=2, pad_token_id=0))


def rows():
    return [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]} for _ in range(16)]


def get_regression_trainer(**kwargs):
    raise RuntimeError("a toy that is no language model")
"""


@pytest.mark.slow
def test_each_test_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "test_trainer_few.py").write_text(TESTS)
    (folder / "helpers.py").write_text(HELPERS)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tests.upstream_trainer", str(folder.parent), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1, done.stdout + done.stderr
    plain, swapped = (
        {name.split("::")[-1]: entry["verdict"] for name, entry in found.items()}
        for found in json.loads(out.read_text()).values()
    )
    assert plain == {
        "test_trains": "passes", "test_refused": "refused by name", "test_looks_into_the_stock_trainer": "neither",
    }  # fmt: skip
    assert swapped == {**plain, "test_toy": "passes"}
    assert "1 neither" in done.stdout
