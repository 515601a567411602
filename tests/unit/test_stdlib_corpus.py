"""The corpus of the examples: offline, the same each time, with the long tail that it is there for."""

import importlib.util
import json
import multiprocessing
import platform
from pathlib import Path

import datasets
import pytest

from hf_hotspa.data.prepare import prepare_dataset

PATH = Path(__file__).parents[2] / "examples" / "stdlib_corpus.py"
SMALL = {"max_files": 12}


def load():
    spec = importlib.util.spec_from_file_location("stdlib_corpus", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corpus = load()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("the corpus must not need a network")

    monkeypatch.setattr("socket.create_connection", refused)
    monkeypatch.setattr("socket.socket.connect", refused)


def test_files_are_ordered_sources_without_tests_and_packages():
    files = corpus.stdlib_files()
    assert len(files) > 400
    assert files == corpus.stdlib_files()
    names = [path.as_posix() for path in files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name or "/tests/" in name for name in names)
    assert {path.suffix for path in files} == {".py"}
    few = corpus.stdlib_files(max_files=12)
    assert len(few) == 12
    assert set(few) < set(files)


def test_files_that_cannot_be_decoded_are_skipped(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9t\xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("y = 2\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(corpus.texts(corpus.stdlib_files())) == [("good.py", "x = 1\n")]
    assert [name for name, _ in corpus.texts(corpus.stdlib_files(tests=True))] == ["good.py", "test/t.py"]


def test_tokenizer_is_lossless_cached_and_reproducible(tmp_path):
    tokenizer = corpus.build_tokenizer(400, cache_dir=tmp_path / "a", **SMALL)
    assert len(tokenizer) == 400
    assert (tokenizer.eos_token, tokenizer.pad_token) == (corpus.EOS, corpus.PAD)
    text = "def café(x):\n\treturn x  # ☃\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    (folder,) = (tmp_path / "a").iterdir()  # and no temporary one
    assert platform.python_version() in folder.name
    assert "400" in folder.name
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    again = corpus.build_tokenizer(400, cache_dir=tmp_path / "a", **SMALL)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    other = corpus.build_tokenizer(400, cache_dir=tmp_path / "b", **SMALL)
    assert other.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    with pytest.raises(ValueError, match="at least 258"):
        corpus.build_tokenizer(200, cache_dir=tmp_path)


CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = {"name": "clock", "arguments": {"zone": "UTC"}}
WRITTEN = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'


@pytest.mark.parametrize("call", [CALL, {"function": CALL}, {"function": {**CALL, "arguments": '{"zone": "UTC"}'}}])
@pytest.mark.parametrize("tools", [[CLOCK], json.dumps([CLOCK]), None])
def test_the_chat_template_of_the_demo_writes_all_of_a_conversation(tmp_path, monkeypatch, call, tools):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = corpus.build_tokenizer(400, cache_dir=tmp_path, **SMALL)
    tokenizer.chat_template = corpus.CHAT_TEMPLATE
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I ask."},
        {"role": "tool", "content": "12:00", "name": "clock"},
        {"role": "assistant", "content": "Noon."},
    ]
    (row,) = prepare_dataset([{"messages": messages, "tools": tools}], tokenizer)
    expected = "" if tools is None else f"<|tools|>\n{json.dumps(CLOCK)}\n"
    expected += f"<|system|>\nBe short.\n<|user|>\nWhat time is it?\n<|assistant|>\n<think>\nI ask.\n</think>\n\n{WRITTEN}{corpus.EOS}"
    expected += f"\n<|tool|>\n12:00\n<|assistant|>\nNoon.{corpus.EOS}\n"
    assert tokenizer.decode(row["input_ids"]) == expected
    learned = tokenizer.decode([label for label in row["labels"] if label != -100])
    assert learned == f"<think>\nI ask.\n</think>\n\n{WRITTEN}{corpus.EOS}Noon.{corpus.EOS}"


def _build(cache_dir):
    return len(load().build_corpus(cache_dir=cache_dir, max_files=30))


def test_several_processes_may_build_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sizes = pool.map(_build, [tmp_path] * 4)
    assert len(set(sizes)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "texts", lambda files: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        corpus.build_corpus(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lengths_have_a_long_tail(tmp_path):
    tokenizer = corpus.build_tokenizer(1024, cache_dir=tmp_path, max_files=60)
    dataset = corpus.build_corpus(cache_dir=tmp_path, max_files=240)
    assert dataset.column_names == ["name", "text"]
    lengths = [len(row) for row in prepare_dataset(dataset, tokenizer)["input_ids"]]
    short = sum(length <= 1024 for length in lengths) / len(lengths)
    long = sum(length > 16384 for length in lengths) / len(lengths)
    assert 0.2 < short < 0.6
    assert 0.02 < long < 0.2
