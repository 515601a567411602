"""Every setting of the numeric and data kind: the same run as the stock Trainer's.

A case is a set of training arguments. All cases of a kind run one after the other in one world: a stock Trainer on one
process, `HotSPaTrainer` on one and on two ranks; then losses, learning rates and weights are compared.
"""

import math
from pathlib import Path

import pytest
import torch
from transformers import SchedulerType, TrainingArguments
from transformers import trainer as stock

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.given_arguments import recompute_argument
from tests.harness import run_ranks
from tests.moves import MINI_BATCH, ROWS, Kit
from tests.oracle import relative_error

pytestmark = pytest.mark.gloo

QUICK = ("data and logging", 1)
"""The kind, and the number of ranks, that are not slow."""
SCHEDULERS = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 2, "min_lr_ratio": 0.1},
    "polynomial": {"power": 2.0},
    "cosine_with_restarts": {"num_cycles": 2},
    "reduce_lr_on_plateau": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
    "greedy": {"patience": 0, "factor": 0.5},
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def scheduler_case(name):
    case = {"lr_scheduler_type": name, "warmup_steps": 2, "lr_scheduler_kwargs": SCHEDULERS.get(name)}
    if name in BY_METRIC:
        case |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": ROWS}
        case.pop("warmup_steps")
    return case


RECOMPUTE = recompute_argument(TrainingArguments)
NEWER = RECOMPUTE == "activation_checkpointing"  # an older transformers recomputes all layers or none
CASES = {
    "schedulers": {s.value: scheduler_case(s.value) for s in SchedulerType},
    "optimizers": {
        "adamw_torch": {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        "adamw_torch_fused": {"optim": "adamw_torch_fused", "weight_decay": 0.2},
        "sgd": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        "adagrad": {"optim": "adagrad"},
        "rmsprop": {"optim": "rmsprop", "optim_args": "momentum=0.5"},
        "nadam": {"cls": (torch.optim.NAdam, {"lr": 5e-3})},
        "adamax": {"cls": (torch.optim.Adamax, {"lr": 5e-3})},
        "warmup ratio": {"warmup_steps": 0.5},
        "no clipping": {"max_grad_norm": 0.0},
        "hard clipping": {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 0.5},
        "weight decay": {"weight_decay": 0.5, "optim": "sgd"},
        "label smoothing": {"label_smoothing_factor": 0.2},
        "label smoothing and evaluation": {
            "label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": ROWS,
        },
        "recomputation": {RECOMPUTE: True},
        **({"every second layer": {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"every_n_layers": 2}}} if NEWER else {}),
        "frozen": {"freeze": "model.layers.0."},
    },
    "data and logging": {
        "an epoch and a half of workers": {
            "max_steps": -1, "num_train_epochs": 1.5, "data_seed": 11, "logging_nan_inf_filter": False,
            "dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True,
        },
        "sequential epochs": {
            "max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": ROWS,
            "logging_strategy": "epoch", "train_sampling_strategy": "sequential",
        },
        "first step and evaluation with a delay": {
            "logging_first_step": True, "logging_steps": 3,
            "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3, "per_device_eval_batch_size": ROWS,
        },
        "drop last, no log": {
            "dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 1, "logging_strategy": "no",
            "full_determinism": True,
        },
    },
}  # fmt: skip


def runs(rank, world_size, kind, stock, folder):
    """What is seen of the run of each case."""
    kit, found = Kit(stock, world_size, Path(folder)), {}
    for name, case in CASES[kind].items():
        model, rows = kit.model(), kit.rows()
        for of_model, parameter in model.named_parameters():
            parameter.requires_grad_(not of_model.startswith(case.get("freeze", "none")))
        options = {key: value for key, value in case.items() if key not in ("cls", "freeze")}
        args = kit.arguments(**{"max_steps": 5, "hotspa_mini_batch_size": MINI_BATCH, **options})
        more = {"optimizer_cls_and_kwargs": case["cls"]} if "cls" in case else {}
        found[name] = kit.train(kit.trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, **more))
        kit.close()
    return found


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        *(pytest.param(kind, world, marks=pytest.mark.slow) for kind in CASES for world in (1, 2) if (kind, world) != QUICK),
        QUICK,
    ],
)  # fmt: skip
def test_a_setting_does_what_it_does_in_the_stock_trainer(kind, world_size, tmp_path):
    [stock] = run_ranks(1, runs, kind, True, str(tmp_path), timeout=240)
    per_rank = run_ranks(world_size, runs, kind, False, str(tmp_path), timeout=240)
    assert list(stock) == list(CASES[kind])
    for name, expected in stock.items():
        for rank, of_rank in enumerate(per_rank):
            place, found = f"{name}, rank {rank} of {world_size}", of_rank[name]
            assert len(found["logs"]) == len(expected["logs"]), place
            for log, of_stock in zip(found["logs"], expected["logs"], strict=True):
                assert log.keys() == of_stock.keys(), place
                assert log["step"] == of_stock["step"], place
                for key, value in of_stock.items():
                    tolerance = {"learning_rate": 0.0, "epoch": 0.0, "grad_norm": 1e-4}.get(key, 1e-5)
                    assert math.isclose(log[key], value, rel_tol=tolerance), f"{place}: {key} {log[key]}, not {value}"
            assert math.isclose(found["training loss"], expected["training loss"], rel_tol=1e-5), place
            assert relative_error(found["weights"], expected["weights"]) <= 2e-5, place


def bf16_run(rank, world_size, folder):
    losses = []
    for bf16 in (False, True):
        kit = Kit(False, world_size, Path(folder))
        args = kit.arguments(bf16=bf16, max_steps=3, eval_strategy="steps", eval_steps=3)
        trainer = kit.trainer(args=args, eval_dataset=kit.rows())
        logs = kit.train(trainer)["logs"]
        assert trainer.engine.description.compute_dtype == (torch.bfloat16 if bf16 else torch.float32)
        assert next(trainer.model.parameters()).dtype == torch.float32
        losses.append([log[key] for log in logs for key in ("loss", "eval_loss") if key in log])
        kit.close()
    return losses


def test_bf16_follows_fp32(tmp_path):
    for of_fp32, of_bf16 in run_ranks(2, bf16_run, str(tmp_path)):
        assert of_bf16 != of_fp32
        assert all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(of_bf16, of_fp32, strict=True))


def hub_run(rank, world_size, folder, fails):
    import types

    from tests.gloo.test_evaluate import hot_trainer

    pushed = []

    class Hub:
        def create_repo(self, name, **kwargs):
            assert rank == 0
            if fails:
                raise ConnectionError("no network here")
            return types.SimpleNamespace(repo_id=f"me/{name}")

    stock.hf_api = Hub
    Hub.upload_folder = lambda self, **kwargs: pushed.append((kwargs["repo_id"], kwargs["commit_message"]))
    try:
        trainer = hot_trainer(
            folder, "dp2:16@32,tp2:60@64", push_to_hub=True, hub_strategy="end", eval_strategy="no", eval_on_start=False
        )
    except HotspaError as error:
        return str(error)
    trainer.create_model_card = lambda **kwargs: None
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub(commit_message="by hand")
    trainer.close_engine()
    return pushed


def test_pushing_to_the_hub_goes_through_one_rank(tmp_path):
    first, second = run_ranks(2, hub_run, str(tmp_path / "model"), False)
    assert [message for _, message in first] == ["Model save", "by hand"]
    assert {repo for repo, _ in first} == {"me/model"}
    assert second == []
    for message in run_ranks(2, hub_run, str(tmp_path / "model"), True):
        assert "no network here" in message
        assert "rank 0" in message
