"""The rules by which peers are compared: mini-batches, what fits, seconds, verdicts, reasons. Made-up numbers, no run."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from contest import one_each  # type: ignore[import-not-found]
from peers.live import SideError  # type: ignore[import-not-found]
from peers.memory import Ladder, longest_held  # type: ignore[import-not-found]
from peers.pages import BEGIN, END, csv_files, families_block, update_block  # type: ignore[import-not-found]
from peers.plan import our_works, paper_buckets  # type: ignore[import-not-found]
from peers.profile import profile_tables  # type: ignore[import-not-found]
from peers.results import Results, json_text, published  # type: ignore[import-not-found]
from peers.sides import sides_of  # type: ignore[import-not-found]
from peers.tables import cell_tables, lines_of, loss_spread, near_the_fastest, verdict  # type: ignore[import-not-found]
from peers.work import Work  # type: ignore[import-not-found]
from side_by_side import CellRun  # type: ignore[import-not-found]

from hf_hotspa.commands.bench.workload import LENGTHS, draw, rows_of_mini_batch
from hf_hotspa.strategy import check_launch, parse_buckets

MIB = 1 << 20


def side(seconds: list[list[float]], loss: float = 6.0, **facts: Any) -> dict[str, Any]:
    """A side that was timed: seconds by round and mini-batch."""
    return {"seconds": seconds, "cpu": seconds, "tokens": 400.0, "slots": 500.0, "loss": loss} | facts


@pytest.fixture
def cell() -> dict[str, Any]:
    """Four mini-batches of 100, 100, 200 and 200 tokens, one of them for warming up."""
    phase: dict[str, Any] = {"strategy": "dp4", "tokens": 50, "compute": 0.8, "own": 0.5, "tp": 0.3, "pp": 0.0}
    phase |= {"wait": 0.1, "load": 0.02, "return": 0.03}
    auto = side([[9.0, 1.0, 2.0, 2.0]], phases=[[[phase]] * 4], pool=["dp4:200"])
    return {
        "lengths": [60, 40, 50, 50, 100, 100, 150, 50],
        "mini_batch_rows": 2,
        "warmup": 1,
        "limit_bytes": 100 * MIB,
        "machine": {"ranks": 4, "cores": 2, "processor": "x", "torch": "2"},
        "sides": {
            "padded": side([[9.0, 2.0, 3.0, 3.0], [9.0, 4.0, 5.0, 1.0]], peak_bytes=90 * MIB, fits=True),
            "big": side([[9.0, 1.0, 1.0, 1.0]], 6.00005, peak_bytes=150 * MIB, fits=False, longest_held=120),
            "own batches": side([[9.0, 2.0]], 5.0, differs="packs over the whole data set", own_batches=True),
            "broken": {"reason": "RuntimeError: no such operation on gloo", "text": "..."},
            "ours, dp4": side([[9.0, 2.0, 2.0, 2.0]]),
            "ours, auto": auto,
            "ours, dp4 (limit)": {"reason": "its packs are short", "longest_held": 120},
            "ours, tp4 (limit)": side([[9.0, 2.0, 4.0, 4.0]], fits=True, peak_bytes=80 * MIB),
            "ours, auto (limit)": side([[9.0, 1.0, 2.0, 2.0]], fits=True, peak_bytes=80 * MIB),
        },
    }


def test_losses_of_exact_sides_are_compared(cell):
    spread, differing = loss_spread(lines_of(cell))
    assert spread == pytest.approx(5e-5)
    assert differing == ["own batches"]
    assert "(ok)" in cell_tables({"cells": {"0.9M fp32 chat": cell}}, ["0.9M fp32 chat"])
    cell["sides"]["big"]["loss"] = 6.01
    assert "TOO FAR APART" in cell_tables({"cells": {"0.9M fp32 chat": cell}}, ["0.9M fp32 chat"])


def test_verdict_compares_with_what_fits_only(cell):
    free, static, peer = verdict(lines_of(cell))
    assert "auto takes 1.667 of the next best, big" in free  # 3 s against 5 s for the same tokens
    assert "2.00x the best static strategy, ours, tp4" in static
    assert "1.80x the best peer that fits, padded" in peer


def test_only_sides_near_the_fastest_are_timed_again(cell):
    assert near_the_fastest(lines_of(cell), 1.15) == {"big", "ours, auto (limit)"}
    near = near_the_fastest(lines_of(cell), 2.0)
    assert near == {"big", "own batches", "ours, dp4", "ours, auto", "ours, tp4 (limit)", "ours, auto (limit)"}
    cell["sides"]["ours, auto (limit)"] = {"same_as": "ours, auto"}
    assert near_the_fastest(lines_of(cell), 1.15) == {"big", "ours, auto"}


def test_above_the_limit_is_above_it_for_us_too(cell):
    cell["sides"]["ours, tp4 (limit)"]["fits"] = False
    cell["sides"]["ours, auto (limit)"]["fits"] = False
    _, own, static, _ = verdict(lines_of(cell))
    assert own == "limit: auto itself is above it"
    assert static == "limit: no static strategy"
    data = {"cells": {"0.9M fp32 chat": cell}}
    text = cell_tables(data, ["0.9M fp32 chat"])
    assert "does not fit (takes 80 MiB)" in text
    assert "* `auto` takes more than the limit of 0.9M fp32 chat.\n" in families_block(data, ["0.9M fp32"])
    # a row for every side
    assert "| broken | RuntimeError: no such operation on gloo |" in text
    assert "does not fit (holds 120 tokens)" in text
    assert "| ours, auto: dp4:200 | 1.667 |" in text
    profile = profile_tables(data)
    assert "| ours, auto | dp4 | 50 | 0.500 | 0.300 | 0.000 | 0.100 | 0.020 | 0.030 | 0.817 |" in profile


def test_the_published_numbers_are_those_of_the_json():
    docs = Path(__file__).resolve().parents[2] / "docs"
    data = Results(docs / "side-by-side.json").data
    kinds = [f"{model} {dtype}" for dtype in ("fp32", "bf16") for model in ("0.9M", "7M")]
    assert f"{BEGIN}\n{families_block(data, kinds)}\n{END}" in (docs / "measured.md").read_text()
    for name, text in csv_files(data).items():
        assert (docs / "data" / name).read_text() == text, "run: python benchmarks/side_by_side.py --pages"
        assert text.count("\n") > 250


def test_a_page_gets_its_block(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    for _ in range(2):
        update_block(page, "| new |\n")
    assert page.read_text() == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="peers"):
        update_block(page, "new")


def test_what_is_published_can_be_gone_on_with(cell, tmp_path: Path):
    cell["sides"]["padded"]["loss"] = 6.0752212347
    path = tmp_path / "side-by-side.json"
    path.write_text(json_text(published({"options": {"logs": "somewhere"}, "cells": {"0.9M fp32 chat": cell}})))
    assert path.read_text().count("\n") < 30  # a line for each side
    cell["sides"]["padded"]["loss"] = 6.0752212
    del cell["sides"]["broken"]["text"]
    assert Results(path).data == {"cells": {"0.9M fp32 chat": cell}}


def test_longest_sequence_between_measured_lengths():
    peaks = [(128, 10.0), (256, 20.0), (512, 60.0)]
    assert longest_held(peaks, 5.0) == 0
    assert longest_held(peaks, 15.0) == 192
    assert longest_held(peaks, 40.0) == 384
    assert longest_held(peaks, 60.0) == 512


def test_a_ladder_is_climbed_once(tmp_path: Path):
    runs: list[Work] = []

    def run(work: Work) -> dict[str, Any]:
        runs.append(work)
        return {"peaks": [float(max(work.lengths[at : at + 4])) for at in range(0, len(work.lengths), 4)]}

    work, ladder = Work("0.9M", "fp32", 4, (1024,) * 8, 4, 2, str(tmp_path)), Ladder(1024)
    side = next(side for side in sides_of(4) if side.name.startswith("Trainer + DDP, padded"))
    assert [ladder.peaks(side, work, run) for _ in range(2)] == [[(2**n, 2.0**n) for n in range(5, 11)]] * 2
    assert len(runs) == 1
    assert runs[0].steps == 7
    packing = next(side for side in sides_of(4) if not side.ladder)
    assert Ladder(1024).peaks(packing, work, run) == ladder.peaks(side, work, run)
    assert [each.lengths[0] for each in runs[1:]] == [32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_drawn_alike_and_cut(name: str):
    lengths = draw(name, 500, 1024, seed=1)
    assert lengths == draw(name, 500, 1024, seed=1)
    assert len(lengths) == 500
    assert 1 <= min(lengths) <= max(lengths) <= 1024
    rows = rows_of_mini_batch(name, 1024, 4096, 4)
    assert rows % 4 == 0
    assert rows == 4 or 0.4 * 4096 < rows * sum(lengths) / len(lengths) < 2.5 * 4096


def test_results_keep_what_is_zero_and_forget_an_earlier_run(tmp_path: Path):
    options = Namespace(ranks=4, warmup=1)
    work = Work("0.9M", "fp32", 4, (30, 10, 20, 20) * 2, 4, 2, "")
    for _ in range(2):
        results = Results(tmp_path / "peers.json")
        results.begin_run(options)
        results.begin_cell("0.9M fp32 chat", work, options)
        results.set_limit("0.9M fp32 chat", 1e6)
        results.note("0.9M fp32 chat", "ours, auto", longest_held=0, fits=False, differs="", packs=None)
        turn = {"seconds": 1.0, "cpu": 2.0, "phases": []}
        results.add_round("0.9M fp32 chat", "ours, auto", [turn, turn], {"tokens": 160, "slots": 160, "loss": 6.0})
        results.fail("0.9M fp32 chat", "TRL SFTTrainer, bfd", "ValueError: no")
        results.save()
    sides = Results(tmp_path / "peers.json").data["cells"]["0.9M fp32 chat"]["sides"]
    assert list(sides) == ["TRL SFTTrainer, bfd", "ours, auto"]  # the order of the table
    assert sides["ours, auto"]["longest_held"] == 0
    assert sides["ours, auto"]["fits"] is False
    assert sides["ours, auto"]["seconds"] == [[1.0, 1.0]]
    assert "differs" not in sides["ours, auto"]
    assert results.failed("0.9M fp32 chat", "TRL SFTTrainer, bfd")


def test_padding_is_counted():
    from peers.sides.common import Turns, tokenizer  # type: ignore[import-not-found]
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening

    work = Work("0.9M", "fp32", 4, (3, 1), 4, 1, "")
    rows = [{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7], [8])]
    turns = Turns(work, None)
    padded = turns.counting(DataCollatorForSeq2Seq(tokenizer(work.vocabulary)))([dict(row) for row in rows])
    assert padded["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert (turns.tokens, turns.slots) == (4, 6)
    turns.counting(DataCollatorWithFlattening())(rows)
    assert (turns.tokens, turns.slots) == (8, 10)


def test_without_packs_each_sequence_is_a_micro_batch_and_replicas_have_as_much():
    packs = one_each([5, 9, 1, 4], dp=2, quadratic_cost=0.0, capacity=9, longest=9)
    assert packs == (((1,), (2,)), ((0,), (3,)))
    assert one_each([], dp=2) == ((), ())


def test_what_our_sides_are_given():
    work = Work("0.9M", "fp32", 4, (64, 8), 2, 1, "")
    plan = {
        "plan_bytes": 5.0,
        "short": {"dp4": "dp4:64", "tp4": "tp4:64"},
        "least": "tp4",
        "free": {"dp4": "dp4:64@128", "tp4": "tp4:64@256"},
        "limited": {"dp4": "dp4:64@64", "tp4": "tp4:64@96"},
    }
    names = ["ours, dp4", "ours, pp4", "ours, auto"]
    free, limited = (our_works(work, plan, under, names) for under in (False, True))
    assert [(free[name].strategies, free[name].limit_bytes) for name in names[::2]] == [
        ("dp4:64@128", None),
        ("auto", None),
    ]
    assert [(limited[name].strategies, limited[name].limit_bytes) for name in names[::2]] == [
        ("dp4:64@64", 5.0),
        ("auto", 5.0),
    ]
    # the paper's baseline: of the strategy that the longest sequence asks for
    static = our_works(work, plan, False, ["ours, static, packed to the context", "ours, static, not packed"]).values()
    assert [(side.strategies, side.packed) for side in static] == [("tp4:64", True), ("tp4:64", False)]
    assert free["ours, pp4"] == "pp4 is not legal for this model on 4 ranks"


@pytest.mark.parametrize(
    ("ranks", "static"),
    [
        (1, ["dp1"]),
        (4, ["dp4", "dp2tp2", "tp4", "dp2pp2", "pp4", "tp2pp2"]),
        (6, ["dp6", "dp3tp2", "dp2tp3", "tp6", "dp3pp2", "dp2pp3", "pp6", "tp2pp3", "tp3pp2"]),
    ],
)
def test_sides_follow_from_the_ranks(ranks: int, static: list[str]):
    names = [side.name for side in sides_of(ranks)]
    ours = [name.removeprefix("ours, ") for name in names if name.startswith("ours, ")]
    assert ours == [*static, "static, packed to the context", "static, not packed", "the paper's way", "auto"]
    assert f"cp{ranks} of accelerate, FSDP2, flattened" in names
    assert {f"tp{ranks} of transformers, Trainer", f"DeepSpeed Ulysses (sp{ranks}), padded to the longest"} < set(names)
    assert len(set(names)) == len(names)
    check_launch(parse_buckets(paper_buckets(ranks, 4096)), ranks)


def test_a_side_of_ours_that_fails_ends_the_run_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import side_by_side as peers  # type: ignore[import-not-found]

    options = peers.parse_options(["--quick", "--lengths", "chat", "--json", str(tmp_path / "peers.json")])

    def run(self: CellRun) -> None:
        self.results.begin_cell(self.key, self.work, self.options)
        for name in ("TRL SFTTrainer, bfd", "ours, tp4"):
            self._failed(name, SideError("RuntimeError: no"))

    monkeypatch.setattr(CellRun, "run", run)
    monkeypatch.setattr(peers, "cell_tables", lambda *_: "")
    results = Results(tmp_path / "peers.json")
    results.begin_run(options)
    assert peers.run_cells(options, results) == ["0.9M fp32 chat: ours, tp4: RuntimeError: no"]  # peers may fail
    monkeypatch.setattr(peers, "run_cells", lambda *_: ["0.9M fp32 chat: ours, tp4: RuntimeError: no"])
    with pytest.raises(SystemExit, match="ours, tp4: RuntimeError: no"):
        peers.main(["--quick", "--json", str(tmp_path / "peers.json")])


def test_the_reason_is_what_was_raised():
    text = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: not on gloo\nmore words\n'
    assert SideError(f"rank 1 failed:\n{text}").reason == "ValueError: not on gloo"
    assert SideError("died").reason == "died"


def cell_run(folder: Path) -> CellRun:
    """A cell without a run, of which our sides are planned without a limit."""
    options = Namespace(
        ranks=4, steps=2, warmup=1, longest=256, tokens=512, sides=["ours, "], limit="off", memory=False
    )
    options.logs = str(folder)
    run = CellRun(options, Results(folder / "peers.json"), ("0.9M", "fp32", "chat"), str(folder))
    run.results.begin_cell(run.key, run.work, options)
    return run


PLAN: dict[str, Any] = {
    "free": {"dp4": "dp4:32@64", "pp4": "pp4:32@64"},
    "short": {"dp4": "dp4:32@32", "pp4": "pp4:32@32"},
    "least": "dp4",
    "need_bytes": 100.0,
    "given_bytes": 10,
}


def test_without_a_limit_no_side_of_ours_is_planned_for_one(tmp_path: Path) -> None:
    run = cell_run(tmp_path)
    found = {contestant.name: contestant.work for contestant in run._ours(dict(PLAN))}
    assert found["ours, dp4"].strategies == "dp4:32@64"
    assert found["ours, auto"].strategies == "auto"
    assert all(work.limit_bytes is None for work in found.values())
    assert not any("(limit)" in name for name in (*found, *run.results.data["cells"][run.key]["sides"]))


def test_limit_and_what_planners_are_given_follow_from_one_strategy(tmp_path: Path) -> None:
    run, plan = cell_run(tmp_path), dict(PLAN)
    run.short_peaks = {"dp4:32@32": 400.0, "pp4:32@32": 300.0}  # less by luck: the model says that dp4 needs the least
    run._ours(plan)
    assert run.results.data["cells"][run.key]["limit_bytes"] == pytest.approx(440.0)
    assert 100.0 < plan["plan_bytes"] < 140.0
