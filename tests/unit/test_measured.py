"""What measured seconds say about switching, and their line in the record of a run."""

import json
import random
import re

import pytest

from hf_hotspa.callbacks.step_reports import RunLogWriter
from hf_hotspa.errors import RunLogError
from hf_hotspa.reporting.measured import MeasuredGain, Rival, known_as
from hf_hotspa.reporting.page import report_page
from hf_hotspa.reporting.run_log import FILE_NAME, read_run_log
from hf_hotspa.reporting.summary import verdict
from tests.run_logs import made_facts, write_run

LEFT_OUT = {"dp4": "does not fit in 144 MiB", "tp8": "tp8 is more than the 4 attention heads"}


def made(*alone, **others):
    return MeasuredGain((1.0, 2.0, 1.0), {"tp4": alone, **others}, 2e-7, LEFT_OUT)


def test_it_paid():
    gain = made(1.5, 2.9, 1.4, pp4=(9.0, 9.0, 9.0), cp4=(2.0,))
    assert gain.best == "tp4"
    answer = "1.45x as fast as tp4, the best single strategy (measured on 3 mini-batches, 95% interval 1.36x to 1.54x)"
    assert gain.sentence == f"Switching pays: {answer}"
    lines = str(gain).splitlines()
    assert "each under every side in turn" in lines[0]
    assert "Seconds and ratios are means; the losses of all sides agree to 2e-07." in lines[0]
    assert [line.split() for line in lines[2:5]] == [
        ["tp4", "1.933", "1.333", "1.45x", "3"],
        ["pp4", "9.000", "1.333", "6.75x", "3"],
        ["cp4", "2.000", "1.000", "2.00x", "1"],
    ]
    assert lines[5] == "DDP (dp4): does not fit in 144 MiB; tp8: tp8 is more than the 4 attention heads"
    assert lines[-1] == gain.sentence


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ((1.5, 2.4, 1.0), "1.23x as fast as tp4, the best single strategy (measured on 3 mini-batches, 95% interval 0.75x to 1.70x)"),
        ((1.0, 2.04, 0.9), "0.98x as fast as tp4, the best single strategy (measured on 3 mini-batches, 95% interval 0.84x to 1.13x)"),
        ((1.0, 2.0, 1.0), "1.00x as fast as tp4, the best single strategy (measured on 3 mini-batches, 95% interval 1.00x to 1.00x)"),
        ((0.8, 1.5, 0.79), "0.77x as fast as tp4, the best single strategy (measured on 3 mini-batches, 95% interval 0.70x to 0.85x)"),
    ],
)  # fmt: skip
def test_it_did_not_pay_or_is_not_clear_while_the_interval_holds_one(alone, said):
    answer = "Switching does not pay" if "0.77x" in said else "Whether switching pays is not clear"
    assert made(*alone).sentence == f"{answer}: {said}"


def test_one_mini_batch_says_nothing_and_the_rival_is_the_fastest_of_those_that_ran_all():
    one = MeasuredGain((1.0,), {"tp4": (1.5,)}, 0.0)
    assert one.sentence == (
        "Whether switching pays is not clear: 1.50x as fast as tp4, the best single strategy "
        "(measured on 1 mini-batch, without an interval)"
    )
    gain = made(1.5, 2.4, 1.4, pp4=(0.8, 1.6, 0.79), cp4=(0.5, 1.0))
    assert gain.best == "pp4"
    assert gain.sentence.startswith("Switching does not pay: 0.80x as fast as pp4")


def test_ratios_follow_from_the_seconds_beside_them():
    draw = random.Random(5)
    for _ in range(200):
        count = draw.randint(1, 30)
        hot = tuple(draw.uniform(1e-4, 1e3) for _ in range(count))
        gain = MeasuredGain(hot, {"tp4": tuple(h * draw.uniform(0.5, 2.0) for h in hot)}, 0.0)
        row = str(gain).splitlines()[2].split()
        assert row[3] == f"{float(row[1]) / float(row[2]):.2f}x"
        assert f" {row[3]} as fast as tp4" in gain.sentence
        assert f"tp4 {row[1]} s and switching {row[2]} s a mini-batch, {row[3]}, on {count}." in gain.sentences


def test_the_interval_holds_the_ratio_as_often_as_it_says():
    """Of seconds that are as long under both, with the noise and the lengths of a small run."""
    draw, held, tries = random.Random(1), 0, 2000
    for _ in range(tries):
        lengths = [draw.uniform(1.0, 4.0) for _ in range(8)]
        rival = Rival.of("tp4", *([n * draw.lognormvariate(0.0, 0.2) for n in lengths] for _ in range(2)))
        held += rival.ratio - rival.margin <= 1.0 <= rival.ratio + rival.margin
    assert 0.92 <= held / tries <= 0.98


def test_what_people_know_has_its_name():
    known = {
        "dp4": "DDP (dp4)",
        "dp4+rc": "DDP (dp4+rc)",
        "dp4+z2": "ZeRO-2 (dp4+z2)",
        "dp4+z3": "FSDP / ZeRO-3 (dp4+z3)",
    }
    others = ("tp4+sp", "dp2tp2+z3", "cp4+z2", "dp4ep4", "dp4+ck64", "dp1", "something else")
    assert {name: known_as(name) for name in (*known, *others)} == known | {name: name for name in others}


def with_gain(folder, gain):
    write_run(folder)
    writer = RunLogWriter(folder, goes_on=True)
    writer.write("gain", **gain.to_dict())
    writer.close()


def test_the_record_and_the_report_have_it(tmp_path):
    gain = made(1.5, 2.9, 1.4)
    with_gain(tmp_path, gain)
    run = read_run_log(tmp_path)
    assert run.gain == gain
    assert run.ended
    assert verdict(run)[:4] == verdict(run, to_be_measured=True)[:4] == gain.sentences
    page = report_page(run)
    assert all(sentence in page for sentence in gain.sentences)
    assert "(predicted)" not in page
    assert set(re.findall(r"\d\.\d\dx", " ".join(gain.sentences))) == {"1.45x", "1.36x", "1.54x"}
    writer = RunLogWriter(tmp_path, goes_on=True)
    writer.header(made_facts())  # training went on: what was measured before says nothing of it
    writer.close()
    assert read_run_log(tmp_path).gain is None


@pytest.mark.parametrize(
    "change",
    [{"switching": [1.0]}, {"singles": {}}, {"switching": [0, 0, 0]}, {"singles": None}, {"singles": {"tp4": []}}],
)
def test_a_line_that_is_none_is_named(tmp_path, change):
    with_gain(tmp_path, made(1.5, 2.4, 1.4))
    path = tmp_path / FILE_NAME
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **change})]) + "\n")
    with pytest.raises(RunLogError, match="this line is not one"):
        read_run_log(path)
