"""The documentation names what exists: every error code, every flag; links lead somewhere."""

import ast
import csv
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_error_code_has_an_entry_and_no_entry_is_of_an_error_that_is_gone():
    codes = {cls.code for cls in HotspaError._by_code.values()}
    assert set(re.findall(r"\*\*(HSP-\d+) ", (ROOT / "docs" / "errors.md").read_text())) == codes


def test_every_flag_is_in_the_table_of_flags():
    ours = {f.name for f in fields(HotSPaTrainingArguments)} - {f.name for f in fields(TrainingArguments)}
    text = (ROOT / "docs" / "flags.md").read_text()
    assert sorted(name for name in ours if f"`{name}`" not in text) == []


def test_the_readme_is_short_and_its_table_small():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for table in tables:
        rows = [line.strip("|\n").split("|") for line in table.splitlines() if set(line) - set("|- ")]
        assert len(rows) <= 1 + 4
        assert all(len(row) <= 3 for row in rows)


def test_the_readme_says_in_order_what_a_newcomer_needs():
    text = (ROOT / "README.md").read_text()
    needed = [
        "**For you**", "**Not for you**", "**What you gain**", "**Status:**", "make train", "make test", "pip install .", "hf-hotspa plan",
        "pip install '.[train]'", "-from transformers import Trainer", "accelerate launch", "HotSPaTrainingArguments(",
        "## What you get even where it does not switch", "## What does not work", "## Documentation",
    ]  # fmt: skip
    places = [text.find(words) for words in needed]
    assert -1 not in places, needed[places.index(-1)]
    assert places == sorted(places)
    assert not re.search(r"[A-Z]+[-_](OF|TO)[-_]", text), "a placeholder cannot be run"


def test_the_numbers_of_the_readme_are_measured_ones():
    text = (ROOT / "README.md").read_text()
    [gain] = re.findall(r"^\*\*What you gain\*\*.*(?:\n.+)*", text, re.MULTILINE)
    measured = " ".join((ROOT / "docs" / "measured.md").read_text().split())
    [span] = re.findall(r"(\S+ to \S+ times as fast as the fastest of)", " ".join(gain.split()))
    assert span in measured
    [of_one_gpu] = re.findall(r"one H100, by leaving out padding alone, (\S+ to \S+) times", gain)
    assert f"| the best stock `Trainer`, [one H100](#one-h100) | 80 GB | {of_one_gpu} |" in measured
    [off] = re.findall(r"how far off predictions are\]\(\S+\): (\S+) in the median", gain)
    assert re.search(rf"\| \*\*seconds\*\*.*?\| {off} \|", (ROOT / "docs" / "predicted.md").read_text())
    [unseen] = re.findall(r"(\S+) on runs that the fit had not seen", gain)
    assert re.search(
        rf"\| each run fitted without its source \| \d+ \| {unseen} \|", (ROOT / "docs" / "predicted.md").read_text()
    )
    assert gain.index(of_one_gpu) < gain.index("Predicted")
    # what is predicted is in the output of the command below it
    [predicted] = re.findall(r"(\d\.\d\d) times the speed of FSDP", gain)
    assert f"Yes: {predicted}x over FSDP" in text


def factors_of_cells(limit):
    """How many times as long as `auto` the fastest of the others, and our best single strategy, take in each cell."""
    cells = {}
    with (ROOT / "docs" / "data" / "side-by-side-families.csv").open() as file:
        for row in csv.DictReader(file):
            if row["limit"] == ("a limit of memory" if limit else "no limit"):
                seconds = re.fullmatch(r"[\d.]+", row["seconds_or_longest"])
                cells.setdefault((row["model"], row["lengths"]), {})[row["family"]] = seconds and float(seconds[0])
    others, ours = [], []
    for table in cells.values():
        auto = table.pop("ours, auto")
        fits = {name: seconds / auto for name, seconds in table.items() if seconds is not None}
        ours.append(fits["ours, one static strategy, packed: the best"])
        others += [min(those)] if (those := [f for name, f in fits.items() if not name.startswith("ours")]) else []
    assert len(ours) == 20
    return [f"| {min(those):.1f} to {max(those):.1f} |" for those in (others, ours)], len(others)


