"""The dtypes of gradients as options, in sizes and in switch seconds."""

import json
from dataclasses import replace

import pytest

from hf_hotspa.cli import main
from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import estimate, port_seconds
from hf_hotspa.costs.terms import Cost
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.vector import GradientDtypes, ParameterSpec, master_dtype
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy
from tests.calibrations import made_calibration
from tests.families import tiny_model

SHAPE = ModelShape("llama", 4, 8, 8, 64, 64, 256, 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
STRATEGY = Strategy(2, 2, 1)
ESTIMATE = "estimate --model llama2-7b --nodes 1x8 --strategy dp2tp4 --pack-tokens 64 --json"
PLAN = "plan --model llama2-7b --nodes 2x8 --hardware a800-80g --lengths commoncrawl --longest 16384 --json"


def test_what_the_words_mean() -> None:
    table = {
        ("fp32", "auto"): ("float32", "float32"),
        ("fp32", "fp32"): ("float32", "float32"),
        ("fp32", "bf16"): ("float32", "bfloat16"),
        ("bf16", "auto"): ("bfloat16", "bfloat16"),
        ("bf16", "fp32"): ("bfloat16", "float32"),
    }
    for words, expected in table.items():
        gradients = GradientDtypes(*words)
        for weights in ("bfloat16", "float32"):
            assert (gradients.accumulated(weights), gradients.moved(weights)) == expected
    assert (GradientDtypes().accumulated("float64"), GradientDtypes().moved("float64")) == ("float64", "float64")
    assert GradientDtypes("bf16").moved("float64") == "bfloat16"
    for dtype in ("bfloat16", "float32", "float64"):
        assert master_dtype(dtype) == ParameterSpec("weight", (1,), dtype, 0).master_dtype
    with pytest.raises(HotspaConfigError, match="in which gradients accumulate is 'fp16'.*use one of fp32, bf16"):
        GradientDtypes("fp16")
    with pytest.raises(HotspaConfigError, match="in which gradients travel is 'int8'.*auto, fp32, bf16"):
        GradientDtypes(wire="int8")


@pytest.mark.parametrize("words", [("fp32", "auto"), ("fp32", "bf16"), ("bf16", "auto"), ("bf16", "fp32")])
def test_memory_and_switches_count_the_bytes_of_the_dtype(words: tuple[str, str]) -> None:
    gradients = GradientDtypes(*words)
    each, wire = (4 if dtype == "float32" else 2 for dtype in (gradients.accumulated(""), gradients.moved("")))
    sizes = ModelSizes(SHAPE, "bfloat16", gradients=gradients)
    (stage,) = sizes.stages(STRATEGY)
    assert stage.gradient_bytes == stage.weight_bytes // 2 * each
    without_switches = MemoryOptions(switch_bytes=0)
    exact = MemoryModel(replace(sizes, gradients=GradientDtypes()), 4, without_switches).breakdown(STRATEGY, 64)
    saved = exact.total - MemoryModel(sizes, 4, without_switches).breakdown(STRATEGY, 64).total
    assert saved == stage.weight_bytes // 2 * (4 - each)  # the master store is fp32 all the same
    cluster = Cluster(4, 4)
    seconds = estimate([STRATEGY], sizes, cluster, efficiency=1.0)[STRATEGY]
    assert seconds == pytest.approx(port_seconds(STRATEGY, sizes.num_parameters * (2 + wire), cluster))


def test_a_calibration_predicts_the_bytes_of_the_run() -> None:
    """It was measured with fp32 gradients, which gives a speed; what a run moves is that of its dtypes."""
    model = tiny_model("llama_gqa_bias")
    found = made_calibration(model, 4, {1: Cost(1e-9, 1e-6, 1e-3), 2: Cost(1e-9, 1e-6, 1e-3)})
    run = ModelSizes(SHAPE, found.key.dtype)
    efficiency, fixed_s = found.switch_fit
    narrow = replace(run, gradients=GradientDtypes(wire="bf16"))
    for sizes, each in ((run, 8), (narrow, 6)):
        moved = port_seconds(STRATEGY, sizes.num_parameters * each, found.cluster()) / efficiency
        cost = CostModel.of_calibration(found, sizes, MemoryOptions())
        assert cost.switch_seconds([STRATEGY])[STRATEGY] == pytest.approx(moved + fixed_s)


def test_the_command_line_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in ([], ["--grad-accum-dtype", "bf16"], ["--grad-wire-dtype", "bf16"]):
        assert main([*ESTIMATE.split(), *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    exact, sums, wire = (answer["memory"]["gradients"] for answer in found)
    assert (2 * sums, wire) == (exact, exact)
    assert found[1]["gradients"] == {"accumulation": "bf16", "wire": "auto"}
    seconds, strategies = [], []
    for words in ([], ["--grad-wire-dtype", "bf16"]):
        assert main([*PLAN.split(), *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        seconds.append(answer["buckets"][-1]["switch_seconds"])
        strategies.append([bucket["strategy"] for bucket in answer["buckets"]])
    # gradients of the last one return once, at the end of its phase
    assert strategies[0] == strategies[1], "the same strategy is compared"
    assert seconds[1] == pytest.approx(seconds[0] * 4 / 6)
