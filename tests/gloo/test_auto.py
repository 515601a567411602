"""`hotspa_strategies=auto` in a world: the stock Trainer's losses, the same choices everywhere, errors on all ranks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import TrainerCallback

from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.strategy import Bucket, Strategy
from tests.calibrations import made_calibration, save_calibration
from tests.families import tiny_model
from tests.gloo.test_trainer import COMMON, MINI_BATCH, STEPS, stock_run
from tests.harness import run_ranks
from tests.moves import padded as _pad
from tests.oracle import exact_in_double, random_rows, relative_error

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
LONGEST = {1: 200, 2: 100, 4: 240}
# under a limit only tp holds the longest sequences; dp is faster for the others
LIMITED = {"hotspa_memory_limit_mb": 3, "hotspa_staging_mb": 1}


def data_of(world_size, vocab_size):
    return random_rows(90, vocab_size, longest=LONGEST[world_size], seed=3)


def auto_run(rank, world_size, dtype, folder, extra, slow=1.0, rows=None, share=None, **changes):
    """Trains; returns losses, the strategies of each mini-batch, the state, refits and logs.

    Args:
        slow: By how much what is measured exceeds what is predicted; or that by the number of phases.
        share: Of the mini-batches, what a race may cost.
    """
    from hf_hotspa.report import PhaseReport
    from hf_hotspa.search import histogram, race
    from hf_hotspa.search.chooser import predict_phases
    from hf_hotspa.trainer import batches, run_plan
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    class Recorder(TrainerCallback):
        def on_step_report(self, args, state, control, report, **kwargs):
            losses.append(report.loss)
            phases.append([p.strategy for p in report.phases])
            # on one process nothing is measured, so nothing is predicted
            assert all((p.predicted_s or 0.0) > 0 for p in report.phases) == (world_size > 1)

    losses, phases = [], []
    model = tiny_model(FAMILY, dtype, **changes)
    costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5), 4: Cost(1e-9, 1.6e-6, 3e-5)}
    # pipelines hold the longest sequences, too: slow links between stages leave tp
    calibration = made_calibration(model, world_size, costs, hop=Hop(1e-2, 1e-5))

    def calibrate(config, **kwargs):
        assert "hotspa_calibration" not in extra
        return calibration

    run_plan.calibrate = calibrate  # this process ends with the test
    race.SHARE = race.SHARE if share is None else share
    batches._SAMPLED_BATCHES = 4
    histogram._LEAST, histogram._EVERY, histogram._KEPT = 24, 4, 48
    if slow != 1.0:  # what is measured depends on the predicted seconds only
        trained = run_plan.RunPlan.trained

        def slowed(self, step, plan, report):
            chooser = self.choices.chooser
            predicted = {str(p.strategy): p for p in predict_phases(chooser._time, chooser._switch, plan)}
            factor = slow[len(report.phases)] if isinstance(slow, dict) else slow
            of_phases = ((p.strategy, predicted[p.strategy]) for p in report.phases)
            shown = (
                PhaseReport(name, 1, 1, 1, of.switch_s, of.compute_s * factor, 0, 0, 0, 0) for name, of in of_phases
            )
            return trained(self, step, plan, replace(report, phases=tuple(shown), ranks=None))

        run_plan.RunPlan.trained = slowed
    options = {"save_strategy": "no", **COMMON, **extra}
    resume = options.pop("resume", None)
    args = HotSPaTrainingArguments(output_dir=folder, hotspa_mini_batch_size=MINI_BATCH, **options)
    rows = data_of(world_size, model.config.vocab_size) if rows is None else rows
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, callbacks=[Recorder()])
    with exact_in_double(dtype):
        trainer.train(resume_from_checkpoint=resume)
    state = json.loads(json.dumps(trainer.hotspa_state()))
    refits = [str(refit) for refit in trainer._hotspa.watchers.plan.choices.refits]
    logs = trainer.state.log_history
    trainer.close_engine()
    return losses, phases, state, refits, logs


@pytest.mark.slow
def test_auto_trains_as_the_stock_trainer_does(tmp_path):
    dtype, world_size, steps = torch.float64, 4, 9
    rows = data_of(world_size, 163)
    [(expected, *_)] = run_ranks(1, stock_run, FAMILY, dtype, str(tmp_path / "stock"), steps, rows)
    limited = {**LIMITED, "hotspa_memory_limit_mb": 1, "hotspa_max_buckets": 2, "max_steps": steps}
    per_rank = run_ranks(world_size, auto_run, dtype, str(tmp_path), limited, 1.1)
    losses, phases, state, refits, logs = per_rank[0]
    assert len(losses) == len(expected) == steps
    for step, (a, b) in enumerate(zip(losses, expected, strict=True), start=1):
        assert math.isclose(a, b, rel_tol=1e-11), f"step {step}: loss {a} instead of {b}"
    assert {len(p) for p in phases} == {1, 2}  # some mini-batches switch, some need not
    assert any("+sp" in strategy for p in phases for strategy in p)  # which nobody asked for
    assert not refits
    assert state["auto"]["chooser"]["num_trained"] == steps
    assert all("hotspa/prediction_error" in log for log in logs if "loss" in log)
    for other in per_rank[1:]:
        assert other[:4] == (losses, phases, state, refits)


# Layers wide beside their keys and values: what is kept of a token of an earlier chunk is little beside what a pack takes.
def test_a_forced_refit_is_the_same_on_all_ranks_and_changes_no_loss(tmp_path):
    dtype = torch.float32
    [(expected, *_)] = run_ranks(1, stock_run, FAMILY, dtype, str(tmp_path / "stock"), STEPS, data_of(2, 163))
    extra = {**LIMITED, "dataloader_num_workers": 1}
    per_rank = run_ranks(2, auto_run, dtype, str(tmp_path), extra, 3.0)
    losses, phases, state, refits, _ = per_rank[0]
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(losses, expected, strict=True))
    assert len(refits) == 1
    assert "the time model is refitted" in refits[0]
    assert all(c == pytest.approx(3.0) for c, _ in state["auto"]["chooser"]["trust"]["factors"].values())
    for other in per_rank[1:]:
        assert other[1:4] == (phases, state, refits)


def test_without_a_limit_one_strategy_is_enough_and_determinism_refits_nothing(tmp_path):
    for losses, phases, _, refits, _ in run_ranks(
        2, auto_run, torch.float32, str(tmp_path), {"full_determinism": True}, 5.0
    ):
        assert len(losses) == STEPS
        assert len({tuple(p) for p in phases}) == 1
        assert not refits


class Stream(IterableDataset):
    """Rows that can only be read one after the other, and in another order each time."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first = 17 * self.epoch
        yield from (*self.rows[first:], *self.rows[:first])


