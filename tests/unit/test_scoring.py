"""What a step costs that scores its rows, and a reference: forwards in seconds, a second set of weights in memory."""

from dataclasses import replace

import pytest

from hf_hotspa.costs.terms import TASKS, Scoring
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy


def setup(task: str = "sft", **more: object) -> Setup:
    return Setup.read("llama2-7b", "1x8", "a100-80g", task=task, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "units"),
    [
        ("sft", 3),
        ("dpo-precomputed", 4),
        ("dpo", 5),
        ("grpo", 3),
        ("grpo-kl", 5),
        ("rloo", 6),
        ("classify", 4),
        ("reward", 4),
    ],
)
@pytest.mark.parametrize("strategy", ["dp8", "dp2tp4+rc", "tp2pp4", "cp2dp4+rc2"])
def test_a_step_is_so_many_forwards(task: str, units: int, strategy: str) -> None:
    asked = Strategy.parse(strategy)
    again = 1 / asked.rc if asked.rc else 0.0
    packs = [[[512, 256]] * 4] * asked.dp
    bare, scored = (setup(t).cost.time for t in ("sft", task))
    layers = replace(bare, heads={}, embeddings={}), replace(scored, heads={}, embeddings={})
    seconds = [time.stage_costs(asked)[0].b for time in layers]
    assert seconds[1] / seconds[0] == pytest.approx((units + again) / (3 + again))
    assert scored.phase_seconds(asked, packs) >= bare.phase_seconds(asked, packs)
    assert TASKS[task].units == units


def test_a_reference_is_kept_beside_the_master_weights() -> None:
    strategy = Strategy.parse("dp8")
    memory = {task: setup(task).memory.breakdown(strategy, 1024) for task in TASKS}
    assert (
        memory["dpo"].master_weights == 2 * memory["sft"].master_weights == 2 * memory["dpo-precomputed"].master_weights
    )
    assert memory["dpo"].total - memory["sft"].total == pytest.approx(memory["sft"].master_weights)
    assert setup("dpo", lora="16").memory.breakdown(strategy, 1024) == setup("sft", lora="16").memory.breakdown(
        strategy, 1024
    )


@pytest.mark.parametrize("strategy", ["dp8", "tp8", "dp2pp4", "dp8+z3"])
def test_a_head_of_one_number_has_no_logits_and_no_vocabulary(strategy: str) -> None:
    asked = Strategy.parse(strategy)
    scored, reward = setup("dpo-precomputed"), setup("reward")
    vocabulary, hidden = 32000, 4096
    assert scored.sizes.num_parameters - reward.sizes.num_parameters == (vocabulary - 1) * hidden
    memory = [each.memory.breakdown(asked, 4096) for each in (scored, reward)]
    assert memory[1].total < memory[0].total
    assert memory[1].weights <= memory[0].weights


def test_a_plan_says_what_it_is_of() -> None:
    planned = {task: make_plan(setup(task), "chat", 4096, 64).to_dict() for task in ("sft", "dpo")}
    assert [(plan["task"], plan["units_of_a_step"]) for plan in planned.values()] == [("sft", 3), ("dpo", 5)]
    assert Scoring() == TASKS["sft"]
