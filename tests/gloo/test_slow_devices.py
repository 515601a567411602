"""Slow devices in training: found two mini-batches after they became slow, and let go two after they recovered; and what they
give away or leave out."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import load_file

from hf_hotspa.features.slow_devices import device_watch
from hf_hotspa.features.slow_devices.columns import LayerColumns, kept_variation, most_varying, num_kept
from hf_hotspa.features.slow_devices.device_step_time import DeviceStepTime
from hf_hotspa.features.slow_devices.flexible_linear import Exchange, FlexibleWork, flexible_works, give
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.features.slow_devices.reaction import pretest
from hf_hotspa.reporting.run_log import read_run_log
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.slow_ranks import Slow, Watch, check_resumed, resumed_runs, said_to_take, slept, watched_runs
from tests.training_runs import contents, make_trainer, newest
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

SLOW_FROM, SLOW_UNTIL, STEPS, PERIOD = 3, 7, 11, 3
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
    check_resumed(tmp_path, points, balanced, *resumed)


# -- migrate ------------------------------------------------------------------------------------------------------------


IN_PRODUCTS = {"product_share": 0.8}


def shares_here(engine):
    """What the ranks of a tensor-parallel group give away."""
    return [work.shares for work in flexible_works(engine).values()]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"target_modules": "all-linear"}], ids=["weights", "lora"])
def test_migrate_gives_columns_away_and_goes_on_bit_for_bit(tmp_path, lora):
    common = {"max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "migrate", "lora": lora}
    points = (5, 8)
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    migrated, *resumed, plain = run_ranks(4, watched_runs, runs, SLOW, shares_here, IN_PRODUCTS)[0]
    losses, given = migrated.losses, migrated.seen
    assert plain.seen == [[]] * STEPS
    assert [step for step, [shares] in enumerate(given, 1) if any(shares)] == [6, 7, 8, 9]
    assert given[5][0][1] > 0.6
    assert all(abs(losses[step] - plain.losses[step]) <= 1e-5 * plain.losses[step] for step in losses)
    assert all(losses[step] == plain.losses[step] for step in range(1, 6))  # as long as nothing is given, bit for bit
    check_resumed(tmp_path, points, migrated, *resumed)


# -- resize -------------------------------------------------------------------------------------------------------------


def decided(engine):
    """Which columns are left out of the products of this rank, and the share that rank 1 hands over or this one leaves out."""
    works = flexible_works(engine).values()
    return [({n: c.pruned for n, c in w.lineage.items()} if w.resized else {}, w.shares[1] + w.resized) for w in works]


@pytest.mark.slow
def test_resize_leaves_columns_out_says_so_and_goes_on_bit_for_bit(tmp_path):
    common, points = {"max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "resize"}, (5, 8)
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    by_rank = run_ranks(4, watched_runs, runs, SLOW, decided, IN_PRODUCTS)
    whole, *resumed, plain = by_rank[1]
    columns = {step: left for step, [(left, _)] in enumerate(whole.seen, 1) if left}
    assert list(columns) == [6, 7, 8, 9]
    assert len(set(map(str, columns.values()))) == len(columns)  # drawn anew each time
    assert all(len(left) == 28 for left in columns.values())  # seven linears in each of four layers
    assert not any(left for [(left, _)] in by_rank[0][0].seen)
    assert [step for step in whole.losses if whole.losses[step] != plain.losses[step]] == [6, 7, 8, 9, 10, 11]
    check_resumed(tmp_path, points, whole, *resumed)


# -- a product that gives and leaves out --------------------------------------------------------------------------------


def some_left_out(work, name, own, columns):
    """Every third of the first four tenths of the columns is left out, whatever migrates behind them."""
    left = [i for i in range(own) if i % 3 == 0 and i < 0.4 * columns]
    work.lineage[name] = LayerColumns(own, tuple(i for i in range(own) if i not in left))
    return work.lineage[name]


def both_at_once(rank, world_size, cases):
    worst, least = 0.0, float("inf")
    for family, strategy, shares, resized in cases:
        model = tiny_model(family, torch.float64)
        rows = random_rows(6, model.config.vocab_size, longest=30)
        engine = make_engine(model, f"{strategy}:40@60", features=(HandOver(),))
        name = str(next(iter(engine.phases)))
        nothing = {name: (0.0,) * world_size}

        def run(given, left, exchange=Exchange.BROADCAST, engine=engine, rows=rows):
            give(engine, given, left)
            for work in flexible_works(engine).values():
                work.exchange = exchange
            report = engine.forward_backward(make_mini_batch(engine, rows))
            found = {n: g.clone() for n, g in engine.full_gradients().items()}
            return report.loss, found, [work.left_share for work in flexible_works(engine).values()]

        with patch.object(FlexibleWork, "kept", some_left_out):
            _exact_loss, exact, none = run(nothing, nothing)
            loss, alone, left = run(nothing, {name: resized})
            assert not any(none)
            assert all(0.05 < share < 0.2 for share in left) == bool(resized[rank]), left
            least = min(least, max(float((g - exact[n]).abs().max()) for n, g in alone.items()))
            for exchange in Exchange:
                with_migration, found, _ = run({name: shares}, {name: resized}, exchange)
                errors = [float((g - alone[n]).abs().max() / alone[n].abs().max()) for n, g in found.items()]
                worst = max(worst, abs(with_migration - loss) / loss, *errors)
        engine.close()
    return worst, least


def test_a_product_may_migrate_and_leave_columns_out_at_once():
    """What migrates changes nothing of what is left out: fp64 against leaving out alone, for a giver, a helper and both."""
    cases = [
        ("llama_gqa_bias", "tp4", (0.0, 0.5, 0.0, 0.0), (0.0, 0.3, 0.0, 0.0)),
        ("phi3_fused", "tp2pp2+sp", (0.0, 0.5, 0.4, 0.0), (0.3, 0.3, 0.0, 0.3)),
        ("llama_uneven", "dp2tp2+rc", (0.0, 0.5, 0.0, 0.0), (0.3, 0.0, 0.3, 0.0)),
    ]
    for worst, least in run_ranks(4, both_at_once, cases):
        assert worst <= 1e-11
        assert least > 1e-6


# -- in training --------------------------------------------------------------------------------------------------------


def runs_of(rank, world_size, runs):
    """`watched_runs`, and what their watches of devices have logged."""
    with patch.object(device_watch.logger, "warning") as warned:
        found = watched_runs(rank, world_size, runs, SLOW, decided, IN_PRODUCTS)
    return found, [call.args[0] % call.args[1:] for call in warned.call_args_list]


def shard(weight, name, rank):
    """Of rank 1 of tp4: its rows of a column-parallel weight, its columns of a row-parallel one."""
    return weight.chunk(4, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]


@pytest.mark.slow
def test_columns_by_variation_and_imputation_go_on_bit_for_bit(tmp_path):
    """Also the papers' rule: columns that were left out keep their old statistics."""
    common = {
        "max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "resize", "hotspa_resize_period": PERIOD,
    }  # fmt: skip
    kinds = {"pri": "same", "pridiffe": "average"}
    runs = []
    for columns, imputation in kinds.items():
        options = {**common, "hotspa_resize_columns": columns, "hotspa_resize_imputation": imputation}
        runs += resumed_runs(tmp_path / columns, options, [7])
    plain = {**common, "hotspa_stragglers": "off", "save_strategy": "no", "hotspa_resize_period": 0}
    results = run_ranks(4, runs_of, [*runs, (str(tmp_path / "off"), None, plain)])
    (pri, pri7, pridiff, pridiff7, off), _ = results[1]
    for whole, resumed, columns in ((pri, pri7, "pri"), (pridiff, pridiff7, "pridiffe")):
        assert [step for step, [(left, _)] in enumerate(whole.seen, 1) if left] == [6, 7, 8, 9]
        check_resumed(tmp_path / columns, [7], whole, resumed)
        assert next(step for step in whole.losses if whole.losses[step] != off.losses[step]) == 6
    (usual, *_), said = results[0]
    assert not any(left for [(left, _)] in usual.seen)
    assert "this run is not exact" in said[0]
    assert "the previous mini-batch's" in said[0]
    # the statistics, from the weights of the checkpoints
    first = dict(tiny_model("qwen3_qk_norm_tied", seed=0).state_dict().items())
    at = {step: load_file(tmp_path / f"pri/a/checkpoint-{step}/model.safetensors") for step in (3, 6)}
    [(left_out6, share6)], [(left_out7, share7)] = pri.seen[5:7]
    cut = {
        name: left for name, left in left_out6.items() if not name.endswith(("k_proj", "v_proj"))
    }  # these are shared
    assert len(cut) == 5 * 4
    for name, left6 in cut.items():
        weight = f"{name}.weight"
        old, new = (
            (shard(b[weight], weight, 1) - shard(a[weight], weight, 1)).abs().mean(0).tolist()
            for a, b in ((first, at[3]), (at[3], at[6]))
        )
        kept6 = most_varying(old, num_kept(len(old), share6))
        assert left6 == tuple(i for i in range(len(old)) if i not in kept6), name
        kept7 = most_varying(kept_variation(new, old, kept6), num_kept(len(old), share7))
        assert left_out7[name] == tuple(i for i in range(len(old)) if i not in kept7), name
    # half of what varies, or more where less does: at lr 1e-2 everything varies by more than the threshold
    [(left_out, _)] = pridiff.seen[6]
    for name, weight in first.items():
        if name.endswith("up_proj.weight"):
            assert len(left_out[name.removesuffix(".weight")]) >= weight.shape[1] - num_kept(weight.shape[1], 0.8 * 0.5)