def with_loader(base):
    """A data loader of the user's own: its rows are the halves of those of the data set."""

    class Loaded(base):
        def get_train_dataloader(self):
            halves = [
                {name: values[cut] for name, values in row.items()}
                for row in data_of(2, 163)
                for cut in (slice(None, len(row["labels"]) // 2), slice(len(row["labels"]) // 2, None))
                if len(row["labels"][cut]) > 1
            ]
            return self.accelerator.prepare(DataLoader(halves, batch_size=6, collate_fn=_pad, drop_last=True))

    return Loaded


SAMPLED = {
    "a stream": (None, {"train_dataset": lambda rows: Stream(rows)}, {}),
    "a stream and workers": (None, {"train_dataset": lambda rows: Stream(rows)}, {"dataloader_num_workers": 1}),
    "a collator": (None, {"train_dataset": lambda rows: rows, "data_collator": lambda rows: _pad}, {}),
    "a loader": (with_loader, {"train_dataset": lambda rows: rows}, {}),
    "a loader alone": (with_loader, {}, {}),
}


QUICK = ("a stream", "a loader")


def sampled_runs(rank, world_size, folder, calibration, names):
    """For each case the stock Trainer under DDP, and ours with auto: losses of this rank, norms, weights, phases, pool."""
    from transformers import Trainer, TrainingArguments

    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    def run(base, given, arguments, **own):
        losses, phases, dtype = [], [], torch.float64
        model = tiny_model(FAMILY, dtype)

        class Recorder(TrainerCallback):
            def on_step_report(self, args, state, control, report, **kwargs):
                phases.append([p.strategy for p in report.phases])

        class Noted(base):
            def training_step(self, *args, **kwargs):
                loss = super().training_step(*args, **kwargs)
                losses.append(loss.item())
                return loss

        args = (HotSPaTrainingArguments if own else TrainingArguments)(
            output_dir=folder, per_device_train_batch_size=MINI_BATCH // 2, save_strategy="no",
            accelerator_config={"dispatch_batches": False}, **{**COMMON, "max_steps": 8, **arguments}, **own,
        )  # fmt: skip
        made = {name: make(data_of(2, model.config.vocab_size)[:84]) for name, make in given.items()}
        trainer = Noted(model=model, args=args, callbacks=[Recorder()], **made)
        with exact_in_double(dtype):
            trainer.train()
        norms = [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
        pool = [bucket.longest for bucket in trainer._hotspa.watchers.plan.choices.plan.pool] if own else None
        if own:
            trainer.close_engine()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return losses, norms, weights, phases, pool

    found = {}
    for name in names:
        subclass, given, arguments = SAMPLED[name]
        subclass = subclass or (lambda base: base)
        expected = run(subclass(Trainer), {"data_collator": lambda rows: _pad, **given}, arguments)
        own = {"hotspa_strategies": "auto", "hotspa_calibration": calibration, "hotspa_report": False, **LIMITED}
        found[name] = expected, run(subclass(HotSPaTrainer), given, arguments, **own)
    return found


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(n for n in SAMPLED if n not in QUICK), marks=pytest.mark.slow)]
)
def test_where_nothing_can_be_scanned_the_first_batches_say_what_is_trained(names, tmp_path):
    """And the training is the stock Trainer's under DDP: looking at them takes no row away, and draws no random number."""
    costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)}
    calibration = save_calibration(tmp_path, tiny_model(FAMILY, torch.float64), 2, costs, hop=Hop(1e-2, 1e-5))
    before = Path(calibration).read_bytes()
    for cases in run_ranks(2, sampled_runs, str(tmp_path), calibration, names, timeout=500):
        assert tuple(cases) == names
        for name, (expected, found) in cases.items():
            # what the batches had, and whatever else memory and model allow
            seen = 50 if "loader" in name else 100
            assert (max(found[4]), max(longest for longest in found[4] if longest < 256)) == (256, seen), name
            assert len(found[0]) == len(expected[0]) == len(found[3]) == 8, name
            for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
                assert math.isclose(a, b, rel_tol=1e-11), name
            worst = max(relative_error(found[2][n], weight) for n, weight in expected[2].items())
            assert worst <= 1e-11, name
    assert Path(calibration).read_bytes() == before


