"""TRL's GRPO and RLOO trainers over a switched model against TRL's own under DDP on as many ranks, in fp64."""

import pytest
import torch

from tests.families import MIXTURE
from tests.trl_runs import (
    EVALUATES,
    RL,
    Case,
    Room,
    brevity,
    calling,
    check_resumed,
    compare,
    look,
    reward,
    rollout,
    worlds,
)

pytestmark = pytest.mark.gloo

SIX = (
    "dp2:16@64,tp2+sp:20@64,cp2+rc:24@64,pp2:28@64,dp2+z2:32@64,tp2+ck9:128@128",
    "dp4+rc:16@64,dp2tp2+sp:20@64,cp2dp2:24@64,tp2pp2:28@64,dp4+z3:32@64,dp2pp2+v2:128@128",
)
TWO = ("dp2:20@64,tp2:128@128", "dp4:20@64,cp2tp2:128@128")
OTHER = ("dp2+z3:20@64,pp2:128@128", "dp2pp2:20@64,tp4+ck9:128@128")
MOE = ("dp2ep2:20@64,tp2:128@128", "dp4ep2:20@64,dp2tp2ep2:128@128")

GREEDY = {"top_k": 1, "max_completion_length": 6}  # sampling may flip a token on the last bit

TURNS = {"max_tool_calling_iterations": 3, "max_completion_length": 48}

CASES = {
    "grpo": Case("GRPO", SIX, "prompts", {**RL, "gradient_accumulation_steps": 2}, wide=True),
    "grpo, all terms": Case(
        "GRPO", TWO, "prompts",
        {**RL, "beta": 0.04, "num_iterations": 2, "steps_per_generation": 2, "entropy_coef": 0.01, "loss_type": "grpo", **EVALUATES},
        reference=True, given=lambda: {"reward_funcs": [reward, brevity]}, wide=True,
    ),
    "rloo": Case("RLOO", SIX, "prompts", {**RL, "beta": 0.05, **EVALUATES}, reference=True, wide=True),
    "grpo, in short": Case(
        "GRPO", TWO, "prompts", {**RL, "beta": 0.04, "num_iterations": 2, "max_steps": 3}, reference=True
    ),
    "grpo with adapters": Case(
        "GRPO", TWO, "prompts", {**RL, "beta": 0.04, "num_iterations": 2, "use_bias_correction_kl": True}, lora=True, wide=True
    ),
    "grpo of an adapter": Case(
        "GRPO", TWO, "prompts", {**RL, "beta": 0.04, "num_iterations": 2, **EVALUATES}, lora="default", wide=True
    ),
    "rloo of an adapter": Case("RLOO", OTHER, "prompts", {**RL, "beta": 0.05, "max_steps": 2}, lora="default"),
    "grpo of experts": Case("GRPO", MOE, "prompts", {**RL, "num_iterations": 2, **EVALUATES}, family=MIXTURE, wide=True),
    "grpo, masks": Case(
        "GRPO", OTHER, "prompts",
        {**RL, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.1, "num_iterations": 2, "loss_type": "bnpo",
         "mask_truncated_completions": True, "delta": 1.5}, wide=True,
    ),
    "grpo, sequences": Case(
        "GRPO", TWO, "prompts",
        {**RL, "importance_sampling_level": "sequence", "loss_type": "luspo", "steps_per_generation": 4,
         "gradient_accumulation_steps": 2, "scale_rewards": "batch"}, wide=True,
    ),
    "grpo, adaptive entropy": Case(
        "GRPO", OTHER, "prompts", {**RL, "use_adaptive_entropy": True, "loss_type": "cispo", "epsilon_high": 5.0}, wide=True
    ),
    "gmpo": Case("GMPO", TWO, "prompts", {**RL, "num_iterations": 2, "beta": 0.04}, reference=True, wide=True),
    "gmpo, at once": Case("GMPO", OTHER, "prompts", {**RL, **EVALUATES}, lora=True, wide=True),
    "grpo with tools": Case(
        "GRPO", TWO, "questions", {**RL, **TURNS}, given=lambda: {"tools": [look], "processing_class": calling()}, wide=True
    ),
    "grpo with environments": Case(
        "GRPO", OTHER, "questions", {**RL, **TURNS, "num_iterations": 2},
        given=lambda: {"environment_factory": Room, "processing_class": calling()}, wide=True,
    ),
    "grpo with rollout_func": Case(
        "GRPO", TWO, "prompts", {**RL, "beta": 0.04}, reference=True, given=lambda: {"rollout_func": rollout}, wide=True
    ),
    "grpo that generates": Case("GRPO", TWO, "prompts", {**RL, **GREEDY, **EVALUATES}, generates=True, wide=True),
    "rloo that generates": Case("RLOO", TWO, "prompts", {**RL, **GREEDY, "beta": 0.0}, generates=True, wide=True),
    **{
        f"{kind}, fp32": Case(kind.upper(), TWO, "prompts", {**RL, "beta": 0.05}, reference=True, dtype=torch.float32, wide=True)
        for kind in ("grpo", "rloo")
    },
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "names"), worlds(CASES, together=True))
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, world_size=world_size)


RESUMED = {
    "grpo": Case(
        "GRPO", TWO, "prompts",
        {**RL, "num_iterations": 3, "beta": 0.04, "use_adaptive_entropy": True, "gradient_accumulation_steps": 2},
        reference=True, dtype=torch.float32,
    ),
    "rloo": Case("RLOO", TWO, "prompts", {**RL, "beta": 0.0, "steps_per_generation": 4}, lora=True, dtype=torch.float32),
}  # fmt: skip
"""Both are saved while a generation batch is trained."""


@pytest.mark.slow
def test_a_run_resumes_inside_a_generation_batch_bit_for_bit(tmp_path):
    check_resumed(__name__, tmp_path, TWO[0], OTHER[0])
