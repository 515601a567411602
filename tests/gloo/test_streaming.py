"""Streams as training and evaluation sets: the rows that the stock Trainer sees, on any number of ranks."""

import math

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.moves import padded as _pad
from tests.oracle import random_rows, relative_error

pytestmark = pytest.mark.gloo

ROWS, MINI_BATCH = 22, 6
COMMON = {
    "learning_rate": 5e-3, "seed": 7, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "save_strategy": "no",
}  # fmt: skip


class Stream(IterableDataset):
    """Rows one after the other; another order in each epoch."""

    def __init__(self, rows, fails_at=()):
        self.rows, self.epoch, self.fails_at = rows, 0, fails_at

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(len(self.rows)):
            if index in self.fails_at:
                raise OSError("the server went away")
            yield self.rows[(index + 5 * self.epoch) % len(self.rows)]


class SizedStream(Stream):
    def __len__(self):
        return len(self.rows)


def make_stream(kind):
    rows = random_rows(ROWS, 160, longest=60, seed=3)
    if kind == "datasets":
        return datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=3, buffer_size=8)
    return {"unsized": Stream, "sized": SizedStream}[kind](rows)


def with_empty_rows(rank, world_size, folder, stream):
    """The losses, and how many rows were left out of each mini-batch."""
    from tests.unit.test_prepare import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<eos>"
    rows = [{"text": None if row % 3 == 0 else "" if row % 8 == 1 else "word " * (row % 7 + 1)} for row in range(24)]
    dataset = datasets.Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if stream else dataset
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_mini_batch_size=6, hotspa_strategies={1: "dp1:64", 2: "dp2:16,tp2:64"}[world_size],
        hotspa_empty_rows="skip", hotspa_report=False, max_steps=4, **COMMON,
    )  # fmt: skip
    model = tiny_model("llama_gqa_bias", vocab_size=400)
    trainer = HotSPaTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], log.get("hotspa/empty", 0.0)) for log in logs]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_empty_rows_are_skipped_and_counted_on_all_ranks(tmp_path, stream):
    [alone] = run_ranks(1, with_empty_rows, str(tmp_path / "1"), stream)
    one, other = run_ranks(2, with_empty_rows, str(tmp_path / "2"), stream)
    assert one == other
    assert sum(count for _, count in alone) == sum(row % 3 == 0 or row % 8 == 1 for row in range(24))
    assert [count for _, count in one] == [count for _, count in alone]
    assert [loss for loss, _ in one] == pytest.approx([loss for loss, _ in alone], rel=2e-5)


CASES = {
    "unsized": {"max_steps": 9},  # more than two epochs
    "sized": {"max_steps": -1, "num_train_epochs": 2},
    "datasets": {"max_steps": 6},
}


def both_runs(rank, world_size, folder):
    """Of the stock Trainer and of ours: losses, the loss of an evaluation, the shape of predictions, weights."""
    found = {}
    for kind, case in CASES.items():
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=MINI_BATCH // world_size,
            accelerator_config={"dispatch_batches": False}, **COMMON, **case,
        )  # fmt: skip
        model = tiny_model("llama_gqa_bias")
        stock = Trainer(model=model, args=args, train_dataset=make_stream(kind), data_collator=_pad)
        own_reading = {"accelerator_config": {"dispatch_batches": False}}  # the rows are not of one width
        ours = hot_trainer(folder, world_size, make_stream(kind), **own_reading, **case)
        for name, trainer in (("stock", stock), ("ours", ours)):
            trainer.train()
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            losses.append(trainer.evaluate(make_stream(kind))["eval_loss"])
            predicted = trainer.predict(make_stream(kind))
            shapes = predicted.predictions.shape, predicted.label_ids.tolist()
            weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
            found[kind, name] = losses, shapes, weights
        ours.close_engine()
    return found


def hot_trainer(folder, world_size, stream, **options):
    strategies = "dp2:16@32,tp2:60@64" if world_size == 2 else "dp1:60@64"
    given = {name: options.pop(name) for name in ("processing_class", "data_collator") if name in options}
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_strategies=strategies, hotspa_mini_batch_size=MINI_BATCH, **{**COMMON, **options}
    )
    model = tiny_model("llama_gqa_bias")
    return HotSPaTrainer(model=model, args=args, train_dataset=stream, **given)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stream_trains_as_in_the_stock_trainer(world_size, tmp_path):
    for found in run_ranks(world_size, both_runs, str(tmp_path)):
        for kind in CASES:
            (losses, shapes, weights), (ours, our_shapes, our_weights) = found[kind, "stock"], found[kind, "ours"]
            assert len(ours) == len(losses) > 6, kind
            assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(ours, losses, strict=True)), kind
            assert our_shapes == shapes, kind
            assert relative_error(our_weights, weights) <= 2e-5, kind


