"""examples/bare_loop.py runs as it is, in one process and in several, and trains."""

import re
from pathlib import Path

import pytest

from tests.gloo.test_examples_run import run_script
from tests.harness import run_ranks

pytestmark = pytest.mark.gloo

LOSS = re.compile(r"step +\d+  loss ([0-9.]+)")


def arguments_of(folder: Path, strategies: str) -> list[str]:
    names = {"strategies": strategies, "output_dir": folder / "model", "steps": 7}
    return ["--use_cpu", *(str(part) for name, value in names.items() for part in (f"--{name}", value))]


def check(folder: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = [float(loss) for loss in LOSS.findall(text)]
    assert len(losses) == 7
    assert min(losses[-2:]) < losses[0] - 0.5, losses
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("What is the ", return_tensors="pt").input_ids
    # a sample of the corpus is better known to the saved model than to an untrained one
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < losses[0]


def test_trains_on_two_ranks(tmp_path):
    log = tmp_path / "log.txt"
    run_ranks(2, run_script, "bare_loop.py", arguments_of(tmp_path, "dp2:256@1024,tp2:1024"), str(log))
    text = log.read_text()
    assert "dp2" in text
    assert "tp2" in text
    check(tmp_path, text)


def test_a_wrong_number_of_processes_is_named(tmp_path):
    log = str(tmp_path / "log.txt")
    [run] = run_ranks(
        1, run_script, "bare_loop.py", arguments_of(tmp_path, "dp2:128"), log, init=False, expect_failure=True
    )
    assert "the strategies need 2 processes and 1 are running" in run.error
    assert "accelerate launch --multi_gpu --num_processes 2" in run.error
