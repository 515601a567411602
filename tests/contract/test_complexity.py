"""How complex a function may be, and how large a class: ruff holds the first (pyproject.toml), this file the second."""

import ast
import re

from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files

MOST_METHODS, MOST_ATTRIBUTES = 30, 20
MOST_OF_ANY_TYPE = 240  # annotations `: Any`; may only fall
MOST_SHORT_DOCSTRINGS = 69  # see `needless_docstrings`; may only fall
UNITS = re.compile(
    r"collective|\[.*\]|\b(bytes?|seconds?|[mn]?s|tokens?|elements?|rows?|ranks?|int\d+|fp\d+|bf16|bool|float|factor|share|dtype)\b",
    re.IGNORECASE | re.DOTALL,
)


def sizes(text: str) -> dict[str, tuple[int, int]]:
    """Class -> its methods, and the attributes that it sets on self."""
    found = {}
    for cls in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        stores = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        attributes = {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}
        found[cls.name] = len(methods), len(attributes)
    return found


def test_classes_are_small() -> None:
    large = {
        f"{file}: {name}": size
        for file in source_files(*PACKAGE_FOLDERS)
        for name, size in sizes((ROOT / file).read_text()).items()
        if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES
    }
    assert large == {}


def test_what_a_class_has_is_counted() -> None:
    text = "class A:\n    def f(self):\n        self.x, self.y = 1, 2\n        other.z = self.x\n    def g(self): ...\n"
    assert sizes(text) == {"A": (2, 2)}


def test_few_things_are_of_any_type() -> None:
    texts = [(ROOT / file).read_text() for file in source_files(*PACKAGE_FOLDERS)]
    assert sum(len(re.findall(r"^.*: Any\b.*$", text, re.MULTILINE)) for text in texts) <= MOST_OF_ANY_TYPE
    assert not [text for text in texts if "trainer: Any" in text]


def needless_docstrings(text: str) -> list[str]:
    """Private functions below ten lines whose docstring names neither a unit, shape or dtype nor "collective"."""
    private = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and re.match("_(?!_)", node.name)
    )
    documented = ((node, ast.get_docstring(node)) for node in private)
    return [
        node.name
        for node, said in documented
        if said and (node.end_lineno or 0) - (node.body[0].end_lineno or 0) < 9 and not UNITS.search(said)
    ]


def test_short_private_functions_have_names_in_the_place_of_docstrings() -> None:
    files = source_files(*PACKAGE_FOLDERS)
    found = [f"{file}: {name}" for file in files for name in needless_docstrings((ROOT / file).read_text())]
    assert len(found) <= MOST_SHORT_DOCSTRINGS, found


def test_needless_docstrings_are_found() -> None:
    text = 'def _double(x):\n    """Doubles x."""\n    return 2 * x\ndef {}(x):\n    """{}"""\n    return x\n'
    assert needless_docstrings(text.format("_size", "In bytes.")) == ["_double"]
    assert needless_docstrings(text.format("_all", "The same on all. Collective.")) == ["_double"]
    assert needless_docstrings(text.format("public", "The same.")) == ["_double"]
    assert needless_docstrings(text.format("_same", "The same.")) == ["_double", "_same"]
    long = text.format("_same", "The same.").replace("return x", "\n    ".join(["x += 1"] * 9))
    assert needless_docstrings(long) == ["_double"]
