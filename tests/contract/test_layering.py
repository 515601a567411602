"""The rules of the source tree: layers, no cycles, one name for every module, functions of a readable length."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.contract import house
from tests.contract.layers import (
    DOCSTRING_ONLY,
    LAYERS,
    PACKAGE_FOLDERS,
    ROOT,
    ROOT_FILES,
    Import,
    imports_of,
    layer_of,
    modules,
    source_files,
)

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 900
FEATURES = "hf_hotspa/features/"
CORE = tuple(
    f"hf_hotspa/{name}" for name in ("engine/", "layout/", "model/", "packing/", "parallel/", "plan/", "strategy.py")
)
MOST_CORE_FILES, MOST_CORE_LINES = 56, 18000  # may only fall
DIRECT = 13
"""Imports of a feature from outside of its folder; may only fall."""
FILES = [file for file in source_files(*PACKAGE_FOLDERS) if file not in ROOT_FILES]


def _imports(files: list[str]) -> Iterator[Import]:
    known = modules()
    for file in files:
        yield from imports_of(file, known)


def test_every_file_has_a_layer() -> None:
    unknown = [file for file in FILES if layer_of(file) is None]
    assert not unknown, f"give these files a layer in tests/contract/layers.py: {', '.join(unknown)}"


def test_a_file_imports_its_own_layer_or_lower() -> None:
    known = modules()
    wrong = []
    for found in _imports(FILES):
        target = known.get(found.module)
        if target is None or target in ROOT_FILES or target.startswith(FEATURES):
            continue
        layer, target_layer = layer_of(found.file), layer_of(target)
        if layer is not None and target_layer is not None and target_layer > layer:
            wrong.append(f"{found.file}:{found.line} (layer {layer}) imports {found.module} (layer {target_layer})")
    assert not wrong, "\n".join(wrong)


def test_features_are_imported_by_the_seam_alone() -> None:
    known = modules()
    direct = [
        f"{found.file}:{found.line} imports {found.module}"
        for found in _imports(FILES)
        if (target := known.get(found.module, "")).startswith(FEATURES)
        and Path(target).parent != Path(found.file).parent
    ]
    assert len(direct) <= DIRECT, "\n".join(direct)


def test_the_core_is_small() -> None:
    """Something new belongs to its feature, or to its only user."""
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in FILES if file.startswith(CORE)}
    assert {Path(file).parts[1] for file in lines} == {Path(name).name for name in CORE}
    assert len(lines) <= MOST_CORE_FILES
    assert sum(lines.values()) <= MOST_CORE_LINES


def test_no_two_files_of_one_name_hold_different_subjects() -> None:
    usual = {
        "__init__.py",
        "feature.py",
        "mode.py",
        "terms.py",
        "arguments.py",
    }  # what they hold is the same everywhere
    names = [name for file in FILES if (name := Path(file).name) not in usual]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_table_is_short() -> None:
    assert len(LAYERS) <= 22


def test_the_picture_of_the_house_is_made_from_the_imports() -> None:
    assert house.shown() == house.picture(), "run python -m tests.contract.house"


def test_what_pages_say_to_read_first_is_there() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    [line] = re.findall(r"^Read these first:.*(?:\n.+)*", page, re.MULTILINE)
    files = re.findall(r"`(hf_hotspa/[^`]+\.py)`", line)
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)


def test_no_cycles() -> None:
    known = modules()
    edges: dict[str, set[str]] = {file: set() for file in FILES}
    for found in _imports(FILES):
        target = known.get(found.module)
        if target in edges and target != found.file and not found.file.endswith("__init__.py"):
            edges[found.file].add(target)
    TopologicalSorter(edges).prepare()  # raises CycleError, which names a circle


def test_folders_import_one_way() -> None:
    known = modules()
    needs: dict[str, set[str]] = {}
    for found in _imports(FILES):
        target = known.get(found.module)
        if (
            target is not None
            and target not in ROOT_FILES
            and found.file not in LAYERS
            and not target.startswith(FEATURES)
        ):
            folder, other = (str(Path(f).parent) for f in (found.file, target))
            needs.setdefault(folder, set()).update({other} - {folder})
    TopologicalSorter(needs).prepare()


def test_nobody_in_the_package_imports_its_root() -> None:
    wrong = [f"{i.file}:{i.line}" for i in _imports(FILES) if i.module in ("hf_hotspa", "hf_hotspa._source_tree")]
    assert not wrong, f"import the module that holds the name, not the package root: {', '.join(wrong)}"


def test_nobody_imports_bare_trainer_or_callbacks() -> None:
    everywhere = source_files(*PACKAGE_FOLDERS, "examples", "tests", "benchmarks")
    wrong = [
        f"{i.file}:{i.line} imports {i.module}; write hf_hotspa.{i.module}"
        for i in _imports(everywhere)
        if i.module.partition(".")[0] in ("trainer", "callbacks")
    ]
    assert not wrong, "from the repository root this makes a second copy of every class:\n" + "\n".join(wrong)


def test_docstring_only_files() -> None:
    for file in DOCSTRING_ONLY:
        body = ast.parse((ROOT / file).read_text()).body
        assert len(body) == 1, f"{file} holds more than a docstring"
        assert isinstance(body[0], ast.Expr)


def _functions(source: str) -> Iterator[tuple[str, int]]:
    """Every function and method of a file, those inside of others too: its name, and its lines without decorators."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short() -> None:
    long = [
        f"{file}: {name} has {lines} lines"
        for file in source_files(*PACKAGE_FOLDERS, "examples")
        for name, lines in _functions((ROOT / file).read_text())
        if lines > MAX_FUNCTION_LINES
    ]
    assert not long, f"more than {MAX_FUNCTION_LINES} lines are asking to be two functions:\n" + "\n".join(long)


