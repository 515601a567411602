"""Expert parallelism (`ep`): loss and gradients equal the plain model's, wherever tokens have to go."""

import pytest
import torch

from hf_hotspa.features.experts.expert_parallel import ExpertParallel
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.family_sweep import gradient_errors
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference

pytestmark = pytest.mark.gloo


def errors_of(rank, world_size, family, bucket_lists):
    """By buckets the worst relative error of the loss and all gradients."""
    found, model = {}, tiny_model_of(family)
    rows = random_rows(9, model.config.get_text_config().vocab_size, longest=24)
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
    for found in run_ranks(4, errors_of, family, legal):
        assert {case: error for case, error in found.items() if not error <= 1e-11} == {}


def of_few_tokens(rank, world_size):
    """One pack of three tokens for four replicas: ranks without a pack, and ranks of whose experts no token wants any."""
    found = {}
    for family in ("mixtral", "qwen3_moe"):
        model = tiny_model_of(family)
        rows = [{"input_ids": [5, 6, 5], "labels": [5, 6, 5]}]
        reference = shared_reference(model, rows)
        for buckets in ("dp4ep4:24@32", "tp4ep4:24@32", "dp2pp2ep2:24@32", "dp4ep4+rc:24"):
            engine = make_engine(model, buckets)
            with exact_in_double(torch.float64):
                report = engine.forward_backward(make_mini_batch(engine, rows))
            errors = gradient_errors(engine.full_gradients(), reference[1])
            error = max(abs(report.loss - reference[0]) / reference[0], *errors.values())
            (runner,) = engine.phases.values()
            found[family, buckets] = (
                error,
                next(a for a in runner.replica.attachments if isinstance(a, ExpertParallel)).num_rows,
            )
            engine.close()
    return found


def test_ranks_that_get_no_token_and_ranks_that_have_none():
    results = run_ranks(4, of_few_tokens)
    for case in results[0]:
        assert max(found[case][0] for found in results) <= 1e-11, case
        # each of four layers computes three tokens by two experts each
        assert sum(found[case][1] for found in results) == 24, case
    # the plain model's routers send those of each layer to two of the four ranks
    assert [found["mixtral", "dp4ep4:24@32"][1] for found in results] == [11, 8, 1, 4]
