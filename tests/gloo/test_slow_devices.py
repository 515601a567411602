"""Slow devices in training: found two mini-batches after they became slow, and let go two after they recovered."""

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback

from hf_hotspa.errors import HotspaError
from hf_hotspa.features.slow_devices.flexible_linear import flexible_works
from hf_hotspa.reporting.run_log import read_run_log
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.slow_ranks import said_to_take, slept
from tests.training_runs import contents, make_trainer, newest, train
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

SLOW_FROM, SLOW_UNTIL, STEPS = 3, 7, 11


class Keeper(TrainerCallback):
    """Keeps the step reports."""

    def __init__(self):
        self.found = []

    def on_step_report(self, args, state, control, report, **kwargs):
        self.found.append(report)


def is_slow(step, rank):
    return 4.0 if rank == 1 and SLOW_FROM <= step < SLOW_UNTIL else 1.0


def watched_run(rank, world_size, folder, strategies, mode):
    keeper = Keeper()
    trainer = make_trainer(
        folder, world_size, max_steps=STEPS, save_strategy="no", hotspa_strategies=strategies, hotspa_report=True,
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


def own_seconds(rank, world_size, strategy, schedule):
    engine = make_engine(tiny_model("llama_gqa_bias"), strategy, pipeline_schedule=schedule)
    mini_batch = make_mini_batch(engine, random_rows(8, engine.description.shape.vocab_size, longest=60))
    engine.forward_backward(mini_batch)
    with slept(0.3 if rank == 1 else 0.0):
        report = engine.forward_backward(mini_batch)
    engine.close()
    return report.own_s, [sum(phase[1] for phase in rows) for rows in report.ranks.phases]


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [("tp2:60", "auto"), ("pp2:60@60", "auto")]
    + [pytest.param(*more, marks=pytest.mark.slow) for more in (("tp2+sp:60", "auto"), ("pp2:60@60", "1f1b"))],
)
def test_own_seconds_leave_out_waiting_for_the_slow_rank(strategy, schedule):
    """Both ranks are in the phase for as long; only the one that sleeps has so many seconds of its own."""
    own, whole = run_ranks(2, own_seconds, strategy, schedule)[0]
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


def balanced_runs(rank, world_size, runs):
    found = []
    for folder, resume, options in runs:
        with said_to_take(rank, is_slow):
            rows = [row for row in random_rows(200, 160, longest=60) if len(row["input_ids"]) >= 20][:36]
            rows = [{name: values[:20] for name, values in row.items()} for row in rows]
            data = Dataset.from_list(rows).to_iterable_dataset() if folder.endswith("stream") else rows
            trainer = make_trainer(folder, world_size, rows=data, **options)
            busiest = Keeper()
            trainer.add_callback(busiest)
            losses = train(trainer, resume)
            found.append((losses, [r.slow for r in busiest.found], [r.phases[0].busiest_tokens for r in busiest.found]))
    return found


@pytest.mark.slow
def test_balance_gives_slow_replicas_less_and_goes_on_bit_for_bit(tmp_path):
    """Also from checkpoints between the onset and what is known of it, and right before the first division by it."""
    common = {
        "max_steps": STEPS, "hotspa_strategies": "dp4:60", "hotspa_mini_batch_size": 12, "hotspa_stragglers": "balance",
    }  # fmt: skip
    points = (4, 5, 8)
    runs = [(str(tmp_path / "a"), None, common)]
    runs += [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), common) for p in points]
    runs += [(str(tmp_path / "stream"), None, common)]
    runs += [(str(tmp_path / "6stream"), str(tmp_path / "stream" / "checkpoint-6"), common)]
    runs += [(str(tmp_path / "even"), None, {**common, "hotspa_stragglers": "watch", "save_strategy": "no"})]
    found = run_ranks(4, balanced_runs, runs)[0]
    (losses, slow, busiest), *resumed, streamed, streamed6, (even, same, evenly) = found
    assert slow == same
    # known after the fifth and the ninth mini-batch, and none is planned ahead
    assert [a == b for a, b in zip(busiest, evenly, strict=True)] == [step not in (6, 7, 8, 9) for step in range(1, 12)]
    assert all(abs(losses[step] - even[step]) <= 1e-5 * even[step] for step in losses)
    assert streamed[1:] == (slow, busiest)  # a mini-batch of a stream has as many rows of one length
    assert streamed6[0] == {step: loss for step, loss in streamed[0].items() if step > 6}
    assert contents(newest(tmp_path / "6stream")) == contents(newest(tmp_path / "stream"))
    for point, (found, _, _) in zip(points, resumed, strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > point}
        assert contents(newest(tmp_path / f"b{point}")) == contents(newest(tmp_path / "a"))