def test_a_stream_whose_lengths_change_is_planned_anew_exactly_and_resumes(tmp_path):
    short, long = random_rows(120, 163, longest=20, seed=1), random_rows(120, 163, longest=100, seed=2)
    rows, steps = Stream([*short, *(row for row in long if len(row["input_ids"]) > 50), *long]), 18
    [(expected, *_)] = run_ranks(1, stock_run, FAMILY, torch.float64, str(tmp_path / "stock"), steps, rows)
    extra = {**LIMITED, "save_strategy": "steps", "save_steps": 15, "max_steps": steps}
    per_rank = run_ranks(2, auto_run, torch.float64, str(tmp_path), extra, {1: 1.0, 2: 1.0}, rows)
    losses, phases, state, _, _ = per_rank[0]
    assert all(math.isclose(a, b, rel_tol=1e-11) for a, b in zip(losses, expected, strict=True))
    for other in per_rank[1:]:
        assert other[:3] == (losses, phases, state)
    # what was planned first is no longer what is trained
    now = [str(Bucket(Strategy.parse(name), *numbers)) for name, *numbers in state["auto"]["pools"][0]]
    assert now != state["auto"]["pool"]
    extra |= {"resume": str(tmp_path / "checkpoint-15"), "save_strategy": "no"}
    resumed = run_ranks(2, auto_run, torch.float64, str(tmp_path), extra, {1: 1.0, 2: 1.0}, rows)[0]
    assert resumed[:3] == (losses[15:], phases[15:], state)


