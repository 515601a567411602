"""Context parallelism (`cp`): loss and gradients equal the plain model's, wherever packs are cut, in every way."""

from itertools import product

import pytest
import torch

from hf_hotspa.costs.divided import exchanged_elements, local_heads
from hf_hotspa.errors import StrategyError, UnsupportedError
from hf_hotspa.features.dropout.mode import Noise
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss
from hf_hotspa.report import MEASURES
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.gloo import test_dropout as dropout
from tests.gloo import test_objective as objective
from tests.gloo import test_own_loss as own_loss
from tests.gloo.test_switch_options import moved
from tests.gloo.test_token_chunks import noisy
from tests.harness import run_ranks
from tests.oracle import exact_in_double, relative_error
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

WAYS = ("ulysses", "allgather", "ring")


def errors_of_even_and_tiny_packs(rank, world_size):
    """Sequences of one length, of which none is cut; and packs that leave a rank without a token, with noise."""
    model, found = tiny_model("llama_gqa_bias", torch.float64), {}
    ids = torch.arange(80).reshape(8, 10).tolist()
    even = [{"input_ids": row, "labels": row} for row in ids]
    tiny = [{"input_ids": [5], "labels": [5]}, *even]
    expected, expected_of_tiny = shared_reference(model, even), shared_reference(model, tiny)
    for way in WAYS:
        engine = make_engine(model, "cp2:10@40", context_parallel=way)
        found[way] = worst_error(engine, make_mini_batch(engine, even), *expected)[0]
        engine.close()
        engine = make_engine(model, "cp2:2,cp2+rc:10@40", context_parallel=way, features=(Noise(1e-12),))
        found[f"tiny {way}"] = worst_error(engine, make_mini_batch(engine, tiny), *expected_of_tiny)[0]
        engine.close()
    return found


def test_packs_of_whole_sequences_and_of_one_token():
    for found in run_ranks(2, errors_of_even_and_tiny_packs):
        assert max(found.values()) <= 1e-11, found


