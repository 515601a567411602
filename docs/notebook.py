"""Writes examples/tutorial.ipynb from docs/tutorial.md: `python docs/notebook.py`. One source: a cell for each block and each text between."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "tutorial.ipynb"
BLOCK = re.compile(r'^```(\w+)(?: title="(.*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([\w-]+\.md(?:#[\w-]+)?)\)")


def _code(language: str, title: str, text: str) -> str:
    if language == "python":
        return f"%%writefile {title}\n{text}" if title else text
    needs_gpus = text.startswith("# needs GPUs")
    return "".join(
        f"{'# ' if needs_gpus and line[0] != '#' else ''}{'' if line[0] == '#' else '!'}{line}\n"
        for line in text.splitlines()
    )


def cells() -> list[dict[str, Any]]:
    """The cells, without outputs."""
    found, at, page = list[dict[str, Any]](), 0, PAGE.read_text()

    def add(kind: str, text: str) -> None:
        rest: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        found.append(
            {"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}, **rest, "source": text.strip("\n")}
        )

    for match in BLOCK.finditer(page):
        add("markdown", _LINK.sub(r"](../docs/\1)", page[at : match.start()]))
        add("code", _code(*match.groups(default="")))
        at = match.end()
    add("markdown", _LINK.sub(r"](../docs/\1)", page[at:]))
    return found


def text() -> str:
    """The notebook's file."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return (
        json.dumps({"cells": cells(), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    NOTEBOOK.write_text(text())
