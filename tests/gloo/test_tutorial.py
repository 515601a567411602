"""`docs/tutorial.md` from its first block to its last on one CPU process, with a small model, a Ctrl-C and a resume."""

import json
import os
import runpy
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_hotspa.cli import main
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.gloo.test_examples_run import executed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
BLOCK = NOTEBOOK["BLOCK"]

pytestmark = pytest.mark.gloo


class Interrupt(TrainerCallback):
    """Presses Ctrl-C in a step of the first run."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun.append(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if len(self.begun) == 1 and state.global_step == 5:
            signal.raise_signal(signal.SIGINT)


def run(language: str, title: str, text: str) -> None:
    """Runs a block as its reader does."""
    if language == "python" and title:
        Path(title).write_text(text)
    elif language == "python":
        exec(compile(text, str(PAGE), "exec"), {})
    elif not text.startswith(("# needs GPUs", "pip install")):
        words = shlex.split(text)
        if words[0] == "python":
            runpy.run_path(words[1])
        else:
            assert words[0] == "hf-hotspa"
            assert main(words[1:]) == 0, text


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder with the model that the page names."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    from from_trl import small_model, small_tokenizer  # type: ignore[import-not-found]

    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    for part in (tokenizer, small_model(tokenizer)):
        part.save_pretrained(tmp_path / "path" / "to" / "model")
    return tmp_path


def test_every_block_of_the_tutorial_runs(reader, monkeypatch, capsys):
    interrupt, init = Interrupt(), HotSPaTrainer.__init__

    def with_interrupt(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_callback(interrupt)

    monkeypatch.setattr(HotSPaTrainer, "__init__", with_interrupt)
    for language, title, text in BLOCK.findall(PAGE.read_text()):
        run(language, title, text)
    assert interrupt.begun == [0, 6]  # the step that runs is finished
    state = json.loads((reader / "out" / "checkpoint-36" / "trainer_state.json").read_text())
    losses = [log["eval_loss"] for log in state["log_history"] if "eval_loss" in log]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert list((reader / "out").rglob("events.out.tfevents*"))
    assert (reader / "out" / "hotspa_report" / "report.html").exists()
    assert (reader / "served" / "model.safetensors").exists()
    assert not list((reader / "served").glob("adapter*"))
    out = capsys.readouterr().out
    assert "'eval_loss'" in out
    assert out.rstrip().splitlines()[-1].strip()


def test_the_notebook_is_the_page():
    assert NOTEBOOK["NOTEBOOK"].read_text() == NOTEBOOK["text"](), "run: python docs/notebook.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(reader):
    commands = reader / "commands"
    commands.mkdir()
    (commands / "pip").write_text("#!/bin/sh\n")  # everything is installed
    (commands / "pip").chmod(0o755)
    path = os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"]))
    cells = executed(NOTEBOOK["NOTEBOOK"], reader, 500, PATH=path, HF_HOTSPA_CACHE=str(reader / "cache"))
    ran = {cell.source: "".join(output.get("text", "") for output in cell.outputs) for cell in cells}
    assert not [text for text in ran.values() if "Traceback" in text or " error: " in text]
    assert "predicted" in ran[next(source for source in ran if source.startswith("!hf-hotspa plan"))]
    assert "'eval_loss'" in ran["!python train.py"]
    assert (reader / "out" / "checkpoint-36").is_dir()
    assert (reader / "served" / "model.safetensors").exists()
    assert ran[cells[-1].source].strip()  # the answer
