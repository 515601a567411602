"""`HotSPaTrainingArguments` and what `HotSPaTrainer` takes: parsed, or refused by name with what to use instead."""

import copy
import importlib
import math
import pickle
import sys
from dataclasses import dataclass, field

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from hf_hotspa.errors import HotspaConfigError, LaunchError, OverlongError, StrategyError, UnsupportedError
from hf_hotspa.features.low_bit_optimizers.terms import LOW_BIT_STATES
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, completed, named
from hf_hotspa.trainer.given_arguments import recompute_argument
from hf_hotspa.trainer.optimizers import ELEMENTWISE_OPTIMIZERS
from hf_hotspa.trainer.trainer import HotSPaTrainer, switched
from tests.families import tiny_model
from tests.oracle import random_rows, relative_error
from tests.unit.test_prepare import PLAIN, byte_tokenizer


def make_arguments(tmp_path, **options):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "hotspa_strategies": "dp1:64@128"}
    return HotSPaTrainingArguments(**{**common, **options})


def make_trainer(tmp_path, trainer_class=HotSPaTrainer, model=None, rows=None, **options):
    kwargs = {name: options.pop(name) for name in list(options) if name in _TRAINER_OPTIONS}
    args = make_arguments(tmp_path, **{"max_steps": 2, "disable_tqdm": True, **options})
    rows = random_rows(8, 160, longest=60) if rows is None else rows
    return trainer_class(model=model or tiny_model("llama_gqa_bias"), args=args, train_dataset=rows, **kwargs)


RECOMPUTE = recompute_argument(TrainingArguments)

_TRAINER_OPTIONS = {
    "data_collator",
    "compute_loss_func",
    "optimizers",
    "compute_metrics",
    "callbacks",
    "optimizer_cls_and_kwargs",
}

REFUSED = [
    {"fp16": True},
    {"torch_compile": True},
    {"fsdp": "hybrid_shard"},
    {"use_liger_kernel": True},
    {"save_on_each_node": True},
    {"fp16_full_eval": True},
    {"debug": "underflow_overflow"},
]


def test_the_dtypes_of_gradients_reach_the_engine(tmp_path):
    trainer = make_trainer(tmp_path, bf16=True, hotspa_grad_wire_dtype="bf16", max_steps=1)
    trainer.train()
    switching = trainer.engine._switching
    assert set(switching.gradient_dtypes) == {torch.float32}
    assert set(switching.return_dtypes) == {torch.bfloat16}
    trainer.close_engine()
    both = make_arguments(tmp_path, hotspa_grad_accum_dtype="bf16").hotspa_gradients
    assert (both.accumulated("bfloat16"), both.moved("bfloat16")) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("options", REFUSED, ids=lambda o: "-".join(map(str, *o.items())))
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, options):
    with pytest.raises(UnsupportedError) as caught:
        make_arguments(tmp_path, **options)
    assert next(iter(options)) in str(caught.value)
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"hotspa_strategies": ""}, HotspaConfigError, "hotspa_strategies is not set"),
        ({"hotspa_strategies": "dp4:64"}, LaunchError, "--multi_gpu --num_processes 4"),
        ({"hotspa_strategies": "dp1+sp:64"}, StrategyError, "without tensor"),
        ({"hotspa_strategies": "dp1"}, StrategyError, "longest"),
        ({"hotspa_overlong": "cut"}, HotspaConfigError, "split"),
        ({"hotspa_pipeline_schedule": "zb"}, HotspaConfigError, "1f1b"),
        ({"hotspa_context_parallel": "rings"}, HotspaConfigError, "use one of auto, ulysses, allgather, ring"),
        ({"hotspa_staging_mb": 0}, HotspaConfigError, "hotspa_staging_mb"),
        ({"hotspa_overlap_load": "yes"}, HotspaConfigError, "hotspa_overlap_load is 'yes'"),
        ({"hotspa_overlap_return": "true"}, HotspaConfigError, "auto, on, off"),
        ({"hotspa_second_source": "both"}, HotspaConfigError, "hotspa_second_source is 'both'"),
        ({"hotspa_grad_accum_dtype": "fp16"}, HotspaConfigError, "fp32, bf16"),
        ({"hotspa_grad_wire_dtype": "int8"}, HotspaConfigError, "auto, fp32, bf16"),
        ({"hotspa_stragglers": "find"}, HotspaConfigError, "use one of off, watch, balance, migrate, resize, semi"),
        ({"hotspa_stragglers": "balance"}, HotspaConfigError, "hotspa_stragglers=balance on one process"),
        ({"hotspa_planner": "fastest"}, HotspaConfigError, "relay, algorithm1, round_robin, first_owner"),
        ({"hotspa_offload": "nvme"}, HotspaConfigError, "none, master"),
        ({"hotspa_offload": "master", "hotspa_stock_checkpoints": True}, UnsupportedError, "do not go together"),
        ({"hotspa_memory_limit_mb": 0}, HotspaConfigError, "hotspa_memory_limit_mb is 0"),
        ({"hotspa_attention_dropout": 0.1}, HotspaConfigError, "hotspa_attention_dropout is 0.1"),
        ({"hotspa_skip_non_finite": -1}, HotspaConfigError, "hotspa_skip_non_finite is -1"),
        ({"hotspa_trace_steps": -1}, HotspaConfigError, "hotspa_trace_steps is -1"),
        (
            {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"offload": True}},
            UnsupportedError,
            "every_n_layers and use_reentrant",
        ),
    ],
)
def test_wrong_flags_are_explained(tmp_path, options, error, fragment):
    with pytest.raises(error, match=".*") as caught:
        make_arguments(tmp_path, **options)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, ValueError)