def with_workers(rank, world_size, folder):
    """Of the stock Trainer and of ours, with workers: an evaluation of a stream in two shards, and losses of three passes over it."""
    rows = [[3 + (7 * row + token) % 150 for token in range(20)] for row in range(13)]

    def make(shards):
        yield from ({"input_ids": rows[row], "labels": rows[row]} for shard in shards for row in range(shard, 13, 2))

    found = []
    for workers in (1, 2):
        options = {"dataloader_num_workers": workers, "per_device_eval_batch_size": 2, "max_steps": 8}
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=MINI_BATCH // world_size, **COMMON, **options
        )
        stream = datasets.IterableDataset.from_generator(make, gen_kwargs={"shards": [0, 1]})
        stock = Trainer(tiny_model("llama_gqa_bias"), args, train_dataset=stream)
        ours = hot_trainer(folder, world_size, stream, **options)
        for trainer in (stock, ours):
            trainer.train()  # first: after an evaluation the stock Trainer leaves DDP out
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            losses.append(trainer.evaluate(stream)["eval_loss"])
            found.append((workers, losses, sorted(trainer.predict(stream).label_ids.tolist())))
        ours.close_engine()
    return found


def test_a_stream_in_shards_read_with_workers_has_the_rows_of_the_stock_trainer(tmp_path):
    for found in run_ranks(2, with_workers, str(tmp_path)):
        for (workers, stock, labels), (_, ours, our_labels) in zip(found[::2], found[1::2], strict=True):
            assert len(ours) == len(stock) == 9, workers
            assert workers > 1 or ours == pytest.approx(stock, rel=2e-5), workers  # several read in another order
            assert our_labels == labels, workers
            assert len(labels) == 13, workers


def in_parts(rank, world_size, folder, cut, saved):
    """Losses and weights where ranks read two files of together 16 rows: of the stock Trainer, of ours, and of ours resumed after some steps."""
    rows = random_rows(16, 160, longest=60, seed=3)

    def make(files):
        yield from (row for file in files for row in (rows[:cut], rows[cut:])[file])

    def run(folder, saved=(), resume=None, cls=None):
        options = {"max_steps": 11, "accelerator_config": {"dispatch_batches": False}, "save_strategy": "no"}
        stream = datasets.IterableDataset.from_generator(make, gen_kwargs={"files": [0, 1]}).shuffle(
            seed=5, buffer_size=4
        )
        if cls is None:
            trainer = hot_trainer(folder, world_size, stream, data_collator=_pad, **options)
        else:
            args = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=MINI_BATCH // world_size, **{**COMMON, **options}
            )
            trainer = cls(tiny_model("llama_gqa_bias"), args, train_dataset=stream, data_collator=_pad)
        trainer.add_callback(SaveAt(saved))
        trainer.train(resume_from_checkpoint=resume)
        if cls is None:
            trainer.close_engine()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], weights

    ours = f"{folder}/ours"
    found = {"stock": run(f"{folder}/stock", cls=Trainer), "ours": run(ours, saved)}
    return found | {step: run(f"{folder}/{step}", resume=f"{ours}/checkpoint-{step}") for step in saved}


@pytest.mark.parametrize(
    ("cut", "saved"),
    [
        (5, (2, 9)),
        pytest.param(5, (1, 4, 6), marks=pytest.mark.slow),
        pytest.param(11, (2, 4, 7), marks=pytest.mark.slow),
    ],
)
def test_a_rank_whose_part_of_a_stream_ends_begins_it_again_as_in_the_stock_trainer(cut, saved, tmp_path):
    for found in run_ranks(2, in_parts, str(tmp_path), cut, saved):
        (stock, stock_weights), (ours, weights) = found.pop("stock"), found.pop("ours")
        assert len(ours) == 11
        assert ours == pytest.approx(stock, rel=1e-5)
        assert relative_error(weights, stock_weights) <= 2e-5
        for step, (again, same) in found.items():
            assert again == ours, step
            assert torch.equal(same, weights), step


def _to_one_width(rows):
    batch = _pad([*rows, {"input_ids": [3] * 60, "labels": [-100] * 60}])
    return {name: column[:-1] for name, column in batch.items()}


