"""What `hf-hotspa plan` is asked about: data sets, saved lengths, and what becomes of long rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hotspa.cli import main
from hf_hotspa.costs.model_config import _PRESETS
from hf_hotspa.search.histogram import KIND, Counts, load_counts

MACHINE = ["--nodes", "1x8", "--hardware", "a800-80g", "--mini-batch", "32", "--max-buckets", "2"]
WORDS = [3, 5, 5, 40, 700, 1, 60, 12]
"""Of the texts; each has the end of a sequence behind it, so it is a token longer."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(["word"] * count)}) + "\n" for count in WORDS))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *args: str, model: str = "llama2-7b") -> dict[str, Any]:
    assert main(["plan", "--model", model, *MACHINE, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    return capsys.readouterr().err


def test_lengths_of_a_data_set_and_the_plan_for_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: str, tokenizer: str
) -> None:
    saved = tmp_path / "lengths.json"
    assert main(["lengths", "--dataset", texts, "--tokenizer", tokenizer, "-o", str(saved)]) == 0
    said = capsys.readouterr().out
    assert f"8 sequences of {texts}; {sum(WORDS) + 8} tokens" in said
    assert "at most 6 (50 %), 701 (90 %), 701 (99 %); the longest 701" in said
    data = json.loads(saved.read_text())
    assert data["kind"] == KIND
    assert data["counts"] == {str(length + 1): count for length, count in sorted(Counter(WORDS).items())}
    at_once = plan(capsys, "--dataset", texts, "--tokenizer", tokenizer)
    from_file = plan(capsys, "--lengths", str(saved))
    assert at_once["lengths"] == {"source": texts, "count": 8, "longest": 701}
    assert at_once.pop("lengths") != from_file.pop("lengths")  # the source
    assert at_once == from_file


def test_the_tokenizer_is_that_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: str, tokenizer: str
) -> None:
    (Path(tokenizer) / "config.json").write_text((_PRESETS / "llama2-7b.json").read_text())
    assert plan(capsys, "--dataset", texts, model=tokenizer)["lengths"]["longest"] == 701
    args = ["plan", "--model", "llama2-7b", *MACHINE, "--dataset", texts]
    assert "llama2-7b comes without one; give --tokenizer" in refusal(capsys, *args)
    assert "no tokenizer 'lab/none'" in (said := refusal(capsys, *args, "--tokenizer", "lab/none"))
    assert "hf download lab/none tokenizer_config.json tokenizer.json" in said
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "a folder with tokenizer.json" in refusal(capsys, *args, "--tokenizer", str(empty))


def test_rows_of_tokens_need_no_tokenizer_and_packed_ones_are_their_documents(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tokens.jsonl"
    rows = [{"input_ids": [1] * 9, "position_ids": [0, 1, 2, 3, 0, 1, 0, 1, 2]}] * 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = tmp_path / "lengths.json"
    assert main(["lengths", "--dataset", str(path), "-o", str(saved)]) == 0
    assert "12 sequences" in capsys.readouterr().out
    assert sorted(load_counts(saved).drawn()) == [2] * 4 + [3] * 4 + [4] * 4
    assert main(["lengths", "--dataset", str(path), "--rows", "3"]) == 0
    assert f"9 sequences of {path}, 3 of 4 rows; 27 tokens" in capsys.readouterr().out


def test_empty_rows_are_left_out(capsys: pytest.CaptureFixture[str], texts: str, tokenizer: str) -> None:
    with Path(texts).open("a") as file:
        file.write('{"text": null}\n{"text": ""}\n')
    assert main(["lengths", "--dataset", texts, "--tokenizer", tokenizer]) == 0
    assert f"8 sequences of {texts}, 2 empty rows left out; {sum(WORDS) + 8} tokens" in capsys.readouterr().out


def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str], texts: str) -> None:
    assert "no file or directory missing.jsonl" in refusal(capsys, "lengths", "--dataset", "missing.jsonl")
    with pytest.raises(SystemExit):
        main(["lengths", "--dataset", texts, "--rows", "0"])
    assert "argument --rows: '0' is not a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--model", "llama2-7b", *MACHINE, "--dataset", texts, "--lengths", "chat"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "expected"), [("truncate", [10, 100, 100]), ("split", [10, 50, 100, 100, 100]), ("drop", [10, 100])]
)
def test_what_becomes_of_long_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, policy: str, expected: list[int]
) -> None:
    """As `hotspa_overlong` has it, with at most 100 tokens."""
    path = tmp_path / "lengths.json"
    Counts.of([10, 100, 250]).save(path)
    args = ["--lengths", str(path), "--longest", "100", "--max-buckets", "1"]
    found = plan(capsys, *args, "--overlong", policy)
    assert found["lengths"] == {"source": str(path), "count": len(expected), "longest": 100}
    mean = 32 * sum(expected) / len(expected)  # mini-batches of 32 sequences, drawn in turn
    assert found["buckets"][0]["tokens"] == pytest.approx(mean, rel=0.1)
    said = refusal(capsys, "plan", "--model", "llama2-7b", *MACHINE, *args)
    assert "1 of 3 lengths are above --longest 100; the longest is 250" in said
    Counts.of([200, 250]).save(path)
    assert "none of 2 sequences has at most 100" in refusal(
        capsys, "plan", "--model", "llama2-7b", *MACHINE, *args, "--overlong", "drop"
    )
