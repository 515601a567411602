"""Two runs side by side, the commands `report` and `compare`, the trace, tables in terminals, pictures."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hf_hotspa import cli
from hf_hotspa.callbacks.step_reports import TracedStep, save_trace, trace_events
from hf_hotspa.errors import RunLogError
from hf_hotspa.reporting import terminal
from hf_hotspa.reporting.compare import compare, compare_page, sentences
from hf_hotspa.reporting.page import save_pictures
from hf_hotspa.reporting.run_log import FILE_NAME, read_run_log
from tests.run_logs import LONG, SHORT, made_report, write_run


def test_a_faster_run(tmp_path):
    a, b = read_run_log(write_run(tmp_path / "a")), read_run_log(write_run(tmp_path / "b", faster=2.0))
    found = compare(a, b)
    assert found.speed_up == pytest.approx(1.28 / 0.65)
    assert [pair.speed_up for pair in found.strategies] == pytest.approx([2.0, 2.0])
    assert sentences(found) == ["B is 1.97x as fast as A", "All 6 losses are equal."]
    assert sentences(compare(b, a))[0] == "A is 1.97x as fast as B"


def test_what_makes_runs_hard_to_compare_is_said(tmp_path):
    a = read_run_log(write_run(tmp_path / "a"))
    b = read_run_log(write_run(tmp_path / "b", settings={"strategies": "tp2:100"}))
    b.steps[2] = replace(b.steps[2], lr=0.5, report=replace(b.steps[2].report, phases=b.steps[2].report.phases[:1]))
    assert sentences(compare(a, b))[2:] == [
        "The runs trained different tokens in some steps: their losses are of different data.",
        "Their learning rates differ in some steps.",
        "Different: strategies auto and tp2:100; pipeline_schedule auto and None.",
    ]


def test_no_speed_up_is_claimed_between_runs_of_other_things(tmp_path):
    a = read_run_log(write_run(tmp_path / "a"))
    lengths = a.facts.lengths
    assert lengths is not None
    others = {
        "model": {"facts": replace(a.facts, model={**a.facts.model, "parameters": 1})},
        "data": {"facts": replace(a.facts, lengths={**lengths, "sequences": [2 * n for n in lengths["sequences"]]})},
        "mini-batches": {
            "steps": [replace(r, report=replace(r.report, num_rows=r.report.num_rows + 1)) for r in a.steps],
        },
    }  # fmt: skip
    for what, change in others.items():
        b = replace(read_run_log(write_run(tmp_path / "b", faster=2.0)), **change)
        found = compare(a, b)
        assert (found.speed_up, [pair.speed_up for pair in found.strategies]) == (None, [None, None])
        assert sentences(found)[0] == f"Which is faster cannot be said: {what} of A and B are not the same"
        assert "x as fast" not in compare_page(a, b, found)


def test_losses_that_differ(tmp_path):
    a, b = read_run_log(write_run(tmp_path / "a")), read_run_log(write_run(tmp_path / "b"))
    changed = b.steps[3]
    b.steps[3] = replace(changed, report=replace(changed.report, loss=changed.report.loss * 1.01))
    found = compare(a, b)
    assert found.largest_relative == pytest.approx(0.01)
    assert found.largest_step == 4
    assert [i for i, d in enumerate(found.loss_differences) if d] == [3]
    assert found.same_tokens


def test_a_static_run_stands_in_for_what_it_replaces(tmp_path):
    hot, static = read_run_log(write_run(tmp_path / "a")), read_run_log(write_run(tmp_path / "b"))
    static.steps = [
        replace(r, report=replace(r.report, phases=tuple(replace(p, strategy=LONG) for p in r.report.phases)))
        for r in static.steps
    ]
    pairs = {pair.strategy: pair for pair in compare(static, hot).strategies}
    assert pairs[SHORT].a is None
    assert pairs[SHORT].speed_up == pytest.approx((200 / 0.32) / (400 / 0.96))
    assert pairs[LONG].speed_up == pytest.approx((200 / 0.64) / (400 / 0.96))


def test_runs_without_a_common_step(tmp_path):
    a = read_run_log(write_run(tmp_path / "a", steps=2))
    b = read_run_log(write_run(tmp_path / "b", steps=2, begin=7))
    with pytest.raises(RunLogError, match="steps 1 to 2 and steps 7 to 8"):
        compare(a, b)


# -- commands ---------------------------------------------------------------------------------------------------------


def test_report_makes_the_page_anew(tmp_path, capsys):
    write_run(tmp_path / "hotspa_report")
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "6 steps, 2.4k tokens" in said
    assert "Switching pays" in said
    assert f"page: {tmp_path / 'hotspa_report' / 'report.html'}" in said
    assert (tmp_path / "hotspa_report" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_compare_says_who_is_faster(tmp_path, capsys):
    write_run(tmp_path / "a"), write_run(tmp_path / "b", faster=2.0)
    page = tmp_path / "both.html"
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert "B is 1.97x as fast as A" in said
    assert "2.00x" in said
    assert page.exists()


@pytest.mark.parametrize("command", ["report {0}", "compare {1} {0}"])
def test_wrong_input_is_one_message(tmp_path, capsys, command):
    good, bad = write_run(tmp_path / "good"), tmp_path / "bad"
    bad.mkdir()
    (bad / FILE_NAME).write_text((good / FILE_NAME).read_text().replace('"kind":"eval"', '"kind":eval', 1))
    assert cli.main(command.format(bad, good).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-hotspa: HSP-330")
    assert f"{bad / FILE_NAME}:4" in said


# -- the trace --------------------------------------------------------------------------------------------------------


def _traced():
    reports = [made_report(1), made_report(2)]
    return [TracedStep(1, 0.0, reports[0]), TracedStep(2, 1.5, reports[1])]


def test_the_trace_follows_the_format(tmp_path):
    trace = json.loads(save_trace(tmp_path / "trace.json", _traced()).read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
    named = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}


@pytest.mark.parametrize("with_ranks", [True, False])
def test_phase_and_switch_spans_make_up_the_step(with_ranks):
    traced = _traced()
    if not with_ranks:
        traced = [replace(t, report=replace(t.report, ranks=None)) for t in traced]
    spans = [e for e in trace_events(traced)["traceEvents"] if e["ph"] == "X"]
    for rank in {e["pid"] for e in spans}:
        for t in traced:
            own = [e for e in spans if e["pid"] == rank and e["args"].get("step", t.step) == t.step]
            inner = [e for e in own if e["cat"] == "inside phases"]
            parts = sum(e["dur"] for e in inner if e["name"] in ("load", "compute", "wait", "return"))
            assert parts == pytest.approx(t.report.total_s * 1e6, rel=0.05)
            assert sum(e["dur"] for e in inner) == pytest.approx(t.report.total_s * 1e6, rel=1e-6)
            phases = [e for e in own if e["cat"] == "phases"]
            assert [e["name"] for e in phases] == [SHORT, LONG]
            assert sum(e["dur"] for e in phases) == pytest.approx(parts)
            assert all(e["ts"] >= t.start_s * 1e6 - 1 for e in own if e["cat"] != "mini-batch")


def test_phases_with_context_parallelism_say_how_ranks_attended():
    step = _traced()[0]
    phases = tuple(replace(p, context="ring" if p.strategy == LONG else "") for p in step.report.phases)
    events = trace_events([replace(step, report=replace(step.report, phases=phases))])["traceEvents"]
    shown = {e["name"]: e["args"].get("context_parallel") for e in events if e.get("cat") == "phases"}
    assert shown == {SHORT: None, LONG: "ring"}


SVG = "{http://www.w3.org/2000/svg}"

# -- terminals and pictures -------------------------------------------------------------------------------------------

ROWS = [["strategy", "packs"], ["dp2", "7"], ["tp2 [red]", "12"]]


def test_plain_tables_are_aligned():
    assert terminal.text_table("title", ROWS, terminal=False).splitlines() == [
        "title",
        "strategy   packs",
        "dp2            7",
        "tp2 [red]     12",
    ]


def test_rich_tables_hold_the_same_cells():
    drawn = terminal.text_table("title", ROWS, terminal=True)
    assert "\x1b[" in drawn
    for text in ("title", "strategy", "dp2", "tp2 [red]", "12"):
        assert text in drawn


def test_pictures(tmp_path):
    paths = save_pictures(read_run_log(write_run(tmp_path)), tmp_path / "new")
    names = ["loss", "step_time", "switch_share", "tokens_per_second", "lengths"]
    assert [p.name for p in paths] == [f"{name}{ending}" for ending in (".svg", ".png") for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[5:])
    titles = "Loss", "Step time", "Switching", "Tokens", "Sequence lengths"
    for path, title, marks in zip(paths[:5], titles, (1, 20, 1, 1, 5), strict=True):
        drawn = ElementTree.parse(path).getroot()
        texts = [text.text for text in drawn.iter(f"{SVG}text")]
        assert texts[0].startswith(title)
        assert len([*drawn.iter(f"{SVG}polyline"), *drawn.iter(f"{SVG}rect")]) > marks
        assert "var(" not in path.read_text()
    assert {"training", "evaluation"} <= {text.text for text in ElementTree.parse(paths[0]).iter(f"{SVG}text")}
