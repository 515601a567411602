"""The light installation: plans, lengths and reports where neither torch nor transformers nor accelerate can be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_hotspa import versions
from hf_hotspa.cli import main
from hf_hotspa.data.prepare import tokenize_rows
from hf_hotspa.rows.light_tokenizer import LightTokenizer
from tests.chat_templates import CASES, tokenizer_for
from tests.contract.layers import ROOT
from tests.contract.outputs import make_files

WITHOUT = """
import importlib.machinery as machinery, sys
real = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ("torch", "transformers", "accelerate", "peft") else real(name, path, target)
machinery.PathFinder.find_spec = staticmethod(find_spec)
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    sys.exit("torch could be imported")
"""
"""As where they are not installed: for `import`, and for those that ask whether they are there."""
COMMAND = WITHOUT + "from hf_hotspa.cli import main\nsys.exit(main(sys.argv[1:]))"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

COPIED = ("hotspa_strategies", "SFTConfig(")


def light(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=_environment(folder))


def _environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "cache"), "PATH": "/usr/bin:/bin", "COLUMNS": "80"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("light")
    make_files(path)
    tokenizer_for(TEMPLATE).save_pretrained(path / "chat")
    rows = [{"messages": CASES["two turns"]}, {"messages": CASES["one turn"]}]
    (path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_question_is_answered_without_torch(folder: Path) -> None:
    words = ["--model", "llama2-7b", "--gpus", "8xh100-80g", "--dataset", "my.jsonl", "--tokenizer", "path/to/model"]
    done = light(folder, "plan", *words, "--mini-batch", "64", "--max-buckets", "2")
    assert done.returncode == 0, done.stderr
    answer, _, rest = done.stdout.partition("\nSwitching ")
    assert answer.startswith(("Yes: ", "No: ", "About the same as "))
    assert ", predicted" in answer
    assert "\nWhy: " in rest
    assert "Copy:" in done.stdout
    assert "of 8,192" not in done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and not line.startswith(COPIED)] == []


def test_lengths_are_those_that_training_sees(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    words = ["lengths", "--dataset", "chats.jsonl", "--tokenizer", "chat"]
    done = light(folder, *words)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder)
    assert main(words) == 0
    assert done.stdout == capsys.readouterr().out


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("marked", [True, False])
def test_conversations_become_the_same_tokens_and_labels(tmp_path: Path, case: str, marked: bool) -> None:
    template = TEMPLATE if marked else TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template += "{% if tools %}{{ tools | tojson }}{% endif %}"
    for extra in ("thinking", "tools"):  # a template that writes all there is
        template = (
            template.replace("{{ m.content }}<eos>", "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}<eos>")
            if case == extra
            else template
        )
    tokenizer_for(template).save_pretrained(tmp_path)
    row = {"messages": CASES[case]}
    both = [
        _tokens(row, tokenizer) for tokenizer in (LightTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    ]
    assert both[0] == both[1]


def _tokens(row, tokenizer):
    try:
        [tokens] = tokenize_rows([row], tokenizer)
    except Exception as error:
        return str(error)
    return {name: list(values) for name, values in tokens.items()}


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_texts_and_completions_become_the_same_tokens(tmp_path: Path, config: dict[str, bool]) -> None:
    tokenizer_for("", merges=[("a", "b"), ("ab", "c")]).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    ours, theirs = LightTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for row in ({"text": "abc abcd<eos>"}, {"text": "Grüße, 世界"}, {"prompt": "abc", "completion": " ab"}):
        assert _tokens(row, ours) == _tokens(row, theirs), row
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)


def test_training_says_which_line_to_run(folder: Path) -> None:
    for program in ("from hf_hotspa import HotSPaTrainer", "from hf_hotspa.trainer import HotSPaTrainingArguments"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT + program],
            capture_output=True,
            text=True,
            env=_environment(folder),
            timeout=100,
        )
        assert "pip install 'hf-hotspa[train]'" in done.stderr.splitlines()[-1]
    for words in (["train", "--model", "x"], ["calibrate", "--model", "llama2-7b"]):
        done = light(folder, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "pip install '.[train]'" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_untried_versions_are_told_and_nothing_else_happens(monkeypatch, caplog) -> None:
    installed = {"torch": "2.99.1", "transformers": "5.23.0", "accelerate": "1.2", "datasets": None, "peft": None}
    monkeypatch.setattr(versions, "version_of", installed.get)
    versions.warn_of_untried_versions.cache_clear()
    versions.warn_of_untried_versions()
    versions.warn_of_untried_versions()
    versions.warn_of_untried_versions.cache_clear()
    [record] = caplog.records
    assert "not tried with torch 2.99.1, accelerate 1.2. Nothing was changed" in record.getMessage()
    assert "transformers" not in record.getMessage()
