"""What `plan` compares with: what people run, and what a user writes; and its answer in one line."""

import json
import random

import pytest

from hf_hotspa.cli import main
from hf_hotspa.errors import HotspaError
from hf_hotspa.search.baselines import DYNAMIC, IN_NODE, MEGATRON
from hf_hotspa.search.setup import Setup, make_plan

CASE = ["--model", "llama2-7b", "--nodes", "1x8", "--hardware", "a800-80g"]


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup.read("llama2-7b", "1x8", "a800-80g")


def test_our_layouts_and_what_clusters_run_are_apart() -> None:
    setup = Setup.read("llama2-7b", "2x4", "a800-80g")
    plan = make_plan(setup, "github", 16384, 64).plan
    rivals = {rival.name: rival for rival in (*plan.rivals, *plan.layouts)}
    assert [rival.name for rival in plan.rivals] == [IN_NODE, MEGATRON]
    assert [layout.name for layout in plan.layouts] == [DYNAMIC]
    for name, rival in rivals.items():
        assert rival.seconds is not None
        assert rival.seconds >= plan.choice.seconds * 0.98, name
        assert all(not b.strategy.z and not b.strategy.ck for b in rival.buckets), name
    assert rivals[MEGATRON].seconds <= rivals[IN_NODE].seconds  # type: ignore[operator]
    # one layout: only how many replicas share a pack changes
    assert len({(b.strategy.tp, b.strategy.pp, b.strategy.dp * b.strategy.cp) for b in rivals[DYNAMIC].buckets}) == 1


_CELLS = [
    ("llama2-7b", "1x8", "a800-80g", 32768),
    ("llama2-7b", "1x4", "h100-80g", 16384),
    ("llama2-13b", "2x4", "a800-80g", 8192),
]
_LARGE = [
    ("llama2-13b", "4x4", "h100-80g", 32768),
    ("llama2-32b", "4x8", "a800-80g", 32768),
    ("llama2-7b", "2x8", "h100-80g", 16384),
]


@pytest.mark.parametrize("cell", [*range(3), *(pytest.param(cell, marks=pytest.mark.slow) for cell in range(3, 18))])
def test_nothing_inside_of_the_search_is_faster_than_what_it_chose(cell: int) -> None:
    draw = random.Random(cell)
    model, nodes, hardware, longest = (_CELLS if cell < 3 else [*_CELLS, *_LARGE])[cell % (3 if cell < 3 else 6)]
    setup = Setup.read(model, nodes, hardware, lora=draw.choice((None, "16")))
    plan = make_plan(
        setup, draw.choice(("commoncrawl", "github", "chat", "uniform")), longest, draw.choice((16, 64))
    ).plan
    assert len(plan.layouts) == 1
    for rival in (*plan.rivals, *plan.layouts):  # a pool must beat a single strategy by one percent to be chosen
        assert rival.seconds is None or plan.choice.seconds <= rival.seconds * 1.0101, (rival, str(plan.choice))


def test_the_search_finds_context_parallelism_inside_of_pipelines() -> None:
    """Few packs fill the pipelines of few replicas only, so these share each pack."""
    plan = make_plan(Setup.read("llama2-32b", "4x8", "h100-80g"), "commoncrawl", 32768, 128).plan
    (dynamic,) = plan.layouts
    assert dynamic.seconds is not None
    assert plan.choice.seconds <= dynamic.seconds * 1.0101
    assert all(bucket.strategy.cp > 1 and bucket.strategy.pp > 1 for bucket in dynamic.buckets)


def test_what_the_plan_says_is_what_its_own_words_cost(setup: Setup) -> None:
    found = make_plan(setup, "github", 16384, 64)
    assert found.plan.rivals == ()  # on one node nobody runs a layout of a cluster
    again = make_plan(setup, "github", 16384, 64, written=[str(found.plan.choice), "tp8,dp2tp4", "dp8:16384@16384000"])
    own, names, large = again.plan.written
    assert own.seconds == pytest.approx(found.plan.choice.seconds)
    assert names.seconds is not None
    assert names.seconds >= found.plan.choice.seconds
    assert {(b.strategy.dp, b.strategy.tp) for b in names.buckets} <= {(1, 8), (2, 4)}
    assert large.seconds is None
    assert "needs 91" in large.why


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("dp3tp2", "needs 6 processes"),
        ("dp8:100", "takes sequences of 100 tokens"),
        ("dp8tp", "dp8tp"),
        ("tp8:4096,dp8:1024", "is not above 4096"),
    ],
)
def test_what_cannot_be_priced_is_refused(written: str, words: str, setup: Setup) -> None:
    with pytest.raises(HotspaError, match=words):
        make_plan(setup, "github", 16384, 64, written=[written])


def test_the_first_lines_are_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    case = ["plan", *CASE, "--lengths", "chat", "--longest", "8192", "--strategies", "tp8"]
    assert main(case) == 0
    text = capsys.readouterr().out
    assert main([*case, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert text.startswith(data["answer"] + "\n")
    assert data["switching"] in " ".join(text.split())
    assert f"Copy:\n{data['copy']}\n" in text
    assert [each["name"] for each in data["written"]] == ["tp8"]
    known = [each["seconds"] for each in (*data["baselines"], *data["rivals"]) if each["seconds"] is not None]
    assert data["gain"]["factor"] == pytest.approx(min(known) / data["seconds"])
    assert f"{data['gain']['factor']:.2f}x" in data["answer"]
    # replicas alone may be twice as far behind
    assert all(each["seconds"] <= data["seconds"] * 1.1 for each in data["near"])