NAN, INF = math.nan, math.inf
WRONG_NUMBERS = {
    "learning_rate": (-1.0, NAN, INF, "1e-3", None, torch.ones(2)),
    "weight_decay": (-0.1, NAN, INF, "0.1"),
    "adam_beta1": (1.0, -0.1, NAN),
    "adam_beta2": (1.5, INF),
    "adam_epsilon": (-1e-8, NAN, INF),
    "max_grad_norm": (NAN, "1.0"),
    "max_steps": ("3", 2.5),
    "num_train_epochs": (-1.0, NAN, INF, "3"),
    "warmup_steps": (-1, NAN, INF, "10"),
    "label_smoothing_factor": (-0.1, 1.5, NAN),
    "neftune_noise_alpha": (-1.0, NAN, INF),
    "logging_steps": (NAN, INF, "5"),
    "save_steps": (NAN, "5"),
    "eval_delay": (NAN,),
    "per_device_train_batch_size": (0, 6.0),
    "gradient_accumulation_steps": (0, -2),
    "dataloader_num_workers": (-1, 1.0),
    "dataloader_prefetch_factor": (0,),
    "seed": (-1, 2**32),
    "ddp_timeout": (0, NAN),
    "lr_scheduler_kwargs": ({"min_lr": NAN}, '{"min_lr": NaN}'),
    "output_dir": ("",),
    "hotspa_longest": (0, 10**15),
    "hotspa_max_buckets": (0, 10**6),
    "hotspa_mini_batch_size": (0, 10**12),
    "hotspa_expert_capacity": (-1.0, NAN, INF),
    "hotspa_switch_timeout": (0.0, NAN, INF),
    "hotspa_eval_strategy": ("short", "dp3", "dp1:64", ""),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_a_value_that_nothing_can_train_with_is_refused_by_its_name(tmp_path, name):
    for value in WRONG_NUMBERS[name]:
        options = {"max_steps": -1, name: value}
        with pytest.raises(HotspaConfigError, match=rf"\b{name} (is|has) .* Fix: "):
            make_arguments(tmp_path, **options)


def test_values_are_checked_wherever_arguments_are_from(tmp_path):
    model, trainer = tiny_model("llama_gqa_bias"), make_trainer(tmp_path)
    trainer.args.weight_decay = NAN  # after the trainer was made
    with pytest.raises(HotspaConfigError, match="weight_decay is nan"):
        trainer.train()
    args = make_arguments(tmp_path)
    args.learning_rate = -1.0  # and before
    with pytest.raises(HotspaConfigError, match="learning_rate is -1.0"):
        HotSPaTrainer(model, args)
    with pytest.raises(HotspaConfigError, match="adam_beta1 is 1.5"):
        HotSPaTrainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, adam_beta1=1.5))
    config = {"optimizer": {"type": "AdamW", "params": {"lr": NAN}}, "train_micro_batch_size_per_gpu": 8}
    with pytest.raises(HotspaConfigError, match=r"optimizer\.params\.lr=NaN"):
        make_arguments(tmp_path, deepspeed=config)


