"""TRL's SFT, DPO and KTO trainers over a switched model against TRL's own under DDP on as many ranks, in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from hf_hotspa.strategy import parse_buckets
from tests.families import MIXTURE
from tests.moves import on
from tests.trl_runs import (
    EVALUATES,
    RL,
    Case,
    check_resumed,
    compare,
    worlds,
)

pytestmark = pytest.mark.gloo

SIX = (
    "dp2:12@64,tp2+sp:16@64,cp2+rc:20@64,pp2:24@64,dp2+z2:28@64,tp2+ck9:128@128",
    "dp4+rc:12@64,dp2tp2+sp:16@64,cp2dp2:20@64,tp2pp2:24@64,dp4+z3:28@64,dp2pp2+v2:128@128",
)
TWO = ("dp2:20@64,tp2:128@128", "dp4:20@64,cp2tp2:128@128")
OTHER = ("dp2+z3:20@64,pp2:128@128", "dp2pp2:20@64,tp4+ck9:128@128")
FREE = {"max_length": None}
MOE = ("dp2ep2:20@64,tp2:128@128", "dp4ep2:20@64,dp2tp2ep2:128@128")

CASES = {
    "sft": Case("SFT", SIX, "completions", {**FREE, **EVALUATES, "gradient_accumulation_steps": 2}),
    "dpo": Case(
        "DPO", TWO, "pairs", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.3, 1.0], **EVALUATES},
        reference=True,
    ),
    "kto": Case("KTO", SIX, "judged", {"precompute_ref_log_probs": True, **EVALUATES}, wide=True),
    "reward": Case("Reward", OTHER, "margins", {"center_rewards_coefficient": 0.05, "gradient_accumulation_steps": 2, **EVALUATES}),
    "reward with adapters": Case("Reward", SIX, "pairs", {"center_rewards_coefficient": 0.05}, lora=True, wide=True),
    "reward of experts": Case("Reward", MOE, "pairs", EVALUATES, family=MIXTURE, wide=True),
    "orpo": Case("ORPO", TWO, "pairs", {"max_length": 128, "beta": 0.2, "gradient_accumulation_steps": 2, **EVALUATES}, wide=True),
    "orpo with adapters": Case("ORPO", OTHER, "pairs", {"max_length": 128}, lora=True, wide=True),
    "cpo": Case("CPO", OTHER, "pairs", {"max_length": 128, "label_smoothing": 0.1, **EVALUATES}, wide=True),
    "simpo": Case("CPO", TWO, "pairs", {"max_length": 128, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7}, wide=True),
    "tpo": Case("TPO", TWO, "triples", {"beta": 0.2, "tpo_alpha": 0.7, **EVALUATES}, wide=True),
    "dpo with adapters": Case("DPO", TWO, "pairs", {"gradient_accumulation_steps": 2}, lora=True, wide=True),
    "sft, dft of what the assistant says": Case(
        "SFT", TWO, "chats", {**FREE, "assistant_only_loss": True, "loss_type": "dft", **EVALUATES}, wide=True
    ),
    "sft packed, bfd": Case(
        "SFT", OTHER, "completions", {"packing": True, "per_device_train_batch_size": 2, "max_steps": 3, "max_length": 60}, wide=True
    ),
    **{
        f"{kind} with noise": Case(kind.upper(), TWO, data, {"neftune_noise_alpha": 5.0, **EVALUATES}, reference=kind == "dpo", wide=True)
        for kind, data in [("sft", "completions"), ("dpo", "pairs")]
    },
    "sft of experts": Case(
        "SFT", MOE, "completions", {**FREE, "router_aux_loss_coef": 0.3, "gradient_accumulation_steps": 2}, family=MIXTURE, wide=True
    ),
    "dpo of experts": Case("DPO", MOE, "pairs", {"router_aux_loss_coef": 0.3}, family=MIXTURE, reference=True, wide=True),
    "sft of an adapter": Case("SFT", OTHER, "completions", {**FREE, **EVALUATES}, lora="default", wide=True),
    "dpo of an adapter": Case("DPO", SIX, "pairs", EVALUATES, lora="default", wide=True),
    "dpo of an adapter, precomputed": Case("DPO", TWO, "pairs", {"precompute_ref_log_probs": True}, lora="default", wide=True),
    "kto of an adapter": Case("KTO", TWO, "judged", lora="default", wide=True),
    "dpo of an adapter, 4-bit": Case("DPO", TWO, "pairs", lora="default", four_bit=True, dtype=torch.float32, wide=True),
    **{
        f"{kind}, fp32": Case(kind.upper(), TWO, data, FREE if kind == "sft" else {}, reference=kind != "sft", dtype=torch.float32,
                              wide=True)
        for kind, data in [("sft", "completions"), ("dpo", "pairs"), ("kto", "judged")]
    },
}  # fmt: skip
CASES |= {f"{name} of six kinds": replace(CASES[name], pools=SIX, wide=True) for name in ("dpo", "reward")}


def test_every_trainer_is_run_by_six_kinds_of_strategies():
    for kind in ("SFT", "DPO", "KTO", "Reward"):
        for world in range(2):
            mixes = [parse_buckets(case.pools[world]) for case in CASES.values() if case.kind == kind]
            assert max(len({str(bucket.strategy) for bucket in mix}) for mix in mixes) >= 6


@pytest.mark.parametrize(("world_size", "names"), worlds(CASES))
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, world_size=world_size)


CHOSEN = {
    name: replace(CASES[name], pools=("auto", "auto"), fields={**CASES[name].fields, "max_steps": steps})
    for name, steps in [("sft", 5), ("dpo", 30), ("kto", 5), ("dpo with adapters", 5), ("sft packed, bfd", 3)]
}
"""With strategies that the run chooses; the longest one tries its nearest plans on its mini-batches."""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_it_is_trl_with_strategies_that_are_chosen(world_size, tmp_path):
    compare(__name__, tmp_path, list(CHOSEN), "CHOSEN", world_size)


def with_zero_term(cls: Any) -> Any:
    """As scripts for DDP add it, so that all parameters have a gradient."""

    class WithTerm(cls):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["return_outputs"] = False
            return super().compute_loss(model, *args, **kwargs) + 0.0 * sum(p.sum() for p in model.parameters())

    WithTerm.__name__ = cls.__name__
    return WithTerm


def shrink(state: Any, model: Any, **_: Any) -> None:
    """Changes weights after the optimizer's step."""
    if state.global_step == 1:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)


