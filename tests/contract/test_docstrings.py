"""Every docstring has the form that the API reference is made from: sections with names that are there."""

import logging
import shutil

import pytest

from tests.contract.layers import ROOT


def problems(folder, caplog):
    """What griffe says about the docstrings of the package below a folder."""
    griffe = pytest.importorskip("griffe", reason="the extra `docs` is not installed: make install brings it")
    seen = 0

    def parse(found):
        nonlocal seen
        if found.docstring:
            found.docstring.parse("google")
            seen += 1
        for member in found.members.values() if found.is_class or found.is_module else ():
            if not member.is_alias:
                parse(member)

    with caplog.at_level(logging.WARNING):
        package = griffe.load(
            "hf_hotspa",
            search_paths=[folder],
            docstring_parser="google",
            allow_inspection=False,
            try_relative_path=False,
        )
        parse(package)
    return seen, [record.getMessage() for record in caplog.records]


def copied(folder):
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hf_hotspa", folder / "hf_hotspa", ignore=no_caches)
    for name in ("trainer", "callbacks"):
        shutil.copytree(ROOT / name, folder / "hf_hotspa" / name, ignore=no_caches)
    return folder


def test_every_docstring_can_be_rendered(tmp_path, caplog):
    seen, found = problems(copied(tmp_path), caplog)
    assert found == []
    assert seen > 800


def test_a_wrong_docstring_is_found(tmp_path, caplog):
    (tmp_path / "hf_hotspa").mkdir()
    (tmp_path / "hf_hotspa" / "__init__.py").write_text(
        'def f(a: int) -> None:\n    """Does it.\n\n    Args:\n        b: Not there.\n    """\n'
    )
    seen, found = problems(tmp_path, caplog)
    assert seen == 1
    assert any("'b'" in text for text in found)
