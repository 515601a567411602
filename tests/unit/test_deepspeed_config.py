"""DeepSpeed's JSON configs: each field sets an argument, has nothing to say here, or is refused by its dotted name."""

import json
import random
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from transformers import HfArgumentParser

from hf_hotspa.errors import HotspaConfigError, HotspaError, UnsupportedError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.deepspeed_config import (
    ARGUMENTS,
    AUTO,
    KNOWN,
    LOG,
    NO_SWITCH,
    OFF,
    ONLY,
    TYPES,
    UNUSED,
    map_config,
)

DEFAULTS = {
    "hotspa_mini_batch_size": None, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0, "dataloader_drop_last": False, "bf16": False, "learning_rate": 5e-5, "adam_epsilon": 1e-8,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear", "hotspa_offload": "none",
}  # fmt: skip


def mapped(config, **given):
    return map_config(config, DEFAULTS | given, DEFAULTS)


def nested(field, value):
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"zero_optimization": {"stage": 0}}, {}),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}}, {}),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}}, {}),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}}, {"hotspa_offload": "master"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {}),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
        ({"train_batch_size": 64}, {"hotspa_mini_batch_size": 64}),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4.0},
         {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}}, {"bf16": True}),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": "auto"}}, {"bf16": True}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 1}}},
         {"learning_rate": 1e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 1.0}),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}}}, {}),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, {"learning_rate": 1e-3}),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}, {}),
        ({"activation_checkpointing": {"partition_activations": False}, "communication_data_type": "fp32"}, {}),
        ({"tensor_parallel": {"autotp_size": 1}, "pipeline": {}, "compile": {"deepcompile": False}}, {}),
        ({"steps_per_print": float("inf"), "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_becomes_of_fields(config, arguments):
    found = mapped(json.loads(json.dumps(config)))
    assert found.arguments == arguments
    assert mapped(config, **arguments).arguments == arguments  # said twice is said once
    for name, value in arguments.items():
        assert f"{name}={value}" in str(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_table_says_what_a_stage_means(stage):
    text = str(mapped({"zero_optimization": {"stage": stage, "overlap_comm": True}, "steps_per_print": 5}))
    assert f"zero_optimization.stage={stage}" in text
    assert [z for z in ("+z2", "+z3") if z in text] == ([f"+z{stage}"] if stage > 1 else [])
    assert mapped({"zero_optimization": {"stage": stage}}).stage == (stage if stage > 1 else 0)
    assert "zero_optimization.overlap_comm, steps_per_print" in text


REFUSED = [
    ({"fp16": {"enabled": True}}, "fp16.enabled=true: loss scaling"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp.enabled=true"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=true"),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge=1: no such field is known (is it zero_optimization.stage?)"),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, 'zero_optimization.offload_param.device="cpu"'),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'offload_optimizer.device="nvme"'),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "offload_optimizer.ratio=0.3"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_optimization.zero_quantized_gradients=true"),
    ({"optimizer": {"type": "Lamb"}}, 'optimizer.type="Lamb"'),
    ({"optimizer": {"type": "OneBitAdam", "params": {"cuda_aware": True}}}, "optimizer.params.cuda_aware=true"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode=false"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "optimizer.params.betas=[0.9]: give two numbers"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, 'optimizer.params.lr="1e-3"'),
    ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type="OneCycle"'),
    ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}, "scheduler.params.total_num_steps=5: WarmupLR takes"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "scheduler.params.warmup_num_steps=0"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, 'scheduler.params.warmup_type="cosine"'),
    ({"scheduler": "WarmupLR"}, "scheduler.type=null"),
    ({"gradient_clipping": True}, "gradient_clipping=true: max_grad_norm must be"),
    ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size=4: write the degree into hotspa_strategies"),
    ({"pipeline": {"stages": 2}}, "pipeline=true: write the degree into hotspa_strategies"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing.cpu_checkpointing=true"),
    ({"communication_data_type": "fp16"}, 'communication_data_type="fp16"'),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype="bf16"'),
    ({"tensorboard": {"enabled": True, "output_path": "x"}}, "tensorboard.enabled=true: use report_to"),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled=true: use hotspa_strategies=auto"),
    ({"my_section": {}}, "my_section={}: no such field"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(config, text):
    with pytest.raises(UnsupportedError) as caught:
        mapped(config)
    assert text in str(caught.value)


def test_all_of_it_is_named_at_once():
    configs = [config for config, _ in REFUSED if len(config) == 1]
    whole = {}
    for config in configs:
        whole = config | whole  # the first one of each section
    with pytest.raises(UnsupportedError) as caught:
        mapped(whole)
    sections = {next(iter(config)) for config in configs}
    assert all(section in str(caught.value) for section in sections)
    assert f"{len(sections)} of the fields" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "given", "text"),
    [
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 2.0}, "max_grad_norm is 2.0"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16 is True"),
        ({"train_batch_size": 64}, {"hotspa_mini_batch_size": 32}, "hotspa_mini_batch_size is 32"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"learning_rate": 1e-4}, "learning_rate is 0.0001"),
        ({"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, "optim is sgd"),
        ({"scheduler": {"type": "WarmupLR"}}, {"lr_scheduler_type": "cosine"}, "lr_scheduler_type is cosine"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}, {}, "learning_rate is 0.001"),
    ],
)  # fmt: skip
def test_what_the_arguments_contradict_is_refused(config, given, text):
    with pytest.raises(UnsupportedError) as caught:
        mapped(config, **given)
    assert text in str(caught.value)


# -- the tables against DeepSpeed itself ------------------------------------------------------------------------------


def upstream_fields():
    for section, cls in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("bf16", DeepSpeedBF16Config),
    ):
        for name, field in cls.model_fields.items():
            yield f"{section}.{field.alias or name}"


