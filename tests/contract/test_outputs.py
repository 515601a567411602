"""What the pages show as output of `hf-hotspa` is what the command above it prints."""

import csv
import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_hotspa.search.estimate import Evaluator
from tests.contract.commands import PAGES, ROOT, TUTORIAL, all_commands, blocks
from tests.contract.outputs import SHOWN, is_plan, make_files, pages, prepared, printed, rewritten, shortened

MOST_PHASES = (
    400  # those of the rivals among them; where memory is short each strategy is looked at whole, with +z2 and with +z3
)
HOW = "run: python -m tests.contract.outputs"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_output_is_that_of_the_command_above(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    assert rewritten(page.read_text()) == page.read_text(), HOW


TABLES = runpy.run_path(str(ROOT / "docs" / "plan_tables.py"))
LINES = list(csv.reader(TABLES["TABLE"].read_text().splitlines()))[1:]


@pytest.mark.parametrize("index", range(len(TABLES["ROWS"])))
def test_a_line_of_the_file_of_plans_is_current(index: int) -> None:
    assert TABLES["row"](*TABLES["ROWS"][index]) == LINES[index], "run: python docs/plan_tables.py"


def test_the_file_of_plans_has_these_lines_and_the_page_their_summary() -> None:
    assert len(LINES) == len(TABLES["ROWS"]) == sum(len(cases) for _, cases in TABLES["GROUPS"]) == 17
    assert TABLES["plans_csv"](LINES) == TABLES["TABLE"].read_text(), "run: python docs/plan_tables.py"
    assert f"{TABLES['BEGIN']}{TABLES['plans_summary'](LINES)}{TABLES['END']}" in TABLES["PAGE"].read_text()


def test_the_table_of_gains_is_of_its_file() -> None:
    known = json.loads(TABLES["GAINS"].read_text())
    assert len(known) == len(TABLES["GAIN_CELLS"])
    assert f"{TABLES['GAINS_BEGIN']}{TABLES['gains_summary'](known)}" in TABLES["PAGE"].read_text()
    assert TABLES["GAINS_TABLE"].read_text() == TABLES["gains_csv"](known), "run: python docs/plan_tables.py gains"


MEMORY = runpy.run_path(str(ROOT / "docs" / "memory_table.py"))


@pytest.mark.parametrize("method", MEMORY["METHODS"])
def test_the_table_of_what_fits_is_current(method: str) -> None:
    rows = MEMORY["read_rows"]()
    assert [tuple(row[:4]) for row in rows] == [tuple(map(str, case)) for case in MEMORY["ROWS"]]
    model, card = next(iter(MEMORY["MODELS"])), list(MEMORY["CARDS"])[-1]
    row = MEMORY["row"](model, method, 2, card)
    assert row in rows, "run: python docs/memory_table.py"
    assert row[4]
    assert f"{MEMORY['BEGIN']}{MEMORY['shown'](rows)}{MEMORY['END']}" in MEMORY["PAGE"].read_text()


def test_the_table_of_longest_sequences_is_current() -> None:
    longest = runpy.run_path(str(ROOT / "docs" / "long_sequences_table.py"))
    shown = longest["BEGIN"] + longest["table"]() + longest["END"]
    assert shown in longest["PAGE"].read_text(), "run: python docs/long_sequences_table.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_output_without_a_command(page: Path) -> None:
    text = page.read_text()
    assert len(SHOWN.findall(text)) == len(re.findall(r"^```output", text, re.MULTILINE))
    ours = re.compile(r"^(GiB a device|predicted +seconds|up to +strategy|machine +GiB)", re.MULTILINE)
    for language, lines in blocks(text):
        assert language == "output" or not ours.search("\n".join(lines)), f"{page.name}: fence it as `output`; {HOW}"


def test_plans_of_the_pages_take_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases that are packed and simulated take the time, some milliseconds each; `benchmarks/plan_speed.py` has seconds."""
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    phases: Counter[str] = Counter()
    simulate = Evaluator._simulate
    for text in dict.fromkeys(command.text for command in all_commands() if command.page != TUTORIAL):
        if is_plan(text):

            def counted(self: Evaluator, *key: Any, text: str = text) -> Any:
                phases[text] += 1
                return simulate(self, *key)

            monkeypatch.setattr(Evaluator, "_simulate", counted)
            printed(f"{text} --json")
        else:
            prepared(text)
    assert len(phases) >= 4
    assert {command: count for command, count in phases.items() if count > MOST_PHASES} == {}


def test_what_is_left_out_stays_left_out() -> None:
    output = "head 1\nhead 2\n\nrows a\nrows b\n\nmore\n\nend 3\n"
    assert shortened("anything\n", output) == output
    assert (
        shortened("(a heading)\n\nrows x\n\n(more)\n\nend 2\n", output)
        == "(a heading)\n\nrows a\nrows b\n\n(more)\n\nend 3\n"
    )
    assert shortened("head 0\n\nrows\n\n(the rest)\n", output) == "head 1\nhead 2\n\nrows a\nrows b\n\n(the rest)\n"
    with pytest.raises(ValueError, match="gone"):
        shortened("(a heading)\n\ngone\n", output)
