"""Expert parallelism (`ep`): loss and gradients equal the plain model's, wherever tokens have to go."""

import math
from functools import partial

import pytest
import torch

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.features.experts.capacity import Capacity
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.specs import describe_model
from hf_hotspa.report import MEASURES
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.family_sweep import gradient_errors
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference

pytestmark = pytest.mark.gloo


def errors_of(rank, world_size, family, bucket_lists, rows=None):
    """By buckets the worst relative error of the loss and all gradients, by default with nine drawn rows."""
    found, model = {}, tiny_model_of(family)
    rows = rows or random_rows(9, model.config.get_text_config().vocab_size, longest=24)
    loss, gradients = shared_reference(model, rows)
    for buckets in bucket_lists:
        engine = make_engine(model, buckets)
        with exact_in_double(torch.float64):
            report = engine.forward_backward(make_mini_batch(engine, rows))
        got = engine.full_gradients()
        assert got.keys() == {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        errors = gradient_errors(got, gradients)  # of routers, too
        found[buckets] = max(abs(report.loss - loss) / abs(loss), *errors.values())
        engine.close()
    return found


def check(results):
    for found in results:
        assert {case: error for case, error in found.items() if not error <= 1e-11} == {}


EVERY = (
    *("afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2"),
    *("mixtral", "olmoe", "qwen3_moe", "solar_open"),
)
SEQUENCE_PARALLEL = (
    *(
        "aria_text",
        "beam",
        "cohere2_moe",
        "deepseek_v2",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
    ),
    *("gpt_oss", "hy_v3", "kolibri1", "laguna", "mellum", "mixtral", "qwen3_moe", "solar_open"),
)
"""Those of them that can be: the attention of the others is not cut, or gathers."""


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_every_family_under_each_layout_that_it_has_a_plan_for(family):
    shape = describe_model(tiny_model_of(family)).shape
    assert shape.num_experts == 8
    layouts = ["dp4ep4", "dp2tp2ep2", "dp2pp2ep2", "tp4ep4", "tp4+sp", "tp4ep4+sp"]
    legal = [f"{name}:24@32" for name in layouts if Strategy.parse(name).unsupported_reason(shape) is None]
    assert f"{layouts[0]}:24@32" in legal
    assert (f"{layouts[-1]}:24@32" in legal) == (family in SEQUENCE_PARALLEL)
    check(run_ranks(4, errors_of, family, legal))


def test_ranks_that_get_no_token_and_ranks_that_have_none():
    """One pack of three tokens for four replicas: ranks without a pack, and ranks of whose experts no token wants any."""
    rows = [{"input_ids": [5, 6, 5], "labels": [5, 6, 5]}]
    buckets = ["dp4ep4:24@32", "tp4ep4:24@32", "dp2pp2ep2:24@32", "dp4ep4+rc:24"]
    check(run_ranks(4, errors_of, "mixtral", buckets, rows))


# -- a capacity: loss, gradients and what is dropped equal one process with the same rule; the report says loads ----------------

LENGTHS = [13, 24, 17, 20, 15, 22]  # a pack of 24 tokens holds one of them
STRATEGIES = ["dp4ep4:24", "dp4ep2+rc:24", "dp4:24", "tp4:24", "tp4ep4:24", "dp2tp2ep2:24", "dp2pp2ep2:24"]
NO_DROPS = 8.0  # as many as there are experts


def rows_of(lengths, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def with_rule(model, factor):
    """The plain model's experts with the rule, a token and an expert at a time; what was dropped is counted."""
    dropped = []

    def forward(hidden, index, weights, own, num_experts):
        most, taken, weights = math.ceil(factor * index.numel() / num_experts), [0] * num_experts, weights.clone()
        for token, experts in enumerate(index.tolist()):
            for place, expert in enumerate(experts):
                taken[expert] += 1
                if taken[expert] > most:
                    weights[token, place] = 0.0
                    dropped.append((token, expert))
        return own(hidden, index, weights)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = partial(forward, own=module.forward, num_experts=module.num_experts)
    return dropped


def with_capacity(rank, world_size, family, strategies):
    found = {}
    for factor, bucket_lists in strategies.items():
        plain, model = tiny_model_of(family), tiny_model_of(family)
        rows = rows_of(LENGTHS, model.config.vocab_size, 3)
        dropped = with_rule(plain, factor)
        loss, gradients = shared_reference(plain, rows)
        without, _ = shared_reference(model, rows)
        model.zero_grad(set_to_none=True)
        for buckets in bucket_lists:
            engine = make_engine(model, buckets, features=(Capacity(factor),))
            mini_batch = make_mini_batch(engine, rows)
            assert all(len(pack.lengths) == 1 for packs in mini_batch.plan.phases[0].replicas for pack in packs)
            with exact_in_double(torch.float64):
                report = engine.forward_backward(mini_batch)
            error = max(abs(report.loss - loss) / loss, *gradient_errors(engine.full_gradients(), gradients).values())
            (phase,) = report.phases
            column = MEASURES.index("expert_tokens")
            per_rank = [int(measured[0][column]) for measured in report.ranks.phases]
            found[factor, buckets] = error, phase.dropped_expert_tokens, phase.expert_tokens, per_rank
            assert phase.busiest_expert_tokens == max(per_rank)
            engine.close()
        found[factor] = len(dropped), abs(loss - without)
    return found


EVERY_FACTOR = dict.fromkeys((0.5, 1.0, 1.25, NO_DROPS), STRATEGIES)
SOME_FACTORS = {0.5: ["tp4ep4:24", "dp2pp2ep2:24"], 1.25: ["dp4ep2+rc:24", "tp4:24"], NO_DROPS: ["dp4ep4:24"]}
"""Much, little and nothing dropped; experts divided beside each of dp, tp and pp, and not divided."""


@pytest.mark.parametrize(
    ("family", "strategies"),
    [
        ("mixtral", SOME_FACTORS),
        *(pytest.param(f, EVERY_FACTOR, marks=pytest.mark.slow) for f in ("mixtral", "qwen3_moe")),
    ],
    ids=["mixtral-some", "mixtral-every", "qwen3_moe-every"],
)
def test_loss_gradients_and_drops_are_those_of_one_process_with_the_same_rule(family, strategies):
    results = run_ranks(4, with_capacity, family, strategies)
    pairs = 4 * 2 * sum(LENGTHS)  # layers, and experts of a token
    for factor, bucket_lists in strategies.items():
        dropped, difference = results[0][factor]
        assert (dropped == 0) == (difference == 0.0) == (factor == NO_DROPS)
        assert dropped < pairs
        for buckets in bucket_lists:
            for found in results:
                error, own, computed, per_rank = found[factor, buckets]
                assert error <= 1e-11, (factor, buckets)
                assert own == dropped, (factor, buckets)
                assert computed == (pairs - dropped if "ep" in buckets else 0) == sum(per_rank), (factor, buckets)
    most, less = results[0][0.5][0], results[0][1.25][0]
    assert most > less > 0


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(factor):
    with pytest.raises(HotspaConfigError, match="capacity factor of experts"):
        EngineOptions(features=(Capacity(factor),))


@pytest.mark.parametrize(
    ("model", "buckets", "schedule", "says"),
    [
        ("llama_gqa_bias", "dp1:24", "auto", "llama has no experts"),
        ("mixtral", "dp1+ck8:24", "auto", "+ck computes parts of packs"),
        ("llama4_text", "dp1:24", "auto", "is not one fused module"),
    ],
)
def test_where_packs_are_not_whole_or_experts_unknown_it_is_refused_by_name(model, buckets, schedule, says):
    model = tiny_model(model) if model == "llama_gqa_bias" else tiny_model_of(model)
    with pytest.raises(UnsupportedError) as caught:
        make_engine(model, buckets, features=(Capacity(1.0),), pipeline_schedule=schedule)
    assert says in str(caught.value)
    assert caught.value.fix
