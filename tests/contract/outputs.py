"""What README.md and docs/ show as output of `hf-hotspa`: made by the commands above it.

A block fenced as `output` stands behind a block fenced as `sh`, and shows what its commands print. A paragraph that is a line
in parentheses stands for paragraphs that are left out. `python -m tests.contract.outputs` rewrites the blocks;
`tests/contract/test_outputs.py` compares them. The commands of a page run in order, in a folder with the files that readers
are told to have: `my.jsonl`, and the folder `path/to/model` with a tokenizer.
"""

import io
import json
import os
import re
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from hf_hotspa.cli import main
from hf_hotspa.search.histogram import synthetic_lengths
from tests.contract.commands import PAGES, commands_of

SHOWN = re.compile(r"^```sh\n((?:(?!```).*\n)*)```\n\n^```output\n((?:(?!```).*\n)*)```$", re.MULTILINE)


def make_files(folder: Path) -> None:
    """Rows with lengths as those of chats, and a tokenizer of which each word of theirs is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lengths = synthetic_lengths("chat", 2000, 8192)
    (folder / "my.jsonl").write_text("".join(json.dumps({"text": "word " * (n - 1)}) + "\n" for n in lengths))
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "path" / "to" / "model")


def printed(command: str) -> str:
    """What a command prints; nothing where that goes to a file.

    Raises:
        AssertionError: it is none of ours, or fails.
    """
    words = shlex.split(command)
    assert words[0] == "hf-hotspa", f"{command!r} is no command of hf-hotspa"
    file = words.pop() if ">" in words else None
    with redirect_stdout(io.StringIO()) as out:
        assert main([word for word in words[1:] if word != ">"]) == 0, command
    if file is None:
        return out.getvalue()
    Path(file).write_text(out.getvalue())
    return ""


def left_out(paragraph: str) -> bool:
    """Whether it stands for paragraphs that are not shown."""
    return re.fullmatch(r"\(.*\)", paragraph) is not None


def is_plan(command: str) -> bool:
    """Whether a command of a page is a plan that needs no measured machine."""
    return command.startswith("hf-hotspa plan ") and "--calibration" not in command


def prepared(command: str) -> None:
    """Runs a command of a page if plans need what it writes."""
    if command.startswith(("hf-hotspa lengths ", "hf-hotspa hardware ")):
        printed(command)


def _first_word(paragraph: str) -> str:
    return re.findall(r"\w*", paragraph.lstrip())[0]


def shortened(shown: str, output: str) -> str:
    """The output with as much of it left out as in what is shown.

    Args:
        shown: What the page shows. Each run of paragraphs behind one that is left out is found by its first word.
        output: What the commands print.

    Raises:
        ValueError: the output has no paragraph that begins like one that is shown.
    """
    paragraphs, found = output.strip("\n").split("\n\n"), list[str]()
    wanted = shown.strip("\n").split("\n\n")
    if not any(map(left_out, wanted)):
        return output
    at = 0
    for before, paragraph in zip(["", *wanted], wanted, strict=False):
        if left_out(paragraph):
            found.append(paragraph)
            continue
        if left_out(before):
            at = list(map(_first_word, paragraphs)).index(_first_word(paragraph), at)
        found.append(paragraphs[at])
        at += 1
    return "\n\n".join(found) + "\n"


def rewritten(text: str) -> str:
    """A page with what its commands print now, run in the current folder."""

    def made(match: re.Match[str]) -> str:
        output = "".join(printed(command.text) for command in commands_of(f"```sh\n{match[1]}```", ""))
        return f"```sh\n{match[1]}```\n\n```output\n{shortened(match[2], output)}```"

    return SHOWN.sub(made, text)


def pages() -> list[Path]:
    return [page for page in PAGES if "```output" in page.read_text()]


def rewrite_all() -> int:
    for page in pages():
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            make_files(Path(folder))
            text = rewritten(page.read_text())
            if text != page.read_text():
                page.write_text(text)
                print(f"rewritten: {os.path.relpath(page)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(rewrite_all())
