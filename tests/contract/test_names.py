"""Names of the code say what they hold, in the words of the field."""

import ast

from tests.contract.layers import ROOT

UNWANTED = {"found", "misfit", "foretold", "told_to_all", "roll_call"}
"""What says nothing of what it holds (a result is always found), and words that were ours alone."""


def names(source: str) -> set[str]:
    """What a module calls its variables, arguments, functions and classes."""
    called = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                called.add(name)
    return called


def test_no_name_says_nothing() -> None:
    files = [path for folder in ("hf_hotspa", "trainer", "callbacks") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    unwanted = {str(path.relative_to(ROOT)): names(path.read_text()) & UNWANTED for path in files}
    assert {path: words for path, words in unwanted.items() if words} == {}


def test_names_of_all_kinds_are_seen() -> None:
    source = "class A:\n    def b(self, c=0):\n        (d := c)\n        for e in d:\n            f, *g = e\n"
    assert names(source) >= {"A", "b", "c", "d", "e", "f", "g"}
