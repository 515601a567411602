"""Streams as training and evaluation sets: the rows that the stock Trainer sees, on any number of ranks."""

import math

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from tests.families import tiny_model
from tests.gloo.test_trainer import _LossRecorder, _pad
from tests.harness import run_ranks
from tests.oracle import random_rows, relative_error
from tests.unit.test_chat import QWEN3

pytestmark = pytest.mark.gloo

ROWS, MINI_BATCH = 22, 6
COMMON = {
    "learning_rate": 5e-3, "seed": 7, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "save_strategy": "no",
}  # fmt: skip


class Stream(IterableDataset):
    """Rows one after the other; another order in each epoch."""

    def __init__(self, rows, fails_at=None):
        self.rows, self.epoch, self.fails_at = rows, 0, fails_at

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(len(self.rows)):
            if index == self.fails_at:
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


CASES = {
    "unsized": {"max_steps": 9},  # more than two epochs
    "sized": {"max_steps": -1, "num_train_epochs": 2},
    "datasets": {"max_steps": 6},
}


def stock_runs(rank, world_size, folder):
    found = {}
    for kind, case in CASES.items():
        model = tiny_model("llama_gqa_bias")
        args = TrainingArguments(output_dir=folder, per_device_train_batch_size=MINI_BATCH, **COMMON, **case)
        trainer = _LossRecorder(model=model, args=args, train_dataset=make_stream(kind), data_collator=_pad)
        trainer.train()
        found[kind] = trainer.losses, torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


def hot_runs(rank, world_size, folder):
    found = {}
    for kind, case in CASES.items():
        trainer = hot_trainer(folder, world_size, make_stream(kind), **case)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found[kind] = losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        if kind == "unsized":
            whole = trainer.evaluate(list(make_stream(kind)))["eval_loss"]
            streamed = trainer.evaluate(make_stream(kind))
            assert math.isclose(streamed["eval_loss"], whole, rel_tol=1e-6)
            predicted = trainer.predict(make_stream(kind))
            assert predicted.predictions.shape[0] == predicted.label_ids.shape[0] == ROWS
        trainer.close_engine()
    return found


def hot_trainer(folder, world_size, stream, **options):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    strategies = "dp2:16@32,tp2:60@64" if world_size == 2 else "dp1:60@64"
    tokenizer = options.pop("processing_class", None)
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_strategies=strategies, hotspa_mini_batch_size=MINI_BATCH, **{**COMMON, **options}
    )
    model = tiny_model("llama_gqa_bias")
    return HotSPaTrainer(model=model, args=args, train_dataset=stream, processing_class=tokenizer)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stream_trains_as_in_the_stock_trainer(world_size, tmp_path):
    [stock] = run_ranks(1, stock_runs, str(tmp_path))
    for found in run_ranks(world_size, hot_runs, str(tmp_path)):
        for kind, (losses, weights) in stock.items():
            assert len(found[kind][0]) == len(losses), kind
            assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found[kind][0], losses, strict=True)), kind
            assert relative_error(found[kind][1], weights) <= 2e-5, kind


def bad_stream(rank, world_size, folder, kind):
    rows = random_rows(ROWS, 160, longest=60, seed=3)
    options = {"max_steps": 4}
    if kind == "fails on one rank":
        stream = Stream(rows, fails_at=8 if rank else None)
    elif kind == "ends on one rank":
        stream = Stream(rows[: 12 if rank else None])
    elif kind == "other tokens":
        rows[9] = {**rows[9], "input_ids": [(t + rank) % 160 for t in rows[9]["input_ids"]]}
        stream = Stream(rows)
    elif kind == "overlong":
        rows[9] = {"input_ids": [3] * 61}
        stream = Stream(rows)
    elif kind == "no token ids":
        rows[9] = {"tokens": [1, 2]}
        stream = Stream(rows)
    elif kind == "a mask":
        stream = Stream([{"input_ids": row["input_ids"], "completion_mask": [1]} for row in rows])
    elif kind == "workers":
        stream, options["dataloader_num_workers"] = Stream(rows), 2
    else:
        stream = Stream([])
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


