"""Expert parallelism (`ep`): loss and gradients equal the plain model's, wherever tokens have to go."""

import pytest
import torch

from hf_hotspa.features.experts.expert_parallel import ExpertParallel
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.family_sweep import gradient_errors
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_logits, shared_reference, worst_error

pytestmark = pytest.mark.gloo

ROUTERS = ("gate.", "router.")
OVERLAP = {"overlap_load": True, "overlap_return": True, "loss_chunk_tokens": 7}


def errors_of(rank, world_size, families, bucket_lists, options=None, longest=24):
    """`{(family, buckets): (loss, worst router gradient, worst other gradient)}`, relative."""
    found = {}
    for family in families:
        model = tiny_model_of(family)
        rows = random_rows(9, model.config.get_text_config().vocab_size, longest=longest)
        loss, gradients = shared_reference(model, rows)
        shape = describe_model(model).shape
        for buckets in bucket_lists:
            engine = make_engine(model, buckets, **(options or {}))
            with exact_in_double(torch.float64):
                report = engine.forward_backward(make_mini_batch(engine, rows))
            got = engine.full_gradients()
            assert got.keys() == {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            errors = gradient_errors(got, gradients)
            routers = {name for name in errors if any(part in name for part in ROUTERS)}
            assert routers, (family, list(errors))
            assert shape.num_experts == 8
            found[family, buckets] = (
                abs(report.loss - loss) / abs(loss),
                max(errors[name] for name in routers),
                max(errors[name] for name in errors if name not in routers),
            )
            engine.close()
    return found


def check(results):
    for found in results:
        wrong = {case: errors for case, errors in found.items() if not max(errors) <= 1e-11}
        assert not wrong, wrong
    return results[0]


STEP = {  # as many strategies as a mini-batch may have, the last with a pack for some replicas only
    "dp4ep4": "dp4ep4:24@32",
    "dp4ep2": "dp4ep2:24@32",
    "dp2tp2ep2": "dp2tp2ep2:24@32",
    "dp2tp2ep4": "dp2tp2ep4:24@32",
    "dp2pp2ep2": "dp2pp2ep2:24@32",
    "tp4ep4": "tp4ep4:24@32",
    "tp2pp2ep2+rc": "tp2pp2ep2+rc:24@32",
    "dp2cp2ep4": "dp2cp2ep4:24@32",
    "tp4+sp": "tp4+sp:24@32",
    "tp4ep4+sp": "tp4ep4+sp:24@32",
    "dp2tp2ep4+sp+rc": "dp2tp2ep4+sp+rc:24@32",
    "cp2tp2ep2+sp": "cp2tp2ep2+sp:24@32",
}


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "qwen3_moe")])
def test_a_family_under_every_layout(family):
    """Packs that only some replicas have among them. The other one under seven layouts: in one mini-batch, below."""
    check(run_ranks(4, errors_of, (family,), list(STEP.values())))


@pytest.mark.slow
def test_two_families_with_switches_beside_the_computation():
    check(run_ranks(4, errors_of, ("mixtral", "qwen3_moe"), list(STEP.values()), OVERLAP))


SOME = ("deepseek_v3", "gpt_oss", "granitemoe", "glm4_moe")


@pytest.mark.slow
def test_other_families():
    """Shared experts and latent attention, biases and interleaved halves, one fused linear, layers without experts."""
    check(run_ranks(4, errors_of, SOME, ["dp4ep4:24@32"]))


