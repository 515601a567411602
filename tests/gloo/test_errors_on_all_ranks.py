"""Bad input: every rank raises the same clear error, and nothing has been sent."""

import pytest
import torch
from transformers.models.stablelm import StableLmConfig, StableLmForCausalLM

from hf_hotspa.errors import HotspaError
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

BUCKETS = "dp2:16@32,tp2:64"


def assert_all_raise(world_size, error_type, fragments, fn, *args):
    outcomes = run_ranks(world_size, fn, *args, expect_failure=True)
    for outcome in outcomes:
        assert outcome.error_type is not None, f"rank {outcome.rank} went on"
        assert outcome.error_type.endswith(error_type), f"{outcome.error_type}: {outcome.error}"
        for fragment in fragments:
            assert fragment in outcome.error, f"rank {outcome.rank}: {fragment!r} is not in {outcome.error!r}"


def build(rank, world_size, buckets, family="llama_gqa_bias"):
    make_engine(tiny_model(family), buckets)


@pytest.mark.parametrize(
    ("world_size", "buckets", "error_type", "fragments"),
    [
        (
            2,
            "dp4:64",
            "LaunchError",
            ["need 4 processes and 2 are running", "--multi_gpu --num_processes 4", "--use_cpu"],
        ),
        (1, "dp4:64", "LaunchError", ["1 are running", "starts one process", "--multi_gpu --num_processes 4"]),
        (2, "pp2:8,tp2:4", "StrategyError", ["not above 8"]),
    ],
)
def test_strategies_that_do_not_fit_the_world(world_size, buckets, error_type, fragments):
    assert_all_raise(world_size, error_type, fragments, build, buckets)


def too_many_stages(rank, world_size):
    make_engine(tiny_model("llama_gqa_bias", num_hidden_layers=2), "pp4:64")


def too_long(rank, world_size):
    make_engine(tiny_model("llama_gqa_bias"), "dp4:256,tp4:257")


def too_many_shards(rank, world_size):
    make_engine(tiny_model("llama_gqa_bias", num_attention_heads=2, num_key_value_heads=2), "tp4:64")


@pytest.mark.parametrize(
    ("fn", "fragments"),
    [
        (too_many_stages, ["pp4 is more than the 2 layers", "legal", "dp2tp2"]),
        (too_long, ["257 tokens", "256 positions"]),
        (too_many_shards, ["tp4 is more than the 2 attention heads", "legal", "dp4"]),
    ],
)
def test_strategies_that_do_not_fit_the_model(fn, fragments):
    assert_all_raise(4, "StrategyError", fragments, fn)


def stable_lm(buckets):
    config = StableLmConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return make_engine(StableLmForCausalLM(config), buckets)


def family_without_plan(rank, world_size):
    stable_lm("tp2:64")


def test_family_without_a_tensor_parallel_plan():
    fragments = ["tp2 cannot run", "'stablelm' has no tensor-parallel plan", "legal", "dp2"]
    assert_all_raise(2, "StrategyError", fragments, family_without_plan)


def different_strategies(rank, world_size):
    make_engine(tiny_model("llama_gqa_bias"), BUCKETS if rank else "dp2:8@32,tp2:64")


def different_models(rank, world_size):
    make_engine(tiny_model("llama_gqa_bias", intermediate_size=48 + rank), BUCKETS)


def test_ranks_with_different_configurations():
    assert_all_raise(2, "PlanMismatchError", ["list of strategies", "nothing was sent"], different_strategies)
    assert_all_raise(2, "PlanMismatchError", ["model", "nothing was sent"], different_models)


def bad_rows(rank, world_size, change, where):
    model = tiny_model("llama_gqa_bias")
    rows = random_rows(6, model.config.vocab_size, longest=60, seed=1, masked=False)
    # the bad row is short, so only one of the two replicas reads it
    bad = min(range(6), key=lambda i: len(rows[i]["input_ids"]) if len(rows[i]["input_ids"]) > 3 else 99)
    change(rows[bad], rank)
    engine = make_engine(model, BUCKETS)
    before = [w.clone() for w in engine.master.weights if w is not None]
    try:
        engine.forward_backward(make_mini_batch(engine, rows))
    except HotspaError:
        assert engine._switching._epoch == 0, "a transfer was started"
        assert all(
            torch.equal(a, b) for a, b in zip(before, [w for w in engine.master.weights if w is not None], strict=True)
        )
        raise


def token_too_large(row, rank):
    row["input_ids"][2] = 163


def label_too_large(row, rank):
    row["labels"][2] = 5000