def test_every_field_of_deepspeeds_sections_is_in_a_table():
    unread = {"zero_optimization.offload_optimizer", "zero_optimization.offload_param", "zero_optimization.leaf_module"}
    assert sorted({*upstream_fields()} - KNOWN - unread) == []


def test_no_field_is_in_two_tables():
    tables = [[*ARGUMENTS], [s + n for s, names in UNUSED.items() for n in names], [*ONLY], [*OFF]]
    every = [field for table in tables for field in table]
    assert len(every) == len(set(every))
    assert set(NO_SWITCH) <= set(OFF)


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("warmup", "total", "low"), [(1, 12, 0.0), (5, 17, 0.25), (8, 6, 0.125)])
def test_learning_rates_are_deepspeeds_to_the_bit(kind, warmup_type, warmup, total, low):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    params = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": low, "cos_min_ratio": 0.05}
    else:
        params |= {"warmup_min_lr": low * 1e-4, "warmup_max_lr": 3e-4}
    if kind != "WarmupLR":
        params |= {"total_num_steps": total}
    schedule = mapped({"scheduler": {"type": kind, "params": params}}).schedule(3e-4, 0, 0)
    theirs = getattr(lr_schedules, kind)(optimizer, **params)
    for step in range(25):  # as its engine: a step, then the rate of the next one
        assert schedule.rate(step) == optimizer.param_groups[0]["lr"], step
        theirs.step()


def test_what_a_scheduler_leaves_open():
    auto = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
    schedule = mapped({"scheduler": {"type": "WarmupDecayLR", "params": auto}}).schedule(2e-3, 50, 7)
    assert schedule.peak == 2e-3
    assert schedule.params == {
        "total_num_steps": 50, "warmup_min_lr": 0.0, "warmup_max_lr": 2e-3, "warmup_num_steps": 7, "warmup_type": LOG,
    }  # fmt: skip
    default = mapped({"scheduler": {"type": "WarmupDecayLR"}}).schedule(2e-3, 50, 7)
    assert default.peak == 1e-3
    assert (default.params["total_num_steps"], default.params["warmup_num_steps"]) == (50, 1000)


# -- at random --------------------------------------------------------------------------------------------------------

VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    0.5,
    1e9,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "auto",
    "cpu",
    "x",
    [],
    [1],
    {},
    {"a": 1},
]


def mapped_or_refused(config):
    try:
        return mapped(config), ""
    except UnsupportedError as error:
        return None, str(error)