def test_odd_values_that_the_stock_trainer_can_do_with_are_taken(tmp_path):
    for options in (
        {"max_grad_norm": -1.0}, {"max_grad_norm": INF}, {"num_train_epochs": -1.0, "max_steps": 2}, {"learning_rate": 0},
        {"learning_rate": np.float32(1e-3)}, {"learning_rate": torch.tensor(1e-3)}, {"save_steps": 0}, {"adam_beta1": 0.0},
        {"data_seed": -1}, {"eval_delay": INF}, {"save_total_limit": -1}, {"max_steps": -7}, {"neftune_noise_alpha": 0},
    ):  # fmt: skip
        assert make_arguments(tmp_path, **options)


def test_a_value_that_the_optimizer_alone_reads_is_named(tmp_path):
    with pytest.raises(HotspaConfigError, match=r"SGD makes weights that are not finite .*\(weight_decay=nan\)"):
        make_trainer(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1e-3, "weight_decay": NAN}))


@dataclass
class _Derived(HotSPaTrainingArguments):
    """Arguments of a user's, with an `__init__` of their own."""

    temperature: float = 0.5


@dataclass
class _Misspelt(HotSPaTrainingArguments):
    hotspa_strategy: str = "dp1:64"


def test_a_misspelt_argument_names_the_one_that_was_meant(tmp_path):
    for cls in (HotSPaTrainingArguments, _Derived):
        for wrong, meant in (
            ("hotspa_strategy", "hotspa_strategies"), ("learning_rat", "learning_rate"),
            ("hotspa_save_async", "hotspa_async_save"), ("hotspa_batches_size_mini", "hotspa_mini_batch_size"),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=rf"{cls.__name__} .*'{wrong}'; did you mean {meant}\?"):
                cls(output_dir=str(tmp_path), **{wrong: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'$"):
        HotSPaTrainingArguments(zzz=1)
    with pytest.raises(
        HotspaConfigError, match="_Misspelt has hotspa_strategy='dp1:64'.*did you mean hotspa_strategies"
    ):
        _Misspelt(output_dir=str(tmp_path), use_cpu=True)
    for args in (make_arguments(tmp_path), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")):
        args.hotspa_startegies, args.strategy = "dp1:64", "of the user"
        with pytest.raises(HotspaConfigError, match="hotspa_startegies='dp1:64'.*did you mean hotspa_strategies"):
            HotSPaTrainer(tiny_model("llama_gqa_bias"), args, train_dataset=PAIR)
    assert (
        _Derived(output_dir=str(tmp_path), use_cpu=True, hotspa_strategies="dp1:64", temperature=1.0).temperature == 1.0
    )


def test_recomputing_more_than_there_are_layers(tmp_path):
    with pytest.raises(StrategyError, match=r"\+rc9 is more than the 4 layers"):
        make_trainer(tmp_path, hotspa_strategies="dp1+rc9:64@128").train()
    if RECOMPUTE == "activation_checkpointing":  # of the stock Trainer, which recomputes the first layer then
        trainer = make_trainer(tmp_path, **{RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"every_n_layers": 9}})
        trainer.train()
        assert trainer.engine.buckets[0].strategy.rc == 4


def test_rows_of_a_step(tmp_path):
    args = make_arguments(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert (args.hotspa_mini_batch_size, args.hotspa_rows_a_step, args.gradient_accumulation_steps) == (None, 15, 5)
    kwargs = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    for given in (kwargs, AcceleratorConfig(**kwargs)):
        args = make_arguments(tmp_path, per_device_train_batch_size=3, accelerator_config=given)
        assert (args.hotspa_mini_batch_size, args.hotspa_rows_a_step, args.gradient_accumulation_steps) == (None, 12, 4)
    assert given.gradient_accumulation_kwargs == {"num_steps": 4}
    with pytest.raises(HotspaConfigError, match=r"The `AcceleratorConfig`'s `num_steps` is set but gradient"):
        make_arguments(tmp_path, gradient_accumulation_steps=2, accelerator_config=kwargs)
    args = make_arguments(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=5, hotspa_mini_batch_size=7
    )
    # 7 rows in 5 batches: of the numbers that stand in plans and logs none is less than what is trained
    assert (args.hotspa_mini_batch_size, args.hotspa_rows_a_step, args.per_device_train_batch_size) == (7, 7, 2)


def test_overlap_flags_reach_the_engine(tmp_path):
    found = []
    for load, return_gradients in (("auto", "auto"), ("on", "off"), ("off", "on")):
        trainer = make_trainer(tmp_path, hotspa_overlap_load=load, hotspa_overlap_return=return_gradients)
        trainer.train()
        overlap = trainer.engine.options.overlap(trainer.engine.device)
        found.append((overlap.load, overlap.return_gradients))
        found.append(trainer.last_report.loss)
    assert found[::2] == [(False, False), (True, False), (False, True)]  # auto is off on CPU
    assert found[1] == found[3] == found[5]


def test_what_is_no_arguments_is_refused(tmp_path):
    with pytest.raises(HotspaConfigError, match="HotSPaTrainingArguments"):
        HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args={"output_dir": str(tmp_path)})


@dataclass
class _OwnArguments(TrainingArguments):
    """Arguments as scripts subclass them."""

    temperature: float = field(default=0.5)

    @property
    def doubled(self):
        return 2 * self.temperature


def test_what_asks_for_nothing_is_accepted_with_a_line(tmp_path, caplog):
    given = {
        "bf16_full_eval": True, "auto_find_batch_size": True, "enable_jit_checkpoint": True,
        "ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 25, "ddp_broadcast_buffers": True,
        "ddp_static_graph": True,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if hasattr(TrainingArguments, name)}
    args = make_arguments(tmp_path, **given)
    # transformers would start training again where memory ran out, and evaluate another model
    assert (args.auto_find_batch_size, args.bf16_full_eval) == (False, False)
    for name, value in given.items():
        assert sum(f"{name}={value}:" in line for line in caplog.messages) == 1
    caplog.clear()
    make_arguments(tmp_path)
    assert not [line for line in caplog.messages if any(name in line for name in given)]


def test_arguments_of_transformers_are_completed(tmp_path, monkeypatch):
    given = _OwnArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", temperature=0.7, max_steps=2)
    trainer = HotSPaTrainer(tiny_model("llama_gqa_bias"), given)
    args = trainer.args
    assert isinstance(args, HotSPaTrainingArguments)
    assert isinstance(args, _OwnArguments)
    assert (args.doubled, args.hotspa_auto, args.place_model_on_device) == (1.4, True, False)
    assert (args.hotspa_mini_batch_size, args.hotspa_rows_a_step) == (None, 8)
    assert args.to_dict()["temperature"] == 0.7
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):  # training_args.bin is a pickle
        assert type(again) is type(args)
        assert (again.doubled, again.hotspa_auto, again.output_dir) == (1.4, True, args.output_dir)
    given.max_steps = 5  # as with the stock Trainer, which holds the same object
    assert args.max_steps == 5
    half = completed(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fp16=True))
    assert "fp16=True" in str(half.stock_reason)  # left to the stock Trainer
    monkeypatch.chdir(tmp_path)
    assert HotSPaTrainer(tiny_model("llama_gqa_bias")).args.output_dir == "tmp_trainer"


