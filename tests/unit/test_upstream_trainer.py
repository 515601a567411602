"""The run of transformers' and of TRL's own tests: what it counts as passing, as refused, and as neither."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

from tests.contract.layers import ROOT
from tests.upstream_trainer import hub
from tests.upstream_trainer.__main__ import PASSES, REFUSED, THIRD, compared

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
OF_TRL = """
import pytest
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

MODEL = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"


def trainer(tmp_path, config="standard_language_modeling", **fields):
    args = SFTConfig(str(tmp_path), max_steps=2, report_to="none", **fields)
    return SFTTrainer(MODEL, args, train_dataset=load_dataset("trl-internal-testing/zen", config, split="train"))


@pytest.mark.parametrize("config", ["standard_prompt_completion", "conversational_language_modeling"])
def test_trains(tmp_path, config):
    assert trainer(tmp_path, config).train().global_step == 2


def test_refused(tmp_path):
    trainer(tmp_path, model_init_kwargs={"dtype": "float16"}).train()


def test_looks_into_the_class_of_trl():
    assert SFTTrainer.__mro__[1].__module__ == "trl.trainer.base_trainer"


def test_is_not_on_the_hub():
    load_dataset("trl-internal-testing/other")
"""


def _ran(folder: Path, *options: str) -> list[dict[str, str]]:
    """The verdict of each test, by its name, of each round of a run in which one test is neither."""
    out = folder / "out.json"
    command = [sys.executable, "-m", "tests.upstream_trainer", str(folder), "--json", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 neither" in done.stdout
    return [
        {name.split("::")[-1]: entry["verdict"] for name, entry in found.items()}
        for found in json.loads(out.read_text()).values()
    ]


def test_only_what_passes_with_the_stock_trainer_counts() -> None:
    error = {"outcome": "failed", "error": "E: an error"}
    cases: dict[str, tuple[dict[str, object] | None, str]] = {
        "same": ({"outcome": "passed"}, PASSES), "by_name": ({**error, "code": "HSP-040", "steps": 0}, REFUSED),
        "too_late": ({**error, "code": "HSP-040", "steps": 1}, THIRD), "without_name": ({**error, "code": None, "steps": 0}, THIRD),
        "skipped": ({"outcome": "skipped"}, THIRD), "did_not_run": (None, THIRD),
    }  # fmt: skip
    stock = {name: {"outcome": "passed"} for name in cases} | {"fails": error}
    ours = {name: note for name, (note, _) in cases.items() if note} | {"fails": {"outcome": "passed"}}
    found = compared(stock, ours)
    assert {name: entry["verdict"] for name, entry in found.items()} == {name: v for name, (_, v) in cases.items()}


def test_the_folder_in_place_of_the_hub_has_each_split(tmp_path: Path) -> None:
    hub.make(tmp_path, [])
    zen = str(tmp_path / "trl-internal-testing" / "zen")
    rows = load_dataset(zen, "conversational_preference", cache_dir=str(tmp_path / "cache"))
    assert {split: len(part) for split, part in rows.items()} == {"train": 17, "test": 2}
    assert rows["train"].column_names == ["prompt", "chosen", "rejected"]


@pytest.mark.slow
def test_each_test_of_trl_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_sft_trainer.py").write_text(OF_TRL)
    assert _ran(folder, "--trl", "sft") == [{
        "test_trains[standard_prompt_completion]": "passes", "test_trains[conversational_language_modeling]": "passes",
        "test_refused": "refused by name", "test_looks_into_the_class_of_trl": "neither",
    }]  # fmt: skip


@pytest.mark.slow
def test_each_test_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "test_trainer_few.py").write_text(TESTS)
    (folder / "helpers.py").write_text(HELPERS)
    plain, swapped = _ran(folder.parent)
    assert plain == {
        "test_trains": "passes", "test_refused": "refused by name", "test_looks_into_the_stock_trainer": "neither",
    }  # fmt: skip
    assert swapped == {**plain, "test_toy": "passes"}
