"""MLPs whose columns are divided over tensor-parallel groups by the speed of devices, and evenly again: exact, and seen by
nothing but the next load."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_hotspa.errors import DeviceMemoryError, PlanMismatchError
from hf_hotspa.strategy import Strategy
from tests.balanced_runs import SLOW_FROM, SLOW_UNTIL, STEPS, balanced_runs
from tests.families import tiny_model
from tests.gloo.test_stage_cuts_by_speed import counted
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, random_rows
from tests.training_runs import contents, newest
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo


def columns(engine: Any) -> dict[str, set[int]]:
    """The columns of MLPs on this rank, by strategy."""
    return {
        str(strategy): {
            slot.shape[1] for slot in runner.replica.slots if slot.spec.name.endswith(("down_proj.weight", "down_proj.base_layer.weight"))
        }
        for strategy, runner in engine.phases.items()
    }  # fmt: skip


def division(
    model: PreTrainedModel, buckets: str, slow: tuple[int, ...], depth: tuple[tuple[int, ...], ...], options: Any
) -> list[Any]:
    """Errors and columns with even shares, with those by speed, and with even ones again."""
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    gradients = {name: gradient for name, gradient in gradients.items() if name in names}
    engine = make_engine(model, buckets, **options)
    mini_batch = make_mini_batch(engine, rows)
    untouched = {s: runner for s, runner in engine.phases.items() if s.tp == 1 and s.pp == 1}
    found = []
    for step_times, of_ranks in (((), ()), (depth, slow), ((), ())):
        with counted() as collectives:
            changed = engine.recut(step_times, rank_times=of_ranks)
        again = engine.recut(step_times, rank_times=of_ranks)
        errors = [worst_error(engine, mini_batch, loss, gradients)[0] for _ in range(2)]
        with exact_in_double(torch.float64), engine.evaluation() as evaluation:
            evaluated = evaluation.run(mini_batch)
        errors.append(abs(evaluated.loss_sum / evaluated.num_labels - loss) / loss)
        engine.write_back(model)  # whole weights come from wherever they are
        shares = [g.clone() for g in engine.master.gradients if g is not None]
        found.append((changed, again, max(errors), columns(engine), shares, len(collectives)))
    assert all(engine.phases[s] is runner for s, runner in untouched.items())
    engine.close()
    return found


def divisions(rank: int, world_size: int, cases: list[Any]) -> list[list[Any]]:
    found = []
    for family, buckets, slow, depth, options in cases:
        lora = family.endswith("+lora")
        name = family.removesuffix("+lora")
        model: Any = tiny_lora(name, torch.float64) if lora else tiny_model(name, torch.float64)
        found.append(division(model, buckets, slow, depth, options))
    return found


MORE = [
    ("gemma2_soft_caps", "tp2+z3:16@20,tp2+z2:40@44", (100, 130), (), {"overlap_load": True}),
    ("llama_gqa_bias", "tp2:16@20,dp2:40", (100, 400), (), {}),
]
TWO = [
    ("phi3_fused", "tp2+sp:16@20,tp2+rc:40", (250, 100), (), {"second_source": True}),
    ("llama_gqa_bias+lora", "tp2:16@20,dp2:40", (300, 100), (), {}),
]
FOUR = [
    # one slow device: a place of tp4 whose shards are in another order, one replica of two, one stage, one place of cp
    ("llama_gqa_bias", "tp4:12@20,dp2tp2:20@24,tp2pp2:40@44", (100, 400, 100, 100), (), {}),
    ("llama_uneven", "tp4:20@24,cp2tp2:40@44", (100, 100, 180, 100), (), {"second_source": True}),
    # layers of the slow stage, too
    ("qwen3_qk_norm_tied", "tp2pp2:20@24,tp4+sp:40@44", (100, 800, 100, 100), ((300, 100),), {}),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, TWO), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, MORE), (4, FOUR)))],
)
def test_every_division_is_exact(world_size: int, cases: list[Any]) -> None:
    ranks = run_ranks(world_size, divisions, cases)
    for index, (_, _, slow, *_) in enumerate(cases):
        for rank in range(world_size):
            even, uneven, back = ranks[rank][index]
            assert [row[0] for row in (even, uneven, back)] == [False, True, True]
            assert not any(row[1] for row in (even, uneven, back))
            assert max(row[2] for row in (even, uneven, back)) <= 1e-11
            assert [row[5] for row in (even, uneven, back)] == [0, 1, 1]  # of agreement
            assert even[3] == back[3]
            for strategy, own in uneven[3].items():
                usual = even[3][strategy]
                mates = [r for r in range(world_size) if r // tp_of(strategy) == rank // tp_of(strategy)]
                if tp_of(strategy) == 1 or all(slow[mate] == 100 for mate in mates):
                    assert own == usual
                elif slow[rank] > 100:
                    assert max(own) < min(usual)
                else:
                    assert max(own) > min(usual)
            for row in (uneven, back):
                for own, first in zip(row[4], even[4], strict=True):
                    assert torch.allclose(
                        own, first, rtol=1e-9, atol=1e-12
                    )  # what a checkpoint holds lies where it lay


def tp_of(strategy: str) -> int:
    return Strategy.parse(strategy).tp


def refusals(rank: int, world_size: int) -> Any:
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    slow = (100, 800)
    plain = make_engine(model, "tp2:40")
    need = [plain.agreement.gather([float(plain._switching.forecast.total)]).max()]
    plain.recut((), rank_times=slow)
    need.append(plain.agreement.gather([float(plain._switching.forecast.total)]).max())
    with pytest.raises(PlanMismatchError):
        plain.recut((), rank_times=(300, 100) if rank else (400, 100))
    plain.close()
    assert need[1] > need[0]  # of the larger share
    engine = make_engine(model, "tp2:40", memory_limit=int(need[0]))
    before = columns(engine)
    with pytest.raises(DeviceMemoryError) as error:
        engine.recut((), rank_times=slow)
    mini_batch = make_mini_batch(engine, rows)
    worst, _ = worst_error(engine, mini_batch, loss, gradients)
    assert columns(engine) == before
    engine.close()
    return worst, str(error.value), dropped_losses(rows)


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


def test_shares_that_one_rank_cannot_hold_are_refused_by_all_and_the_even_ones_train_on() -> None:
    for worst, text, losses in run_ranks(2, refusals):
        assert worst <= 1e-11
        assert "the strategies need" in text
        assert losses[0] != losses[1]  # other masks
        assert losses[2:] == pytest.approx(losses[:2], rel=1e-11)  # a column is dropped wherever it lies


# -- in training --------------------------------------------------------------------------------------------------------


def is_slow(step: int, rank: int) -> float:
    return 3.0 if rank == 1 and SLOW_FROM <= step < SLOW_UNTIL else 1.0


def widths_here(engine: Any) -> list[int]:
    return [width for of_strategy in columns(engine).values() for width in of_strategy]


@pytest.mark.slow
def test_balance_divides_while_a_rank_is_slow_and_goes_on_bit_for_bit(tmp_path: Any) -> None:
    """From checkpoints between the onset and the new shares, with uneven shares, and after the recovery."""
    common = {"max_steps": STEPS, "hotspa_strategies": "tp2:60", "hotspa_stragglers": "balance"}
    points = (3, 4, 6, 8)
    runs: list[Any] = [(str(tmp_path / "a"), None, common)]
    runs += [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), common) for p in points]
    runs += [(str(tmp_path / "even"), None, {**common, "hotspa_stragglers": "watch", "save_strategy": "no"})]
    by_rank = run_ranks(2, balanced_runs, runs, is_slow, widths_here)
    (losses, widths, slow), *resumed, (even, evenly, same) = by_rank[0]
    (_, others, _), *_ = by_rank[1]
    assert slow == same == [()] * 3 + [(1,)] * 4 + [()] * 2  # two mini-batches after onset and recovery
    assert [step for step, (a, b) in enumerate(zip(widths, evenly, strict=True), 1) if a != b] == [5, 6, 7, 8]
    assert len(set(widths[4:8])) == 1  # shares, and what is known of devices with them, stay
    assert widths[4] > others[4]
    assert {a + b for a, b in zip(widths, others, strict=True)} == {2 * evenly[0]}
    assert all(abs(losses[step] - even[step]) <= 1e-5 * even[step] for step in losses)
    for point, (found, of_layers, _) in zip(points, resumed, strict=True):
        assert found == {step: loss for step, loss in losses.items() if step > point}
        assert of_layers == widths[point:]
        assert contents(newest(tmp_path / f"b{point}")) == contents(newest(tmp_path / "a"))
