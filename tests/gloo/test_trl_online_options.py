"""Options of TRL's GRPO and RLOO trainers crossed at random: equal to TRL's own under DDP, or refused by name."""

from typing import Any

import pytest

from tests.families import MIXTURE
from tests.gloo.test_trl_options import OF_EXPERTS, POOLS, Draw
from tests.trl_runs import DENSE, EVALUATES, RL, Case, brevity, compare, reward

pytestmark = pytest.mark.gloo

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def common(draw: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = {
        **RL,
        "gradient_accumulation_steps": draw.choice([1, 1, 2]),
        "steps_per_generation": draw.choice([None, 1, 2, 4]),
        "num_iterations": draw.choice([1, 1, 2]),
        "num_generations": draw.choice([2, 4]),
        "beta": draw.choice([0.0, 0.04, 0.3]),
        "temperature": draw.choice([1.0, 0.7]),
        "epsilon": draw.choice([0.01, 0.2]),
        "mask_truncated_completions": draw.maybe(0.3),
        "max_grad_norm": draw.choice([0.0, 0.5]),
        "optim": draw.choice(["adamw_torch", "sgd"]),
        "gradient_checkpointing": draw.maybe(0.3),
        "shuffle_dataset": draw.maybe(0.7),
        "disable_dropout": draw.maybe(0.3),
        "pad_to_multiple_of": draw.choice([None, None, 8]),
        "max_steps": 3,
    }
    if draw.maybe(0.4):
        fields |= EVALUATES | {"eval_steps": 2}
    return fields


def grpo(draw: Draw) -> dict[str, Any]:
    fields: dict[str, Any] = common(draw) | {
        "loss_type": draw.choice(LOSSES),
        "importance_sampling_level": draw.choice(["token", "token", "sequence"]),
        "scale_rewards": draw.choice(["group", "batch", "none"]),
        "use_bias_correction_kl": draw.maybe(0.3),
        "top_entropy_quantile": draw.choice([1.0, 1.0, 0.4]),
        "off_policy_mask_threshold": draw.choice([None, None, 0.01]),
        "delta": draw.choice([None, None, 1.5]),
    }
    if fields["loss_type"] == "cispo":
        fields["epsilon_high"] = 5.0
    how = draw.choice(["", "", "bonus", "adaptive"])
    if how == "bonus":
        fields["entropy_coef"] = 0.02
    elif how == "adaptive":
        fields["use_adaptive_entropy"] = True
    return fields


def rloo(draw: Draw) -> dict[str, Any]:
    return common(draw) | {
        "normalize_advantages": draw.maybe(0.4),
        "reward_clip_range": draw.choice([None, (-0.5, 0.6)]),
    }


def drawn(seed: int) -> Case:
    draw = Draw(1000 + seed)
    kind, make = [("GRPO", grpo), ("GRPO", grpo), ("RLOO", rloo)][seed % 3]
    fields = make(draw)
    if fields["num_generations"] == 2 and "eval_strategy" in fields:
        fields["num_generations_eval"] = 2
    family = draw.choice([DENSE, DENSE, DENSE, "qwen3_qk_norm_tied", "gemma2_soft_caps", MIXTURE])
    lora = family != MIXTURE and draw.maybe(0.3)
    if family == MIXTURE:
        fields["router_aux_loss_coef"] = draw.choice([0.001, 0.0, 0.3])
        fields["beta"] = 0.0  # experts of a reference that TRL loads itself run by an operation that has no fp64
    reference = fields["beta"] != 0.0 and not lora  # TRL loads it by the name of the model, which has none here
    if reference and draw.maybe(0.3):
        fields |= {"sync_ref_model": True, "ref_model_sync_steps": draw.choice([1, 2]), "ref_model_mixup_alpha": 0.4}
    pools = OF_EXPERTS if family == MIXTURE else draw.choice(POOLS)
    both_rewards = {"reward_funcs": [reward, brevity]} if draw.maybe(0.4) else {}
    return Case(kind, pools, "prompts", fields, lora, reference, family, lambda: dict(both_rewards))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_what_is_drawn_is_equal_or_refused(part, tmp_path):
    compare(__name__, tmp_path, range(10 * part, 10 * part + 10), "drawn")
