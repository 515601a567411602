"""The layer table of the source files, and the imports between them, read without importing anything."""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A file imports its own layer or lower ones; a folder is a layer, or a part of one. Layers 0 to 2 import no torch.
LAYERS: dict[str, int] = {
    "hf_hotspa": 0,
    "hf_hotspa/layout": 1,
    "hf_hotspa/plan": 2,
    "hf_hotspa/costs": 2,
    "hf_hotspa/search": 2,
    "hf_hotspa/packing": 2,
    "hf_hotspa/rows": 2,
    "hf_hotspa/checkpoint/format": 2,
    "hf_hotspa/reporting": 2,
    "hf_hotspa/parallel": 3,
    "hf_hotspa/data": 3,
    "hf_hotspa/model": 4,
    "hf_hotspa/engine": 5,
    "hf_hotspa/checkpoint": 5,
    "hf_hotspa/switched": 6,
    "hf_hotspa/calibrate": 6,
    "callbacks": 6,
    "trainer": 7,
    "hf_hotspa/features": 8,
    "hf_hotspa/commands": 8,
    "hf_hotspa/trl.py": 8,
    "hf_hotspa/cli.py": 8,
}
# The package root finds and re-exports.
ROOT_FILES = ("hf_hotspa/__init__.py", "hf_hotspa/_source_tree.py")
PACKAGE_FOLDERS = ("hf_hotspa", "trainer", "callbacks")
TORCH_FREE_LAYERS = 2


@dataclass(frozen=True)
class Import:
    """One import statement: which module it names, and where it stands."""

    file: str
    line: int
    module: str


def source_files(*folders: str) -> list[str]:
    """The Python files below the folders, as paths relative to the repository."""
    return sorted(str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.py"))


def layer_of(file: str) -> int | None:
    """The layer of a file; None when its folder has none. An `__init__` file that holds a docstring only has layer 0."""
    if file in DOCSTRING_ONLY:
        return 0
    row = folder_of(file)
    return None if row is None else LAYERS[row]


def folder_of(file: str) -> str | None:
    """The row of the layer table that a file belongs to: its own, its folder's, or that of the folder above, which may not be
    the package."""
    path = Path(file)
    rows = [file, str(path.parent), *(str(p) for p in path.parents[1:] if str(p) != PACKAGE_FOLDERS[0])]
    return next((row for row in rows if row in LAYERS), None)


def module_of(file: str) -> str:
    parts = list(Path(file).with_suffix("").parts)
    if parts[0] in ("trainer", "callbacks"):
        parts.insert(0, "hf_hotspa")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def modules() -> dict[str, str]:
    """Module name -> file, for the files of the package."""
    return {module_of(file): file for file in source_files(*PACKAGE_FOLDERS)}


def imports_of(file: str, known: dict[str, str], text: str | None = None) -> list[Import]:
    """Every import of a file, also inside functions; `from package import module` names the module."""
    found = []
    own = module_of(file).split(".")
    package = own if file.endswith("__init__.py") else own[:-1]
    for node in ast.walk(ast.parse((ROOT / file).read_text() if text is None else text, file)):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""] if node.level else [])
            base = base.rstrip(".") or node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.append(Import(file, node.lineno, name if name in known else base))
    return found


DOCSTRING_ONLY = frozenset(
    file for file in source_files(PACKAGE_FOLDERS[0]) if file.endswith("/__init__.py") and file not in ROOT_FILES
)
