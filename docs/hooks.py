"""For the site (`make docs`): a tree in which the package lies as it is installed.

`trainer/` and `callbacks/` are mapped into `hf_hotspa` by setup.cfg; what reads sources without importing them must be
shown them there. The copy is made anew at each build.
"""

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".cache" / "docs-tree"


def on_startup(**kwargs: Any) -> None:
    """Makes the tree before the plugins look where the sources are."""
    shutil.rmtree(TREE, ignore_errors=True)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hf_hotspa", TREE / "hf_hotspa", ignore=no_caches)
    for name in ("trainer", "callbacks"):
        shutil.copytree(ROOT / name, TREE / "hf_hotspa" / name, ignore=no_caches)
