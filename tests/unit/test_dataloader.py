"""The train dataloader: the stock Trainer's order, the same on every rank, through workers and after a resume."""

import json

import datasets
import pytest
import torch
from accelerate import PartialState, skip_first_batches
from transformers import Trainer, TrainingArguments

from hf_hotspa.costs.coefficients import Cost
from hf_hotspa.costs.online_calibration import PhaseSeconds
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.data.collator import MiniBatch
from hf_hotspa.errors import DataError, HotspaConfigError, OverlongError, TokenRangeError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.rows.scan import scan_dataset
from hf_hotspa.search.chooser import PhaseChooser, predict_phases
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.trainer.dataloader import MiniBatchLoader, planned_ahead

BUCKETS = parse_buckets("dp4:6@12,dp2tp2:16,tp2pp2:40")
NUM_ROWS = 23
ROWS = [{"input_ids": [row] * (1 + row * 7 % 40)} for row in range(NUM_ROWS)]  # every token names its row


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Nothing is written to the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def loader(dataset=ROWS, rank=0, **kwargs):
    options = {"mini_batch_size": 5, "vocab_size": 100, "seed": 7} | kwargs
    return MiniBatchLoader(dataset, scan_dataset(dataset, disable_progress=True), BUCKETS, rank=rank, **options)


def planned_rows(batch):
    return sorted({s.row for s in batch["mini_batch"].plan.sequences()})


def run_rows(batches):
    """The rows whose tokens are in the tensors of one rank, phase by phase."""
    return [
        [sorted({t for m in phase.micro_batches for t in m.input_ids.flatten().tolist()}) for phase in b.phases]
        for b in (batch["mini_batch"] for batch in batches)
    ]


