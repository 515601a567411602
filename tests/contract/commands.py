"""The commands that README.md and docs/ tell people to type, read from their fenced blocks.

A block is fenced as `sh` or `bash`. One whose first line is the comment `# needs GPUs`, which readers see, is not run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NEEDS_GPUS = "# needs GPUs"
TUTORIAL = "docs/tutorial.md"
"""The page that tests/gloo/test_tutorial.py runs as a whole."""
_FENCE = re.compile(r"^( *)(```+)(.*)$")
_COMMENT = re.compile(r"\s+#.*$|^#.*$")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Args:
        page: The page, relative to the repository.
        text: The command on one line, without comments.
        needs_gpus: Whether its block says so.
    """

    page: str
    text: str
    needs_gpus: bool


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Language and lines of each fenced block.

    Raises:
        ValueError: a block is not closed.
    """
    language, fence = "", ""
    lines: list[str] = []
    for line in text.splitlines():
        found = _FENCE.match(line)
        if fence:
            if found and found[2].startswith(fence) and not found[3].strip():
                yield language, lines
                fence = ""
            else:
                lines.append(line)
        elif found:
            language, fence, lines = (found[3].split() or [""])[0], found[2], []
    if fence:
        raise ValueError(f"a block of {language!r} is not closed")


def commands_of(text: str, page: str) -> Iterator[Command]:
    for language, lines in blocks(text):
        if language in ("sh", "bash", "shell", "console"):
            needs_gpus = bool(lines) and lines[0].strip() == NEEDS_GPUS
            whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
            for line in whole.splitlines():
                command = " ".join(_COMMENT.sub("", line).split())
                if command:
                    yield Command(page, command, needs_gpus)


def all_commands() -> list[Command]:
    return [c for page in PAGES for c in commands_of(page.read_text(), page.relative_to(ROOT).as_posix())]
