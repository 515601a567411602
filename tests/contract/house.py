"""The picture of the house in docs/how-it-works.md, made from the imports: `python -m tests.contract.house` rewrites it.

A line a folder, the highest layer first, and behind it the folders of lower layers that it imports. What another of these
imports already is left out, so that the picture shows each step down once.
"""

import re
import textwrap
from pathlib import Path

from tests.contract.layers import LAYERS, ROOT, ROOT_FILES, folder_of, imports_of, modules

PAGE = ROOT / "docs" / "how-it-works.md"
_BLOCK = re.compile(r"(?<=<!-- made from the imports by python -m tests.contract.house -->\n\n```\n)[^`]*(?=```)")
_LINE = "─── below this line nothing imports torch "
_WIDTH = 110


def imported() -> dict[str, set[str]]:
    """Row of the layer table -> the rows of lower layers that its files import."""
    known = modules()
    edges: dict[str, set[str]] = {row: set() for row in LAYERS}
    for file in known.values():
        row = folder_of(file)
        if file in ROOT_FILES or row is None:
            continue
        targets = (known.get(found.module) for found in imports_of(file, known))
        rows = {folder_of(target) for target in targets if target and target not in ROOT_FILES}
        edges[row] |= {to for to in rows if to is not None and LAYERS[to] < LAYERS[row]}
    return edges


def picture() -> str:
    edges = imported()

    def below(row: str) -> set[str]:
        return {each for to in edges[row] for each in {to, *below(to)}}

    lines, last = [], max(LAYERS.values()) + 1
    for row, layer in sorted(LAYERS.items(), key=lambda item: -item[1]):
        if last > 2 >= layer:
            lines.append(_LINE.ljust(_WIDTH, "─"))
        through = {each for to in edges[row] for each in below(to)}
        steps = sorted(edges[row] - through, key=lambda each: (-LAYERS[each], each))
        head = f"{f'L{layer}' if layer != last else '':4}{_short(row):20}"
        text = ", ".join(map(_short, steps))
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"{head}─► ", subsequent_indent=" " * 27) or [head.rstrip()]
        last = layer
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _short(row: str) -> str:
    if row == "hf_hotspa":
        return "hf_hotspa/*.py"
    name = row.removeprefix("hf_hotspa/")
    return name if name.endswith(".py") else f"{name}/"


def shown(page: Path = PAGE) -> str:
    match = _BLOCK.search(page.read_text())
    assert match is not None, f"{page} has no picture of the house"
    return match[0]


if __name__ == "__main__":
    PAGE.write_text(_BLOCK.sub(lambda _: picture(), PAGE.read_text()))