def refused(rank, world_size, folder):
    found = []
    for number, options in enumerate(
        (
            {"hotspa_strategies": "cp2:60", "hotspa_stragglers": "balance"},
            {"hotspa_strategies": "dp2:60", "hotspa_stragglers": "migrate"},
        )
    ):
        trainer = make_trainer(f"{folder}/{number}", world_size, **options)
        with pytest.raises(HotspaError) as error:
            trainer.train()
        found.append(str(error.value))
        trainer.close_engine()
    return found


def test_answers_that_have_nothing_to_divide_are_refused(tmp_path):
    for found in run_ranks(2, refused, str(tmp_path)):
        assert "no strategy has replicas, stages or shards (cp2)" in found[0]
        assert "use a strategy with dp2 or pp2 or tp2 or more" in found[0]
        assert "no strategy is tensor parallel (dp2)" in found[1]


# -- migrate ------------------------------------------------------------------------------------------------------------


def watched_runs(rank, world_size, runs, kind):
    """Of each run its losses, and what a callback of a kind found."""
    found = []
    for folder, resume, options in runs:
        with said_to_take(rank, is_slow, product_share=0.8):
            trainer = make_trainer(folder, world_size, **options)
            watch = kind(trainer)
            trainer.add_callback(watch)
            found.append((train(trainer, resume), watch.found))
    return found


class Given(TrainerCallback):
    """Keeps what the ranks of a tensor-parallel group gave away in each mini-batch."""

    def __init__(self, trainer):
        self.trainer, self.found = trainer, []

    def on_phase_begin(self, args, state, control, phase, **kwargs):
        self.found.append([work.shares for work in flexible_works(self.trainer.engine).values()])


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
    runs = [(str(tmp_path / "a"), None, common)]
    runs += [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), common) for p in points]
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    (losses, given), *resumed, (plain, none) = run_ranks(ranks, watched_runs, runs, Given)[0]
    assert none == [[]] * STEPS
    assert [step for step, [shares] in enumerate(given, 1) if any(shares)] == [6, 7, 8, 9]
    assert given[5][0][1] > (0.6 if ranks == 4 else 0.55)  # a single helper is slower with it, and so takes less
    assert all(abs(losses[step] - plain[step]) <= 1e-5 * plain[step] for step in losses)
    assert all(losses[step] == plain[step] for step in range(1, 6))  # as long as nothing is given, bit for bit
    for point, (found, _) in zip(points, resumed, strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > point}
        assert contents(newest(tmp_path / f"b{point}")) == contents(newest(tmp_path / "a"))


# -- resize -------------------------------------------------------------------------------------------------------------


class Lineages(TrainerCallback):
    """Keeps which columns were left out of the products of this rank, and by how many products."""

    def __init__(self, trainer):
        self.trainer, self.found = trainer, []

    def on_phase_end(self, args, state, control, phase, **kwargs):
        for work in flexible_works(self.trainer.engine).values():
            self.found.append({name: c.pruned for name, c in work.lineage.items()})


@pytest.mark.slow
def test_resize_leaves_columns_out_says_so_and_goes_on_bit_for_bit(tmp_path):
    common = {"max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "resize"}
    runs = [(str(tmp_path / "a"), None, common)]
    runs += [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), common) for p in (5, 8)]
    runs += [(str(tmp_path / "off"), None, {**common, "hotspa_stragglers": "off", "save_strategy": "no"})]
    by_rank = run_ranks(4, watched_runs, runs, Lineages)
    (losses, lineages), *resumed, (plain, _) = by_rank[1]
    left_out = [step for step, columns in enumerate(lineages, 1) if columns]
    assert left_out == [6, 7, 8, 9]
    assert len({str(lineages[step - 1]) for step in left_out}) == len(left_out)  # drawn anew each time
    assert all(len(lineages[step - 1]) == 28 for step in left_out)  # seven linears in each of four layers
    assert not any(any(columns) for columns in by_rank[0][0][1])
    assert [step for step in losses if losses[step] != plain[step]] == [6, 7, 8, 9, 10, 11]
    for point, (found, _) in zip((5, 8), resumed, strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > point}
        assert contents(newest(tmp_path / f"b{point}")) == contents(newest(tmp_path / "a"))
