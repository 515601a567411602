"""`docs/data.md`: every line of its table of columns, its line of the log and its code do what the page says."""

import json
import re
from pathlib import Path

import datasets
import pytest

from hf_hotspa.data.prepare import prepare_dataset, tokenize_rows
from hf_hotspa.rows.chat_text import ChatTemplate
from tests.chat_templates import bracketed, tokenizer_for
from tests.unit.test_chat import CHATML, QWEN3

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
TABLE = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")][1:]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
ASKED = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT = ASKED.format("hi") + "[yes<|im_end|>]\n"
# For each line of the table rows, and the text that is trained with brackets around what is learned.
CASES = {
    "`input_ids`, optional `labels`": [
        ({"input_ids": [64, 65, 66], "text": "no"}, "[abc]"),
        ({"input_ids": [64, 65, 66], "labels": [-100, 65, 66], "messages": TALK}, "a[bc]"),
    ],
    "`messages`, `conversations` or `conversation`": [
        ({"messages": TALK, "text": "no"}, CHAT),
        ({"conversations": SHARED, "prompt": "no", "completion": "no"}, CHAT),
        ({"conversation": TALK, "instruction": "no", "output": "no"}, CHAT),
    ],
    "`prompt` and `completion`, texts": [({"prompt": "1+1=", "completion": "2", "text": "no"}, "1+1=[2<eos>]")],
    "`prompt` and `completion`, lists of messages": [({"prompt": TALK[:1], "completion": TALK[1:], "text": "no"}, CHAT)],
    "`instruction`, optional `input` or `context`, and `output` or `response`": [
        ({"instruction": "hi", "output": "yes", "text": "no"}, CHAT),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, ASKED.format("Add\n\n1 2") + "[3<|im_end|>]\n"),
        ({"instruction": "Add", "context": "1 2", "response": "3"}, ASKED.format("Add\n\n1 2") + "[3<|im_end|>]\n"),
        (
            {"instruction": "Add", "output": "3", "history": [["hi", "yes"]]},
            CHAT + "<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]\n",
        ),
    ],
    "`question` and `answer` (or `response`); `query` and `response`": [
        ({"question": "hi", "answer": "yes"}, CHAT),
        ({"question": "hi", "response": "yes"}, CHAT),
        ({"query": "hi", "response": "yes"}, CHAT),
    ],
    "`text`": [({"text": "abc"}, "[abc<eos>]")],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def learned_of(tokenizer, row):
    labels = row.get("labels") or row["input_ids"]
    return bracketed(tokenizer, row["input_ids"], [label != -100 for label in labels])


def test_every_line_of_the_table_is_tried():
    assert list(CASES) == TABLE


@pytest.mark.parametrize("line", CASES)
def test_the_table_of_columns(line):
    tokenizer = tokenizer_for(CHATML)
    assert tokenizer.decode([64, 65, 66]) == "abc"
    for row, expected in CASES[line]:
        (prepared,) = prepare_dataset([row], tokenizer)
        assert learned_of(tokenizer, prepared) == expected
        (streamed,) = tokenize_rows([row], tokenizer)
        assert learned_of(tokenizer, streamed) == expected


def test_questions_without_a_chat_template():
    tokenizer = tokenizer_for("")
    tokenizer.chat_template = None
    for line in TABLE[4:6]:
        (row, _), *_ = CASES[line]
        (prepared,) = prepare_dataset([row], tokenizer)
        assert learned_of(tokenizer, prepared) == "### Instruction:\nhi\n\n### Response:\n[yes<eos>]"


def test_the_line_of_the_log():
    """Qwen3's template and our short one with its behaviour write these conversations alike."""
    assert f"\n{ChatTemplate(tokenizer_for(QWEN3)).statement()}\n" in PAGE


def test_the_code_of_the_page_gives_lengths(tmp_path, monkeypatch):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"conversations": SHARED[:n]}) + "\n" for n in (1, 2)))
    monkeypatch.chdir(tmp_path)
    names = {"tokenizer": tokenizer_for(CHATML)}
    exec(code, names)
    assert names["lengths"].tolist() == [len(names["tokenizer"].encode(t, add_special_tokens=False)) for t in (
        ASKED.format("hi").removesuffix("<|im_start|>assistant\n"), CHAT.replace("[", "").replace("]", ""))]  # fmt: skip