@pytest.mark.slow
def test_sequence_parallel_with_shared_experts_and_latent_attention():
    """Shared experts on rows without a batch dim, layers without experts, experts that tp cuts in a pipeline of two stages."""
    check(run_ranks(4, errors_of, ("deepseek_v2", "glm4_moe"), ["tp4ep4+sp:24@32", "tp2pp2+sp:24@32"]))


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
        "gpt_oss",
    ),
    *("hy_v3", "kolibri1", "laguna", "mellum", "mixtral", "qwen3_moe", "solar_open"),
)
"""Those of them that can be: the attention of the others is not cut, or gathers."""


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_every_family_under_each_layout_that_it_has_a_plan_for(family):
    shape = describe_model(tiny_model_of(family)).shape
    layouts = ["dp4ep4", "dp2tp2ep2", "dp2pp2ep2", "tp4ep4", "tp4+sp", "tp4ep4+sp"]
    legal = [f"{name}:24@32" for name in layouts if Strategy.parse(name).unsupported_reason(shape) is None]
    assert f"{layouts[0]}:24@32" in legal
    assert (f"{layouts[-1]}:24@32" in legal) == (family in SEQUENCE_PARALLEL)
    check(run_ranks(4, errors_of, (family,), legal))


SWITCHED = "dp4:3@24,dp4ep4:6@24,dp2tp2ep2:15@32,tp4:24@32,dp2pp2ep2:40@44,tp4ep4:50@54,dp2cp2ep2+rc:60@64"


LENGTHS = [3] * 5 + [6, 5, 4, 6, 5, 6, 6] * 3 + [12, 15, 9, 13] + [22, 19] + [33, 38, 31] + [47] + [55, 60]


def rows_of(lengths, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def one_mini_batch(rank, world_size, options):
    model, errors = tiny_model_of("qwen3_moe"), []
    engine = make_engine(model, SWITCHED, **options)
    for seed in range(2):  # the second mini-batch reuses all buffers
        rows = rows_of(LENGTHS, model.config.vocab_size, seed)
        reference = shared_reference(model, rows)
        mini_batch = make_mini_batch(engine, rows)
        assert len(mini_batch.phases) == 7
        packs = [tuple(map(len, phase.replicas)) for phase in mini_batch.plan.phases]
        assert any(len(set(of_phase)) > 1 for of_phase in packs)
        errors.append(worst_error(engine, mini_batch, *reference)[0])
        with exact_in_double(torch.float64), engine.evaluation() as evaluation:
            found = evaluation.run(mini_batch, with_logits=True)
        errors.append(abs(found.loss_sum / found.num_labels - reference[0]) / reference[0])
        assert sorted(found.logits) == [(row, 0) for row in range(len(LENGTHS))]
        expected = shared_logits(model, rows)
        errors += [relative_error(logits, expected[row]) for (row, _), logits in found.logits.items()]
    engine.close()
    return max(errors)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(OVERLAP, marks=pytest.mark.slow), pytest.param({"second_source": True}, marks=pytest.mark.slow)],
)
def test_beside_other_strategies_in_one_mini_batch(options):
    """Trained, and evaluated with logits; replicas without a pack keep step with those that have one."""
    assert max(run_ranks(4, one_mini_batch, options)) <= 1e-11


def weights_of(rank, world_size, first, second):
    """Whether every element that a rank holds under two strategies, loaded one after the other, is the model's, bit by bit."""
    model = tiny_model_of("mixtral", torch.float32)
    engine = make_engine(model, f"{first}:8,{second}:24")
    expected, same = dict(model.named_parameters()), []
    for strategy, runner in engine.phases.items():
        runner.load()
        for parameter, slot in runner.replica.parameters:
            whole = expected[slot.spec.name].detach()
            if slot.spec.experts and strategy.ep > 1:
                size = slot.spec.experts // strategy.ep
                here = whole[size * strategy.expert_shard(rank) : size * (strategy.expert_shard(rank) + 1)]
                assert here.shape == slot.shape
            elif tuple(slot.shape) == tuple(whole.shape):
                here = whole
            else:
                continue
            same.append(torch.equal(parameter.detach(), here))
        runner.release()
    engine.close()
    return len(same), all(same)


def test_a_load_of_experts_is_bit_exact():
    for count, same in run_ranks(4, weights_of, "dp4", "dp4ep4"):
        assert same
        assert count > 60


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