@pytest.mark.parametrize("second_source", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_switch_between_dp_and_cp_moves_no_byte(second_source):
    buckets = "dp4:60", "dp4:10@24,cp4:40,dp2cp2+rc:60"
    results = run_ranks(4, moved, buckets, {"second_source": second_source})
    for alone, (error, hot) in results:
        assert error <= 1e-11
        for [(*_, load, back, _)], phases in zip(alone[1], hot, strict=True):
            assert sorted(way for *_, way in phases) == ["", "allgather", "ulysses"]
            assert sum(load + back for _, load, back, _ in phases) == load + back > 0


def sent(rank, world_size, names):
    """Bytes that cp of one whole sequence sent: of all ranks, of each, and what `exchanged_elements` says of one."""
    model, found = tiny_model("llama_gqa_bias", torch.float64), {}
    rows = [{"input_ids": list(range(48)), "labels": list(range(48))}]
    shape = describe_model(model).shape
    width, column = shape.attention_size // shape.num_attention_heads, MEASURES.index("context_bytes")
    for way, name in product(WAYS, names):
        engine = make_engine(model, f"{name}:48@48", context_parallel=way)
        report = engine.forward_backward(make_mini_batch(engine, rows))
        engine.close()
        strategy = Strategy.parse(name)
        elements = exchanged_elements(way, *local_heads(strategy, shape), strategy.cp)
        again = {"ulysses": 3 / 2, "allgather": 4 / 3, "ring": 4 / 3}[way] if strategy.rc else 1
        layers = shape.num_layers / strategy.pp
        of_ranks = [phases[0][column] for phases in report.ranks.phases]
        found[way, name] = report.phases[0].context_bytes, of_ranks, elements * again * 48 * width * 8 * layers
    return found


@pytest.mark.parametrize("names", [("cp4+rc", "cp2tp2"), pytest.param(("cp4", "cp2pp2"), marks=pytest.mark.slow)])
def test_bytes_between_ranks_of_cp_are_those_of_the_formula(names):
    for found in run_ranks(4, sent, names):
        assert {name: of_ranks for name, (_, of_ranks, _) in found.items()} == {
            name: [pytest.approx(each, rel=1e-12)] * 4 for name, (_, _, each) in found.items()
        }
        assert all(total == sum(of_ranks) > 0 for total, of_ranks, _ in found.values())


# ---- what is per sequence, and what is per token


def objectives(rank, world_size, way):
    """Label smoothing; noise on embeddings; a loss of one's own that reads columns. The largest error of each."""
    buckets = "dp2:16@32,cp2:30@40,cp2+ck9:60@64" if way != "ring" else "dp2:16@32,cp2:60@64"
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows = own_loss.rows_with_columns()
    token_loss = TokenLoss(own_loss.weighted_focal, ("weights", "domain"), example=rows[4])
    cases = {
        "smoothing": (
            {"label_smoothing": objective.SMOOTHING},
            lambda: objective.reference(model, rows, objective.smoothed),
        ),
        "noise": ({"features": (Noise(objective.ALPHA),), "seed": objective.SEED}, lambda: noisy(model, rows)),
        "own loss": (
            {"loss": token_loss, "loss_chunk_tokens": 7},
            lambda: own_loss.reference(model, rows, own_loss.weighted_focal_of_row),
        ),
    }
    found = {}
    for name, (options, make_reference) in cases.items():
        with exact_in_double(torch.float64):
            loss, gradients = make_reference()
            engine = make_engine(model, buckets, context_parallel=way, **options)
            batch = make_mini_batch(engine, rows, columns=token_loss.columns if "loss" in options else ())
            report = engine.forward_backward(batch, step=objective.STEP)
            got = engine.full_gradients()
        found[name] = max(abs(report.loss - loss) / abs(loss), *(relative_error(got[n], gradients[n]) for n in got))
        engine.close()
    return found


def objectives_in_every_way(rank, world_size):
    return {way: objectives(rank, world_size, way) for way in WAYS}


@pytest.mark.slow
def test_objectives_do_not_see_the_cuts():
    for ways in run_ranks(2, objectives_in_every_way):
        for way, found in ways.items():
            assert max(found.values()) <= 1e-11, (way, found)


DROPPED = {
    f"{name} {way}": (name, buckets, {"context_parallel": way})
    for name, buckets in (
        ("lora", "dp2:16@24,cp2:30@40,cp2+rc:60"),
        ("attention", "dp2:16@24,cp2:30@40,cp2+ck11:60"),
        ("soft caps", "cp2:60"),
    )
    for way in ("ulysses", "allgather")
}


def dropped(rank, world_size, names):
    dropout.CASES = DROPPED
    return dropout.errors(rank, world_size, names)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["lora allgather", "attention ulysses", "soft caps allgather"], marks=pytest.mark.slow),
        pytest.param(["lora ulysses", "attention allgather", "soft caps ulysses"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_dropout_drops_the_same_elements(names):
    for found in run_ranks(2, dropped, names, timeout=300):
        for name, (worst, other, evaluated, same) in found.items():
            assert worst <= 1e-11, name
            assert min(other, evaluated) > 1e-6
            assert same, name


# ---- what cannot run


def refusals(rank, world_size):
    rows = own_loss.rows_with_columns()
    whole = SequenceLoss(own_loss.whole_sequences, ("domain",), example=rows[4])
    said = []
    for family, buckets, options in (
        ("lfm2", "cp2:30", {}),
        ("gemma2_soft_caps", "cp2:30", {"context_parallel": "ring"}),
        ("llama_gqa_bias", "cp2:1", {}),
        ("llama_gqa_bias", "cp2:30", {"loss": whole}),
    ):
        model = tiny_model_of(family) if family == "lfm2" else tiny_model(family)
        with pytest.raises((StrategyError, UnsupportedError)) as caught:
            make_engine(model, buckets, **options)
        said.append(str(caught.value))
    return said


def test_refusals_come_on_every_rank_before_a_byte_moves():
    for family, ring, short, loss in run_ranks(2, refusals):
        assert "divided over ranks (cp)" in family
        assert "legal with 2 processes" in family
        assert "a sliding window" in ring or "a cap of" in ring
        assert "allgather" in ring
        assert "packs of 1 tokens, and cp2 divides them over 2 ranks" in short
        assert "TokenLoss" in loss
