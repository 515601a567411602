"""Expert parallelism (`ep`): loss and gradients equal the plain model's, wherever tokens have to go."""

import pytest
import torch

from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
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
