"""The documentation names what exists: every error code, every flag; links lead somewhere."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODES = sorted({cls.code for cls in HotspaError._by_code.values()})


@pytest.mark.parametrize("code", CODES)
def test_every_error_code_has_an_entry(code):
    assert f"**{code} " in (ROOT / "docs" / "errors.md").read_text()


def test_no_entry_is_of_an_error_that_is_gone():
    assert set(re.findall(r"\*\*(HSP-\d+) ", (ROOT / "docs" / "errors.md").read_text())) == set(CODES)


def test_every_flag_is_in_the_readme():
    ours = {f.name for f in fields(HotSPaTrainingArguments)} - {f.name for f in fields(TrainingArguments)}
    text = (ROOT / "README.md").read_text()
    assert sorted(name for name in ours if f"`{name}`" not in text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor and found.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page.name}: {target}"