def synced(cls: Any) -> Any:
    """With the callbacks of TRL that read weights, given by the user."""
    from trl.trainer.callbacks import BEMACallback, SyncRefModelCallback

    class Synced(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))
            self.bema: Any = BEMACallback(update_freq=2)
            self.add_callback(self.bema)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            out = super().train(*args, **kwargs)
            norms = [float(p.double().norm()) for p in self.bema.running_model.parameters()]
            self.state.log_history.append({"bema": sum(norms)})
            return out

    Synced.__name__ = cls.__name__
    return Synced


DROPPING = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights=False, task_type="CAUSAL_LM")
CALLED = {
    "callbacks that read and change weights, a zero term": Case(
        "DPO", TWO, "pairs", {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "gradient_accumulation_steps": 2, "max_steps": 3},
        reference=True, change=lambda cls: synced(with_zero_term(cls)), given=lambda: {"callbacks": [on(on_optimizer_step=shrink)]},
        dtype=torch.float32,
    ),
    "dropout that TRL switches off": Case(
        "KTO", TWO, "judged", {"max_steps": 3}, given=lambda: {"peft_config": DROPPING}, dtype=torch.float32, wide=True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "names"), worlds(CALLED, together=True)[:2])
def test_callbacks_and_changes_of_trl_s_own_are_honoured(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, "CALLED", world_size)


class Drawn(torch.utils.data.Sampler[int]):
    """A sampler that draws some rows more than once, and others never."""

    def __iter__(self) -> Any:
        return iter([i * 7 % 30 for i in range(50)])

    def __len__(self) -> int:
        return 50


def with_sampler(cls: Any) -> Any:
    return type(
        cls.__name__, (cls,), {"_get_train_sampler": lambda self, dataset=None: Drawn(), "__module__": __name__}
    )


ADAPTED = {"lora": True, "dtype": torch.float32, "begun": 2}
TAKEN_OVER = {
    "an adapter of another name, own sampler": Case(
        "SFT", TWO, "completions", {**FREE, "max_steps": 3}, **{**ADAPTED, "lora": "mine"}, change=with_sampler
    ),
    "grpo": Case(
        "GRPO", TWO, "prompts", {**RL, "num_iterations": 2, "max_steps": 4}, dtype=torch.float32, begun=3
    ),
    "the model only": Case("SFT", TWO, "completions", {**FREE, "save_only_model": True}, **ADAPTED, wide=True),
    "dpo": Case("DPO", TWO, "pairs", {"gradient_accumulation_steps": 2}, **ADAPTED, wide=True),
    "kto": Case("KTO", TWO, "judged", **ADAPTED, wide=True),
    "dpo of an adapter": Case("DPO", TWO, "pairs", **{**ADAPTED, "lora": "default"}, wide=True),
    "rloo of an adapter": Case("RLOO", TWO, "prompts", RL, **{**ADAPTED, "lora": "default"}, wide=True),
    "rloo": Case("RLOO", TWO, "prompts", RL, **ADAPTED, wide=True),
    "grpo, the model only": Case(
        "GRPO", TWO, "prompts", {**RL, "save_only_model": True}, dtype=torch.float32, begun=2, wide=True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "names"), worlds(TAKEN_OVER, together=True)[:2])
def test_a_run_that_trl_began_is_taken_over(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, "TAKEN_OVER", world_size)


RESUMED = {
    "sft": Case(
        "SFT", TWO, "chats", {**FREE, "assistant_only_loss": True, "loss_type": "dft", "gradient_accumulation_steps": 2},
        dtype=torch.float32,
    ),
    "dpo": Case("DPO", TWO, "pairs", lora=True, dtype=torch.float32),
    "dpo of an adapter": Case("DPO", TWO, "pairs", lora="default", dtype=torch.float32),
    "kto": Case("KTO", TWO, "judged", {"precompute_ref_log_probs": True}, dtype=torch.float32),
    "reward": Case("Reward", TWO, "pairs", lora=True, dtype=torch.float32),
}  # fmt: skip


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_in_another_layout_from_the_same_bits(tmp_path):
    check_resumed(__name__, tmp_path, TWO[0], OTHER[0])
