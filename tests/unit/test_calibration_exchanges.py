"""Exchanges of context parallelism that were measured: what phases and plans make of them, and files that have none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from hf_hotspa.calibrate.probe import context_layouts
from hf_hotspa.costs.calibration import Calibration, ExchangeSample
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.divided import GATHER, RING, ULYSSES
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.search.histogram import Counts
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.search.tables import calibration_text
from hf_hotspa.strategy import Strategy
from tests.calibrations import made_calibration
from tests.families import tiny_model

MODEL = tiny_model("llama_gqa_bias").float()
SHAPE = describe_model(MODEL, None).shape
SIZES = ModelSizes(SHAPE, "float32")
HOP = Hop(1e-5, 1e-8)
LAYOUTS = context_layouts(4, [1, 2])
LONG = [[(512,)]]
CP4 = Strategy(cp=4)


def calibrated(all_to_all: float, gather: float) -> Calibration:
    """One whose exchanges take so many seconds a megabyte, and a millisecond or two each."""
    given = made_calibration(MODEL, 4, {1: Cost(b=1e-6), 2: Cost(b=6e-7)}, hop=HOP)
    taken: dict[Literal["all_to_all", "gather"], tuple[float, float]]
    taken = {"all_to_all": (1e-3, all_to_all), "gather": (2e-3, gather)}
    samples = tuple(
        ExchangeSample(name, layout.cp, layout.tp, size, fixed + each * size / 1e6)
        for layout in LAYOUTS
        for name, (fixed, each) in taken.items()
        for size in (1000, 1_000_000)
    )
    return replace(given, slots=float("inf"), exchanges=samples)


def seconds(calibration: Calibration, way: str, strategy: Strategy = CP4) -> float:
    options = MemoryOptions(context_parallel=way)
    return CostModel.of_calibration(calibration, SIZES, options).time.phase_seconds(strategy, LONG)


def test_layouts_are_every_cp_beside_every_tp() -> None:
    assert [(s.dp, s.cp, s.tp) for s in LAYOUTS] == [(2, 2, 1), (1, 4, 1), (1, 2, 2)]
    assert context_layouts(1, [1]) == []
    assert [(s.cp, s.tp) for s in context_layouts(6, [1, 3])] == [(2, 1), (3, 1), (6, 1), (2, 3)]


def test_each_way_takes_what_its_exchanges_were_measured_to() -> None:
    assert SHAPE.num_attention_heads == 8
    assert (SHAPE.attention_size, SHAPE.num_key_value_heads) == (SHAPE.hidden_size, 2)
    calibration, layers = calibrated(all_to_all=3.0, gather=0.5), SHAPE.num_layers
    found = calibration.context_exchanges[4, 1]
    assert found.all_to_all.latency_s == pytest.approx(1e-3)
    assert found.all_to_all.token_s == pytest.approx(3e-6 * SHAPE.hidden_size * 4)
    computed = layers * 512 * 1e-6 / 4
    head = SHAPE.hidden_size // 8 * 4 * 512  # bytes of a head of all tokens
    # queries, result, keys and values, two heads repeated to four, twice: three quarters of a quarter leave the rank
    moved = 2 * 24 * head / 4 * 3 / 4
    assert seconds(calibration, ULYSSES) == pytest.approx(computed + layers * (4e-3 + moved * 3e-6), rel=1e-6)
    # keys and values of two heads, gathered twice, and their gradients by an all-to-all
    moved = 2 * 2 * head * 3 / 4
    expected = layers * (2 * (2e-3 + moved * 0.5e-6) + 1e-3 + moved * 3e-6)
    assert seconds(calibration, GATHER) == pytest.approx(computed + expected, rel=1e-6)
    # the ring has hops
    hops = replace(calibration, exchanges=())
    assert seconds(calibration, RING) == seconds(hops, RING)
    assert seconds(hops, ULYSSES) < seconds(calibration, ULYSSES) / 10


def test_what_was_not_measured_has_hops() -> None:
    calibration = calibrated(1.0, 1.0)
    hops = replace(calibration, exchanges=())
    some = replace(calibration, exchanges=tuple(s for s in calibration.exchanges if s.cp == 2))
    for way in (ULYSSES, GATHER):
        assert seconds(some, way) == seconds(hops, way)
        assert seconds(some, way, Strategy(2, cp=2)) > 2 * seconds(hops, way, Strategy(2, cp=2))
    only = replace(calibration, exchanges=tuple(s for s in calibration.exchanges if s.name == "gather"))
    assert seconds(only, GATHER) == seconds(hops, GATHER)


def test_a_slow_exchange_makes_a_plan_take_another_strategy(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL.config.to_dict(), default=str))

    def planned(calibration: Calibration) -> set[int]:
        file = tmp_path / "calibration.json"
        slow_computation = tuple(replace(s, seconds=1000 * s.seconds) for s in calibration.samples)
        replace(calibration, samples=slow_computation).save(file)
        setup = Setup.read(str(config), "1x4", calibration=str(file))
        longest = SHAPE.max_position_embeddings or 512
        choice = make_plan(setup, Counts.of([8] * 7 + [longest]), mini_batch_size=8).plan.choice
        return {bucket.strategy.cp for bucket in (*choice.buckets, choice.static)}

    fast = calibrated(1e-6, 1e-6)
    fast = replace(fast, exchanges=tuple(replace(s, seconds=s.seconds * 1e-3) for s in fast.exchanges))
    assert max(planned(fast)) > 1
    assert planned(calibrated(1e6, 1e6)) == {1}


def test_files_with_exchanges_and_without(tmp_path: Path) -> None:
    calibration, path = calibrated(3.0, 0.5), tmp_path / "calibration.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    shown = calibration_text(calibration)
    assert "exchanges  all-to-all us" in shown
    assert "cp2tp2" in shown
    data = json.loads(path.read_text())
    sample = data["exchanges"][0]
    for wrong, message in (
        ({**sample, "seconds": 0}, "seconds is 0"),
        ({**sample, "name": "ring"}, "ring"),
        ({key: value for key, value in sample.items() if key != "num_bytes"}, "'num_bytes' is missing"),
    ):
        path.write_text(json.dumps({**data, "exchanges": [wrong]}))
        with pytest.raises(HotspaConfigError, match=message):
            Calibration.load(path)
    del data["exchanges"]  # as it was before they were measured
    path.write_text(json.dumps(data))
    earlier = Calibration.load(path)
    assert earlier == replace(calibration, exchanges=())
    assert "exchanges  all-to-all" not in calibration_text(earlier)
