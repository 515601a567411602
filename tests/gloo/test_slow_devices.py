"""Slow devices in training: found two mini-batches after they became slow, and let go two after they recovered."""

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_hotspa.reporting.run_log import read_run_log
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.slow_ranks import said_to_take, slept
from tests.training_runs import make_trainer
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

SLOW_FROM, SLOW_UNTIL, STEPS = 3, 7, 11
STRATEGIES = "dp4:16@32,tp2pp2:60"


class Keeper(TrainerCallback):
    """Keeps the step reports."""

    def __init__(self):
        self.found = []

    def on_step_report(self, args, state, control, report, **kwargs):
        self.found.append(report)


def is_slow(step, rank):
    return 4.0 if rank == 1 and SLOW_FROM <= step < SLOW_UNTIL else 1.0


def watched_run(rank, world_size, folder, mode):
    keeper = Keeper()
    trainer = make_trainer(
        folder, world_size, max_steps=STEPS, save_strategy="no", hotspa_strategies=STRATEGIES, hotspa_report=True,
        hotspa_mini_batch_size=12, hotspa_stragglers=mode, callbacks=[keeper],
    )  # fmt: skip
    collectives, gather = 0, dist.all_gather

    def counting(*args, **kwargs):
        nonlocal collectives
        collectives += 1
        return gather(*args, **kwargs)

    with said_to_take(rank, is_slow):
        dist.all_gather = counting
        try:
            trainer.train()
        finally:
            dist.all_gather = gather
    logged = [log["hotspa/slow_devices"] for log in trainer.state.log_history if "hotspa/slow_devices" in log]
    trainer.close_engine()
    return [(r.slow, r.paces, r.own_s, r.loss) for r in keeper.found], logged, collectives


def test_watch_finds_onset_and_recovery_and_makes_no_collective(tmp_path):
    results = run_ranks(4, watched_run, str(tmp_path / "watch"), "watch")
    reports, logged, collectives = results[0]
    for other in results[1:]:
        assert [row[:3] for row in other[0]] == [row[:3] for row in reports]
    slow = [row[0] for row in reports]
    onset, recovery = SLOW_FROM + 1, SLOW_UNTIL + 1
    assert slow == [()] * onset + [(1,)] * (recovery - onset) + [()] * (STEPS - recovery)
    assert all(len(own) == 4 and sum(own) > 0 for _, _, own, _ in reports)
    assert logged == [float(len(found)) for found in slow[1:]]  # the first step is said to be warming up
    record = read_run_log(str(tmp_path / "watch"))
    assert [r.report.slow for r in record.steps] == slow
    page = (tmp_path / "watch" / "hotspa_report" / "report.html").read_text()
    assert "Called slow at some time: rank 1." in page
    off, said, without = run_ranks(4, watched_run, str(tmp_path / "off"), "off")[0]
    assert [row[3] for row in off] == [row[3] for row in reports]  # the losses, bit for bit
    assert without == collectives
    assert said == []
    assert all(row[0] == () and row[1] is None for row in off)


def own_seconds(rank, world_size, strategy, schedule):
    engine = make_engine(tiny_model("llama_gqa_bias"), strategy, pipeline_schedule=schedule)
    mini_batch = make_mini_batch(engine, random_rows(8, engine.description.shape.vocab_size, longest=60))
    engine.forward_backward(mini_batch)
    with slept(0.3 if rank == 1 else 0.0):
        report = engine.forward_backward(mini_batch)
    engine.close()
    return report.own_s, [sum(phase[1] for phase in rows) for rows in report.ranks.phases]


@pytest.mark.parametrize(
    ("strategy", "schedule"), [("tp2:60", "auto"), ("tp2+sp:60", "auto"), ("pp2:60@60", "auto"), ("pp2:60@60", "1f1b")]
)
def test_own_seconds_leave_out_waiting_for_the_slow_rank(strategy, schedule):
    """Both ranks are in the phase for as long; only the one that sleeps has so many seconds of its own."""
    own, whole = run_ranks(2, own_seconds, strategy, schedule)[0]
    assert own[1] > 2 * own[0], (own, whole)
    assert whole[0] > 2 * own[0], (own, whole)
