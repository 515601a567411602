"""What `plan` answers to questions from one GPU to 64: both answers and the copied line, which agree with its own table."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hf_hotspa.reporting.gain_words import PREDICTED_ERROR
from hf_hotspa.search.baselines import DYNAMIC, DataParallel
from hf_hotspa.search.setup import PlannedSetup, Setup, make_plan
from hf_hotspa.search.tables import plan_text
from hf_hotspa.strategy import parse_buckets

_QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "0.6B": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32B": {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}  # fmt: skip
FULL: dict[str, str] = {}
LORA, QLORA = {"lora": "16"}, {"lora": "16", "quantization": "nf4"}
YES, SAME, NO = "Yes: ", "About the same as ", "No: "
PAYS, EQUAL, ONE = "Switching pays: ", "Switching is about the same: ", "Switching would not gain more: "
OURS, STOCK = 'hotspa_strategies="', "SFTConfig("


@dataclass(frozen=True)
class Case:
    """A question, and how its answers and the copied line begin."""

    model: str
    nodes: str
    hardware: str
    task: dict[str, str]
    lengths: str
    longest: int
    answer: str
    switching: str
    copy: str
    rows: int = 64  # of a step


CASES = (
    Case("0.6B", "1x1", "4090-24g", FULL, "chat", 4096, YES, EQUAL, OURS),
    Case("8B", "1x1", "4090-24g", QLORA, "chat", 2048, YES, PAYS, OURS),
    Case("8B", "1x1", "4090-24g", QLORA, "github", 16384, SAME, ONE, OURS),
    Case("8B", "1x1", "4090-24g", QLORA, "chat", 8192, SAME, EQUAL, OURS),
    Case("8B", "1x1", "h100-80g", LORA, "chat", 8192, YES, ONE, OURS),
    Case("0.6B", "1x1", "l4-24g", LORA, "uniform", 2048, SAME, ONE, STOCK),
    Case("0.6B", "1x2", "4090-24g", FULL, "chat", 8192, SAME, ONE, STOCK),
    Case("8B", "1x4", "a100-80g", QLORA, "chat", 8192, SAME, ONE, STOCK),
    Case("8B", "1x4", "l40s-48g", LORA, "commoncrawl", 16384, SAME, EQUAL, STOCK),
    Case("8B", "1x4", "h100-80g", FULL, "chat", 4096, NO, ONE, STOCK),
    Case("0.6B", "1x8", "t4-16g", LORA, "chat", 2048, NO, ONE, STOCK),
    Case("8B", "1x8", "a100-80g", FULL, "chat", 8192, YES, ONE, OURS),
    Case("8B", "1x8", "h100-80g", FULL, "github", 32768, YES, ONE, OURS),
    Case("8B", "1x8", "b200-180g", FULL, "uniform", 8192, SAME, ONE, STOCK),
    Case("32B", "1x8", "h100-80g", LORA, "chat", 8192, YES, ONE, OURS),
    Case("32B", "1x8", "h200-141g", FULL, "github", 16384, SAME, ONE, OURS),
    Case("8B", "2x8", "h100-80g", FULL, "chat", 32768, YES, ONE, OURS),
    Case("32B", "4x8", "h100-80g", FULL, "chat", 16384, YES, ONE, OURS),
    Case("32B", "4x8", "a100-80g", QLORA, "commoncrawl", 16384, YES, ONE, OURS),
    Case("32B", "8x8", "b200-180g", FULL, "chat", 32768, YES, ONE, OURS),
    Case("llama2-7b", "1x1", "4090-24g", QLORA, "chat", 8192, YES, PAYS, OURS, 512),
)
"""`python -m tests.unit.test_questions` prints them as they are now."""


def ask(folder: Path, case: Case) -> PlannedSetup:
    model = case.model
    if model in MODELS:
        config = folder / f"{model}.json"
        config.write_text(json.dumps(MODELS[model]))
        model = str(config)
    dtype = {"dtype": "float16"} if case.hardware == "t4-16g" else {}
    setup = Setup.read(model, case.nodes, case.hardware, **case.task, **dtype)
    return make_plan(setup, case.lengths, case.longest, case.rows)


def begin(text: str, *words: str) -> str:
    return next((word for word in words if text.startswith(word)), text)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.model}-{case.nodes}-{case.hardware}-{case.lengths}-{case.longest}"
)
def test_a_question_is_answered_twice_and_nothing_contradicts_the_table(case: Case, tmp_path: Path) -> None:
    planned = ask(tmp_path, case)
    plan, data, text = planned.plan, planned.to_dict(), plan_text(planned)
    assert begin(plan.answer, YES, SAME, NO) == case.answer
    assert begin(plan.switching, PAYS, EQUAL, ONE) == case.switching
    assert begin(plan.to_copy, OURS, STOCK) == case.copy
    # both answers say what the table shows
    others = {
        each.name: each.seconds for every in (plan.baselines, plan.rivals) for each in every if each.seconds is not None
    }
    assert DYNAMIC not in others
    ours = plan.choice.seconds
    if others:
        name = min(others, key=lambda each: others[each])
        gain = others[name] / ours
        assert (gain > 1 + PREDICTED_ERROR) == (case.answer == YES)
        assert (1 / gain > 1 + PREDICTED_ERROR) == (case.answer == NO)
        assert name in plan.answer
        assert f"{1 / gain if case.answer == NO else gain:.2f}x" in plan.answer
    else:
        assert plan.answer.startswith("Yes: nothing that people run holds")
    single = min([plan.choice.static_seconds, *(each.seconds for each in plan.layouts if each.seconds)])
    assert (len({bucket.strategy for bucket in plan.choice.buckets}) == 1) == (case.switching == ONE)
    assert (case.switching == PAYS) == (plan.choice.switches and single / ours > 1 + PREDICTED_ERROR)
    assert all(near.seconds >= ours for near in plan.choice.near)
    assert plan.switching in " ".join(text.split())
    assert f"Copy:\n{plan.to_copy}\n" in text
    # what is copied holds, with whole logits
    limit = planned.setup.limit_bytes
    assert limit is not None
    if case.copy == OURS:
        buckets = parse_buckets(plan.to_copy.partition('"')[2].rstrip('"'))
        assert all(need.total <= limit for need in planned.setup.cost.rank_bytes(buckets))
    else:
        stock = plan.stock
        assert stock is not None
        assert ("liger" in plan.to_copy) == stock.liger
        assert (stock.seconds or 0.0) <= ours * (1 + PREDICTED_ERROR)
        if stock.liger:  # only where the answer names it, and nothing with whole logits fits
            assert case.answer == NO
            assert [each.name for each in plan.baselines if each.seconds is not None and not each.liger] == []
            return
        machine = planned.setup.hardware
        assert machine is not None
        tokens = stock.padded * plan.longest or stock.pack_tokens
        held = DataParallel(planned.setup.memory, planned.setup.cost.time, machine).breakdown(
            stock.stage, stock.recompute, tokens
        )
        assert held.total <= limit
        assert held.logits == tokens * planned.setup.model.shape.vocab_size * 10
    if planned.setup.world_size == 1:
        assert len(plan.baselines) == 1
        assert not {"deepspeed", "fsdp", "DDP", "ZeRO"} & set(text.replace("=", " ").split())
    assert data["answer"] == plan.answer
    assert data["copy"] == plan.to_copy


def main() -> None:
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            plan = ask(Path(folder), case).plan
        print(
            replace(
                case,
                answer=begin(plan.answer, YES, SAME, NO),
                switching=begin(plan.switching, PAYS, EQUAL, ONE),
                copy=begin(plan.to_copy, OURS, STOCK),
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
