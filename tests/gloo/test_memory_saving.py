"""What saves memory and must change nothing: sequence parallelism, recomputation, the loss in chunks of tokens.

Each alone, together, and several in one hot-switched mini-batch, against the plain model in fp64.
"""

import pytest
import torch

from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import strategies_of
from tests.families import FAMILIES, tiny_model
from tests.gloo.test_exact import TOLERANCE, check, rank_errors
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

CHUNKS = {"loss_chunk_tokens": 7}
"""Packs of the tests have 40 to 64 tokens: several chunks, the last one shorter."""
HOT = "dp4+rc2:5@24,dp2tp2+sp:12@32,tp2pp2+sp+rc:30@40,tp4:40@64"


def option_buckets(world_size: int, family: str) -> list[str]:
    """Every strategy that is legal with sequence parallelism, recomputing or not, and the others recomputing."""
    shape = describe_model(tiny_model(family)).shape
    legal = [s for s in strategies_of(world_size) if s.unsupported_reason(shape) is None]
    may_sp = shape.sp_unsupported_reason is None
    # 67 tokens: not a multiple of any tp
    return [f"{s}{option}:40@67" for s in legal for option in (("+sp", "+sp+rc") if may_sp and s.tp > 1 else ("+rc",))]


@pytest.mark.parametrize(
    "family", ["gemma2_soft_caps", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama_gqa_bias", "phi3_fused"))]
)
def test_sequence_parallel_and_recomputing_with_the_loss_in_chunks(family):
    buckets = option_buckets(4, family)
    check(run_ranks(4, rank_errors, family, torch.float64, buckets, [CHUNKS, {}]), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, CHUNKS, {"overlap_load": True, "overlap_return": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_of_every_family(family, dtype, options):
    buckets = option_buckets(4, family)
    check(run_ranks(4, rank_errors, family, dtype, buckets, [options], timeout=300), dtype)


def one_mini_batch(rank, world_size, family, options):
    model = tiny_model(family, torch.float64)
    rows = random_rows(30, model.config.vocab_size, longest=40, seed=3)
    loss, gradients = shared_reference(model, rows)
    engine = make_engine(model, HOT, **options)
    mini_batch = make_mini_batch(engine, rows)
    assert len(mini_batch.phases) == 4
    error, report = worst_error(engine, mini_batch, loss, gradients)
    strategies = {phase.strategy for phase in report.phases}
    with exact_in_double(torch.float64), engine.evaluation() as evaluation:
        found = evaluation.run(mini_batch)
    engine.close()
    return error, strategies, abs(found.loss_sum / found.num_labels - loss) / abs(loss)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_of_it_in_one_mini_batch(overlap):
    options = {**CHUNKS, "overlap_load": overlap, "overlap_return": overlap}
    for error, strategies, evaluated in run_ranks(4, one_mini_batch, "qwen3_qk_norm_tied", options):
        assert error <= TOLERANCE[torch.float64][1]
        assert evaluated <= TOLERANCE[torch.float64][0]
        assert strategies == {"dp4+rc2", "dp2tp2+sp", "tp2pp2+sp+rc", "tp4"}