def test_the_first_table_of_what_was_measured_is_of_the_cells():
    text = (ROOT / "docs" / "measured.md").read_text().partition("## Side by side")[0]
    rows = [line for line in text.splitlines() if line.startswith("| the ")]
    for number, (limit, kind) in enumerate(((False, 0), (False, 1), (True, 1), (True, 0))):
        spans, fitting = factors_of_cells(limit)
        assert rows[number].endswith(spans[kind])
        assert not limit or kind or f"in {fitting} of 20 cases" in rows[number]


START_AND_USE = re.findall(
    r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("  - Start:")[1].split("  - Reference:")[0], re.MULTILINE
)


WRITTEN = re.compile(r"^```.*?^```|^<!-- begin.*?^<!-- end", re.MULTILINE | re.DOTALL)
"""What commands print, code, and tables that programs write."""
GUIDE = {"checkpoints": 1120, "trl": 1200}
"""Words of pages of Start and Use that have more than 1,100. These numbers may only fall."""
ALL_PAGES = 40_000
"""Words of all pages together, with what programs write. May only fall: raw numbers are files of docs/data."""


PRIVATE = (
    "adapter", "bucket", "calibration", "chunk", "layout", "master store", "mini-batch", "pack", "phase", "race", "rank", "replica",
    "shard", "static", "strategy", "switch",
)  # fmt: skip
"""Words that mean something particular here, and that the pages of Start use: each is in the glossary."""
AVOIDED = (
    "delta", "drift", "engine", "hot", "hybrid", "lockstep", "mailbox", "pool", "relay", "seam", "second source", "slot",
    "straggler", "tape", "wire", "world",
)  # fmt: skip
"""Words of the code and of other pages that the pages of Start do without."""


def test_the_private_words_of_start_are_in_the_glossary():
    start = (ROOT / "mkdocs.yml").read_text().split("  - Start:")[1].split("  - Use:")[0]
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in re.findall(r"([\w-]+\.md)$", start, re.MULTILINE))]
    pages = [page for page in pages if page.name != "glossary.md"]

    def words(text: str) -> str:
        """Without code and addresses."""
        return (
            re.sub(r"`[^`]+`|\]\([^)]*\)|https?://\S+", "]", WRITTEN.sub("", text))
            .lower()
            .replace("strategies", "strategy")
        )

    text = words("\n".join(page.read_text() for page in pages))
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = [line.split("|")[1].lower() for line in glossary.splitlines() if line.startswith("| ")]

    def used(word: str, text: str = text) -> bool:
        return re.search(rf"\b{word}(s|es|ed|ing)?\b", text) is not None

    assert [word for word in PRIVATE if not used(word)] == []
    assert [word for word in PRIVATE if not any(word in term for term in terms)] == []
    assert [word for word in AVOIDED if used(word)] == []
    # what it is, for whom, what to type, what was measured and what it cannot do are said without any of them
    first = words(pages[0].read_text().partition("## Will it help me?")[0])
    assert [word for word in (*PRIVATE, *AVOIDED) if used(word, first)] == []


@pytest.mark.parametrize("name", START_AND_USE)
def test_people_finish_the_pages_of_start_and_use(name):
    text = WRITTEN.sub("", (ROOT / "docs" / name).read_text())
    assert len(text.split()) <= GUIDE.get(name.removesuffix(".md"), 1100)


def test_the_pages_together_do_not_grow():
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= ALL_PAGES


def test_the_nav_has_five_groups():
    nav = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[1].split("\nextra_css")[0]
    groups = re.findall(r"^  - (\w+):$", nav, re.MULTILINE)
    assert groups == ["Start", "Use", "Reference", "Evidence", "Research"]
    assert len(START_AND_USE) >= 13


def test_the_script_of_the_readme_is_python_that_knows_the_arguments():
    [script] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    tree = ast.parse(script)
    assert len([line for line in script.splitlines() if line.strip()]) <= 12
    [call] = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "HotSPaTrainingArguments"]
    known = {f.name for f in fields(HotSPaTrainingArguments)}
    assert {keyword.arg for keyword in call.keywords} <= known


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


def test_the_nav_of_the_site_has_every_page():
    nav = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted(pages)