def resumed_runs(rank, world_size, folder):
    from hf_hotspa.errors import HotspaError

    rows = random_rows(ROWS, 160, longest=60, seed=3)
    wrong, messages = [], {}

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

    for kind, (cls, options, saved, ends) in RESUMED.items():
        path = f"{folder}/{kind}"
        logs, weights = run(cls(rows), path, SaveAt(saved, ends) if saved else None, **options)
        assert len(logs) == 10, kind
        for step in saved or (4, 8):
            again, same = run(cls(rows), f"{path}-{step}", SaveAt((), ends), f"{path}/checkpoint-{step}")
            if again != logs or not torch.equal(same, weights):
                wrong.append((kind, step, again, logs))
    # the order of this one depends on what the checkpoint cannot know; the last has no place in a stream
    cases = {"other rows": (CountingStream(rows, 1), 6), "other rows, behind a pass": (CountingStream(rows, 1), 8)}
    for name, (stream, step) in cases.items():
        try:
            run(stream, f"{folder}/other", None, f"{folder}/no set_epoch/checkpoint-{step}")
        except HotspaError as error:
            messages[name] = str(error)
    again, _ = run(
        CountingStream(rows, 1), f"{folder}/other", None, f"{folder}/no set_epoch/checkpoint-6",
        hotspa_allow_data_order_change=True,
    )  # fmt: skip
    return wrong, messages, len(again)


def test_a_resumed_run_goes_on_in_the_stream_bit_for_bit(tmp_path):
    for wrong, messages, steps in run_ranks(2, resumed_runs, str(tmp_path)):
        assert not wrong
        assert list(messages) == ["other rows", "other rows, behind a pass"]
        for message in messages.values():
            assert "HSP-220" in message
            assert "other rows than it did before" in message
        assert "mini-batch 2 of pass 2" in messages["other rows"]
        assert steps == 10


BAD = {
    "fails on one rank": ["the server went away", "mini-batch 2 of the stream, rank 1"],
    "ends on one rank": ["ends on some ranks", "do not split it by rank"],
    "other tokens": ["PlanMismatch", "mini-batch"],
    "overlong": ["HSP-302", "61 tokens", "counted from row 6 of the stream"],
    "no token ids": ["no 'input_ids'", "dataset row 3, counted from row 6"],
    "a mask": ["completion_mask", "no 'labels'"],
    "workers": ["dataloader_num_workers is 2"],
    "empty": ["the stream is empty"],
}


def bad_streams(rank, world_size, folder):
    from hf_hotspa.errors import HotspaError

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


def test_skipped_mini_batches_are_replayed():
    from accelerate.data_loader import skip_first_batches

    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.strategy import parse_buckets
    from hf_hotspa.trainer.streaming import StreamLoader, StreamRows

    def make():
        return StreamLoader(
            StreamRows(
                make_stream("unsized"), PackedBucketCollator(parse_buckets("dp1:60@64"), rank=0, vocab_size=163),
                mini_batch_size=MINI_BATCH, any_rank=lambda flag: flag,
            )
        )  # fmt: skip

    loader = make()
    loader.set_epoch(1)
    whole = [item["mini_batch"].content for item in loader]
    assert len(whole) == 4
    assert [item["mini_batch"].content for item in loader] == whole, "a second walk begins anew"
    resumed = skip_first_batches(make(), 3)
    resumed.batch_sampler.batch_sampler.set_epoch(1)  # as the Trainer does
    assert [item["mini_batch"].content for item in resumed] == whole[3:]
    loader.set_epoch(2)
    assert [item["mini_batch"].content for item in loader] != whole


def text_stream(rank, world_size, folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "def": 2, "return": 3, "x": 4}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    rows = [{"text": "def x return " * (1 + n % 9)} for n in range(12)]
    trainer = hot_trainer(folder, world_size, Stream(rows), max_steps=2, processing_class=tokenizer)
    trainer.train()
    # Conversations of several turns, under a template that rewrites the earlier ones, as a stream and map-style.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = QWEN3
    said = ["def", "x", "return x", "def def", "x x x"]
    chats = [
        {
            "conversations": [
                {"from": ("human", "gpt")[i % 2], "value": said[(n + i) % 5]} for i in range(2 + 2 * (n % 3))
            ]
        }
        for n in range(MINI_BATCH)
    ]
    losses = []
    for kind, data in (("stream", Stream(chats)), ("rows", datasets.Dataset.from_list(chats))):
        chatting = hot_trainer(folder + kind, world_size, data, max_steps=1, processing_class=tokenizer)
        chatting.train()
        losses.append(chatting.state.log_history[0]["loss"])
    return trainer.state.global_step, trainer.state.log_history[0]["loss"], losses


def test_text_and_chats_are_tokenised_as_they_come(tmp_path):
    [(steps, loss, chats)] = run_ranks(1, text_stream, str(tmp_path))
    assert steps == 2
    assert 4 < loss < 6
    assert 4 < chats[0] < 6
    assert chats[0] == pytest.approx(chats[1], rel=1e-6)
