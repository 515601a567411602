"""Ranks agree in one way: `Agreement.run`. Nobody collects an error by hand and hands it to a check that may be forgotten."""

import ast

from tests.contract.layers import ROOT, source_files

HANDS_OVER = {"check", "agree", "settle"}


def by_hand(text: str) -> list[int]:
    """Lines of calls that hand over an error which the same function took from an `except`."""
    lines = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        caught = {
            name.id
            for handler in nodes
            if isinstance(handler, ast.ExceptHandler)
            for assignment in ast.walk(handler)
            if isinstance(assignment, ast.Assign)
            for target in assignment.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        for call in nodes:
            if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in HANDS_OVER:
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                lines += [call.lineno for value in values if isinstance(value, ast.Name) and value.id in caught]
    return lines


def test_an_error_that_is_collected_by_hand_is_found() -> None:
    caught = "def f():\n    error = None\n    try:\n        g()\n    except E as found:\n        error = found\n    "
    for call in ("self.agreement.check({}, error, 'set-up')", "engine.agree(error=error, where='resume')"):
        assert by_hand(f"{caught}{call}\n") == [7]


def test_errors_are_agreed_on_by_agreement_run() -> None:
    found = {
        file: lines
        for file in source_files("hf_hotspa", "trainer", "callbacks", "examples", "benchmarks")
        # where `run` itself is
        if file != "hf_hotspa/parallel/agreement.py" and (lines := by_hand((ROOT / file).read_text()))
    }
    assert not found, f"use Agreement.run(where, function) in {found}"
