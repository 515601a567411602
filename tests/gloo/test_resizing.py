"""Columns left out in training: chosen by how weights vary, imputed, beside columns that migrate (`semi`), and gone on with."""

from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from hf_hotspa.features.slow_devices import device_watch
from hf_hotspa.features.slow_devices.columns import LayerColumns, kept_variation, most_varying, num_kept
from hf_hotspa.features.slow_devices.device_step_time import DeviceStepTime
from hf_hotspa.features.slow_devices.flexible_linear import Exchange, FlexibleWork, flexible_works, give
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.features.slow_devices.reaction import pretest
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.slow_ranks import Slow, check_resumed, resumed_runs, watched_runs
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

SLOW, STEPS, PERIOD = Slow(3, 7), 11, 3


# -- a product that gives and leaves out --------------------------------------------------------------------------------


def some_left_out(work, name, own, columns):
    """Every third of the first four tenths of the columns is left out, whatever migrates behind them."""
    left = [i for i in range(own) if i % 3 == 0 and i < 0.4 * columns]
    work.lineage[name] = LayerColumns(own, tuple(i for i in range(own) if i not in left))
    return work.lineage[name]


def both_at_once(rank, world_size, cases):
    worst, least = 0.0, float("inf")
    for family, strategy, shares, resized in cases:
        model = tiny_model(family, torch.float64)
        rows = random_rows(6, model.config.vocab_size, longest=30)
        engine = make_engine(model, f"{strategy}:40@60", features=(HandOver(),))
        name = str(next(iter(engine.phases)))
        nothing = {name: (0.0,) * world_size}

        def run(given, left, exchange=Exchange.BROADCAST, engine=engine, rows=rows):
            give(engine, given, left)
            for work in flexible_works(engine).values():
                work.exchange = exchange
            report = engine.forward_backward(make_mini_batch(engine, rows))
            found = {n: g.clone() for n, g in engine.full_gradients().items()}
            return report.loss, found, [work.left_share for work in flexible_works(engine).values()]

        with patch.object(FlexibleWork, "kept", some_left_out):
            _exact_loss, exact, none = run(nothing, nothing)
            loss, alone, left = run(nothing, {name: resized})
            assert not any(none)
            assert all(0.05 < share < 0.2 for share in left) == bool(resized[rank]), left
            least = min(least, max(float((g - exact[n]).abs().max()) for n, g in alone.items()))
            for exchange in Exchange:
                with_migration, found, _ = run({name: shares}, {name: resized}, exchange)
                errors = [float((g - alone[n]).abs().max() / alone[n].abs().max()) for n, g in found.items()]
                worst = max(worst, abs(with_migration - loss) / loss, *errors)
        engine.close()
    return worst, least


def test_a_product_may_migrate_and_leave_columns_out_at_once():
    """What migrates changes nothing of what is left out: fp64 against leaving out alone, for a giver, a helper and both."""
    cases = [
        ("llama_gqa_bias", "tp4", (0.0, 0.5, 0.0, 0.0), (0.0, 0.3, 0.0, 0.0)),
        ("phi3_fused", "tp2pp2+sp", (0.0, 0.5, 0.4, 0.0), (0.3, 0.3, 0.0, 0.3)),
        ("llama_uneven", "dp2tp2+rc", (0.0, 0.5, 0.0, 0.0), (0.3, 0.0, 0.3, 0.0)),
    ]
    for worst, least in run_ranks(4, both_at_once, cases):
        assert worst <= 1e-11
        assert least > 1e-6


# -- in training --------------------------------------------------------------------------------------------------------


def decided(engine):
    """Which columns are left out of the products of this rank, and the share that rank 1 hands over or this one leaves out."""
    works = flexible_works(engine).values()
    return [({n: c.pruned for n, c in w.lineage.items()} if w.resized else {}, w.shares[1] + w.resized) for w in works]


def runs_of(rank, world_size, runs):
    """`watched_runs`, and what their watches of devices have logged."""
    with patch.object(device_watch.logger, "warning") as warned:
        found = watched_runs(rank, world_size, runs, SLOW, decided, {"product_share": 0.8})
    return found, [call.args[0] % call.args[1:] for call in warned.call_args_list]


def shard(weight, name, rank):
    """Of rank 1 of tp4: its rows of a column-parallel weight, its columns of a row-parallel one."""
    return weight.chunk(4, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]