SFT = {
    "max_length": (int, 1024), "packing": (bool, False), "loss_type": (str, "nll"), "completion_only_loss": (object, None),
    "assistant_only_loss": (bool, False), "padding_free": (bool, False), "dataset_num_proc": (object, None), "own_thing": (float, 0.0),
}  # fmt: skip
PAIR = [{"prompt": "2+2=", "completion": " four"}] * 3
CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}] * 3


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed, with a trainer and arguments of its own; and one without a trainer."""
    lines = ["from dataclasses import dataclass", "from transformers import Trainer, TrainingArguments"]
    for name in ("NotedArguments", "OtherConfig"):
        own = [f"    {field}: {kind.__name__} = {value!r}" for field, (kind, value) in SFT.items()]
        lines += ["@dataclass", f"class {name}(TrainingArguments):", *own]
    lines += ["class OtherTrainer(Trainer): pass"]
    folder = tmp_path / "site-packages" / "otherlibrary"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder.parent)
    yield importlib.import_module("otherlibrary")
    del sys.modules["otherlibrary"]


def made(kind, folder, rows=(), trainer=HotSPaTrainer, **fields):
    fields = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 1,
        "save_strategy": "no",
        **fields,
    }
    tokenizer = byte_tokenizer(PLAIN)
    tokenizer.pad_token = "<eos>"
    model = tiny_model("llama_gqa_bias", vocab_size=400)
    given = kind(output_dir=str(folder), **fields)
    given.hotspa_strategies, given.hotspa_report = "dp1:256", False
    return trainer(model, given, train_dataset=rows or PAIR, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("rows", "fields", "refused"),
    [
        (PAIR, {}, ""),
        (PAIR, {"max_length": None, "padding_free": True, "dataset_num_proc": 4, "completion_only_loss": True}, ""),
        (PAIR, {"loss_type": "dft"}, r"OtherConfig has loss_type='dft'.*switched.*token_loss"),
        (PAIR, {"packing": True, "own_thing": 0.5}, r"packing=True, own_thing=0.5.*HotSPaTrainingArguments"),
        (PAIR, {"completion_only_loss": False}, "completion_only_loss=False"),
        ([{"text": "a"}] * 3, {"completion_only_loss": False}, ""),
        (CHAT, {}, "assistant_only_loss=False"),
        (CHAT, {"assistant_only_loss": True}, ""),
        (PAIR, {"max_length": 9}, r"max_length=9 .*row 0 has 10 tokens.*hotspa_overlong='truncate'"),
        (PAIR, {"max_length": 10}, ""),
        (datasets.Dataset.from_list(PAIR).to_iterable_dataset(), {}, "max_length=1024 .*not known"),
        (datasets.Dataset.from_list(PAIR).to_iterable_dataset(), {"max_length": None}, ""),
    ],
)  # fmt: skip
def test_fields_of_the_arguments_of_another_trainer(tmp_path, library, rows, fields, refused):
    if refused:
        with pytest.raises(HotspaConfigError, match=refused):
            made(library.OtherConfig, tmp_path, rows, **fields).train()
    else:
        made(library.OtherConfig, tmp_path, rows, **fields).train()


def test_whose_fields_are_whose(tmp_path, library):
    asks = {"loss_type": "dft", "packing": True, "own_thing": 0.5, "max_length": 3}
    made(library.NotedArguments, tmp_path, **asks).train()  # comes with no trainer: callbacks read it, or nobody

    @dataclass
    class Own(library.OtherConfig):
        packing: bool = True
        shown: float = 0.7

    with pytest.raises(HotspaConfigError, match="Own has packing=True [|]"):
        made(Own, tmp_path)
    Own.__module__ = library.OtherConfig.__module__ = "nowhere.config"  # of a library that is not there any more
    with pytest.raises(HotspaConfigError, match="Own has packing=True, shown=0.7"):
        made(Own, tmp_path)
    library.OtherConfig.__module__ = "otherlibrary"
    made(library.OtherConfig, tmp_path, trainer=switched(library.OtherTrainer), own_thing=0.5)  # reads its own


HONOURED = {o.value for o in ELEMENTWISE_OPTIMIZERS} | LOW_BIT_STATES.keys()


@pytest.mark.parametrize("optim", sorted({o.value for o in OptimizerNames} - HONOURED))
def test_every_other_optimizer_is_refused_with_its_reason(tmp_path, optim):
    with pytest.raises(HotspaConfigError) as caught:
        make_arguments(tmp_path, optim=optim)
    reason = next(
        (reason for part, reason in REASONS.items() if part in optim),
        "another package or device, and nobody has tested it",
    )
    assert reason in str(caught.value)
    assert repr(optim) in str(caught.value)


REASONS = {
    "galore": "whole matrices",
    "apollo": "whole matrices",
    "adafactor": "whole matrices",
    "lomo": "whole matrices",
    "stable": "whole matrices",
    "grok": "whole matrices",
    "schedule_free": "separate weights",
}


def test_classes_of_optimizers_that_need_no_more_than_elements_are_accepted(tmp_path):
    for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"):
        make_trainer(tmp_path, optimizer_cls_and_kwargs=(getattr(torch.optim, name), {"lr": 1e-3}))
    for name in ("Adafactor", "Muon", "LBFGS"):
        with pytest.raises(HotspaConfigError, match=name):
            make_trainer(tmp_path, optimizer_cls_and_kwargs=(getattr(torch.optim, name), {}))


def test_a_model_changed_after_it_was_built_is_refused(tmp_path):
    model = tiny_model("llama_gqa_bias")
    model.model.layers[0].register_forward_hook(lambda *a: None)
    with pytest.raises(HotspaConfigError, match="forward hooks"):
        make_trainer(tmp_path, model=model).train()
    model = tiny_model("llama_gqa_bias")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 60)
    with pytest.raises(HotspaConfigError, match=r"layers.0.mlp.up_proj.bias.*2 differ"):
        make_trainer(tmp_path, model=model).train()


def test_resized_embeddings_are_carried_over(tmp_path):
    model = tiny_model("llama_gqa_bias")
    model.resize_token_embeddings(170)  # transformers writes the new size into the config
    trainer = make_trainer(tmp_path, model=model)
    trainer.train()
    assert trainer.model.get_input_embeddings().weight.shape[0] == 170


def test_policies_are_counted_in_the_log(tmp_path):
    rows = [{"input_ids": [5] * 65}, {"input_ids": [6] * 130}, {"input_ids": [7] * 10}]
    for policy, counts in (
        ("truncate", {"hotspa/truncated": 2.0}),
        ("split", {"hotspa/split": 2.0}),
        ("drop", {"hotspa/dropped": 2.0}),
    ):
        trainer = make_trainer(
            tmp_path, rows=rows, hotspa_overlong=policy, hotspa_mini_batch_size=3, max_steps=1, logging_steps=1
        )
        trainer.train()
        [log] = [log for log in trainer.state.log_history if "loss" in log]
        assert {k: v for k, v in log.items() if k.split("/")[-1] in ("truncated", "split", "dropped")} == counts
    with pytest.raises(OverlongError, match="dataset row 1"):
        make_trainer(tmp_path, rows=rows).train()
    rows[1]["input_ids"], rows[0] = [6] * 30, {"input_ids": None}
    for strategies in ("dp1:64@128", "auto"):
        trainer = make_trainer(
            tmp_path, rows=rows, hotspa_empty_rows="skip", hotspa_mini_batch_size=3, max_steps=1, logging_steps=1,
            hotspa_strategies=strategies,
        )  # fmt: skip
        trainer.train()
        [log] = [log for log in trainer.state.log_history if "loss" in log]
        assert (log["hotspa/empty"], trainer.last_report.num_rows) == (1.0, 2)


SUPPORTED: list[dict[str, object]] = [
    {},
    {"average_tokens_across_devices": False},
    {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
    {"train_sampling_strategy": "group_by_length"},
    {"dataloader_in_order": False, "dataloader_num_workers": 1},
    {"label_names": ["labels", "targets"]},
    {"accelerator_config": {"use_seedable_sampler": False}},
    {"accelerator_config": {"split_batches": True}},
    {"accelerator_config": {"dispatch_batches": True}},
    {"eval_use_gather_object": True, "eval_strategy": "steps", "eval_steps": 2},
    # near a gradient of 0 RMSprop makes steps of rounding, unless eps is larger
    *({"optim": optim.value, "optim_args": "eps=0.1" if "rms" in optim else None} for optim in ELEMENTWISE_OPTIMIZERS),
]
# an older release does not have every one of them
SUPPORTED = [options for options in SUPPORTED if options.keys() <= TrainingArguments.__dataclass_fields__.keys()]


@pytest.mark.parametrize("options", SUPPORTED, ids=lambda o: o.get("optim", "-".join(o)) or "plain")
def test_one_process_equals_the_stock_trainer(tmp_path, options):
    rows = [{"input_ids": (ids := [i * (s + 1) % 90 + 3 for i in range(40)]), "labels": ids} for s in range(12)]
    shared = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "per_device_train_batch_size": 4, "seed": 3}
    shared |= {"save_strategy": "no", "disable_tqdm": True, "per_device_eval_batch_size": 5, **options}
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    found = []
    for cls, args in (
        (HotSPaTrainer, make_arguments(tmp_path, **shared)),
        (Trainer, TrainingArguments(**common, **shared)),
    ):
        model = tiny_model("llama_gqa_bias", torch.float64)
        trainer = cls(model=model, args=args, train_dataset=rows, eval_dataset=rows[:7])
        trainer.train()
        found.append((model, [log for log in trainer.state.log_history if "loss" in log or "eval_loss" in log]))
    (hot, logs), (stock, stock_logs) = found
    assert len(logs) == len(stock_logs) >= 4
    for ours, theirs in zip(logs, stock_logs, strict=True):
        names = {"loss", "eval_loss", "grad_norm", "learning_rate", "epoch"} & theirs.keys()
        assert names == {"loss", "eval_loss", "grad_norm", "learning_rate", "epoch"} & ours.keys()
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    for a, b in zip(hot.parameters(), stock.parameters(), strict=True):
        assert relative_error(a.detach(), b.detach()) <= 1e-5


def test_training_again_continues_from_the_trained_weights(tmp_path):
    trainer = make_trainer(tmp_path, learning_rate=1e-2)
    trainer.train()
    first = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(first, trainer.model.parameters(), strict=True))
    engine = trainer.engine
    trainer.train()
    assert trainer.engine is engine
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()  # weights given from outside count
    trainer.train()
    assert trainer.engine is engine
    assert 0 < trainer.model.lm_head.weight.abs().max() < 0.1
    trainer.close_engine()
    assert trainer.engine is None
    trainer.train()  # a new engine from the model
    assert trainer.state.global_step == 2


def test_arguments_by_place_are_those_of_the_stock_trainer():
    assert named(("collator", "rows"), {"callbacks": []}, Trainer.__init__) == {
        "data_collator": "collator", "train_dataset": "rows", "callbacks": [],
    }  # fmt: skip
    with pytest.raises(TypeError, match="multiple values for argument 'data_collator'"):
        named(("collator",), {"data_collator": "another"}, Trainer.__init__)
    with pytest.raises(TypeError, match="by place"):
        named((None,) * 30, {}, Trainer.__init__)