def test_files_are_short() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in source_files(*PACKAGE_FOLDERS, "examples")}
    long = {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long, f"more than {MAX_FILE_LINES} lines are asking to be two files: {long}"


def test_every_file_says_what_it_owns() -> None:
    silent = [f for f in source_files(*PACKAGE_FOLDERS) if not ast.get_docstring(ast.parse((ROOT / f).read_text()))]
    assert not silent, f"no docstring: {silent}"


# ---- the readers of this file are tested too: a rule that sees nothing finds nothing


READ = [
    ("import hf_hotspa.errors", "hf_hotspa.errors"),
    ("import hf_hotspa.errors as e", "hf_hotspa.errors"),
    ("from hf_hotspa import errors", "hf_hotspa.errors"),
    ("from hf_hotspa import HotSPaTrainer", "hf_hotspa"),
    ("from hf_hotspa.errors import PlanError", "hf_hotspa.errors"),
    ("def f():\n    from hf_hotspa.strategy import Strategy", "hf_hotspa.strategy"),
    ("import trainer.trainer", "trainer.trainer"),
    ("from trainer import x", "trainer"),
    ("from . import collator", "hf_hotspa.data.collator"),
    ("from .collator import x", "hf_hotspa.data.collator"),
    ("from .. import errors", "hf_hotspa.errors"),
    ("from ..errors import PlanError", "hf_hotspa.errors"),
]


def test_imports_are_read() -> None:
    known = {"hf_hotspa.errors": "", "hf_hotspa.strategy": "", "hf_hotspa.data.collator": ""}
    for statement, module in READ:
        read = imports_of("hf_hotspa/data/prepare.py", known, statement)
        assert [found.module for found in read] == [module], statement


def test_functions_are_measured() -> None:
    source = "@cache\ndef f(\n    a,\n):\n    def g():\n        return a\n    return g\n\nclass A:\n    async def h(self): ...\n"
    assert dict(_functions(source)) == {"f": 6, "g": 2, "h": 1}
    long = "class A:\n    def f(self):\n" + "        pass\n" * MAX_FUNCTION_LINES
    assert [lines > MAX_FUNCTION_LINES for _, lines in _functions(long)] == [True]


CLEAN = {"printable", "text_table", "_table", "choice_text", "str(measured)"}
"""What makes a text that no terminal acts on; measurements are tables, whose cells are clean."""


def _raw(file: str, source: str) -> list[str]:
    """The calls that print a text of any origin as it is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tqdm.write", "print"):
            text = node.args[0]
            maker = text.func if isinstance(text, ast.Call) else text
            if not {ast.unparse(text), ast.unparse(maker)} & CLEAN:
                found.append(f"{file}:{node.lineno} {ast.unparse(text)}")
    return found


def test_what_training_prints_cannot_act_on_a_terminal() -> None:
    files = source_files("trainer", "callbacks")
    assert [place for file in files for place in _raw(file, (ROOT / file).read_text())] == []
    assert _raw("a.py", "print(f'{path}')\ntqdm.write(printable(path))") == ["a.py:1 f'{path}'"]


def test_layer_table() -> None:
    assert layer_of("hf_hotspa/errors.py") == 0
    assert layer_of("hf_hotspa/layout/vector.py") == 1
    assert layer_of("trainer/trainer.py") == 7
    assert layer_of("hf_hotspa/no_such_folder/file.py") is None
    assert set(LAYERS.values()) == set(range(9))
    assert modules()["hf_hotspa.trainer"] == "trainer/__init__.py"
