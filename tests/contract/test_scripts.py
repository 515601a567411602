"""Scripts beside the package import names that exist: most of them run only by hand, or in slow tests."""

import ast
from contextlib import suppress
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest

from tests.contract.layers import ROOT

SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_names_of_the_package_exist(script: Path) -> None:
    nodes, modules, missing = list(ast.walk(ast.parse(script.read_text()))), {}, list[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "hf_hotspa":
            package = import_module(node.module)
            for name in node.names:
                if not hasattr(package, name.name):  # it may be a module
                    with suppress(ImportError):
                        import_module(f"{node.module}.{name.name}")
                found = getattr(package, name.name, missing)
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