@pytest.mark.slow
def test_columns_by_variation_and_imputation_go_on_bit_for_bit(tmp_path):
    """Also the papers' rule: columns that were left out keep their old statistics."""
    common = {
        "max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "resize", "hotspa_resize_period": PERIOD,
    }  # fmt: skip
    kinds = {"pri": "same", "pridiffe": "average"}
    runs = []
    for columns, imputation in kinds.items():
        options = {**common, "hotspa_resize_columns": columns, "hotspa_resize_imputation": imputation}
        runs += resumed_runs(tmp_path / columns, options, [7])
    plain = {**common, "hotspa_stragglers": "off", "save_strategy": "no", "hotspa_resize_period": 0}
    results = run_ranks(4, runs_of, [*runs, (str(tmp_path / "off"), None, plain)])
    (pri, pri7, pridiff, pridiff7, off), _ = results[1]
    for whole, resumed, columns in ((pri, pri7, "pri"), (pridiff, pridiff7, "pridiffe")):
        assert [step for step, [(left, _)] in enumerate(whole.seen, 1) if left] == [6, 7, 8, 9]
        check_resumed(tmp_path / columns, whole.losses, {7: resumed.losses})
        assert next(step for step in whole.losses if whole.losses[step] != off.losses[step]) == 6
    (usual, *_), said = results[0]
    assert not any(left for [(left, _)] in usual.seen)
    assert "this run is not exact" in said[0]
    assert "the previous mini-batch's" in said[0]
    # the statistics, from the weights of the checkpoints
    first = dict(tiny_model("qwen3_qk_norm_tied", seed=0).state_dict().items())
    at = {step: load_file(tmp_path / f"pri/a/checkpoint-{step}/model.safetensors") for step in (3, 6)}
    [(left_out6, share6)], [(left_out7, share7)] = pri.seen[5:7]
    cut = {
        name: left for name, left in left_out6.items() if not name.endswith(("k_proj", "v_proj"))
    }  # these are shared
    assert len(cut) == 5 * 4
    for name, left6 in cut.items():
        weight = f"{name}.weight"
        old, new = (
            (shard(b[weight], weight, 1) - shard(a[weight], weight, 1)).abs().mean(0).tolist()
            for a, b in ((first, at[3]), (at[3], at[6]))
        )
        kept6 = most_varying(old, num_kept(len(old), share6))
        assert left6 == tuple(i for i in range(len(old)) if i not in kept6), name
        kept7 = most_varying(kept_variation(new, old, kept6), num_kept(len(old), share7))
        assert left_out7[name] == tuple(i for i in range(len(old)) if i not in kept7), name
    # half of what varies, or more where less does: at lr 1e-2 everything varies by more than the threshold
    [(left_out, _)] = pridiff.seen[6]
    for name, weight in first.items():
        if name.endswith("up_proj.weight"):
            assert len(left_out[name.removesuffix(".weight")]) >= weight.shape[1] - num_kept(weight.shape[1], 0.8 * 0.5)


def semi_runs(rank, world_size, runs):
    engine = make_engine(tiny_model("llama_gqa_bias"), "dp2tp2:30,tp4:60", features=(HandOver(),))
    giving = DeviceStepTime(engine, "semi").giving
    pretest(engine, giving)
    curves = {name: [list(vars(c).values()) for c in found] for name, found in giving.curves.items()}
    engine.close()
    return curves, runs_of(rank, world_size, runs)


@pytest.mark.slow
def test_semi_divides_by_its_pretest_says_so_and_goes_on_bit_for_bit(tmp_path):
    common = {
        "max_steps": STEPS, "hotspa_strategies": "tp4:60", "hotspa_stragglers": "semi", "hotspa_resize_columns": "pri",
        "hotspa_resize_period": 2,
    }  # fmt: skip
    results = run_ranks(4, semi_runs, resumed_runs(tmp_path, common, [7]))
    curves, ((whole, resumed), said) = results[0]
    for other, _ in results[1:]:
        assert other == curves
    assert [len(found) for found in curves.values()] == [2, 1]
    assert all(seconds >= 0.0 for found in curves.values() for curve in found for seconds in curve)
    assert all(sum(curve) > 0.0 for found in curves.values() for curve in found)
    assert "hotspa_stragglers=semi: this run is not exact" in said[0]
    lost = [share for [(_, share)] in results[1][1][0][0].seen]
    assert [step for step, share in enumerate(lost, 1) if share > 0.1] == [6, 7, 8]
    # with products of 3.2 and the rest of 0.2, three quarters of the products would make it as fast as before; what
    # migrates makes the others slower, so it may lose less
    assert all(0.5 < share <= 0.76 for share in lost[5:8])
    assert lost[8] < 0.1  # as fast as the others in the eighth, and so at once: it is called slow for one more
    check_resumed(tmp_path, whole.losses, {7: resumed.losses})