def test_any_config_is_mapped_or_refused_by_its_fields():
    rng, fields = random.Random(0), sorted(KNOWN)
    refused = 0
    for _ in range(2_000):
        config, changed = {}, []
        for _ in range(rng.randint(1, 4)):
            field = rng.choice(fields)
            if rng.random() < 0.4:  # a letter more, or less, or another one
                at = rng.randrange(len(field))
                field = field[:at] + rng.choice(["", "x", "_"]) + field[at + rng.randint(0, 1) :]
            field = ".".join(part or "_" for part in field.split("."))
            if any(field.startswith(other.split(".")[0]) or other.startswith(field.split(".")[0]) for other in changed):
                continue
            config |= nested(field, rng.choice(VALUES))
            changed.append(field)
        found, error = mapped_or_refused(config)
        if found is None:
            refused += 1
            assert any(field.split(".")[0] in error for field in changed)
            continue
        assert set(found.arguments) <= set(DEFAULTS)
        for field in changed:  # nothing that is not in a table gets through
            assert field in KNOWN or field.split(".")[0] in OFF or any(k.startswith(f"{field}.") for k in KNOWN), field
    assert 400 < refused < 1_960


# -- the arguments ----------------------------------------------------------------------------------------------------


def arguments(tmp_path, deepspeed, **options):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "hotspa_strategies": "dp1:64@128"}
    return HotSPaTrainingArguments(**common, deepspeed=deepspeed, **options)


CONFIG = {
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.25, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.5}},
}  # fmt: skip


def test_a_path_a_dict_and_json_text_come_to_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    for given in (str(path), dict(CONFIG), json.dumps(CONFIG)):
        args = arguments(tmp_path, given)
        assert (args.max_grad_norm, args.learning_rate, args.adam_beta2, args.weight_decay) == (0.25, 1e-4, 0.9, 0.5)
        assert (args.hotspa_mini_batch_size, args.hotspa_offload, args.adam_epsilon) == (12, "master", 1e-6)
        assert args.deepspeed == given
        assert args.deepspeed_plugin is None
        again = HotSPaTrainingArguments(**{k: v for k, v in args.to_dict().items() if k in ("deepspeed", "use_cpu")},
                                        output_dir=str(tmp_path), hotspa_strategies="dp1:64")  # fmt: skip
        assert again.hotspa_mini_batch_size == 12
    assert arguments(tmp_path, None).hotspa_deepspeed is None


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("no/such.json", HotspaConfigError, "no/such.json"),
        ("{1}", HotspaConfigError, "cannot be read"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', HotspaConfigError, "'train_batch_size' is there twice"),
        ({"train_batch_size": 13, "train_micro_batch_size_per_gpu": 3}, UnsupportedError, "train_batch_size=13"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
         UnsupportedError, "make 6"),
    ],
)  # fmt: skip
def test_what_the_arguments_refuse(tmp_path, given, error, text):
    with pytest.raises(error) as caught:
        arguments(tmp_path, given)
    assert text in str(caught.value)


def test_the_stock_trainers_example_needs_one_change(tmp_path):
    """The config that users of the stock Trainer copy: ZeRO-3 with everything on auto, and parameters offloaded."""
    path, auto = tmp_path / "ds.json", "auto"
    config = {
        "fp16": {"enabled": auto, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": auto},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), auto)},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), auto),
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": auto,
            "stage3_prefetch_bucket_size": auto, "stage3_param_persistence_threshold": auto,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": auto, "gradient_clipping": auto, "steps_per_print": 2000,
        "train_batch_size": auto, "train_micro_batch_size_per_gpu": auto, "wall_clock_breakdown": False,
    }  # fmt: skip
    line = ["--deepspeed", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--learning_rate", "3e-5"]
    line += ["--hotspa_strategies", "dp1:64", "--bf16"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r'1 of the fields .*zero_optimization.offload_param.device="cpu"'):
        HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses(line)
    del config["zero_optimization"]["offload_param"]
    path.write_text(json.dumps(config))
    [args] = HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses(line)
    assert (args.bf16, args.learning_rate, args.hotspa_offload, args.max_grad_norm) == (True, 3e-5, "master", 1.0)
    schedule = args.hotspa_deepspeed.schedule(args.learning_rate, 100, args.get_warmup_steps(100))
    assert (schedule.peak, schedule.params["warmup_num_steps"]) == (3e-5, 1)


def test_a_file_without_an_object_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("[1]")
    with pytest.raises(HotspaError, match="not a JSON object"):
        arguments(tmp_path, str(path))


def test_accelerates_deepspeed_launch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UnsupportedError, match="MULTI_GPU"):
        arguments(tmp_path, None)


def test_mapping_needs_neither_deepspeed_nor_torch():
    code = (
        "import sys, hf_hotspa.trainer.deepspeed_config as c; "
        "print(c.map_config({'zero_optimization': {'stage': 2}}, {}, {})); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'transformers')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    assert "run with +z2: gradients leave layer by layer" in found.stdout
