"""Named terms: what a feature's terms change in the bytes of a rank and in the seconds of a stage."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_hotspa.costs import memory, time
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.model_config import load_model
from hf_hotspa.costs.sizes import MasterSizes, ModelSizes
from hf_hotspa.costs.terms import LOSS, Cost, MemoryTerm, Rate, Terms, TimeTerm
from hf_hotspa.seam import hooks
from hf_hotspa.strategy import Bucket, Strategy

SIZES = ModelSizes(load_model("llama2-7b").shape)
PIPELINE = Strategy(2, 2, 2)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds the terms of one more feature."""

    def add(**terms: Any) -> None:
        for module in (memory, time):
            monkeypatch.setattr(module, "hooks", lambda name: (*hooks(name), Terms(**terms)))

    return add


def test_bytes_belong_to_the_part_that_a_term_names(adding: Callable[..., None]) -> None:
    before = MemoryModel(SIZES, 8).stages(Bucket(PIPELINE, 0, 1000))
    adding(
        memory=(
            MemoryTerm("kept", "activations", lambda stage: Rate(2.0, 3.0, 5.0)),
            MemoryTerm("on the first stage", "weights", lambda stage: None if stage.is_last else Rate(fixed=7.0)),
            MemoryTerm("by packs", "weights", lambda stage: lambda packs: 11.0 * (packs.number or 0)),
        )
    )
    model = MemoryModel(SIZES, 8)
    for one, other in zip(before, model.stages(Bucket(PIPELINE, 0, 1000)), strict=True):
        more = {name: other.parts()[name] - number for name, number in one.parts().items()}
        assert more.pop("activations") == 2 * one.held_tokens + 3 * 1000 + 5
        assert more.pop("weights") == (0 if one.stage else 7)
        assert set(more.values()) == {0}
    assert model.breakdown(PIPELINE, 1000, num_packs=4).weights == before[0].weights + 7 + 44
    limit = model.breakdown(PIPELINE, 1000, num_packs=4).total
    assert model.largest_pack(PIPELINE, limit + 1, num_packs=4) == 1000


def test_of_a_moment_only_what_exceeds_the_loss_counts(adding: Callable[..., None]) -> None:
    first, last = MemoryModel(SIZES, 8).stages(Bucket(Strategy(2, 2, 2, rc=1), 0, 1000))
    one_pack = MemoryModel(SIZES, 8).breakdown(Strategy(4, 2), 1000).logits
    adding(memory=(MemoryTerm("for a while", "activations", lambda stage: Rate(fixed=one_pack / 2), "a while"),))
    found = MemoryModel(SIZES, 8).stages(Bucket(Strategy(2, 2, 2, rc=1), 0, 1000))
    assert found[0].activations == first.activations + one_pack / 2
    assert found[1].activations == last.activations
    assert LOSS in {term.moment for term in memory.TERMS}


def test_a_master_store_of_another_form_replaces_the_usual(adding: Callable[..., None]) -> None:
    adding(master=lambda stage: MasterSizes(1, 2, 3) if stage.options.switch_bytes == 1000 else None)
    own = MemoryModel(SIZES, 8, MemoryOptions(switch_bytes=1000)).breakdown(PIPELINE, 10)
    assert (own.master_weights, own.master_gradients, own.optimizer) == (1, 2, 3)
    usual = MemoryModel(SIZES, 8).breakdown(PIPELINE, 10)
    assert usual.master_weights == SIZES.master(8).weight_bytes


def test_seconds_of_a_layer(adding: Callable[..., None]) -> None:
    hardware = load_hardware("a100-80g")
    before = CostModel.of_hardware(hardware, SIZES, MemoryOptions(), 8).time
    plain = before.stage_costs(PIPELINE)
    adding(time=(TimeTerm("more", lambda time, strategy: Cost(c=strategy.tp)),))
    after = CostModel.of_hardware(hardware, SIZES, MemoryOptions(), 8).time
    [first, last] = after.stage_terms(PIPELINE)
    assert first["more"] == last["more"] == Cost(c=2 * 16)
    assert {"layers", "exchanges of cp ranks", "embedding"} <= first.keys()
    assert "head" in last
    assert "head" not in first
    for one, other in zip(plain, after.stage_costs(PIPELINE), strict=True):
        assert (other.b - one.b, other.c - one.c) == pytest.approx((0, 2 * 16))
