"""Scripts beside the package import names that exist: most of them run only by hand, or in slow tests."""

import ast
from contextlib import suppress
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_names_of_the_package_exist(script: Path) -> None:
    nodes, modules, missing = list(ast.walk(ast.parse(script.read_text()))), {}, list[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hf_hotspa":
            for name in node.names:
                with suppress(ImportError):  # loads a module that is named
                    import_module(f"{node.module}.{name.name}")
                found = getattr(import_module(node.module or ""), name.name, missing)
                if found is missing:
                    missing.append(f"line {node.lineno}: {node.module}.{name.name}")
                if ismodule(found):
                    modules[name.asname or name.name] = found
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                missing.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    assert not missing
