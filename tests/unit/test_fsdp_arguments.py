"""transformers' arguments for FSDP: a stage of sharding, nothing to say, or refused by name."""

import json

import pytest
from transformers import HfArgumentParser

from hf_hotspa.errors import HotspaConfigError, StrategyError, UnsupportedError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, given_buckets
from hf_hotspa.trainer.deepspeed_config import FSDP_UNUSED, read_fsdp


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        (None, None, (0, False)),
        (False, {"reshard_after_forward": True}, (0, False)),
        ("", None, (0, False)),
        (True, None, (3, False)),
        ("full_shard", None, (3, False)),
        ("full_shard auto_wrap", {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}, (3, False)),
        (["shard_grad_op", "offload"], None, (2, True)),
        ("no_shard", None, (0, False)),
        (True, {"fsdp_reshard_after_forward": False}, (2, False)),
        (True, {"reshard_after_forward": "true", "fsdp_offload_params": "true"}, (3, True)),
        (True, {"sharding_strategy": "SHARD_GRAD_OP"}, (2, False)),
        (True, {"xla": False, "activation_checkpointing": "false"}, (3, False)),
        (True, dict.fromkeys(FSDP_UNUSED, 1), (3, False)),
    ],
)
def test_what_settings_come_to(fsdp, config, expected, tmp_path):
    assert read_fsdp(fsdp, config) == expected
    if config is not None:
        (tmp_path / "fsdp.json").write_text(json.dumps(config))
        assert read_fsdp(fsdp, str(tmp_path / "fsdp.json")) == expected


def test_what_cannot_be_honoured_is_named_all_at_once():
    config = {"activation_checkpointing": True, "reshard_after_forward": "hybrid_shard", "xla": True, "sharding": 1}
    with pytest.raises(UnsupportedError) as caught:
        read_fsdp("hybrid_shard_zero2 fast", config)
    for name in ("hybrid_shard_zero2", "'fast'", "activation_checkpointing", "hybrid_shard'", ".xla=", "sharding=1"):
        assert name in str(caught.value)
    assert "6 of the settings" in str(caught.value)
    with pytest.raises(HotspaConfigError, match="cannot be read"):
        read_fsdp(True, "no such file.json")


def arguments(tmp_path, **options):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "hotspa_strategies": "dp1+z2:64,dp1+rc:128", **options}
    return HotSPaTrainingArguments(**given)


def strategies_of(args):
    return [str(bucket.strategy) for bucket in given_buckets(args)]


def test_length_ranges_that_become_the_same_strategy_are_joined_or_refused(tmp_path):
    given = "dp1:16@32,dp1+rc:64,dp1+z2:128"
    [first, last] = given_buckets(arguments(tmp_path, hotspa_strategies=given, activation_checkpointing=True))
    assert (str(first.strategy), first.low, first.longest, first.pack_tokens) == ("dp1+rc", 0, 64, 64)
    assert (str(last.strategy), last.low, last.longest) == ("dp1+rc+z2", 64, 128)
    with pytest.raises(StrategyError, match="two length ranges .* under dp1.rc"):
        arguments(tmp_path, hotspa_strategies="dp1:16,dp1+z2:64,dp1+rc:128", activation_checkpointing=True)


def test_strategies_that_say_nothing_are_sharded(tmp_path):
    assert strategies_of(arguments(tmp_path)) == ["dp1+z2", "dp1+rc"]
    asked = arguments(tmp_path, fsdp="full_shard offload")
    assert strategies_of(asked) == ["dp1+z2", "dp1+rc+z3"]
    assert (asked.hotspa_offload, asked.fsdp) == ("master", None)  # transformers would start it
    config = {"zero_optimization": {"stage": 2}}
    assert strategies_of(arguments(tmp_path, deepspeed=config)) == ["dp1+z2", "dp1+rc+z2"]
    (from_words,) = HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--hotspa_strategies", "dp1:64", "--fsdp", "shard_grad_op"]
    )
    assert strategies_of(from_words) == ["dp1+z2"]
