"""For the site (`make docs`): a tree in which the package lies as it is installed, and the README's table of flags.

`trainer/` and `callbacks/` are mapped into `hf_hotspa` by setup.cfg; what reads sources without importing them must be
shown them there. The copy is made anew at each build.
"""

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".cache" / "docs-tree"
FLAGS = "<!-- the table of flags in README.md -->"


def on_startup(**kwargs: Any) -> None:
    """Makes the tree before the plugins look where the sources are."""
    shutil.rmtree(TREE, ignore_errors=True)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hf_hotspa", TREE / "hf_hotspa", ignore=no_caches)
    for name in ("trainer", "callbacks"):
        shutil.copytree(ROOT / name, TREE / "hf_hotspa" / name, ignore=no_caches)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Puts the table where a page asks for it."""
    if FLAGS not in markdown:
        return markdown
    [table] = re.findall(r"^\| flag \|.*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return markdown.replace(FLAGS, table.replace("](docs/", "]("))  # the pages lie beside each other there