class ByRow(torch.utils.data.Dataset):
    """What the stock Trainer trains on: examples that tell their row."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        return {"x": torch.tensor([float(row)]), "row": row}


class Recorder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def forward(self, x, row):
        self.batches.append(sorted(row.tolist()))
        return {"loss": self.layer(x).mean()}


def stock_trainer(tmp_path, **kwargs):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=5,
        num_train_epochs=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **kwargs,
    )
    return Trainer(Recorder(), args, train_dataset=ByRow())


@pytest.mark.parametrize("seeds", [{"seed": 3}, {"seed": 3, "data_seed": 11}], ids=["seed", "data_seed"])
def test_the_order_is_the_stock_trainers(tmp_path, seeds):
    trainer = stock_trainer(tmp_path, **seeds)
    trainer.train()
    stock = trainer.model.batches
    ours = []
    mine = loader(seed=seeds.get("data_seed", seeds["seed"]))
    for epoch in range(2):
        mine.set_epoch(epoch)
        ours += [planned_rows(batch) for batch in mine]
    assert len(stock) == 10
    assert ours == stock
    assert stock[:5] != stock[5:]  # the epochs differ, so the comparison can fail


def test_sequential_order_and_lengths():
    plain = loader(shuffle=False)
    assert [planned_rows(batch) for batch in plain] == [
        list(range(a, min(a + 5, NUM_ROWS))) for a in range(0, NUM_ROWS, 5)
    ]
    assert len(plain) == 5
    assert len(plain.dataset) == NUM_ROWS
    assert plain.num_tokens == sum(len(row["input_ids"]) for row in ROWS)
    full = loader(drop_last=True)
    assert len(full) == len(list(full)) == 4
    assert {b["mini_batch"].plan.num_rows for b in full} == {5}


def test_every_rank_has_the_same_plans_and_together_they_read_every_row():
    batches = [list(loader(rank=rank)) for rank in range(4)]
    digests = [[b["mini_batch"].plan.digest() for b in own] for own in batches]
    assert digests[0] == digests[1] == digests[2] == digests[3]
    assert len(set(digests[0])) == 5
    per_rank = [run_rows(own) for own in batches]
    for step, batch in enumerate(batches[0]):
        for p, phase in enumerate(batch["mini_batch"].plan.phases):
            read = sorted({row for rank in range(4) for row in per_rank[rank][step][p]})
            assert read == sorted({s.row for s in phase.sequences()})
            if phase.bucket.strategy.dp == 4 and len(read) > 1:
                assert per_rank[0][step][p] != per_rank[1][step][p]


class Counting:
    def __init__(self):
        self.read = []

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        self.read.append(row)
        return ROWS[row]


def test_a_rank_reads_only_its_own_rows():
    counting = Counting()
    mine = loader(counting, rank=1, mini_batch_size=NUM_ROWS)
    counting.read.clear()  # of the scan
    (batch,) = mine
    plan = batch["mini_batch"].plan
    packs = [pack for phase in plan.phases for pack in phase.replicas[phase.bucket.strategy.coord(1).dp]]
    assert sorted(counting.read) == sorted({s.row for pack in packs for s in pack.sequences})
    assert len(counting.read) < NUM_ROWS


def test_workers_give_the_same_batches_as_the_main_process():
    expected = list(loader(datasets.Dataset.from_list(ROWS)))
    for options in (
        {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True, "multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "spawn", "pin_memory": True},
    ):
        mine = loader(datasets.Dataset.from_list(ROWS), **options)
        for _ in range(2 if options.get("persistent_workers") else 1):
            mine.set_epoch(0)
            got = list(mine)
            assert run_rows(got) == run_rows(expected)
            assert [b["mini_batch"].plan for b in got] == [b["mini_batch"].plan for b in expected]


@pytest.mark.parametrize("kind", ["list", "datasets", "datasets with gaps", "torch format", "transform"])
def test_kinds_of_datasets(kind):
    rows = [
        {**row, "labels": [-100, *row["input_ids"][1:]] if i % 2 else row["input_ids"]} for i, row in enumerate(ROWS)
    ]
    if kind == "datasets with gaps":
        rows = [row if i % 3 else {**row, "labels": None} for i, row in enumerate(rows)]
    dataset = rows
    if kind != "list":
        dataset = datasets.Dataset.from_list([{"other": "x", **row} for row in rows])
    if kind == "torch format":
        dataset = dataset.with_format("torch")
    if kind == "transform":
        dataset = dataset.with_transform(lambda batch: {k: batch[k] for k in ("input_ids", "labels")})
    assert run_rows(loader(dataset)) == run_rows(loader())
    assert all(batch["mini_batch"].error is None for batch in loader(dataset))


def test_resuming_skips_mini_batches_and_keeps_the_order():
    whole = loader()
    whole.set_epoch(3)
    expected = [planned_rows(b) for b in whole]
    PartialState(cpu=True)
    rest = skip_first_batches(loader(), 2)
    assert len(rest) == 3
    # What the Trainer does: a plain DataLoader has no set_epoch, so it reaches for the wrapped batch sampler.
    rest.batch_sampler.batch_sampler.set_epoch(3)
    assert [planned_rows(b) for b in rest] == expected[2:]


class Resuming(Trainer):
    """A stock Trainer on our loader; the model only sees which rows it would train."""

    seen = ()

    def get_train_dataloader(self):
        return loader(seed=self.args.seed)

    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(inputs["mini_batch"], MiniBatch)
        self.seen = [*self.seen, planned_rows(inputs)]
        return torch.zeros(())


def test_the_stock_training_loop_runs_and_resumes_on_it(tmp_path):
    def trainer(**kwargs):
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, num_train_epochs=2, report_to="none", save_steps=7,
            disable_tqdm=True, seed=5, per_device_train_batch_size=5, **kwargs,
        )  # fmt: skip
        return Resuming(Recorder(), args, train_dataset=ByRow())

    straight = trainer()
    assert straight.num_examples(straight.get_train_dataloader()) == NUM_ROWS
    straight.train()
    assert straight.state.global_step == len(straight.seen) == 10
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert resumed.seen == straight.seen[7:]


def test_plans_without_reading_a_row():
    mine = loader()
    mine.set_epoch(1)
    read = [b["mini_batch"].plan for b in mine]
    assert list(loader().plans(epoch=1)) == read
    assert list(loader().plans(epoch=0)) != read


class Failing(Counting):
    def __getitem__(self, row):
        if row == 4 and self.armed:
            raise OSError("disk on fire")
        return ROWS[row]

    armed = False


def test_whatever_the_dataset_raises_is_carried():
    failing = Failing()
    mine = loader(failing, shuffle=False, num_workers=0)
    failing.armed = True
    first, second, *_ = mine
    assert isinstance(first["mini_batch"].error, DataError)
    assert "OSError: disk on fire" in str(first["mini_batch"].error)
    assert "rank 0" in str(first["mini_batch"].error)
    assert second["mini_batch"].error is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_token_outside_the_vocabulary_is_carried_also_from_workers(num_workers):
    mine = loader(vocab_size=20, shuffle=False, num_workers=num_workers)
    errors = [batch["mini_batch"].error for batch in mine]
    assert [type(e) for e in errors[:4]] == [type(None)] * 4
    assert type(errors[4]) is TokenRangeError
    assert "vocabulary has the ids 0 to 19" in str(errors[4])


def test_what_cannot_work_is_refused_when_the_loader_is_made():
    with pytest.raises(OverlongError, match=r"dataset row 3\b"):
        loader([*ROWS[:3], {"input_ids": [1] * 41}])
    assert len(loader([*ROWS[:3], {"input_ids": [1] * 41}], policy="split")) == 1
    with pytest.raises(HotspaConfigError, match="the policy for over-long sequences is"):
        loader(policy="ignore")
    with pytest.raises(HotspaConfigError, match="mini-batch of 0"):
        loader(mini_batch_size=0)
    with pytest.raises(DataError, match="23 rows do not fill one mini-batch of 24"):
        loader(mini_batch_size=24, drop_last=True)
    with pytest.raises(DataError, match="scan has 22 rows and the dataset 23"):
        MiniBatchLoader(
            ROWS, scan_dataset(ROWS[1:], disable_progress=True), BUCKETS, mini_batch_size=2, rank=0, vocab_size=100
        )


# ------------------------------------------------------------------------------------- buckets chosen for mini-batches

TIME = TimeModel("test", StageCosts((1,) * 4), {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 3e-6, 1e-5)})


def chooser(**options):
    table = scan_dataset(ROWS, disable_progress=True)
    return PhaseChooser(BUCKETS, TIME, {b.strategy: 1e-5 for b in BUCKETS}, table, **{"delay": 8} | options)


def chosen_plans(batches):
    return [b["mini_batch"].plan.digest() for b in batches]


def train(loader, chooser, epoch, ran, stop=None, skip=0):
    """Walks through an epoch as the Trainer does; phases take 3 times as long as predicted, dp 20 times."""
    batches = skip_first_batches(loader, skip) if skip else loader
    batches.set_epoch(epoch) if hasattr(batches, "set_epoch") else batches.batch_sampler.batch_sampler.set_epoch(epoch)
    number = epoch * len(loader) + skip
    for batch in batches:
        plan = batch["mini_batch"].plan
        ran.append((number, plan.digest()))
        measured = {
            p.strategy: PhaseSeconds(p.strategy, p.compute_s * (20.0 if p.strategy.dp == 4 else 3.0), p.switch_s)
            for p in predict_phases(TIME, chooser._switch, plan)
        }
        chooser.trained(number, plan, measured)
        number += 1
        if number == stop:
            return


def whole_run(num_workers, epochs=4):
    PartialState()
    mine, ran = chooser(), []
    batches = loader(chooser=mine, num_workers=num_workers)
    for epoch in range(epochs):
        train(batches, mine, epoch, ran)
    return ran, mine.state_dict()


def test_choices_are_a_chain_that_workers_do_not_change():
    ran, state = whole_run(0)
    assert whole_run(2) == (ran, state)
    assert len(ran) == 20
    assert state["in_force"][-1][1]  # something was corrected on the way
    plain = [plan.digest() for epoch in range(4) for plan in loader().plans(epoch)]
    assert [digest for _, digest in ran] != plain
    # the plans of an epoch can be looked at without training it
    assert [p.digest() for p in loader(chooser=chooser()).plans(0)][:1] == [ran[0][1]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5, 8, 14])
def test_a_resumed_loader_chooses_as_the_whole_run(stop, num_workers):
    PartialState()
    ran, state = whole_run(0)
    first, head = chooser(), []
    batches = loader(chooser=first)
    for epoch in range(-(-stop // 5)):
        train(batches, first, epoch, head, stop)
    saved = json.loads(json.dumps(first.state_dict()))
    second = chooser()
    batches = loader(chooser=second, num_workers=num_workers)
    second.load_state_dict(saved)
    train(batches, second, stop // 5, head, skip=stop % 5)
    for epoch in range(stop // 5 + 1, 4):
        train(batches, second, epoch, head)
    assert head == ran
    assert second.state_dict() == state


def test_skipped_mini_batches_are_not_chosen(monkeypatch):
    PartialState()
    mine = chooser()
    asked = []
    choose = mine.choose
    monkeypatch.setattr(mine, "choose", lambda number, *rest: asked.append(number) or choose(number, *rest))
    mine.load_state_dict(chooser().state_dict() | {"num_trained": 3})
    assert len(list(skip_first_batches(loader(chooser=mine), 3))) == 2
    assert asked == [3, 4]
    # who looks at them anyway gets the buckets of the pool
    assert planned_rows(next(iter(loader(chooser=mine)))) == planned_rows(next(iter(loader())))


def test_a_chooser_that_decides_too_late_is_refused():
    assert planned_ahead(2, None) == 5
    with pytest.raises(HotspaConfigError, match="delay of the chooser is 3"):
        loader(chooser=chooser(delay=3), num_workers=2)


def test_an_overlong_row_ends_the_iteration_on_every_rank():
    table = scan_dataset(ROWS, disable_progress=True)
    short = loader(chooser=PhaseChooser(BUCKETS[:1], TIME, {BUCKETS[0].strategy: 0.0}, table))
    with pytest.raises(OverlongError):  # in the thread that chooses
        list(short)
