"""Rotary tables by the length of a row: each sequence of a pack has its own, wherever strategies cut packs and sequences."""

import pytest
import torch

from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.unit.test_rope import DYNAMIC, LONGROPE
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error, worst_error_with_logits

pytestmark = pytest.mark.gloo

BORDER = LONGROPE["original_max_position_embeddings"]

# all tokens in one pack where it fits: rows of both sides of the border are in it, and chunks and ranks have parts of them
SOME = ["pp2dp2+v2:40@200", "cp2tp2+sp:40@200", "dp4:10@64,tp2dp2:20@64,cp4+ck13:40@64"]
MORE = [
    "dp4:40@200", "tp2pp2:40@200", "tp2dp2+sp+rc:40@200", "dp4+ck7:40@200", "dp2cp2:40@200", "cp2pp2+ck19:40@200",
]  # fmt: skip


def errors(rank, world_size, strategies):
    model, found = tiny_model("llama_gqa_bias", torch.float64, rope_parameters=LONGROPE, max_position_embeddings=64), {}
    rows = random_rows(11, model.config.vocab_size, longest=40)
    sides = {len(row["input_ids"]) > BORDER for row in rows}
    assert sides == {False, True}
    expected = shared_reference(model, rows)
    for buckets in strategies:
        engine = make_engine(model, buckets)
        found[buckets] = worst_error(engine, make_mini_batch(engine, rows), *expected)[0]
        engine.close()
    found["evaluated"] = worst_error_with_logits(model, "dp4:10@64,tp4:20@64,cp2pp2:60@128", 30)
    model = tiny_model("llama_gqa_bias", torch.float64, rope_parameters=DYNAMIC, max_position_embeddings=40)
    # packs of more tokens than there are positions
    engine = make_engine(model, "dp4:10@64,tp2pp2:20@200,cp4+ck13:40@200")
    found["dynamic"] = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))[0]
    engine.close()
    return found


@pytest.mark.parametrize("strategies", [SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_every_sequence_has_the_tables_of_its_own_length(strategies):
    for found in run_ranks(4, errors, strategies):
        assert {case: error for case, error in found.items() if not error <= 1e-11} == {}
