"""How complex a function may be, and how large a class: ruff holds the first (pyproject.toml), this file the second."""

import ast
import re

from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files

MOST_METHODS, MOST_ATTRIBUTES = 30, 20
MOST_OF_ANY_TYPE = 240  # annotations `: Any`; may only fall


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
