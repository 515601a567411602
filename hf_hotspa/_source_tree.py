"""Finds `hf_hotspa.trainer` and `hf_hotspa.callbacks` when the package runs from a source tree.

An installed package has both inside `hf_hotspa/`; an editable install maps them. In a checkout that was only put on
`sys.path`, the two folders lie beside `hf_hotspa/`. This finder comes last and looks there.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SIBLINGS = ("trainer", "callbacks")


class SourceTreeFinder:
    """A meta path finder for the packages of this project that lie beside `hf_hotspa/`."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a mapped package; None for other names. Modules are found through the package path."""
        parent, _, name = fullname.rpartition(".")
        if parent != "hf_hotspa" or name not in SIBLINGS:
            return None
        folder = ROOT / name
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install() -> bool:
    """Appends the finder to `sys.meta_path`, once, unless the siblings are found; returns whether it is a source
    tree."""
    if not (ROOT / "setup.cfg").is_file() or not all((ROOT / name / "__init__.py").is_file() for name in SIBLINGS):
        return False
    if any(find_spec(f"hf_hotspa.{name}") is None for name in SIBLINGS):
        sys.meta_path.append(SourceTreeFinder)
    return True