class Many(Dataset):
    """A million Python rows, which are made when they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 10**6

    def __getitem__(self, number):
        self.read += 1
        ids = [7] * (5 + number % 50)
        return {"input_ids": ids, "labels": ids}


def long_run_of_many(rank, world_size, folder):
    rows = Many()
    losses, *_ = auto_run(rank, world_size, torch.float32, folder, {"max_steps": 2}, rows=rows)
    return len(losses), rows.read


def test_a_million_python_rows_are_not_read_before_the_first_step(tmp_path):
    for steps, read in run_ranks(2, long_run_of_many, str(tmp_path)):
        assert steps == 2
        assert read < 1000


class Once(IterableDataset):
    """Its own iterator: rows that were read are gone."""

    def __init__(self, rows):
        self.rows = iter(rows)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rows)


def test_rows_that_can_be_read_once_only_are_refused_on_every_rank(tmp_path):
    rows = Once(data_of(2, 163))
    found = run_ranks(2, refused_run, str(tmp_path), {}, rows)
    assert found[0] == found[1]
    assert found[0][0] == "UnsupportedError"
    assert "give hotspa_strategies, or a data set that begins anew" in found[0][1]


def test_plans_are_raced_alike_on_all_ranks_exactly_and_a_resumed_race_goes_on(tmp_path):
    """What switches is measured to take three times as long as predicted: one strategy stays."""
    stock = FAMILY, torch.float64, str(tmp_path / "stock"), STEPS, data_of(2, 163)
    [(expected, *_)] = run_ranks(1, stock_run, *stock)
    extra = {**LIMITED, "save_strategy": "steps", "save_steps": 5, "max_steps": STEPS}
    slow = {1: 1.0, 2: 3.0}
    per_rank = run_ranks(2, auto_run, torch.float64, str(tmp_path), extra, slow, None, 1.0)
    losses, phases, state, _, _ = per_rank[0]
    assert all(math.isclose(a, b, rel_tol=1e-11) for a, b in zip(losses, expected, strict=True))
    for other in per_rank[1:]:
        assert other[:3] == (losses, phases, state)
    raced = state["auto"]["race"]
    assert len(raced["names"]) > 1
    assert not raced["queue"]
    assert len(raced["levels"]) > 1  # measured; plans that are predicted alike cost nothing beyond the fastest
    assert raced["spent"] >= 0
    assert len({tuple(p) for p in phases}) > 1
    assert {len(p) for p in phases[-3:]} == {1}
    extra |= {"resume": str(tmp_path / "checkpoint-5"), "save_strategy": "no"}
    resumed = run_ranks(2, auto_run, torch.float64, str(tmp_path), extra, slow, None, 1.0)[0]
    assert (resumed[0], resumed[1]) == (losses[5:], phases[5:])
    assert resumed[2] == state


def refused_run(rank, world_size, folder, extra, rows=None, **changes):
    from hf_hotspa.errors import HotspaError

    with pytest.raises(HotspaError) as caught:
        auto_run(rank, world_size, torch.float64, folder, extra, 1.0, rows, **changes)
    return type(caught.value).__name__, str(caught.value)


REFUSED = (
    ({"hotspa_memory_limit_mb": 1}, "DeviceMemoryError", ["a limit of ", "MiB", "hotspa_memory_limit_mb"]),
    ({"hotspa_longest": 20}, "OverlongError",
     ["over the limit", "hotspa_overlong", "raise hotspa_longest to 100 or leave it out"]),
    ({"hotspa_longest": 1000}, "OverlongError", ["256 positions", "hotspa_longest"]),
)  # fmt: skip


def refused_by_a_wide_model(rank, world_size, folder):
    # one of its layers takes more than the smallest limit there is, whatever is divided or loaded a layer at a time
    return [refused_run(rank, world_size, folder, extra, intermediate_size=8192) for extra, *_ in REFUSED]


def test_bad_input_is_refused_on_every_rank(tmp_path):
    first, second = run_ranks(2, refused_by_a_wide_model, str(tmp_path))
    assert first == second
    for (found, text), (_, name, words) in zip(first, REFUSED, strict=True):
        assert found == name
        assert all(word in text for word in words), text


def broken_file(folder, kind, model):
    costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)}
    path = Path(save_calibration(folder, model, 4 if kind == "world" else 2, costs))
    if kind == "torn":
        path.write_text(path.read_text()[:200])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("torn", ["not valid JSON", "calibrate again"]),
        ("world", ["processes a node 4 instead of 2"]),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused_on_every_rank(kind, words, tmp_path):
    path = broken_file(tmp_path, kind, tiny_model(FAMILY))
    found = run_ranks(2, refused_run, str(tmp_path), {"hotspa_calibration": path})
    assert found[0] == found[1]
    assert all(word in found[0][1] for word in words), found[0][1]


def measured_run(rank, world_size, folder):
    import os

    os.environ["HF_HOTSPA_CACHE"] = folder
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    model = tiny_model(FAMILY)
    args = HotSPaTrainingArguments(output_dir=folder, save_strategy="no", **{**COMMON, "max_steps": 2})
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=data_of(1, model.config.vocab_size))
    trainer.train()
    first = trainer.engine
    assert first.description.vector.measured == trainer._hotspa.watchers.plan.stage_costs
    assert (first.description.vector.measured is not None) == (world_size > 1)  # stages are cut by seconds
    trainer.train()  # goes on with what is there
    assert trainer.engine is first
    found = trainer.hotspa_state()["auto"]
    trainer.close_engine()
    return found["pool"], found["chooser"]["num_trained"]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_but_the_trainer_is_needed(world_size, tmp_path):
    found = run_ranks(world_size, measured_run, str(tmp_path))
    assert all(pool == found[0][0] and num_trained == 2 for pool, num_trained in found)
    if world_size == 1:
        assert found[0][0][0].startswith("dp1:")
    # one process measures nothing: there is nothing to switch
    assert len(list((tmp_path / "calibration").glob("*.json"))) == (world_size > 1)
