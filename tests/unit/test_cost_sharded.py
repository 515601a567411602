"""What `+z2` and `+z3` hold and take by the cost models: two units in the place of all, and never faster for it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.engine.switching import arena_bytes, lay_out
from hf_hotspa.layout.placement import strategy_layout
from hf_hotspa.model.specs import describe_model
from hf_hotspa.plan.units import Units
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy, strategies_with_options
from tests.families import FAMILIES, tiny_model

SETUP = Setup.read("llama2-7b", "1x8", "a800-80g")
assert SETUP.hardware is not None
COST = CostModel.of_hardware(SETUP.hardware, SETUP.sizes, MemoryOptions(), 8)
LAYER = SETUP.sizes.shape.layer_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_by_the_vector_are_what_arenas_take(family):
    description = describe_model(tiny_model(family))
    vector, sizes = description.vector, ModelSizes(description.shape, "float32", vector=description.vector)
    dtypes = [getattr(torch, segment.dtype) for segment in vector.segments]
    for text in ("dp4+z3", "dp2tp2+z3", "dp2pp2+z2", "pp4+z3"):
        strategy = Strategy.parse(text)
        if strategy.unsupported_reason(description.shape):
            continue
        layout, rooms = strategy_layout(vector, strategy), Units(vector).rooms(strategy)
        held = [
            sum(
                arena_bytes([lay_out(layout.rank_sizes(rank), dtypes, shared)])
                for shared in (rooms.weights, rooms.gradients)
            )
            for rank in range(4)
        ]
        counted = max(stage.arena_bytes for stage in sizes.stages(strategy))
        assert counted <= max(held) <= counted + 4 * 64 * 2 * len(vector.segments)  # buffers are aligned
        whole = max(stage.arena_bytes for stage in sizes.stages(replace(strategy, z=0)))
        assert counted < whole if strategy.pp == 1 else counted <= whole  # a stage may have one layer


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sharding_is_never_predicted_to_be_faster(data):
    shape = SETUP.sizes.shape
    sharded = [s for s in strategies_with_options(8, shape) if s.z]
    strategy = data.draw(st.sampled_from(sharded))
    if data.draw(st.booleans()):
        strategy = replace(strategy, ck=512)
    whole = replace(strategy, z=0)
    pack = st.lists(st.integers(1, 4096), min_size=1, max_size=4)
    replicas = [data.draw(st.lists(pack, min_size=1, max_size=5)) for _ in range(strategy.dp)]
    switch = COST.switch_seconds([strategy, whole])
    seconds = {s: COST.time.phase_seconds(s, replicas, 8192) + switch[s] for s in (strategy, whole)}
    assert seconds[strategy] >= seconds[whole]
