"""Slow devices in training: found two mini-batches after they became slow, and let go two after they recovered."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from hf_hotspa.features.slow_devices.flexible_linear import flexible_works
from hf_hotspa.reporting.run_log import read_run_log
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.slow_ranks import Slow, Watch, check_resumed, resumed_runs, said_to_take, slept, watched_runs
from tests.training_runs import contents, make_trainer, newest
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

SLOW_FROM, SLOW_UNTIL, STEPS = 3, 7, 11
SLOW = Slow(SLOW_FROM, SLOW_UNTIL)


def watched_run(rank, world_size, folder, strategies, mode):
    trainer = make_trainer(
        folder, world_size, max_steps=STEPS, save_strategy="no", hotspa_strategies=strategies, hotspa_report=True,
        hotspa_mini_batch_size=12, hotspa_stragglers=mode,
    )  # fmt: skip
    watch = Watch(trainer, str)
    trainer.add_callback(watch)
    collectives, gather = 0, dist.all_gather

    def counting(*args, **kwargs):
        nonlocal collectives
        collectives += 1
        return gather(*args, **kwargs)

    with said_to_take(rank, SLOW), patch.object(dist, "all_gather", counting):
        trainer.train()
    logged = [log["hotspa/slow_devices"] for log in trainer.state.log_history if "hotspa/slow_devices" in log]
    trainer.close_engine()
    return [(r.slow, r.paces, r.own_s, r.loss) for r in watch.reports], logged, collectives


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [(2, "dp2:16@32,tp2:60"), pytest.param(4, "dp4:16@32,tp2pp2:60", marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_watch_finds_onset_and_recovery_and_makes_no_collective(tmp_path, ranks, strategies):
    results = run_ranks(ranks, watched_run, str(tmp_path / "watch"), strategies, "watch")
    reports, logged, collectives = results[0]
    for other in results[1:]:
        assert [row[:3] for row in other[0]] == [row[:3] for row in reports]
    slow = [row[0] for row in reports]
    onset, recovery = SLOW_FROM + 1, SLOW_UNTIL + 1
    assert slow == [()] * onset + [(1,)] * (recovery - onset) + [()] * (STEPS - recovery)
    assert all(len(own) == ranks and sum(own) > 0 for _, _, own, _ in reports)
    assert logged == [float(len(found)) for found in slow[1:]]  # the first step is said to be warming up
    record = read_run_log(str(tmp_path / "watch"))
    assert [r.report.slow for r in record.steps] == slow
    page = (tmp_path / "watch" / "hotspa_report" / "report.html").read_text()
    assert "Called slow at some time: rank 1." in page
    off, said, without = run_ranks(ranks, watched_run, str(tmp_path / "off"), strategies, "off")[0]
    assert [row[3] for row in off] == [row[3] for row in reports]  # the losses, bit for bit
    assert without == collectives
    assert said == []
    assert all(row[0] == () and row[1] is None for row in off)


def own_seconds(rank, world_size, cases):
    found = {}
    for strategy, schedule in cases:
        engine = make_engine(tiny_model("llama_gqa_bias"), strategy, pipeline_schedule=schedule)
        mini_batch = make_mini_batch(engine, random_rows(8, engine.description.shape.vocab_size, longest=60))
        engine.forward_backward(mini_batch)
        with slept(0.3 if rank == 1 else 0.0):
            report = engine.forward_backward(mini_batch)
        engine.close()
        found[strategy] = report.own_s, [sum(phase[1] for phase in rows) for rows in report.ranks.phases]
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [("tp2:60", "auto"), ("pp2:60@60", "auto")],
        pytest.param([("tp2+sp:60", "auto"), ("pp2:60@60", "1f1b")], marks=pytest.mark.slow),
    ],
)
def test_own_seconds_leave_out_waiting_for_the_slow_rank(cases):
    """Both ranks are in the phase for as long; only the one that sleeps has so many seconds of its own."""
    for own, whole in run_ranks(2, own_seconds, cases)[0].values():
        assert own[1] > 2 * own[0], (own, whole)
        assert whole[0] > 2 * own[0], (own, whole)


# -- balance ------------------------------------------------------------------------------------------------------------


def errors_by_speed(rank, world_size, buckets, speeds):
    model = tiny_model("llama_uneven", torch.float64)
    rows = random_rows(16, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    engine = make_engine(model, buckets)
    mini_batch = make_mini_batch(engine, rows, speeds=speeds)
    worst, _ = worst_error(engine, mini_batch, loss, gradients)
    engine.close()
    return worst, [[len(packs) for packs in phase.replicas] for phase in mini_batch.plan.phases]


def test_packs_divided_by_speed_train_exactly():
    worst, packs = run_ranks(4, errors_by_speed, "dp4:16@32,dp2pp2:40", (1.0, 0.2, 1.0, 0.1))[0]
    assert worst <= 1e-11
    assert packs[0][1] < packs[0][0]


@pytest.mark.slow
def test_balance_gives_slow_replicas_less_and_goes_on_bit_for_bit(tmp_path):
    """Also from checkpoints between the onset and what is known of it, and right before the first division by it."""
    rows = [row for row in random_rows(200, 160, longest=60) if len(row["input_ids"]) >= 20][:36]
    rows = [{name: values[:20] for name, values in row.items()} for row in rows]
    common = {
        "max_steps": STEPS, "hotspa_strategies": "dp4:60", "hotspa_mini_batch_size": 12, "hotspa_stragglers": "balance",
    }  # fmt: skip
    points, stream = (4, 5, 8), {**common, "rows": Dataset.from_list(rows).to_iterable_dataset()}
    common["rows"] = rows
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "stream"), None, stream)]
    runs += [(str(tmp_path / "6stream"), str(tmp_path / "stream" / "checkpoint-6"), stream)]
    runs += [(str(tmp_path / "even"), None, {**common, "hotspa_stragglers": "watch", "save_strategy": "no"})]
    found = run_ranks(4, watched_runs, runs, SLOW, str, {})[0]
    balanced, *resumed, streamed, streamed6, even = found
    assert balanced.slow == even.slow
    # known after the fifth and the ninth mini-batch, and none is planned ahead
    alike = [a == b for a, b in zip(balanced.busiest, even.busiest, strict=True)]
    assert alike == [step not in (6, 7, 8, 9) for step in range(1, 12)]
    assert all(abs(loss - even.losses[step]) <= 1e-5 * even.losses[step] for step, loss in balanced.losses.items())
    # a mini-batch of a stream has as many rows of one length
    assert (streamed.slow, streamed.busiest) == (balanced.slow, balanced.busiest)
    assert streamed6.losses == {step: loss for step, loss in streamed.losses.items() if step > 6}
    assert contents(newest(tmp_path / "6stream")) == contents(newest(tmp_path / "stream"))
    check_resumed(tmp_path, balanced.losses, dict(zip(points, (run.losses for run in resumed), strict=True)))


# -- migrate ------------------------------------------------------------------------------------------------------------


IN_PRODUCTS = {"product_share": 0.8}


def shares_here(engine):
    """What the ranks of a tensor-parallel group give away."""
    return [work.shares for work in flexible_works(engine).values()]


LORA = {"target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("lora", "ranks"),
    [
        pytest.param(None, 4, id="weights", marks=pytest.mark.slow),
        pytest.param(LORA, 2, id="lora", marks=pytest.mark.slow),
        pytest.param(LORA, 4, id="lora on four ranks", marks=pytest.mark.slow),
    ],
)
def test_migrate_gives_columns_away_and_goes_on_bit_for_bit(tmp_path, lora, ranks):
    common = {"max_steps": STEPS, "hotspa_strategies": f"tp{ranks}:60", "hotspa_stragglers": "migrate", "lora": lora}
    points = (5, 8)
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    migrated, *resumed, plain = run_ranks(ranks, watched_runs, runs, SLOW, shares_here, IN_PRODUCTS)[0]
    losses, given = migrated.losses, migrated.seen
    assert plain.seen == [[]] * STEPS
    assert [step for step, [shares] in enumerate(given, 1) if any(shares)] == [6, 7, 8, 9]
    assert given[5][0][1] > (0.6 if ranks == 4 else 0.55)  # a single helper is slower with it, and so takes less
    assert all(abs(losses[step] - plain.losses[step]) <= 1e-5 * plain.losses[step] for step in losses)
    assert all(losses[step] == plain.losses[step] for step in range(1, 6))  # as long as nothing is given, bit for bit
    check_resumed(tmp_path, losses, dict(zip(points, (run.losses for run in resumed), strict=True)))


# -- resize -------------------------------------------------------------------------------------------------------------


def left_out_here(engine):
    """Which columns are left out of the products of this rank, by product."""
    (work,) = flexible_works(engine).values() or [None]
    return {name: columns.pruned for name, columns in work.lineage.items()} if work is not None else {}


@pytest.mark.slow
def test_resize_leaves_columns_out_says_so_and_goes_on_bit_for_bit(tmp_path):
    common, points = {"max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "resize"}, (5, 8)
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    by_rank = run_ranks(4, watched_runs, runs, SLOW, left_out_here, IN_PRODUCTS)
    whole, *resumed, plain = by_rank[1]
    left_out = [step for step, columns in enumerate(whole.seen, 1) if columns]
    assert left_out == [6, 7, 8, 9]
    assert len({str(whole.seen[step - 1]) for step in left_out}) == len(left_out)  # drawn anew each time
    assert all(len(whole.seen[step - 1]) == 28 for step in left_out)  # seven linears in each of four layers
    assert not any(any(columns) for columns in by_rank[0][0].seen)
    assert [step for step in whole.losses if whole.losses[step] != plain.losses[step]] == [6, 7, 8, 9, 10, 11]
    check_resumed(tmp_path, whole.losses, dict(zip(points, (run.losses for run in resumed), strict=True)))
