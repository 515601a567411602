"""The documentation names what exists: every error code, every flag; links lead somewhere."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


# The fields that trl 1.16's SFTConfig adds to TrainingArguments, and those whose default it changes.
SFT_CONFIG = (
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "chat_template_path", "dataset_text_field",
    "dataset_kwargs", "dataset_num_proc", "eos_token", "max_length", "truncation_mode", "shuffle_dataset", "packing",
    "packing_strategy", "padding_free", "pad_to_multiple_of", "eval_packing", "completion_only_loss",
    "assistant_only_loss", "loss_type", "activation_offloading", "pad_token", "learning_rate", "logging_steps", "bf16",
    "gradient_checkpointing",
)  # fmt: skip


def test_the_migration_page_knows_every_field_of_sft_config():
    text = (ROOT / "docs" / "migration.md").read_text()
    assert [name for name in SFT_CONFIG if not re.search(rf"`{name}\b", text)] == []


def test_the_pictures_of_pages_are_there():
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_nav_of_the_site_has_every_page():
    nav = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted(pages)
