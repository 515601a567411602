"""Layers of pipelines that are cut by measured seconds, and layers and columns of MLPs that are divided by the speed of devices,
and evenly again: exact, and seen by nothing but the next load."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError, PlanMismatchError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.pass_through import PassThrough
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, random_rows
from tests.slow_ranks import Slow, check_resumed, resumed_runs, watched_runs
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

Cut = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Relative step times of stages by depth, and of ranks."""
EVEN: Cut = ((), ())
SLOW_SECOND: Cut = (((100, 400),), ())


def layers(engine: Any) -> dict[str, int]:
    """The layers of this rank, by strategy."""
    return {
        str(strategy): sum(not isinstance(layer, PassThrough) for layer in runner.replica.layers)
        for strategy, runner in engine.phases.items()
    }


def columns(engine: Any) -> dict[str, set[int]]:
    """The columns of MLPs on this rank, by strategy."""
    return {
        str(strategy): {
            slot.shape[1] for slot in runner.replica.slots if slot.spec.name.endswith(("down_proj.weight", "down_proj.base_layer.weight"))
        }
        for strategy, runner in engine.phases.items()
    }  # fmt: skip


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the collectives of agreement."""
    calls = list[int]()

    def counting(plain: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return plain(*args, **kwargs)

        return called

    with patch.multiple(dist, all_gather=counting(dist.all_gather), barrier=counting(dist.barrier)):
        yield calls


class Recut(NamedTuple):
    changed: bool
    again: bool  # whether the same once more changes anything
    num_collectives: int
    error: float
    here: Any
    shares: list[torch.Tensor]  # gradients of this rank's part of the master store


def recut(family: str, buckets: str, cut: Cut, here: Callable[[Any], Any], options: dict[str, Any]) -> list[Recut]:
    """What is there, trained twice and evaluated, with the even cut, with another, and with the even one again."""
    name, _, lora = family.partition("+")
    model: Any = tiny_lora(name, torch.float64) if lora else tiny_model(name, torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    gradients = {name: gradient for name, gradient in gradients.items() if name in names}
    engine = make_engine(model, buckets, **options)
    mini_batch = make_mini_batch(engine, rows)
    untouched = {s: runner for s, runner in engine.phases.items() if s.tp == 1 and s.pp == 1}
    found = []
    for step_times, of_ranks in (EVEN, cut, EVEN):
        with counted() as collectives:
            changed = engine.recut(step_times, rank_times=of_ranks)
        again = engine.recut(step_times, rank_times=of_ranks)
        errors = [worst_error(engine, mini_batch, loss, gradients)[0] for _ in range(2)]
        with exact_in_double(torch.float64), engine.evaluation() as evaluation:
            evaluated = evaluation.run(mini_batch)
        errors.append(abs(evaluated.loss_sum / evaluated.num_labels - loss) / loss)
        engine.write_back(model)  # whole weights come from wherever they are
        shares = [g.clone() for g in engine.master.gradients if g is not None]
        found.append(Recut(changed, again, len(collectives), max(errors), here(engine), shares))
    assert all(engine.phases[s] is runner for s, runner in untouched.items())
    engine.close()
    return found


def recuts(rank: int, world_size: int, cases: list[Any], here: Callable[[Any], Any]) -> list[list[Recut]]:
    return [recut(family, buckets, cut, here, options) for family, buckets, cut, options in cases]


def check(found: list[Recut]) -> tuple[Any, Any]:
    """Whether a cut is exact and costs one collective; returns what is here of the even one and of the other."""
    assert [each.changed for each in found] == [False, True, True]
    assert not any(each.again for each in found)
    assert [each.num_collectives for each in found] == [0, 1, 1]  # of agreement
    assert max(each.error for each in found) <= 1e-11
    even, uneven, back = found
    assert even.here == back.here
    for other in (uneven, back):
        for own, first in zip(other.shares, even.shares, strict=True):
            assert torch.allclose(own, first, rtol=1e-9, atol=1e-12)  # what a checkpoint holds lies where it lay
    return even.here, uneven.here


OF_LAYERS: list[Any] = [
    ("llama_gqa_bias", "dp2:16@20,pp2+rc:40@44", SLOW_SECOND, {"second_source": True, "pipeline_schedule": "1f1b"}),
    ("llama_gqa_bias", "pp2+z2:16@20,pp2+z3:40@44", SLOW_SECOND, {"overlap_load": True}),
]
MORE_OF_LAYERS: list[Any] = [("qwen3_qk_norm_tied", "pp2:16@20,dp2:40", SLOW_SECOND, {})]


@pytest.mark.parametrize("cases", [OF_LAYERS, pytest.param(MORE_OF_LAYERS, marks=pytest.mark.slow)])
def test_every_cut_of_layers_is_exact(cases: list[Any]) -> None:
    for rank, of_cases in enumerate(run_ranks(2, recuts, cases, layers)):
        for found in of_cases:
            even, uneven = ({n for name, n in here.items() if "pp2" in name} for here in check(found))
            assert even != uneven == {3 if rank == 0 else 1}


MORE: list[Any] = [
    ("gemma2_soft_caps", "tp2+z3:16@20,tp2+z2:40@44", ((), (100, 130)), {"overlap_load": True}),
    ("llama_gqa_bias", "tp2:16@20,dp2:40", ((), (100, 400)), {}),
]
TWO: list[Any] = [
    ("phi3_fused", "tp2+sp:16@20,tp2+rc:40", ((), (250, 100)), {"second_source": True}),
    ("llama_gqa_bias+lora", "tp2:16@20,dp2:40", ((), (300, 100)), {}),
]
FOUR: list[Any] = [
    # one slow device: a place of tp4 whose shards are in another order, one replica of two, one stage, one place of cp
    ("llama_gqa_bias", "tp4:12@20,dp2tp2:20@24,tp2pp2:40@44", ((), (100, 400, 100, 100)), {}),
    ("llama_uneven", "tp4:20@24,cp2tp2:40@44", ((), (100, 100, 180, 100)), {"second_source": True}),
    # layers of the slow stage, too
    ("qwen3_qk_norm_tied", "tp2pp2:20@24,tp4+sp:40@44", (((300, 100),), (100, 800, 100, 100)), {}),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, TWO), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, MORE), (4, FOUR)))],
)
def test_every_division_of_columns_is_exact(world_size: int, cases: list[Any]) -> None:
    for rank, of_cases in enumerate(run_ranks(world_size, recuts, cases, columns)):
        for (_, _, (_, slow), _), found in zip(cases, of_cases, strict=True):
            even, uneven = check(found)
            for strategy, own in uneven.items():
                usual, tp = even[strategy], Strategy.parse(strategy).tp
                mates = [r for r in range(world_size) if r // tp == rank // tp]
                if tp == 1 or all(slow[mate] == 100 for mate in mates):
                    assert own == usual
                elif slow[rank] > 100:
                    assert max(own) < min(usual)
                else:
                    assert max(own) > min(usual)


REFUSED: list[tuple[str, Cut, list[Cut], Callable[[Any], Any]]] = [
    ("pp2:40", SLOW_SECOND, [(((500, 100),), ()), (((400, 100),), ())], layers),
    ("tp2:40", ((), (100, 800)), [((), (400, 100)), ((), (300, 100))], columns),
]
"""Strategies, a cut that needs more memory, and what two ranks do not agree on."""


def refusals(rank: int, world_size: int) -> tuple[list[tuple[float, str]], list[float]]:
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows, found = random_rows(11, model.config.vocab_size, longest=40), []
    reference = shared_reference(model, rows)
    for buckets, (step_times, of_ranks), others, here in REFUSED:
        plain, need = make_engine(model, buckets), []
        for cut in (EVEN, (step_times, of_ranks)):
            plain.recut(cut[0], rank_times=cut[1])
            need.append(plain.agreement.gather([float(plain._switching.forecast.total)]).max())
        with pytest.raises(PlanMismatchError):
            plain.recut(others[rank][0], rank_times=others[rank][1])
        plain.close()
        assert need[1] > need[0]  # of the larger share
        engine = make_engine(model, buckets, memory_limit=int(need[0]))
        before = here(engine)
        with pytest.raises(DeviceMemoryError) as error:
            engine.recut(step_times, rank_times=of_ranks)
        with pytest.raises(DeviceMemoryError, match="given by hand"):
            engine.recut(*others[1][:1], partial(lambda of, _: said(of), rank), others[1][1])
        worst, _ = worst_error(engine, make_mini_batch(engine, rows), *reference)
        assert here(engine) == before
        engine.close()
        found.append((worst, str(error.value)))
    return found, dropped_losses(rows)


def said(rank: int) -> None:
    if rank == 1:
        raise DeviceMemoryError("given by hand")


def dropped_losses(rows: list[dict[str, Any]]) -> list[float]:
    """The loss of one mini-batch with dropout in front of adapters, with even and uneven shares."""
    engine = make_engine(tiny_lora("llama_gqa_bias", torch.float64, lora_dropout=0.4), "tp2:40")
    mini_batch, losses = make_mini_batch(engine, rows), []
    for of_ranks in ((), (100, 400)):
        engine.recut((), rank_times=of_ranks)
        with exact_in_double(torch.float64):
            losses += [engine.forward_backward(mini_batch, step=step).loss for step in range(2)]
    engine.close()
    return losses


def test_a_cut_that_one_rank_cannot_hold_is_refused_by_all_and_the_old_one_trains_on() -> None:
    for found, losses in run_ranks(2, refusals):
        for worst, text in found:
            assert worst <= 1e-11
            assert "the strategies need" in text
        assert losses[0] != losses[1]  # other masks
        assert losses[2:] == pytest.approx(losses[:2], rel=1e-11)  # a column is dropped wherever it lies


# -- in training --------------------------------------------------------------------------------------------------------

STEPS = 9
SAID = {"token_s": 1.0, "by_weights": True}


def sizes_here(engine: Any) -> tuple[list[int], list[int]]:
    return list(layers(engine).values()), [width for widths in columns(engine).values() for width in widths]


@pytest.mark.parametrize(
    ("strategy", "times", "points"),
    [
        ("pp2:60", 4.0, (4, 6)),
        pytest.param("pp2:60", 4.0, (3, 8), marks=pytest.mark.slow),
        pytest.param("tp2:60", 3.0, (3, 4, 6, 8), marks=pytest.mark.slow),
    ],
)
def test_balance_divides_while_a_rank_is_slow_and_goes_on_bit_for_bit(
    strategy: str, times: float, points: tuple[int, ...], tmp_path: Path
) -> None:
    """From checkpoints between the onset and the cut (3, 4), in the uneven cut (6), and after the recovery (8)."""
    common = {"max_steps": STEPS, "hotspa_strategies": strategy, "hotspa_stragglers": "balance"}
    runs = resumed_runs(tmp_path, common, points)
    runs += [(str(tmp_path / "even"), None, {**common, "hotspa_stragglers": "watch", "save_strategy": "no"})]
    first, second = run_ranks(2, watched_runs, runs, Slow(2, 6, times), sizes_here, SAID)
    balanced, *resumed, even = first
    assert balanced.slow == even.slow == [()] * 3 + [(1,)] * 4 + [()] * 2  # two mini-batches after onset and recovery
    kind = 0 if "pp" in strategy else 1
    own, others, evenly = ([sizes[kind] for sizes in run.seen] for run in (balanced, second[0], even))
    assert [step for step, (a, b) in enumerate(zip(own, evenly, strict=True), 1) if a != b] == [5, 6, 7, 8]
    assert all(size == own[4] for size in own[4:8])  # shares, and what is known of devices with them, stay
    assert own[4] > others[4]
    assert [a + b for (a,), (b,) in zip(own, others, strict=True)] == [2 * evenly[0][0]] * STEPS
    for step, loss in balanced.losses.items():
        assert abs(loss - even.losses[step]) <= 1e-5 * even.losses[step]
    for point, run in zip(points, resumed, strict=True):
        assert run.seen == balanced.seen[point:]
    check_resumed(tmp_path, points, balanced, *resumed)


def test_a_slow_node_that_holds_a_whole_stage_is_found_and_has_fewer_layers(tmp_path: Path) -> None:
    """Both ranks of the second stage of dp2pp2: nobody who does the same is faster."""
    options = {"max_steps": STEPS, "hotspa_strategies": "dp2pp2:60", "hotspa_mini_batch_size": 12}
    runs = [(str(tmp_path), None, {**options, "hotspa_stragglers": "balance", "save_strategy": "no"})]
    found = [run for (run,) in run_ranks(4, watched_runs, runs, Slow(2, 6, ranks=(2, 3)), layers, SAID)]
    assert all(run.slow == [()] * 3 + [(2, 3)] * 4 + [()] * 2 for run in found)
    seen = [[n for here in run.seen for n in here.values()] for run in found]
    assert seen == 2 * [[2] * 4 + [3] * 4 + [2]] + 2 * [[2] * 4 + [1] * 4 + [2]]


# -- stages by measured seconds -------------------------------------------------------------------------------------------

FAMILY = "qwen3_qk_norm_tied"
HEAVY = {
    "first": StageCosts((9, 1, 1, 1), sends=(1, 1, 1)),
    "last": StageCosts((1, 1, 1, 9)),
    "head": StageCosts((2, 2, 2, 2), head=4),
}
CUTS = {"first": [1, 3], "last": [3, 1], "head": [3, 1]}
"""Layers of the stages of pp2."""


BUCKETS = ("pp2:40@44", "dp2:8@24,pp2:40@20")

Found = list[tuple[str, float, list[int], list[torch.Tensor]]]
"""For each kind of costs, and by count: the worst error, layers of this rank's stages, and its masters' gradients."""


def with_costs(rank: int, world_size: int) -> tuple[list[Found], str, str]:
    """What is found under each pool; what is raised where ranks disagree, and where the costs are of another model."""
    model = tiny_model(FAMILY, torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    of_pools = list[Found]()
    for buckets in BUCKETS:
        of_pools.append([])
        for name, costs in {**HEAVY, "by count": None}.items():
            engine = make_engine(model, buckets, stage_costs=costs)
            error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
            shares = [g.clone() for g in engine.master.gradients if g is not None]
            of_pools[-1].append((name, error, list(layers(engine).values()), shares))
            engine.close()
    other = HEAVY["first"] if rank else HEAVY["last"]
    with pytest.raises(PlanMismatchError) as differs:
        make_engine(model, "pp2:40", stage_costs=other)
    with pytest.raises(HotspaConfigError) as wrong:
        make_engine(model, "pp2:40", stage_costs=replace(other, layers=(1, 2, 3), sends=()))
    return of_pools, str(differs.value), str(wrong.value)


def test_every_cut_is_exact_masters_are_divided_alike_and_other_costs_are_refused() -> None:
    ranks = run_ranks(2, with_costs)
    for pool in range(len(BUCKETS)):
        of_ranks = [of_pools[pool] for of_pools, _, _ in ranks]
        for at, (name, *_) in enumerate(of_ranks[0]):
            stages = [found[at][2][-1] for found in of_ranks]
            assert stages == CUTS.get(name, stages)
            assert sum(stages) == 4
            for found in of_ranks:
                assert found[at][1] <= 1e-11, name
                for share, by_count in zip(found[at][3], found[-1][3], strict=True):
                    assert share.shape == by_count.shape  # what a checkpoint holds lies where it lay
                    assert torch.allclose(share, by_count, rtol=1e-9, atol=1e-12)
    for _, differs, wrong in ranks:
        assert "stage_costs" in differs
        assert "costs of 3 layers for a model of 4" in wrong
