"""What a step costs that scores its rows, and a reference: forwards in seconds, a second set of weights in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_hotspa.costs.terms import TASKS, Scoring
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy


def setup(task: str = "sft", **more: object) -> Setup:
    if task == "distill":
        more.setdefault("teacher", "llama2-13b")
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
        ("embed", 4),
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


def test_a_teacher_costs_its_forward_and_its_weights() -> None:
    strategy, bare, taught = Strategy.parse("dp2tp4"), setup(), setup("distill")
    ratio = taught.scoring.units - 3
    assert ratio == pytest.approx(40 * 13_000 / (32 * 9_500), rel=0.3)  # 13B to 7B
    assert setup("distill", teacher="llama2-7b").scoring.units == 4
    memory = [of.memory.breakdown(strategy, 1024) for of in (bare, taught)]
    sizes = taught.scoring.teacher
    assert sizes is not None
    assert sizes.num_parameters == pytest.approx(13e9, rel=0.01)
    head = 32_000 / 4 * 5120 * 2
    more = sizes.weight_bytes / 8 + sizes.stages(strategy)[0].weight_bytes + head
    assert memory[1].master_weights - memory[0].master_weights == pytest.approx(more)
    assert memory[1].logits - memory[0].logits == pytest.approx(1024 * 32_000 / 4 * 4)
    adapted = setup("distill", lora="16").memory.breakdown(strategy, 1024).master_weights
    assert adapted - setup("sft", lora="16").memory.breakdown(strategy, 1024).master_weights == pytest.approx(more)


def test_strategies_of_a_distillation_run_the_teacher_too(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=32_000, num_hidden_layers=2).save_pretrained(tmp_path)
    taught, of_two_layers = setup("distill"), setup("distill", teacher=str(tmp_path))
    lacking = set(taught.strategies()) - set(of_two_layers.strategies())
    assert lacking == {s for s in setup().strategies() if s.num_stages > 2}
    plan = make_plan(taught, "chat", 4096, 64).to_dict()
    assert (plan["task"], plan["teacher"]) == ("distill", "llama2-13b")


@pytest.mark.parametrize(
    ("task", "teacher", "named"),
    [
        ("distill", None, "without --teacher"),
        ("dpo", "llama2-13b", "without --task distill"),
        ("distill", {"vocab_size": 128}, "vocabulary"),
    ],
)
def test_a_teacher_that_does_not_fit_is_named(
    task: str, teacher: str | dict[str, int] | None, named: str, tmp_path: Path
) -> None:
    if isinstance(teacher, dict):
        LlamaConfig(**teacher).save_pretrained(tmp_path)
        teacher = str(tmp_path)
    with pytest.raises(HotspaConfigError, match=named):
        setup(task, teacher=teacher)
