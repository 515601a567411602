"""The time model: schedules, coefficients, stages, and published step times."""

import math
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls  # type: ignore[import-untyped]

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.fit import Sample, nonnegative_least_squares
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import estimate
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import Pipeline, TimeModel, pipeline_seconds, shared_pipelines
from hf_hotspa.engine.switching import PlanPool
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import ParameterSpec, build_vector
from hf_hotspa.packing.pipeline_order import operations, reaches
from hf_hotspa.plan.switch_plan import overlapped_seconds
from hf_hotspa.strategy import Strategy
from tests.random_models import plain
from tests.unit.test_cost_memory import LLAMA_7B, SIZES_7B

# --------------------------------------------------------------------------------------------------------- schedules


def longest_path(
    forward: list[list[float]],
    backward: list[list[float]],
    hops: list[float],
    reach: list[int],
    chains: Sequence[int] = (),
) -> float:
    """The same schedule as a graph: the end of an operation is the latest end of what it waits for."""
    stages = len(forward)
    orders = [
        [("FB"[is_backward], i) for i, is_backward in operations(reach, stages, stage, chains)]
        for stage in range(stages)
    ]

    @cache
    def end(stage: int, kind: str, i: int) -> float:
        at = orders[stage].index((kind, i))
        waits = [end(stage, *orders[stage][at - 1])] if at else [0.0]
        if kind == "F" and stage > 0:
            waits.append(end(stage - 1, "F", i) + hops[i])
        if kind == "B" and stage < stages - 1:
            waits.append(end(stage + 1, "B", i) + hops[i])
        return max(waits) + (forward if kind == "F" else backward)[stage][i]

    return max((end(s, *orders[s][-1]) for s in range(stages) if orders[s]), default=0.0)


@pytest.mark.parametrize("chunked", [False, True])
def test_simulation_is_the_longest_path(chunked: bool) -> None:
    rng = random.Random(1)
    for _ in range(150):
        stages, chains = rng.randint(1 + chunked, 5), [rng.randint(1, 4) for _ in range(rng.randint(1, 4) * chunked)]
        total = sum(chains) if chunked else rng.randint(0, 7)
        forward, backward = ([[rng.random() for _ in range(total)] for _ in range(stages)] for _ in range(2))
        hops, tokens = [rng.random() * 0.3 for _ in range(total)], [rng.randint(1, 9) for _ in range(total)]
        for limit in (None, rng.randint(1, 20), 36):
            reach = reaches(tokens, limit, chains)
            expected = longest_path(forward, backward, hops, reach, chains)
            pipeline = Pipeline(forward, backward, hops, reach, None, chains)
            assert pipeline_seconds(pipeline) == pytest.approx(expected)
            assert shared_pipelines([pipeline], 1, math.inf) == pytest.approx(expected)
        if not chunked:  # with one micro-batch in flight they follow one another
            single = pipeline_seconds(Pipeline(forward, backward, hops, range(1, total + 1)))
            passed = sum(hops) * 2 * (stages - 1) + sum(map(sum, forward)) + sum(map(sum, backward))
            assert single == pytest.approx(passed)


# ------------------------------------------------------------------------------------------------------ coefficients


def model_of(layers: dict[int, Cost], **extra) -> TimeModel:
    return TimeModel("test", StageCosts((1,) * 4), layers, **extra)


def test_packs_replicas_and_phases() -> None:
    model = model_of({1: Cost(1e-9, 1e-6, 1e-3), 2: Cost(5e-10, 6e-7, 1e-3)}, heads={1: Cost(b=1e-5)})
    alone = model.phase_seconds(Strategy(2, 1, 1), [[(100, 200), (50,)]])
    layer = Cost(1e-9, 1e-6, 1e-3)
    assert alone == pytest.approx(4 * (layer.of([100, 200]) + layer.of([50])) + 350e-5)
    assert model.phase_seconds(Strategy(2, 1, 1), [[(100, 200), (50,)], []]) == pytest.approx(alone)
    assert model.phase_seconds(Strategy(2, 1, 1), [[], []]) == 0
    piped = model.phase_seconds(Strategy(1, 1, 2), [[(100, 200)]])
    assert piped == pytest.approx(4 * layer.of([100, 200]) + 300e-5)  # one pack passes both stages


# ------------------------------------------------------------------------------------------------------------ fitting


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_nonnegative_least_squares_against_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rng.integers(4, 9), rng.integers(1, 5))) * 10.0 ** rng.integers(-6, 6)
    target = rng.normal(size=len(matrix))
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    best = nnls(matrix, target)[1]
    # where the system can be solved, both are left with rounding, which grows with the condition number
    assert np.linalg.norm(matrix @ found - target) <= best * (1 + 1e-8) + 1e-10 * np.linalg.norm(target)


def test_fit_refuses_what_is_no_measurement() -> None:
    good = [Sample(1, 2, (n,), n * 1e-6) for n in (1, 2, 3)]
    with pytest.raises(HotspaConfigError, match="at least three lengths"):
        TimeModel.fit(good[:2], SIZES_7B)
    with pytest.raises(HotspaConfigError, match="no measurements"):
        TimeModel.fit([], SIZES_7B)
    for wrong in (Sample(1, 2, (4,), float("nan")), Sample(1, 2, (4,), -1.0), Sample(1, 0, (4,), 1.0)):
        with pytest.raises(HotspaConfigError, match="is not a measurement"):
            TimeModel.fit([*good, wrong], SIZES_7B)


# ------------------------------------------------------------------------------------------- published step times


# ----------------------------------------------------------------------------------------------------- switch seconds


def test_estimated_switches_are_near_planned_ones() -> None:
    specs = [
        ParameterSpec(f"{layer}.{name}", (2048, width), "bfloat16", layer, 0, plain(2048))
        for layer in range(4)
        for name, width in (("a", 64), ("b", 48), ("c", 80), ("d", 16), ("e", 112))
    ]
    vector = build_vector(specs, [1] * 4, 0)
    sizes = ModelSizes(LLAMA_7B, vector=vector)
    for world_size, devices_per_node in ((4, 4), (8, 4), (8, 2)):
        cluster = Cluster(world_size, devices_per_node)
        names = [s for s in ("dp8", "tp8", "dp4tp2", "tp4pp2", "dp2tp4") if Strategy.parse(s).world_size == world_size]
        strategies = [Strategy.parse(s) for s in names] or [Strategy(4, 1, 1), Strategy(1, 4, 1), Strategy(2, 1, 2)]
        wire = [2] * len(vector.segments), [4] * len(vector.segments)
        pool = PlanPool(vector, strategies, cluster, *wire)
        planned = {
            strategy: overlapped_seconds(pool.load(strategy).loads(cluster, wire[0]), cluster)
            + overlapped_seconds(pool.return_gradients(strategy).loads(cluster, wire[1]), cluster)
            for strategy in strategies
        }
        guessed = estimate(strategies, sizes, cluster, efficiency=1.0)
        for strategy in strategies:
            assert 0.4 < guessed[strategy] / planned[strategy] < 2.5, (strategy, cluster)
    with pytest.raises(HotspaConfigError, match="efficiency of 0"):
        estimate(strategies, sizes, cluster, efficiency=0)
