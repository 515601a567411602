"""No test asserts how long something took: on a busy or a slower machine it would fail for no fault.

What may be asserted is that something comes at all, before a deadline that only a hang would reach: in a comparison with
a name that holds the word `deadline`.
"""

import ast
from collections.abc import Collection

from tests.contract.layers import ROOT

CLOCKS = {"perf_counter", "monotonic", "time", "process_time", "perf_counter_ns", "monotonic_ns", "time_ns"}


def reads_clock(node: ast.AST, seconds: Collection[str] = ()) -> bool:
    """Whether an expression reads a clock of the module `time`, or a name that holds such a reading."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in seconds:
            return True
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in CLOCKS
            and isinstance(part.func.value, ast.Name)
            and part.func.value.id == "time"
        ):
            return True
    return False


def wall_time_assertions(source: str) -> list[int]:
    """The lines of assertions about seconds that a clock gave."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        seconds = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and reads_clock(node.value)
            for target in node.targets
            if isinstance(target, ast.Name) and "deadline" not in target.id
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and reads_clock(node.test, seconds):
                names = [part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)]
                if not any("deadline" in name for name in names):
                    found.append(node.lineno)
    return found


def test_an_assertion_is_found():
    assert wall_time_assertions(
        "def f():\n    begin = time.monotonic()\n    assert time.monotonic() - begin < 5\n"
    ) == [3]
    assert wall_time_assertions("def f():\n    s = time.perf_counter() - b\n    assert s < 5\n") == [3]
    assert not wall_time_assertions("def f():\n    assert time.monotonic() < deadline\n")


def test_no_test_asserts_seconds():
    files = sorted((ROOT / "tests").rglob("*.py"))
    lines = {str(path.relative_to(ROOT)): wall_time_assertions(path.read_text()) for path in files}
    assert {file: found for file, found in lines.items() if found} == {}
