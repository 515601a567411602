"""Pipelines whose layers are cut by the speed of devices, and evenly again: exact, and seen by nothing but the next load."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_hotspa.errors import DeviceMemoryError, PlanMismatchError
from hf_hotspa.model.pass_through import PassThrough
from tests.balanced_runs import SLOW_FROM, SLOW_UNTIL, STEPS, balanced_runs
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import contents, newest
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

SLOW_SECOND = ((100, 400),)


def num_layers(engine: Any) -> dict[str, int]:
    return {
        str(strategy): sum(not isinstance(layer, PassThrough) for layer in runner.replica.layers)
        for strategy, runner in engine.phases.items()
    }


def recut_steps(rank: int, world_size: int, family: str, buckets: str, options: dict[str, Any]) -> list[Any]:
    """Errors, layers here and gradients of the masters under the even cut, one by speed, and the even one again."""
    model = tiny_model(family, torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    engine = make_engine(model, buckets, **options)
    mini_batch = make_mini_batch(engine, rows)
    untouched = {s: runner for s, runner in engine.phases.items() if s.pp == 1}
    found = []
    for step_times in ((), SLOW_SECOND, ()):
        with counted() as collectives:
            changed = engine.recut(step_times)
        again = engine.recut(step_times)
        errors = [worst_error(engine, mini_batch, loss, gradients)[0] for _ in range(2)]
        shares = [g.clone() for g in engine.master.gradients if g is not None]
        found.append((changed, again, len(collectives), max(errors), num_layers(engine), shares))
    assert all(engine.phases[s] is runner for s, runner in untouched.items())
    engine.close()
    return found


class counted:  # reads as a statement
    """Counts the collectives of agreement."""

    def __enter__(self) -> list[int]:
        self.calls, self.gather, self.barrier = list[int](), dist.all_gather, dist.barrier

        def counting(plain: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(1)
                return plain(*args, **kwargs)

            return call

        dist.all_gather, dist.barrier = counting(self.gather), counting(self.barrier)
        return self.calls

    def __exit__(self, *_: object) -> None:
        dist.all_gather, dist.barrier = self.gather, self.barrier


@pytest.mark.parametrize(
    ("family", "buckets", "options"),
    [
        pytest.param("qwen3_qk_norm_tied", "pp2:16@20,dp2:40", {}, marks=pytest.mark.slow),
        ("llama_gqa_bias", "dp2:16@20,pp2+rc:40@44", {"second_source": True, "pipeline_schedule": "1f1b"}),
        ("llama_gqa_bias", "pp2+z2:16@20,pp2+z3:40@44", {"overlap_load": True}),
    ],
)
def test_every_cut_is_exact_and_costs_one_collective(family: str, buckets: str, options: dict[str, Any]) -> None:
    ranks = run_ranks(2, recut_steps, family, buckets, options)
    for rank, found in enumerate(ranks):
        assert [row[0] for row in found] == [False, True, True]
        assert not any(row[1] for row in found)
        assert [row[2] for row in found] == [0, 1, 1]
        assert max(row[3] for row in found) <= 1e-11
        pipelines = [{layers for name, layers in row[4].items() if "pp2" in name} for row in found]
        assert pipelines[0] == pipelines[2]
        assert pipelines[1] == {3 if rank == 0 else 1}
        assert pipelines[0] != pipelines[1]
        for own, first in zip(found[1][5], found[0][5], strict=True):
            assert torch.allclose(own, first, rtol=1e-9, atol=1e-12)  # what a checkpoint holds lies where it lay


def refusals(rank: int, world_size: int) -> Any:
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    plain = make_engine(model, "pp2:40")
    need = [plain.agreement.gather([float(plain._switching.forecast.total)]).max()]
    plain.recut(SLOW_SECOND)
    need.append(plain.agreement.gather([float(plain._switching.forecast.total)]).max())
    with pytest.raises(PlanMismatchError):
        plain.recut(((400, 100),) if rank else ((500, 100),))
    plain.close()
    assert need[1] > need[0]
    engine = make_engine(model, "pp2:40", memory_limit=int(need[0]))
    before = num_layers(engine)
    with pytest.raises(DeviceMemoryError) as error:
        engine.recut(SLOW_SECOND)
    with pytest.raises(DeviceMemoryError, match="given by hand"):
        engine.recut(((400, 100),), lambda _: said(rank))
    mini_batch = make_mini_batch(engine, rows)
    worst, _ = worst_error(engine, mini_batch, loss, gradients)
    assert num_layers(engine) == before
    engine.close()
    return worst, str(error.value)


def said(rank: int) -> None:
    if rank == 1:
        raise DeviceMemoryError("given by hand")


def test_a_cut_that_one_rank_cannot_hold_is_refused_by_all_and_the_old_one_trains_on() -> None:
    for worst, text in run_ranks(2, refusals):
        assert worst <= 1e-11
        assert "the strategies need" in text


# -- in training --------------------------------------------------------------------------------------------------------


def is_slow(step: int, rank: int) -> float:
    return 4.0 if rank == 1 and SLOW_FROM <= step < SLOW_UNTIL else 1.0


def layers_here(engine: Any) -> list[int]:
    return list(num_layers(engine).values())


@pytest.mark.parametrize("points", [(4, 6), pytest.param((3, 8), marks=pytest.mark.slow)])
def test_balance_cuts_while_a_stage_is_slow_and_goes_on_bit_for_bit(points: tuple[int, ...], tmp_path: Any) -> None:
    """From checkpoints between the onset and the cut (3, 4), in the uneven cut (6), and after the recovery (8)."""
    common = {"max_steps": STEPS, "hotspa_strategies": "pp2:60", "hotspa_stragglers": "balance"}
    runs: list[Any] = [(str(tmp_path / "a"), None, common)]
    runs += [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), common) for p in points]
    runs += [(str(tmp_path / "even"), None, {**common, "hotspa_stragglers": "watch", "save_strategy": "no"})]
    by_rank = run_ranks(2, balanced_runs, runs, is_slow, layers_here)
    (losses, layers, slow), *resumed, (even, evenly, same) = by_rank[0]
    (_, others, _), *_ = by_rank[1]
    assert slow == same == [()] * 3 + [(1,)] * 4 + [()] * 2  # two mini-batches after onset and recovery
    assert [step for step, (a, b) in enumerate(zip(layers, evenly, strict=True), 1) if a != b] == [5, 6, 7, 8]
    assert set(layers[4:8]) == {3}
    assert [a + b for a, b in zip(layers, others, strict=True)] == [4] * STEPS
    assert all(abs(losses[step] - even[step]) <= 1e-5 * even[step] for step in losses)
    for point, (found, of_layers, _) in zip(points, resumed, strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > point}
        assert of_layers == layers[point:]
        assert contents(newest(tmp_path / f"b{point}")) == contents(newest(tmp_path / "a"))


def is_slow_node(step: int, rank: int) -> float:
    return 4.0 if rank >= 2 and SLOW_FROM <= step < SLOW_UNTIL else 1.0


def test_a_slow_node_that_holds_a_whole_stage_is_found_and_has_fewer_layers(tmp_path: Any) -> None:
    """Both ranks of the second stage of dp2pp2: nobody who does the same is faster."""
    options = {"max_steps": STEPS, "hotspa_strategies": "dp2pp2:60", "hotspa_mini_batch_size": 12}
    runs = [(str(tmp_path), None, {**options, "hotspa_stragglers": "balance", "save_strategy": "no"})]
    by_rank = [runs_of_rank[0] for runs_of_rank in run_ranks(4, balanced_runs, runs, is_slow_node, layers_here)]
    assert all(slow == [()] * 3 + [(2, 3)] * 4 + [()] * 2 for _, _, slow in by_rank)
    assert [layers for _, layers, _ in by_rank] == 2 * [[2] * 4 + [3] * 4 + [2]] + 2 * [[2] * 4 + [1] * 4 + [2]]
