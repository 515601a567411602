"""Tables as text: drawn by rich on a terminal, aligned plain text in a pipe or a file."""

import secrets
import sys
from collections.abc import Sequence
from io import StringIO
from typing import Any, TextIO

from hf_hotspa.errors import printable

_shown: set[str] = set()


class CleanOutput:
    """Standard output of a command: only tables of `text_table` can print control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.escape = stream, f"<{secrets.token_hex(8)}>"  # no file can contain it

    def write(self, text: str) -> int:
        """Writes text with control characters escaped."""
        self._stream.write(printable(text).replace(self.escape, "\x1b"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_terminal() -> bool:
    return bool(getattr(sys.stdout, "isatty", lambda: False)())


def text_table(title: str, rows: Sequence[Sequence[str]], left: int = 1, terminal: bool | None = None) -> str:
    """Returns a title and aligned columns, drawn by rich for a terminal; None checks standard output. `rows`: the first
    one is the heading. `left`: columns that are flush left."""
    title, rows = printable(title), [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    if is_terminal() if terminal is None else terminal:
        return _drawn(title, rows, left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title] if title else []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _drawn(title: str, rows: Sequence[Sequence[str]], left: int) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="left" if i < left else "right", style="bold" if i < left else "")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    out = StringIO()
    Console(file=out, force_terminal=True).print(table)
    drawn = out.getvalue().rstrip("\n")
    return drawn.replace("\x1b", sys.stdout.escape) if isinstance(sys.stdout, CleanOutput) else drawn


def once(key: str) -> bool:
    """True the first time in this process, then False: for warnings that should come once."""
    if key in _shown:
        return False
    _shown.add(key)
    return True