def semi_runs(rank, world_size, runs):
    engine = make_engine(tiny_model("llama_gqa_bias"), "dp2tp2:30,tp4:60", features=(HandOver(),))
    giving = DeviceStepTime(engine, "semi").giving
    pretest(engine, giving)
    curves = {name: [list(vars(c).values()) for c in found] for name, found in giving.curves.items()}
    engine.close()
    return curves, runs_of(rank, world_size, runs)


@pytest.mark.slow
def test_semi_divides_by_its_pretest_says_so_and_goes_on_bit_for_bit(tmp_path):
    common = {
        "max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "semi", "hotspa_resize_columns": "pri",
        "hotspa_resize_period": 2,
    }  # fmt: skip
    results = run_ranks(4, semi_runs, resumed_runs(tmp_path, common, [7]))
    curves, ((whole, resumed), said) = results[0]
    for other, _ in results[1:]:
        assert other == curves
    assert [len(found) for found in curves.values()] == [2, 1]
    assert all(seconds >= 0.0 for found in curves.values() for curve in found for seconds in curve)
    assert all(sum(curve) > 0.0 for found in curves.values() for curve in found)
    assert "hotspa_stragglers=semi: this run is not exact" in said[0]
    lost = [share for [(_, share)] in results[1][1][0][0].seen]
    assert [step for step, share in enumerate(lost, 1) if share > 0.1] == [6, 7, 8]
    # with products of 3.2 and the rest of 0.2, three quarters of the products would make it as fast as before; what
    # migrates makes the others slower, so it may lose less
    assert all(0.5 < share <= 0.76 for share in lost[5:8])
    assert lost[8] < 0.1  # as fast as the others in the eighth, and so at once: it is called slow for one more
    check_resumed(tmp_path, [7], whole, resumed)
