"""The engine under every way to switch: planners, nodes, a second source, tiny staging, overlap. Always the same sums."""

import pytest
import torch

from hf_hotspa.errors import HotspaConfigError
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

POOL = "dp4:8@16,dp2tp2:16@24,tp2pp2:24@32,tp4:40,pp4:60"


def steps(rank, world_size, family, buckets, settings):
    """Two mini-batches with an SGD step between: by options of the engine the worst error against the plain model."""
    model = tiny_model(family, torch.float64)
    plain, mini_batches = torch.optim.SGD(model.parameters(), lr=0.1), []
    for seed in range(2):
        rows = random_rows(24, model.config.vocab_size, longest=60, seed=seed)
        mini_batches.append((rows, *shared_reference(model, rows)))
        for name, parameter in model.named_parameters():
            parameter.grad = mini_batches[-1][2][name].clone()
        plain.step()
    return [in_one_way(tiny_model(family, torch.float64), buckets, mini_batches, options) for options in settings]


def in_one_way(model, buckets, mini_batches, options):
    engine = make_engine(model, buckets, **options)
    assert engine._switching.pool.second_source == options["second_source"]
    optimizer = torch.optim.SGD([p for _, p in engine.named_parameters()], lr=0.1)
    worst = 0.0
    for rows, loss, gradients in mini_batches:
        error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
        worst = max(worst, error)
        optimizer.step()
    switching = engine._switching
    assert switching.executor.reserved_bytes == switching.forecast.switch
    assert switching.arenas.num_bytes <= switching.forecast.weights + switching.forecast.gradients
    engine.close()
    return worst


OVERLAPS = [{"overlap_load": on, "overlap_return": on} for on in (False, True)]  # each alone: test_overlap.py


def ways(half: bool) -> list[dict[str, object]]:
    """Half of the eight ways; in either half every two options meet in all four combinations."""
    return [
        {"planner": planner, "second_source": second, "devices_per_node": 2, "staging_bytes": 1 << 13, **overlap}
        for planner in ("relay", "algorithm1")
        for second in (False, True)
        for i, overlap in enumerate(OVERLAPS)
        if ((planner == "relay") ^ second ^ (i == 1)) is half
    ]


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_way_to_switch_is_exact(half):
    """On two emulated nodes of two ranks, in rounds of a few KiB."""
    for found in run_ranks(4, steps, "qwen3_qk_norm_tied", POOL, ways(half)):
        assert len(found) == 4
        assert max(found) <= 1e-11, found


@pytest.mark.slow
def test_nodes_of_three_and_one():
    options = {"devices_per_node": 3, "second_source": True}
    assert max(worst for (worst,) in run_ranks(4, steps, "llama_gqa_bias", POOL, [options])) <= 1e-11


@pytest.mark.parametrize(
    "options", [{"planner": "fastest"}, {"memory_limit": 0}, {"switch_timeout_s": 0.0}, {"pipeline_schedule": "x"}]
)
def test_options_that_cannot_be_meant_are_refused(options):
    with pytest.raises(HotspaConfigError):
        make_engine(tiny_model("llama_gqa_bias"), "dp1:60@80", **options)


def moved(rank, world_size, pools, options):
    """By pool the worst error of two mini-batches; of each phase the bytes that were loaded and given back, and its way of cp."""
    model, found = tiny_model("qwen3_qk_norm_tied", torch.float64), []
    mini_batches = [random_rows(24, model.config.vocab_size, longest=60, seed=seed) for seed in range(2)]
    expected = [shared_reference(model, rows) for rows in mini_batches]
    for buckets in pools:
        engine, worst, phases = make_engine(model, buckets, **options), 0.0, []
        for rows, of_plain in zip(mini_batches, expected, strict=True):
            error, report = worst_error(engine, make_mini_batch(engine, rows), *of_plain)
            worst = max(worst, error)
            phases.append([(p.strategy, p.load_bytes, p.return_bytes, p.context) for p in report.phases])
        engine.close()
        found.append((worst, phases))
    return found


@pytest.mark.parametrize(
    ("second_source", "overlap"),
    [
        (False, OVERLAPS[0]),
        pytest.param(True, OVERLAPS[1], marks=pytest.mark.slow),
        pytest.param(False, OVERLAPS[1], marks=pytest.mark.slow),
        pytest.param(True, OVERLAPS[0], marks=pytest.mark.slow),
    ],
)
def test_phases_of_equal_layout_share_one_load_and_one_return(second_source, overlap):
    hot, options = "dp4:8@16,tp4:16@24,dp4+rc:60", {"second_source": second_source, **overlap}
    by_rank = run_ranks(4, moved, ("dp4:60", hot), options)
    (of_dp,) = {load + back for (_, phases), _ in by_rank for ((_, load, back, _),) in phases}
    for _, (worst, mini_batches) in by_rank:
        assert worst <= 1e-11
        for phases in mini_batches:
            own = [(load, back) for name, load, back, _ in phases if name.startswith("dp4")]
            assert [name for name, *_ in phases] in (
                ["dp4", "dp4+rc", "tp4"],
                ["tp4", "dp4", "dp4+rc"],
            )
            assert (own[0][1], own[1][0]) == (0, 0)
            assert own[0][0] + own[1][1] == of_dp
