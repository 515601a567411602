"""Layers timed one by one: kinds, what follows from their seconds, and files that have none. A cut by measured seconds is one
cut: of layouts, time model, memory model and plans alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_hotspa.calibrate import probe as timed
from hf_hotspa.calibrate.probe import Measuring, kinds_of_layers, time_layers
from hf_hotspa.costs.calibration import Calibration, LayerSample, PhaseSample
from hf_hotspa.costs.fit import Sample
from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.placement import stage_of_unit, strategy_layout
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.search.setup import Setup
from hf_hotspa.search.tables import calibration_text
from hf_hotspa.strategy import Strategy
from tests.calibrations import made_calibration
from tests.families import tiny_model
from tests.tiny_families import tiny_model_of
from tests.unit.test_stages import cuts

FAMILY = "llama_gqa_bias"
LENGTHS = (512,)
ALONE = Measuring(Agreement(None, 0), torch.device("cpu"), 1.0, 1, lambda _: None)


def calibrated(seconds: dict[tuple[int, ...], float]) -> Calibration:
    """One whose layers took so long, by the indices of those of a kind."""
    calibration = made_calibration(tiny_model(FAMILY), 2, {1: Cost(b=1e-6)})
    layers = tuple(LayerSample(kind, LENGTHS, s) for kind, s in seconds.items())
    each = {index: s for kind, s in seconds.items() for index in kind}
    samples = tuple(  # of the first layers, by the tokens
        replace(sample, seconds=sum(each[i] for i in range(sample.num_layers)) * sum(sample.lengths) / sum(LENGTHS))
        for sample in calibration.samples
    )
    return replace(calibration, layers=layers, samples=samples)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ((0, 1, 2, 3),)),
        ("gemma2", ((0, 2), (1, 3))),
        ("deepseek_v3", ((0,), (1, 2, 3))),
        ("nemotron_h", ()),  # transformers has no plan of stages for it
    ],
)
def test_kinds_of_layers(family: str, kinds: tuple[tuple[int, ...], ...]) -> None:
    model = tiny_model_of(family)
    assert kinds_of_layers(model, describe_model(model)) == kinds


def test_layers_of_other_widths_are_of_other_kinds() -> None:
    model = tiny_model(FAMILY)
    description = describe_model(model)
    model.model.layers[2].mlp.up_proj = torch.nn.Linear(model.config.hidden_size, 9)
    assert kinds_of_layers(model, description) == ((0, 1, 3), (2,))


def test_layers_alike_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "_Layer", None)  # none is made
    assert time_layers(tiny_model_of("llama"), 8, ALONE) == ()


def test_a_layer_of_each_kind_runs_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran = timed._Layer.run, []

    def counted(layer: timed._Layer) -> None:
        run(layer)
        trained = [p for p, _ in layer._replica.parameters if any(p is q for q in layer._layer.parameters())]
        ran.append((layer._layer, all(p.grad is not None for p in trained), len(trained)))

    monkeypatch.setattr(timed._Layer, "run", counted)
    samples = time_layers(tiny_model_of("deepseek_v3").float(), 24, ALONE)
    assert [sample.layers for sample in samples] == [(0,), (1, 2, 3)]
    assert all(sample.lengths == (24,) and sample.seconds > 0 for sample in samples)
    assert len(ran) == 8  # two kinds, a round that warms up and one that counts, twice each
    assert len({id(layer) for layer, _, _ in ran}) == 2
    assert all(graded and count for _, graded, count in ran)


def test_seconds_of_layers_decide_the_cut() -> None:
    calibration = calibrated({(0, 1, 3): 1e-3, (2,): 9e-3})
    assert calibration.layer_weights == pytest.approx((1 / 3, 1 / 3, 3, 1 / 3))
    costs = calibration.stage_costs((100, 100, 100, 100))  # whatever parameters say
    assert costs.layers == pytest.approx([1e6, 1e6, 9e6, 1e6], rel=1e-3)  # nanoseconds
    assert costs.head == pytest.approx(0, abs=1e4)
    assert costs.stages(2) == (range(2), range(2, 4))
    assert costs.stages(3) == (range(2), range(2, 3), range(3, 4))
    with pytest.raises(HotspaConfigError, match="a calibration of 4 layers for a model of 5"):
        calibration.stage_costs((100,) * 5)


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("heavy", [3e-3, 11e-3])
def test_the_slowest_stage_is_that_of_the_best_of_all_cuts(place: int, heavy: float) -> None:
    seconds = [heavy if layer == place else 1e-3 + 1e-4 * (layer % 2) for layer in range(8)]
    calibration = calibrated({(index,): s for index, s in enumerate(seconds)})
    costs = calibration.stage_costs((7, 1, 7, 1, 7, 1, 7, 1))
    head = costs.head / costs.layers[0] * seconds[0]

    def slowest(cut: tuple[range, ...]) -> float:
        return max(sum(seconds[i] for i in stage) + (head if stage.stop == 8 else 0) for stage in cut)

    for pp in (2, 3, 4):
        assert slowest(costs.stages(pp)) <= 1.001 * min(slowest(cut) for cut in cuts(8, pp))


def test_copies_of_few_layers_are_as_deep_as_their_layers_weigh() -> None:
    # a mean layer of 1 ms whose first takes a fifth of that; the ends take 0.2 ms
    seconds = [0.2e-3, *[3.8e-3 / 3] * 3]
    plain = calibrated({(0, 1, 2, 3): 1e-3})
    samples = tuple(
        Sample(1, count, lengths, (sum(seconds[:count]) + 0.2e-3) * sum(lengths) / 512, with_ends=True)
        for count in (1, 3)
        for lengths in ((8,), (64,), (256,), (32, 32, 32), (512,))
    )
    told = replace(
        plain, samples=samples, layers=(LayerSample((0,), LENGTHS, 1.0), LayerSample((1, 2, 3), LENGTHS, 19 / 3))
    )
    assert told.depth(1) == pytest.approx(0.2)
    assert told.depth(4) == pytest.approx(4)
    layers, ends = told.fitted
    assert layers[1].of(LENGTHS) == pytest.approx(1e-3)
    assert ends[1].of(LENGTHS) == pytest.approx(0.2e-3)
    # without them the ends vanish: what the first layer lacks is taken from them
    assert replace(told, layers=()).fitted[1][1].of(LENGTHS) < 0.1e-3
    # a whole phase of the copy is predicted as it was measured
    phase = PhaseSample("dp2", 3, (((512,),), ((512,),)), sum(seconds[:3]) + 0.2e-3)
    vector = describe_model(tiny_model(FAMILY), None).vector
    sizes = ModelSizes(describe_model(tiny_model(FAMILY), None).shape, "float32", vector=vector)
    factors = replace(told, phases=(phase,)).time_model(sizes).phase_factors
    assert factors[1, 1, 1] == pytest.approx(1)


def test_files_with_layers_and_without(tmp_path: Path) -> None:
    calibration = calibrated({(0, 1, 3): 1e-3, (2,): 9e-3})
    path = tmp_path / "calibration.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert "layers alone, 512 tokens: 1 ms (3 like layer 0), 9 ms (1 like layer 2)" in calibration_text(calibration)
    data = json.loads(path.read_text())
    for wrong, message in (
        ([{"layers": [0, 2], "lengths": [8], "seconds": 1.0}], "instead of each layer once"),
        ([{"layers": [0], "lengths": [8], "seconds": 0}], "layers.0..seconds is 0"),
        ([{"layers": [], "lengths": [8], "seconds": 1.0}], "instead of each layer once"),
        ([{"layers": [0], "seconds": 1.0}], "'lengths' is missing"),
    ):
        path.write_text(json.dumps({**data, "layers": wrong}))
        with pytest.raises(HotspaConfigError, match=message):
            Calibration.load(path)
    del data["layers"]  # as it was before layers were timed
    path.write_text(json.dumps(data))
    earlier = Calibration.load(path)
    assert earlier.layers == ()
    assert earlier.layer_weights == ()
    assert earlier.stage_costs((1, 1, 4, 1)).stages(3) == (range(2), range(2, 3), range(3, 4))
    assert "layers alone" not in calibration_text(earlier)


# -- the cut that follows -------------------------------------------------------------------------------------------------


HEAVY = StageCosts((9, 1, 1, 1))
PP2 = Strategy(pp=2)


def test_seconds_of_a_calibration_become_costs() -> None:
    model = tiny_model(FAMILY)
    calibration = made_calibration(model, 2, {1: Cost(b=1e-6), 2: Cost(b=6e-7)}, hop=Hop(1e-5, 1e-9))
    costs = calibration.stage_costs((100, 100, 300, 100))
    tokens = max(sum(sample.lengths) for sample in calibration.samples)
    layer = tokens * 1e-6 / 1e-9  # tp 1, nanoseconds
    assert costs.layers == pytest.approx([layer * share for share in (2 / 3, 2 / 3, 2, 2 / 3)], rel=1e-3)
    assert costs.sends == (round((1e-5 + 1e-9 * tokens) / 1e-9),) * 3
    assert costs.head == pytest.approx(0, abs=layer / 100)  # its ends are free
    assert costs.stages(2) == (range(2), range(2, 4))
    assert costs == calibration.stage_costs((100, 100, 300, 100))


def test_one_cut_everywhere() -> None:
    model = tiny_model(FAMILY)
    description = describe_model(model, None)
    by_count, vector = description.vector, description.vector.with_measured(HEAVY)
    cut = HEAVY.stages(2)
    assert cut == (range(1), range(1, 4)) != by_count.stage_costs.stages(2)
    assert [stage_of_unit(vector, PP2, layer) for layer in range(4)] == [0, 1, 1, 1]
    sizes = ModelSizes(description.shape, "float32", vector=vector)
    assert sizes.layers_of_stages(2) == cut
    assert [stage.num_layers for stage in sizes.stages(PP2)] == [1, 3]
    calibration = made_calibration(model, 2, {1: Cost(b=1e-6)})
    assert calibration.time_model(sizes).cut == HEAVY
    assert calibration.time_model(replace(sizes, vector=by_count)).cut == by_count.stage_costs
    first, second = calibration.time_model(sizes).stage_costs(PP2)
    assert first.b == pytest.approx(3 * second.b, rel=1e-3)  # layers are weighed by what was measured
    held = [sum(strategy_layout(vector, PP2).rank_sizes(rank)) for rank in range(2)]
    assert held[0] < sum(strategy_layout(by_count, PP2).rank_sizes(0))
    shapes = ModelSizes(description.shape, measured=HEAVY)  # the arithmetic without a vector
    assert shapes.layers_of_stages(2) == cut
    assert [stage.num_layers for stage in shapes.stages(PP2)] == [1, 3]
    memory = MemoryModel(sizes, 2)
    assert memory.arena_bytes(PP2) > MemoryModel(replace(sizes, vector=by_count), 2).arena_bytes(PP2)
    assert sum(held) == sum(sum(strategy_layout(by_count, PP2).rank_sizes(rank)) for rank in range(2))


def test_a_cut_moves_nothing_in_the_vector_and_changes_its_digest() -> None:
    by_count = describe_model(tiny_model(FAMILY), None).vector
    vector = by_count.with_measured(HEAVY)
    assert (vector.specs, vector.segments) == (by_count.specs, by_count.segments)
    assert vector.digest() != by_count.digest()  # ranks that cut otherwise are told apart
    assert vector.with_measured(None) == by_count
    with pytest.raises(HotspaConfigError, match="costs of 3 layers for a model of 4"):
        by_count.with_measured(StageCosts((1, 1, 1)))


def test_a_plan_with_a_calibration_cuts_as_training_does(tmp_path: object) -> None:
    model = tiny_model(FAMILY)
    calibration = made_calibration(model, 2, {1: Cost(b=1e-6), 2: Cost(b=6e-7)}, hop=Hop(1e-5, 1e-9))
    calibration.save(f"{tmp_path}/calibration.json")
    config = f"{tmp_path}/config.json"
    with open(config, "w") as file:
        json.dump(model.config.to_dict(), file, default=str)
    setup = Setup.read(config, "1x2", calibration=f"{tmp_path}/calibration.json", dtype="float32")
    description = describe_model(model, torch.float32)
    trained = calibration.stage_costs(description.vector.layer_costs)
    assert setup.sizes.measured is not None
    for pp in (2, 4):
        assert setup.sizes.layers_of_stages(pp) == trained.stages(pp)
