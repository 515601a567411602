"""TRL's GRPO and RLOO trainers over a switched model against TRL's own under DDP on as many ranks, in fp64."""

from typing import Any

import pytest
import torch

from tests.families import MIXTURE
from tests.harness import run_ranks
from tests.trl_runs import EVALUATES, RL, Case, both_sides, brevity, reward, wrong_ones

pytestmark = pytest.mark.gloo

SIX = (
    "dp2:16@64,tp2+sp:20@64,cp2+rc:24@64,pp2:28@64,dp2+z2:32@64,tp2+ck9:128@128",
    "dp4+rc:16@64,dp2tp2+sp:20@64,cp2dp2:24@64,tp2pp2:28@64,dp4+z3:32@64,dp2pp2+v2:128@128",
)
TWO = ("dp2:20@64,tp2:128@128", "dp4:20@64,cp2tp2:128@128")
OTHER = ("dp2+z3:20@64,pp2:128@128", "dp2pp2:20@64,tp4+ck9:128@128")
MOE = ("dp2ep2:20@64,tp2:128@128", "dp4ep2:20@64,dp2tp2ep2:128@128")

CASES = {
    "grpo": Case("GRPO", SIX, "prompts", {**RL, "gradient_accumulation_steps": 2}),
    "grpo, all terms": Case(
        "GRPO", TWO, "prompts",
        {**RL, "beta": 0.04, "num_iterations": 2, "steps_per_generation": 2, "entropy_coef": 0.01, "loss_type": "grpo", **EVALUATES},
        reference=True, given=lambda: {"reward_funcs": [reward, brevity]},
    ),
    "rloo": Case("RLOO", SIX, "prompts", {**RL, "beta": 0.05, **EVALUATES}, reference=True),
}  # fmt: skip


def both(rank: int, world_size: int, names: list[str], folder: str) -> Any:
    return both_sides({name: CASES[name] for name in names}, world_size, folder)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, [name for name, case in CASES.items() if not case.wide]),
    ],
)
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    found = run_ranks(world_size, both, names, str(tmp_path), timeout=1500)
    wrong = wrong_ones(found, {name: CASES[name] for name in names})
    assert not wrong, "\n".join(wrong)
