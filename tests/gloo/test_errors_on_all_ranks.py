"""Bad input: every rank raises the same clear error, and nothing has been sent.

One world tries one attempt after the other.
"""

import pytest
import torch
from transformers.models.stablelm import StableLmConfig, StableLmForCausalLM

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

BUCKETS = "dp2:16@32,tp2:64"


def build(buckets=BUCKETS, memory_limit=None, **changes):
    make_engine(tiny_model("llama_gqa_bias", **changes), buckets, memory_limit=memory_limit)


def without_a_plan():
    config = StableLmConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    make_engine(StableLmForCausalLM(config), "tp2:64")


def run(rows):
    """A mini-batch that is refused before the first transfer; the weights stay."""
    engine = make_engine(tiny_model("llama_gqa_bias"), BUCKETS)
    before = [w.clone() for w in engine.master.weights if w is not None]
    try:
        engine.forward_backward(make_mini_batch(engine, rows))
    finally:
        assert engine._switching._epoch == 0, "a transfer was started"
        after = [w for w in engine.master.weights if w is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        engine.close()


def rows_with(column, value):
    """Rows of which a short one, which only one of two replicas reads, has a bad token."""
    rows = random_rows(6, 163, longest=60, seed=1, masked=False)
    bad = min(range(6), key=lambda i: len(rows[i]["input_ids"]) if len(rows[i]["input_ids"]) > 3 else 99)
    rows[bad][column][2] = value
    return rows


def train(folder, rows, **options):
    args = HotSPaTrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=2, report_to="none", hotspa_strategies=BUCKETS, **options
    )
    HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=rows).train()


def overlong():
    rows = random_rows(12, 100, longest=60)
    rows[7] = {"input_ids": [5] * 65}
    return rows


ATTEMPTS = {  # name -> what a rank tries, the class of the error, and what it says
    "too many ranks": (
        lambda rank, folder: build("dp4:64"), "LaunchError",
        ["need 4 processes and 2 are running", "--multi_gpu --num_processes 4", "--use_cpu"],
    ),
    "unordered buckets": (lambda rank, folder: build("pp2:8,tp2:4"), "StrategyError", ["not above 8"]),
    "too many stages": (
        lambda rank, folder: build("pp2:64", num_hidden_layers=1), "StrategyError",
        ["pp2 is more than the 1 layers", "legal", "dp2"],
    ),
    "too long": (
        lambda rank, folder: build("dp2:256,tp2:257"), "StrategyError", ["257 tokens", "256 positions"],
    ),
    "too many shards": (
        lambda rank, folder: build("tp2:64", num_attention_heads=1, num_key_value_heads=1), "StrategyError",
        ["tp2 is more than the 1 attention heads", "legal", "dp2"],
    ),
    "a family without a tensor-parallel plan": (
        lambda rank, folder: without_a_plan(), "StrategyError",
        ["tp2 cannot run", "'stablelm' has no tensor-parallel plan", "legal", "dp2"],
    ),
    "too little memory": (
        lambda rank, folder: build(memory_limit=1000), "DeviceMemoryError", ["MiB", "weights", "the device has 0.0 MiB"],
    ),
    "other strategies": (
        lambda rank, folder: build(BUCKETS if rank else "dp2:8@32,tp2:64"), "PlanMismatchError",
        ["list of strategies", "nothing was sent"],
    ),
    "other models": (
        lambda rank, folder: build(intermediate_size=48 + rank), "PlanMismatchError", ["model", "nothing was sent"],
    ),
    "a token that is too large": (
        lambda rank, folder: run(rows_with("input_ids", 163)), "TokenRangeError", ["rank", "row", "163"],
    ),
    "a label that is too large": (
        lambda rank, folder: run(rows_with("labels", 5000)), "TokenRangeError", ["rank", "row", "163"],
    ),
    "other mini-batches": (
        lambda rank, folder: run(random_rows(6 + rank, 163, longest=60, seed=1)), "PlanMismatchError",
        ["mini-batch", "nothing was sent"],
    ),
    "no labels": (
        lambda rank, folder: run([{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 4), "DataError",
        ["none of the 4 rows", "label"],
    ),
    "a row that is too long": (
        lambda rank, folder: train(folder, overlong(), hotspa_overlong="error"), "OverlongError",
        ["65 tokens", "64 tokens", "row 7", "split"],
    ),
    "no rows": (lambda rank, folder: train(folder, []), "DataError", ["empty"]),
}  # fmt: skip


def attempts(rank, world_size, folder):
    found = {}
    for name, (attempt, *_) in ATTEMPTS.items():
        try:
            attempt(rank, folder)
        except HotspaError as error:
            found[name] = type(error).__name__, str(error)
    return found


def test_every_rank_raises_the_same_error_and_nothing_was_sent(tmp_path):
    for rank, found in enumerate(run_ranks(2, attempts, str(tmp_path))):
        assert list(found) == list(ATTEMPTS), f"rank {rank} went on"
        for name, (_, error_type, fragments) in ATTEMPTS.items():
            assert found[name][0] == error_type, found[name]
            assert all(fragment in found[name][1] for fragment in fragments), found[name]


def test_one_process_is_told_how_to_start_several():
    with pytest.raises(HotspaError, match=r"1 are running.*starts one process.*--multi_gpu --num_processes 4"):
        build("dp4:64")


def wrong_values(rank, world_size, folder):
    common = {"output_dir": folder, "use_cpu": True, "report_to": "none", "hotspa_strategies": "dp2:64", "max_steps": 1}

    def changed(name, value, here=True, after=False):
        args = HotSPaTrainingArguments(**common)
        rows = random_rows(4, 160, longest=60)
        trainer = HotSPaTrainer(tiny_model("llama_gqa_bias"), args, train_dataset=rows) if after else None
        setattr(args, name, value if here else getattr(args, name))
        if trainer is None:
            HotSPaTrainer(tiny_model("llama_gqa_bias"), args)
        else:
            trainer.train()

    tries = {
        "adam_beta1": lambda: changed("adam_beta1", 1.5, rank == 1),
        "weight_decay": lambda: changed("weight_decay", float("inf"), rank == 0, after=True),
        # what cannot be made on the main process, which alone makes it, is known to all
        "output_dir cannot be made": lambda: changed("output_dir", "/dev/null/out"),
    }
    for name, attempt in tries.items():
        with pytest.raises(HotspaError, match=name):
            attempt()


def test_wrong_values_are_refused_on_all_ranks(tmp_path):
    run_ranks(2, wrong_values, str(tmp_path))