@pytest.mark.parametrize("change", [token_too_large, label_too_large])
def test_token_outside_the_vocabulary_stops_all_ranks_before_the_first_transfer(change):
    assert_all_raise(2, "TokenRangeError", ["rank", "row", "163"], bad_rows, change, "")


def other_data(rank, world_size):
    model = tiny_model("llama_gqa_bias")
    engine = make_engine(model, BUCKETS)
    rows = random_rows(6 + rank, model.config.vocab_size, longest=60, seed=1)
    engine.forward_backward(make_mini_batch(engine, rows))


def test_ranks_with_different_mini_batches():
    assert_all_raise(2, "PlanMismatchError", ["mini-batch", "nothing was sent"], other_data)


def no_labels(rank, world_size):
    model = tiny_model("llama_gqa_bias")
    engine = make_engine(model, BUCKETS)
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 4
    engine.forward_backward(make_mini_batch(engine, rows))


def test_mini_batch_without_labels():
    assert_all_raise(2, "DataError", ["none of the 4 rows", "label"], no_labels)


def infinite_weight(rank, world_size):
    model = tiny_model("llama_gqa_bias")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    engine = make_engine(model, BUCKETS)
    engine.forward_backward(make_mini_batch(engine, random_rows(6, model.config.vocab_size, longest=60, seed=1)))


def test_non_finite_gradients_are_an_error_on_all_ranks():
    assert_all_raise(2, "NonFiniteError", ["mini-batch 1", "weights were not changed"], infinite_weight)


def train(rank, world_size, rows, folder, **options):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    args = HotSPaTrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=2, report_to="none", hotspa_strategies=BUCKETS, **options
    )
    HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=rows).train()


def overlong(rank, world_size, policy, folder):
    rows = random_rows(12, 100, longest=60)
    rows[7] = {"input_ids": [5] * 65}
    train(rank, world_size, rows, folder, hotspa_overlong=policy)


def test_overlong_sequence_under_the_policy_error(tmp_path):
    assert_all_raise(2, "OverlongError", ["65 tokens", "64 tokens", "row 7", "split"], overlong, "error", str(tmp_path))


def empty(rank, world_size, folder):
    train(rank, world_size, [], folder)


def test_empty_data_set(tmp_path):
    assert_all_raise(2, "DataError", ["empty"], empty, str(tmp_path))


def fails_inside_a_phase(rank, world_size):
    engine = make_engine(tiny_model("llama_gqa_bias"), BUCKETS, timeout_s=20)
    rows = random_rows(6, 100, longest=60, seed=1)
    if rank == 1:

        def broken(*args, **kwargs):
            raise MemoryError("no memory for this pack")

        engine.phases[engine.buckets[0].strategy].compute = broken
    engine.forward_backward(make_mini_batch(engine, rows))


def test_failure_of_one_rank_inside_a_phase_is_named_on_the_others():
    outcomes = run_ranks(2, fails_inside_a_phase, expect_failure=True, timeout=280)
    assert "no memory for this pack" in outcomes[1].error
    assert "no memory for this pack" in outcomes[0].error, outcomes[0].error
    assert "rank 1" in outcomes[0].error


def wrong_values(rank, world_size, folder):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    common = {"output_dir": folder, "use_cpu": True, "report_to": "none", "hotspa_strategies": "dp2:64", "max_steps": 1}
    found = {}

    def tries(name, make):
        try:
            found[name] = make()
        except HotspaError as error:
            found[name] = str(error)

    def changed(name, value, here=True, after=False):
        args = HotSPaTrainingArguments(**common)
        trainer = (
            HotSPaTrainer(tiny_model("llama_gqa_bias"), args, train_dataset=random_rows(4, 160, longest=60))
            if after
            else None
        )
        setattr(args, name, value if here else getattr(args, name))
        if trainer is None:
            HotSPaTrainer(tiny_model("llama_gqa_bias"), args)
        else:
            trainer.train()

    for name, value in {"learning_rate": "1e-3", "max_grad_norm": float("nan"), "output_dir": ""}.items():
        tries(name, lambda name=name, value=value: HotSPaTrainingArguments(**{**common, name: value}) and None)
    tries("adam_beta1", lambda: changed("adam_beta1", 1.5, rank == 1))
    tries("weight_decay", lambda: changed("weight_decay", float("inf"), rank == 0, after=True))
    # what cannot be made on the main process, which alone makes it, is known to all
    tries("output_dir cannot be made", lambda: changed("output_dir", "/dev/null/out"))
    return found


def test_wrong_values_are_refused_on_all_ranks(tmp_path):
    for found in run_ranks(2, wrong_values, str(tmp_path)):
        for name, message in found.items():
            assert message is not None, f"{name} was taken"
            assert name in message
