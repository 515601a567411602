"""Chunks of tokens (`+ck`): loss and gradients equal the plain model's on whole sequences, wherever these are cut."""

import math
import re
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import StrategyError, UnsupportedError
from hf_hotspa.features.dropout.dropout import EmbeddingNoise
from hf_hotspa.features.dropout.mode import Noise
from hf_hotspa.features.token_chunks import token_chunks
from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.gloo import test_dropout as dropout
from tests.gloo import test_objective as objective
from tests.gloo import test_own_loss as own_loss
from tests.gloo.test_exact import check, rank_errors
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error, worst_error_with_logits

pytestmark = pytest.mark.gloo

LOSS = {"loss_chunk_tokens": 7}


def family_errors(rank, world_size, family):
    model = tiny_model_of(family)
    rows = random_rows(6, 163, longest=30, seed=2)
    shape = describe_model(model).shape
    buckets = (
        "dp2+ck4:4@16",
        *(["tp2+ck7:15@20"] if shape.has_tp_plan else []),
        *(["pp2+ck5:30@40"] if shape.has_pp_plan else []),
    )
    engine = make_engine(model, ",".join(buckets))
    found = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))[0]
    engine.close()
    return found


@pytest.mark.parametrize(
    "family", ["gpt_oss", "gpt_neox", pytest.param("deepseek_v3", marks=pytest.mark.slow), "gemma3_text"]
)
def test_other_attentions(family):
    """Sinks with windows; partial rotary embeddings and biases; latent attention with experts; two kinds of rotary tables."""
    assert max(run_ranks(2, family_errors, family)) <= 1e-11


def one_mini_batch(rank, world_size):
    model = tiny_model("llama_gqa_bias", torch.float64)
    buckets = "dp2+ck3+kg1:10@24,tp2+sp+ck7+kh:14@32,pp2+rc+ck11:60@64"
    return worst_error_with_logits(model, buckets, 15, overlap_load=True, overlap_return=True, **LOSS)


def test_chunks_beside_other_strategies_in_one_mini_batch():
    """Trained, and evaluated with logits; others are drawn (test_fuzz.py)."""
    assert max(run_ranks(2, one_mini_batch)) <= 1e-11


# ---- what is per sequence, and what is per token


def objectives(rank, world_size):
    """The largest errors with noise on embeddings, and with a loss of one's own that reads columns."""
    model, rows, found = tiny_model("llama_gqa_bias", torch.float64), own_loss.rows_with_columns(), []
    token_loss = TokenLoss(own_loss.weighted_focal, ("weights", "domain"), example=rows[4])
    noise = {"features": (Noise(objective.ALPHA),), "seed": objective.SEED}
    for sp, options, make_reference in (
        ("", noise, lambda: noisy(model, rows)),
        ("+sp", {"loss": token_loss, **LOSS}, lambda: own_loss.reference(model, rows, own_loss.weighted_focal_of_row)),
    ):
        with exact_in_double(torch.float64):
            loss, gradients = make_reference()
            engine = make_engine(model, f"dp2+ck5:8@32,pp2+ck6:30@40,tp2{sp}+ck7:60@64", **options)
            batch = make_mini_batch(engine, rows, columns=token_loss.columns if sp else ())
            report = engine.forward_backward(batch, step=objective.STEP)
            got = engine.full_gradients()
        found.append(max(abs(report.loss - loss) / loss, *(relative_error(got[n], gradients[n]) for n in got)))
        engine.close()
    return found


def noisy(model, rows):
    drawn, empty = EmbeddingNoise(objective.ALPHA, objective.SEED), torch.empty(0)
    drawn.step = objective.STEP

    def of_row(index, embeddings):
        pack = MicroBatch(empty, empty, empty, empty, (embeddings.shape[1],), 0, ((index, 0),))
        return drawn.draw(pack, embeddings)

    return objective.reference(model, rows, objective.cross_entropy, of_row)


@pytest.mark.slow
def test_objectives_do_not_see_the_cuts():
    for found in run_ranks(2, objectives):
        assert max(found) <= 1e-11, found


DROPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("lora", "dp2+ck5:8@24,pp2+ck6:30@40,tp2+sp+ck11:60", {}),
    "attention": ("attention", "dp2+ck5+kh:8@24,pp2+rc+ck6:30@40,tp2+rc+ck11+kg1+kh:60", {}),
    "soft caps": ("soft caps", "pp2+ck9:30,tp2+ck9+kh:60", {}),
}


def dropped(rank, world_size):
    dropout.CASES = DROPPED
    return dropout.errors(rank, world_size, list(DROPPED))


@pytest.mark.slow
def test_dropout_drops_the_same_elements_in_both_forwards():
    dropout.check(run_ranks(2, dropped, timeout=300))


def fetched(rank, world_size, family):
    """Errors where what is kept is copied although it need not be, as to another device; and for each chain how often an
    attention asked, and how often what it asked for was there."""
    made = []

    class Recorded(token_chunks.PrefixFetcher):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    # this process ends with the test
    token_chunks.fetches, token_chunks.PrefixFetcher = lambda host, device: True, Recorded
    buckets = ["dp1+ck7+kh:40@64", "dp1+rc+ck5+kg2+kh:40@64"]
    errors = rank_errors(rank, world_size, family, torch.float64, buckets, [{}])
    return errors, [(fetcher.num_fetched, fetcher.num_ahead) for fetcher in made]


@pytest.mark.parametrize("family", ["gemma2_soft_caps", pytest.param("qwen3_qk_norm_tied", marks=pytest.mark.slow)])
def test_keys_and_values_are_fetched_an_attention_ahead(family):
    ((errors, chains),) = run_ranks(1, fetched, family)
    check([errors], torch.float64)
    assert chains
    assert all(num_ahead > num_fetched / 2 for num_fetched, num_ahead in chains), chains


# ---- what it is for


class _Counted:
    def __init__(self, tensor, most):
        self.tensor, self.bytes, self.most = tensor, tensor.nbytes, most
        most[0] += self.bytes
        most[1] = max(most)

    def __del__(self):
        self.most[0] -= self.bytes


def test_no_more_than_a_chunk_is_in_a_graph(monkeypatch):
    """The tokens of every forward, and the bytes that autograd keeps at a time, beside those of whole sequences."""
    model, tokens, forward = tiny_model("llama_gqa_bias"), [], Replica.forward
    monkeypatch.setattr(
        Replica,
        "forward",
        lambda self, micro_batch, *rest: (tokens.append(micro_batch.num_tokens), forward(self, micro_batch, *rest))[1],
    )
    ids = torch.arange(200).remainder(160).tolist()
    rows = [{"input_ids": ids, "labels": ids}, *({"input_ids": ids[:n], "labels": ids[:n]} for n in (30, 9))]
    kept, losses = {}, []
    for buckets in ("dp1:200@240", "dp1+ck20:200@240"):
        engine, most = make_engine(model, buckets), [0, 0]
        tokens.clear()
        with saved_tensors_hooks(lambda t, most=most: _Counted(t, most), lambda held: held.tensor):
            losses.append(engine.forward_backward(make_mini_batch(engine, rows)).loss)
        kept[buckets] = most[1]
        assert len(engine.phases.popitem()[1].replica.losses) == 1  # one pack
        engine.close()
    # the long one: nine chunks twice and the last one once; 30 tokens: twice 20 and then the rest with the shortest one
    assert tokens == [20] * 19 + [20, 19, 20]
    assert math.isclose(losses[0], losses[1], rel_tol=1e-5)
    assert kept["dp1+ck20:200@240"] < kept["dp1:200@240"] / 4


def test_what_cannot_run_in_chunks_says_why():
    convolving = describe_model(tiny_model_of("lfm2")).shape
    assert re.search(
        "Lfm2DecoderLayer 0 of lfm2 is given whole sequences", Strategy(ck=8).unsupported_reason(convolving)
    )
    with pytest.raises(StrategyError, match="legal with 1 processes"):
        make_engine(tiny_model_of("lfm2"), "dp1+ck8:30")
    rows = own_loss.rows_with_columns()
    whole = SequenceLoss(own_loss.whole_sequences, ("domain",), example=rows[4])
    with pytest.raises(UnsupportedError, match="whole sequences, and cp and .ck compute these in parts.*TokenLoss"):
        make_engine(tiny_model("llama_gqa_bias"), "dp1+ck8:60", loss=whole)
