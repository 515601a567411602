"""Calibrations as plain data, the cost models that follow from them, and ranks that share cores."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hf_hotspa.costs.calibration import (
    Calibration,
    CalibrationKey,
    Link,
    MemorySample,
    ModelFacts,
    PhaseSample,
    SwitchSample,
    cache_folder,
    config_digest,
)
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.fit import Sample
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes, OptimizerState
from hf_hotspa.costs.switch_time import port_seconds
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.costs.time import Pipeline, pipeline_seconds, shared_pipelines, shared_seconds
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import pack_sequences
from hf_hotspa.packing.pipeline_order import operations, reaches
from hf_hotspa.search.estimate import Evaluator, LengthTable
from hf_hotspa.strategy import Strategy, strategies_of
from tests.run_logs import of_earlier_releases

SHAPE = ModelShape("llama", 8, 8, 4, 256, 256, 2048, 800_000)
SIZES = ModelSizes(SHAPE, "float32")
LAYERS = {1: Cost(2e-9, 3e-5, 4e-4), 2: Cost(1e-9, 1.6e-5, 9e-4), 4: Cost(6e-10, 9e-6, 2e-3)}
ENDS = {1: Cost(0.0, 5e-6, 2e-4), 2: Cost(0.0, 3e-6, 3e-4), 4: Cost(0.0, 2e-6, 4e-4)}
PACKS = ((64,), (256,), (1024,), (64,) * 4, (256,) * 4)
KEY = CalibrationKey("a processor", "cpu", 2, 1 << 34, 4, 4, 1, "gloo", "float32", "cafe", {"torch": "2.13.0"})


def calibration(**changes: Any) -> Calibration:
    samples = tuple(
        Sample(tp, layers, pack, layers * LAYERS[tp].of(pack) + ENDS[tp].of(pack), with_ends=True)
        for tp in LAYERS
        for layers in (1, 3)
        for pack in PACKS
    )
    memory = tuple(
        MemorySample(tp, layers, tokens, tokens * (layers * 20_000 / tp + 5_000) + 1e6)
        for tp in LAYERS
        for layers in (1, 3)
        for tokens in (512, 1024)
    )
    given = Calibration(
        KEY,
        ModelFacts("llama", 256, 800_000, 2048, 8),
        samples,
        2.0,
        Link(1e-4, 1e9),
        Hop(2e-4, 1e-6),
        memory=memory,
        measured_at="2026-01-01T00:00:00+00:00",
        notes=("a note",),
    )
    return replace(given, **changes)


# ------------------------------------------------------------------------------------------------- models from samples


def test_known_constants_come_back() -> None:
    exclusive = calibration(slots=math.inf).time_model(SIZES)
    assert exclusive.slots == math.inf
    for tp, cost in LAYERS.items():
        assert asdict(exclusive.layers[tp]) == pytest.approx(asdict(cost), rel=1e-6)
        assert asdict(exclusive.heads[tp]) == pytest.approx(asdict(ENDS[tp]), rel=1e-6)
    assert exclusive.hop(Strategy(1, 1, 4)) == Hop(2e-4, 1e-6)


def test_ranks_that_share_cores_take_turns() -> None:
    whole = {tp: 8 * LAYERS[tp].of((512,)) + ENDS[tp].of((512,)) for tp in LAYERS}
    for slots in (1.0, 1.7, 2.0, 3.9, 4.0, math.inf):
        model = calibration(slots=slots).time_model(SIZES)
        for tp, seconds in whole.items():
            found = model.phase_seconds(Strategy(4 // tp, tp, 1), [[(512,)]] * (4 // tp))
            assert found == pytest.approx(seconds * max(1.0, 4 / slots), rel=1e-6)
        # a rank that is alone on two cores is as fast as its core, not twice as fast
        one = model.phase_seconds(Strategy(4, 1, 1), [[(512,)], [], [], []])
        assert one == pytest.approx(whole[1], rel=1e-6)


def test_more_nodes_have_more_cores() -> None:
    model = calibration().time_model(SIZES, world_size=8)
    assert model.slots == 4
    assert KEY.slots == 2
    assert replace(KEY, threads=2).slots == 1
    assert replace(KEY, world_size=8).slots == 4
    assert replace(KEY, kind="cuda").slots == math.inf


def test_memory_is_what_was_measured() -> None:
    model = calibration().memory_model(SIZES, MemoryOptions(optimizer=OptimizerState(0)))
    found = model.breakdown(Strategy(2, 2, 1), 3000)
    assert found.activations == pytest.approx(3000 * 8 * 10_000, rel=1e-6)
    assert found.logits == pytest.approx(3000 * 5_000, rel=1e-6)
    assert model.options.optimizer == OptimizerState(0)
    assert model.options.compute_dtype == "float32"
    assert calibration(memory=()).memory_model(SIZES).options.activation_bytes == {}


def test_switches_are_what_was_measured() -> None:
    cluster = calibration().cluster()
    assert (cluster.world_size, cluster.num_nodes, cluster.intra_bandwidth) == (4, 1, 1e9)
    samples = []
    for strategy in strategies_of(4):
        for count in (1_000_000, 3_000_000):
            seconds = port_seconds(strategy, 8 * count, cluster) / 0.5 + 3e-3
            samples.append(SwitchSample(str(strategy), count, seconds / 3, seconds * 2 / 3))
    found = calibration(switches=tuple(samples))
    efficiency, fixed_s = found.switch_fit
    assert efficiency == pytest.approx(0.5)
    assert fixed_s == pytest.approx(3e-3)
    switches = CostModel.of_calibration(found, SIZES, MemoryOptions()).switch_seconds([Strategy(4), Strategy(1, 4)])
    assert switches[Strategy(4)] == pytest.approx(
        port_seconds(Strategy(4), 8 * SIZES.num_parameters, cluster) * 2 + 3e-3
    )
    assert switches[Strategy(4)] > switches[Strategy(1, 4)]


def test_the_machine_as_hardware() -> None:
    found = calibration(inter=Link(1e-3, 1e8), hop_inter=Hop(1e-3, 1e-5)).hardware()
    assert found.device.flops("float32") == pytest.approx(6 * 800_000 / 3e-5, rel=1e-6)
    assert found.device.memory_bytes == (1 << 34) // 4
    assert found.cluster(8).inter_bandwidth == 1e8
    assert found.cluster(8).latency_s == 1e-3


# ------------------------------------------------------------------------------------------------------ shared cores


def stepped(
    forward: list[list[list[float]]],
    backward: list[list[list[float]]],
    hops: list[list[float]],
    ranks: int,
    slots: float,
    reach: list[list[int]],
    step: float = 1e-4,
) -> float:
    """The same pipelines in small steps of time: what processor sharing means, without events."""
    lanes: list[list[Any]] = []  # replica, stage, operations to come, seconds left of the running one
    for replica, ahead in enumerate(forward):
        for stage in range(len(ahead)):
            order = [("fb"[is_backward], i) for i, is_backward in operations(reach[replica], len(ahead), stage)]
            lanes.append([replica, stage, order, None])
    ready = {(r, "f", 0, i): 0.0 for r, ahead in enumerate(forward) for i in range(len(ahead[0]))}
    ready |= {(r, "b", len(ahead) - 1, i): 0.0 for r, ahead in enumerate(forward) for i in range(len(ahead[0]))}
    now = 0.0
    while any(order for _, _, order, _ in lanes):
        for lane in lanes:
            replica, stage, order, left = lane
            if (
                left is None
                and order
                and ready.get((replica, order[0][0], stage, order[0][1]), math.inf) <= now + 1e-12
            ):
                kind, i = order[0]
                lane[3] = (forward if kind == "f" else backward)[replica][stage][i]
        busy = [lane for lane in lanes if lane[3] is not None]
        speed = min(1.0, slots / (len(busy) * ranks)) if busy else 1.0
        now += step
        for lane in busy:
            lane[3] -= speed * step
            if lane[3] <= 1e-9:
                replica, stage, order, _ = lane
                kind, i = order.pop(0)
                lane[3] = None
                ready[replica, kind, stage + (1 if kind == "f" else -1), i] = now + hops[replica][i]
    return now


@pytest.mark.parametrize("seed", range(8))
def test_shared_pipelines_against_small_steps(seed: int) -> None:
    rng = random.Random(seed)
    stages, dp = rng.randint(2, 4), rng.randint(1, 3)
    ranks, slots = rng.choice([1, 2]), rng.choice([1.0, 2.0, 2.5, 16.0])
    totals = [rng.randint(1, 5) for _ in range(dp)]

    def seconds() -> list[list[list[float]]]:
        return [[[rng.uniform(0.05, 0.4) for _ in range(total)] for _ in range(stages)] for total in totals]

    forward, backward = seconds(), seconds()
    hops = [[rng.choice([0.0, 0.03]) for _ in range(total)] for total in totals]

    def pipelines(limits: list[list[int]]) -> list[Pipeline]:
        return [Pipeline(*each) for each in zip(forward, backward, hops, limits, strict=True)]

    plain = [[total] * total for total in totals]
    found = shared_pipelines(pipelines(plain), ranks, slots)
    assert found == pytest.approx(stepped(forward, backward, hops, ranks, slots, plain), rel=0.01)
    limits = [reaches([rng.randint(1, 9) for _ in range(total)], rng.randint(1, 20)) for total in totals]
    limited = shared_pipelines(pipelines(limits), ranks, slots)
    assert limited == pytest.approx(stepped(forward, backward, hops, ranks, slots, limits), rel=0.01)
    # with cores for all, it is the schedule itself
    alone = max(map(pipeline_seconds, pipelines(plain)))
    assert shared_pipelines(pipelines(plain), ranks, 1e9) == pytest.approx(alone)
    assert shared_pipelines(pipelines(limits), ranks, 1e9) == pytest.approx(
        max(map(pipeline_seconds, pipelines(limits)))
    )
    # never below the work, nor below the longest pipeline
    work = ranks * sum(t for kind in (forward, backward) for replica in kind for stage in replica for t in stage)
    assert found >= max(alone, work / slots) * (1 - 1e-9)


def test_loads_share_cores() -> None:
    assert shared_seconds([1, 1, 1, 1], 1, 2.0) == pytest.approx(2)
    assert shared_seconds([1, 1, 1, 1], 1, 8.0) == pytest.approx(1)
    assert shared_seconds([4, 1, 1, 1], 1, 2.0) == pytest.approx(2 + 3)  # four share for 2 s, then one is alone
    assert shared_seconds([3], 4, 2.0) == pytest.approx(6)
    assert shared_seconds([], 1, 2.0) == 0
    loads = [Pipeline([[0.0], [t]], [[0.0], [0.0]], [0.0], [1]) for t in (4.0, 1.0, 1.0, 1.0)]
    assert shared_pipelines(loads, 1, 2.0) == pytest.approx(5)


def test_estimates_know_of_shared_cores() -> None:
    model = calibration().time_model(SIZES)
    rng = random.Random(3)
    batch = [rng.choice([64, 128, 256, 512, 1024]) for _ in range(80)]
    table = LengthTable([batch], [0, 1024])
    for strategy in strategies_of(4):
        evaluator = Evaluator([batch], model, {strategy: 0.0}, 1e-4)
        exact = evaluator.phase(strategy, 0, 1024, 1024).compute_s
        packs = pack_sequences(sorted(batch), capacity=1024, dp=strategy.dp, pp=strategy.pp, quadratic_cost=1e-4)
        replicas = [[[sorted(batch)[i] for i in pack] for pack in replica] for replica in packs]
        assert exact == model.phase_seconds(strategy, replicas)
        assert evaluator.bound(strategy, 0, 1024, 1024) <= exact * (1 + 1e-9)
        assert table.phase_seconds(model, strategy, [(1024, 0)], 0.0)[0, 1] == pytest.approx(exact, rel=0.15)


# ------------------------------------------------------------------------------------------------------------ the file


def test_round_trip(tmp_path: Path) -> None:
    for given in (
        calibration(),
        calibration(slots=math.inf, memory=(), inter=Link(1e-3, 1e8), hop_inter=Hop(1e-3, 0.0)),
        calibration(switches=(SwitchSample("dp4", 1000, 0.1, 0.2),), phases=phases({(1, 1, 1): 1.25, (1, 1, 2): 1.1})),
    ):
        given.save(tmp_path / "folder" / "c.json")
        assert Calibration.load(tmp_path / "folder" / "c.json", KEY) == given
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["c.json"]
    assert "a processor" in (tmp_path / "folder" / "c.json").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("samples"), "'samples' is missing"),
        (lambda d: d.update(samples=d["samples"][:2]), "different packs"),
        (lambda d: d.update(samples=[]), "no measurements"),
        (lambda d: d["samples"][0].update(seconds=float("nan")), "seconds is nan"),
        (lambda d: d["samples"][0].update(lengths=[0]), r"samples\[0\].lengths\[0\] is 0"),
        (lambda d: d["samples"][0].update(lengths=7), "wrong type"),
        (lambda d: d["samples"][0].update(tp=1.5), "tp is 1.5"),
        (lambda d: d.update(key="cpu"), "wrong type"),
        (lambda d: d.update(slots=0), "slots is 0"),
        (lambda d: d["key"].update(dtype="float7"), "float7"),
        (lambda d: d.update(schema_version=0), "schema version 0"),
        (lambda d: d.update(kind="plan"), "not of kind hf_hotspa calibration"),
        (
            lambda d: d.update(switches=[{"strategy": "up4", "num_parameters": 1, "load_s": 1, "return_s": 1}]),
            "'up4' is not a strategy",
        ),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = tmp_path / "c.json"
    calibration().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(HotspaConfigError, match=message) as caught:
        Calibration.load(path)
    assert "delete the file and calibrate again" in str(caught.value)
    assert str(path) in str(caught.value)


def test_torn_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration().save(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(HotspaConfigError, match="delete the file and calibrate again"):
        Calibration.load(path)
    with pytest.raises(HotspaConfigError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")


def test_a_calibration_of_another_case_is_refused(tmp_path: Path) -> None:
    calibration().save(tmp_path / "c.json")
    for name, value in (("cores", 3), ("dtype", "bfloat16"), ("versions", {"torch": "9"}), ("model", "beef")):
        other = replace(KEY, **{name: value})  # type: ignore[arg-type]
        assert other.digest() != KEY.digest()
        with pytest.raises(HotspaConfigError, match=f"another case: {name}"):
            Calibration.load(tmp_path / "c.json", other)
    assert CalibrationKey(**asdict(KEY)).digest() == KEY.digest()


def test_the_digest_of_a_config() -> None:
    config = {"hidden_size": 4, "dtype": "float32", "pad_token_id": 1, "transformers_version": "5"}
    assert config_digest(config) == config_digest({"hidden_size": 4, "dtype": "bfloat16"})
    assert config_digest(config) != config_digest({"hidden_size": 8})


def test_where_calibrations_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOTSPA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "calibration"
    monkeypatch.delenv("HF_HOTSPA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "hf_hotspa" / "calibration"


# --------------------------------------------------------------------------------------------------------- whole phases


def of_four(tp: int, cp: int, pp: int) -> Strategy:
    return Strategy(4 // tp // cp // pp, tp, pp, cp=cp)


def phases(factors: dict[tuple[int, int, int], float], num_layers: int = 3) -> tuple[PhaseSample, ...]:
    """What would be measured on four ranks if whole phases took so many times what their packs say."""
    layers, head = (SHAPE.layer_parameters,) * num_layers, SHAPE.vocab_size * SHAPE.hidden_size
    copy = replace(calibration().time_model(SIZES), cut=StageCosts(layers, head))
    found = []
    for degrees, factor in factors.items():
        strategy = of_four(*degrees)
        for replicas in ([((64,), (256,))] * strategy.dp, [((128, 64),)] * strategy.dp):
            seconds = factor * copy.phase_seconds(strategy, replicas)
            found.append(PhaseSample(str(strategy), num_layers, tuple(replicas), seconds))
    return tuple(found)


def test_whole_phases_correct_what_packs_predict() -> None:
    factors = {(1, 1, 1): 1.25, (2, 1, 1): 0.9, (1, 1, 2): 1.5, (4, 1, 1): 1.0, (1, 2, 1): 1.4, (2, 2, 1): 1.8}
    plain, found = calibration().time_model(SIZES), calibration(phases=phases(factors)).time_model(SIZES)
    assert found.phase_factors == pytest.approx(factors)
    # the other depths of a pipeline count as the nearest that was measured, and a cp that was not as none
    others = {(1, 1, 4): 1.5, (1, 1, 8): 1.5, (2, 1, 2): 1.0, (1, 4, 1): 1.25, (1, 2, 2): 1.5}
    for degrees, factor in (factors | others).items():
        strategy = Strategy(1, 1, 8) if degrees[2] == 8 else of_four(*degrees)
        for after, before in zip(found.stage_costs(strategy), plain.stage_costs(strategy), strict=True):
            assert after.of((300, 20)) == pytest.approx(factor * before.of((300, 20))), strategy


def test_factors_are_means_within_bounds() -> None:
    first, second = phases({(2, 1, 1): 1.0})
    mixed = replace(first, seconds=first.seconds * 1.21), second
    assert calibration(phases=mixed).time_model(SIZES).phase_factors[2, 1, 1] == pytest.approx(1.1)
    for wild, factor in ((50.0, 2.0), (0.01, 0.5)):
        assert calibration(phases=phases({(2, 1, 1): wild})).time_model(SIZES).phase_factors == {(2, 1, 1): factor}
    unknown = replace(first, strategy="tp8")
    assert calibration(phases=(unknown,)).time_model(SIZES).phase_factors == {}


def test_older_files_have_no_phases() -> None:
    given = calibration(phases=phases({(1, 1, 1): 1.25, (1, 1, 2): 1.1}))
    data = given.to_dict()
    named = Calibration.from_dict(json.loads(of_earlier_releases(json.dumps(data))))
    assert named.phases[0].strategy == "dp4tp1pp1"
    assert named.time_model(SIZES) == given.time_model(SIZES)
    data["runs"] = [{"strategy": "tp2", "ratio": 0.9, "number": 3}]  # what an earlier release added after runs
    assert Calibration.from_dict(json.loads(json.dumps(data))) == given
    del data["phases"]
    assert Calibration.from_dict(json.loads(json.dumps(data))) == replace(given, phases=())
    for broken in ({"strategy": "dp2tp"}, {"seconds": 0}, {"replicas": [[["many"]]]}):
        data["phases"] = [{**asdict(given.phases[0]), **broken}]
        with pytest.raises(HotspaConfigError, match="calibrate again"):
            Calibration.from_dict(json.loads(json.dumps(data)))
