"""A cut by measured seconds is one cut: of layouts, time model, memory model and plans alike."""

import json
from dataclasses import replace

import pytest
import torch

from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.placement import stage_of_unit, strategy_layout
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.specs import describe_model
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy
from tests.calibrations import made_calibration
from tests.families import tiny_model

FAMILY = "llama_gqa_bias"
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
