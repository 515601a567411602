"""examples/chat_lora.py runs as it is, learns, and saves an adapter that PEFT loads."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from peft import PeftModel

from tests.gloo.test_examples_run import run_script
from tests.harness import run_ranks

pytestmark = pytest.mark.gloo

SCRIPT = Path(__file__).parents[2] / "examples" / "chat_lora.py"


@pytest.mark.slow
def test_an_adapter_learns_from_conversations(tmp_path, monkeypatch):
    arguments = ["--use_cpu", "--output_dir", str(tmp_path / "out"), "--max_steps", "8", "--hotspa_report", "False"]
    arguments += ["--hotspa_strategies", "dp2:256@1024,tp2:1024", "--logging_steps", "1", "--save_strategy", "no"]
    run_ranks(2, run_script, "chat_lora.py", [*arguments, "--report_to", "none"], str(tmp_path / "log.txt"))
    text = (tmp_path / "log.txt").read_text()
    first, last = map(float, re.search(r"loss ([0-9.]+) -> ([0-9.]+); the adapter is in", text).groups())
    assert last < first - 0.5
    assert not (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    example = runpy.run_path(str(SCRIPT), run_name="example")
    loaded = PeftModel.from_pretrained(example["small_model"](example["small_tokenizer"]()), tmp_path / "out")
    learned = [weight for name, weight in loaded.named_parameters() if "lora_B" in name]
    assert learned
    assert all(weight.abs().max() > 0 for weight in learned)


def test_settings_of_the_small_model_are_not_those_of_a_users(tmp_path, monkeypatch):
    """1e-2, 20 steps and rows cut at 1,024 tokens would wreck a model that has been trained, in silence."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    parse = runpy.run_path(str(SCRIPT), run_name="example")["parse"]
    given = {
        "small": ["--hotspa_strategies", "dp1:512"],  # those of the script are for 4 processes
        "own": ["--model", "Qwen/Qwen3-0.6B", "--dataset", "my.jsonl"],
    }
    found = {}
    for name, words in given.items():
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--use_cpu", "--output_dir", str(tmp_path), *words])
        _, found[name] = parse()
    assert (found["small"].learning_rate, found["small"].max_steps, found["small"].hotspa_overlong) == (
        1e-2,
        20,
        "truncate",
    )
    assert (found["own"].learning_rate, found["own"].max_steps, found["own"].hotspa_overlong) == (2e-4, -1, "error")
    assert found["own"].hotspa_auto