def bad_stream(rank, world_size, folder, kind):
    rows = random_rows(ROWS, 160, longest=60, seed=3)
    options = {"max_steps": 4}
    if kind == "fails on one rank":
        stream = Stream(rows, fails_at=(8,) if rank else ())
    elif kind == "ends on one rank":
        stream = Stream(rows[: 12 if rank else None])
    elif kind == "fails where one rank reads for all":
        stream = Stream(rows, fails_at=(14,))
        options |= {"accelerator_config": {"dispatch_batches": True}, "data_collator": _to_one_width}
    elif kind == "overlong":
        rows[9] = {"input_ids": [3] * 61}
        stream = Stream(rows)
    elif kind == "no token ids":
        rows[9] = {"tokens": [1, 2]}
        stream = Stream(rows)
    elif kind == "divided already":
        stream = split_dataset_by_node(datasets.Dataset.from_list(rows).to_iterable_dataset(4), rank, world_size)
    elif kind == "a mask":
        stream = Stream([{"input_ids": row["input_ids"], "completion_mask": [1]} for row in rows])
    hot_trainer(folder, world_size, stream, **options).train()


class CountingStream(IterableDataset):
    """Without `set_epoch`: the order of a pass depends on how many passes have ended before it."""

    def __init__(self, rows, passes=0):
        self.rows, self.passes = rows, passes

    def __iter__(self):
        for index in range(len(self.rows)):
            yield self.rows[(index + 5 * self.passes) % len(self.rows)]
        self.passes += 1


class SaveAt(TrainerCallback):
    """Saves after these steps; ends the pass after others."""

    def __init__(self, saved, ends_pass=()):
        self.saved, self.ends_pass = saved, ends_pass

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step in self.saved
        control.should_epoch_stop = state.global_step in self.ends_pass


# 22 rows are 4 mini-batches: ten steps are two passes and a half. Checkpoints in each, and where they end.
RESUMED = {
    "unsized": (Stream, {}, (2, 4, 7, 9), ()),
    "sized": (SizedStream, {}, (4, 7), ()),
    "no set_epoch": (CountingStream, {}, (6, 8, 9), ()),
    "passes ended early": (CountingStream, {}, (3, 6), (3, 5)),
    "save_strategy=epoch": (Stream, {"save_strategy": "epoch"}, (), ()),
}


def resumed_runs(rank, world_size, folder, kinds):
    rows = random_rows(ROWS, 160, longest=60, seed=3)
    wrong = []

    def run(stream, folder, callback=None, resume=None, **options):
        options = {"max_steps": 10, "neftune_noise_alpha": 5.0, **options}
        trainer = hot_trainer(folder, world_size, stream, **options)
        if callback is not None:
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            trainer.close_engine()
        logs = [[log["step"], log["epoch"], log["loss"]] for log in trainer.state.log_history if "loss" in log]
        return logs, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    for kind in kinds:
        cls, options, saved, ends = RESUMED[kind]
        path = f"{folder}/{kind}"
        logs, weights = run(cls(rows), path, SaveAt(saved, ends) if saved else None, **options)
        assert len(logs) == 10, kind
        for step in saved or (4, 8):
            again, same = run(cls(rows), f"{path}-{step}", SaveAt((), ends), f"{path}/checkpoint-{step}")
            if again != logs or not torch.equal(same, weights):
                wrong.append((kind, step, again, logs))
    return wrong


@pytest.mark.parametrize(
    "kinds",
    [
        ["passes ended early"],
        pytest.param(["unsized", "sized", "no set_epoch", "save_strategy=epoch"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_a_resumed_run_goes_on_in_the_stream_bit_for_bit(kinds, tmp_path):
    for wrong in run_ranks(2, resumed_runs, str(tmp_path), kinds):
        assert not wrong


BAD = {
    "fails on one rank": ["HSP-301", "the server went away", "rank 1"],
    "fails where one rank reads for all": ["HSP-301", "the server went away", "rank 0"],
    "ends on one rank": ["HSP-203", "rank 0: train 1 batches; rank 1: train 0 batches", "step 3"],
    "overlong": ["HSP-302", "61 tokens", "rank 1, row 0 of the batch"],
    "no token ids": ["no 'input_ids', only ['tokens']", "rank 1"],
    "divided already": ["split_dataset_by_node", "pass the whole stream"],
    "a mask": ["completion_mask", "an entry for each token"],
}


def bad_streams(rank, world_size, folder):
    messages = {}
    for kind in BAD:
        try:
            bad_stream(rank, world_size, folder, kind)
        except HotspaError as error:
            messages[kind] = str(error)
    return messages


def test_a_bad_stream_is_an_error_on_every_rank(tmp_path):
    for rank, messages in enumerate(run_ranks(2, bad_streams, str(tmp_path))):
        assert list(messages) == list(BAD), f"rank {rank} went on"
        for kind, fragments in BAD.items():
            for fragment in fragments:
                assert fragment in messages[kind], f"rank {rank}: {messages[kind]}"
