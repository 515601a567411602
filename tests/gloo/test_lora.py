"""LoRA: gradients of every strategy equal PEFT's on the plain model, and frozen weights move no more than they must."""

import pytest
import torch

from tests.families import MIXTURE
from tests.harness import run_ranks
from tests.lora import FAMILIES, tiny_lora
from tests.oracle import exact_in_double, random_rows, reference_step, relative_error
from tests.worlds import make_engine, make_mini_batch, worst_error

pytestmark = pytest.mark.gloo

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
HOT = "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4:45@48,tp4:60"

CASES = {
    **{family: (family, HOT, {}) for family in FAMILIES},
    # trained biases of the base; factors and ranks of single layers; the first pipeline stage has nothing to train
    "biases": ("llama_gqa_bias", "dp2tp2:16@32,tp2pp2:60", {"bias": "all", "use_rslora": True}),
    "lora biases": ("llama_gqa_bias", "tp4:60", {"bias": "lora_only", "rank_pattern": {"q_proj": 5, "2.mlp.*": 1}}),
    "last layers": ("qwen3_qk_norm_tied", "pp4:30@32,tp2pp2:60", {"layers_to_transform": [3], "target_modules": ["o_proj", "v_proj"]}),
    # adapters of fused experts, one around the other, and of a router; [experts, in, out], with biases that have none
    "experts": (MIXTURE, "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4+ck7:45@48,tp4:60", {"target_parameters": EXPERTS}),
    "experts, other memory": (MIXTURE, "dp4+rc:5@32,tp2dp2+sp:10@32,dp4+z3:16@40,dp2cp2:60@66", {"target_parameters": EXPERTS}),
    "transposed experts": (
        "gpt_oss", "dp2pp2:10@20,pp4:60@66", {"target_parameters": ["experts.down_proj", "gate_up_proj"], "target_modules": ["q_proj"]},
    ),
    "in place": ("llama_gqa_bias", "dp4:5@24,dp2cp2+rc:16@40,cp4:60@66", {}),
    "saving memory": ("llama_gqa_bias", "dp4+rc:12@32,dp2tp2+sp:30@32,tp2pp2+sp+rc:60@66", {}),
}  # fmt: skip


def trained_gradients(model, rows):
    """The reference loss, and the gradients of what is trained."""
    loss, gradients = reference_step(model, rows)
    named = model.named_parameters(remove_duplicate=False)
    return loss, {name: gradients[name] for name, p in named if p.requires_grad}


def step_error(engine, model, rows):
    """`worst_error` on rank 0, which holds every gradient; the others take part, and spare the reference."""
    mini_batch = make_mini_batch(engine, rows)
    if engine.rank == 0:
        return worst_error(engine, mini_batch, *trained_gradients(model, rows))
    with exact_in_double(engine.description.compute_dtype):
        report = engine.forward_backward(mini_batch)
    engine.full_gradients()
    return 0.0, report


def one_step_errors(rank, world_size, cases):
    found = {}
    for name, (family, buckets, config), options in cases:
        model = tiny_lora(family, torch.float64, **config)
        rows = random_rows(15, model.config.vocab_size, longest=60)
        engine = make_engine(model, buckets, **options)
        found[name], report = step_error(engine, model, rows)
        assert len(report.phases) >= min(4, len(engine.buckets)), [p.strategy for p in report.phases]
        engine.close()
    return found


def check(per_rank, count):
    for found in per_rank:
        assert len(found) == count
    assert max(per_rank[0].values()) <= 1e-11, per_rank[0]
    assert min(per_rank[0].values()) > 0


QUICK = ("llama_gqa_bias", "phi3_fused", "last layers", "experts", "in place")
"""The others are run by the slow tests: these show nearly all of them."""


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_hot_switched_gradients_equal_those_of_peft(names):
    cases = [(name, CASES[name], {}) for name in names]
    check(run_ranks(4, one_step_errors, cases, timeout=280), len(cases))


def mixed_dtypes(rank, world_size):
    """A bf16 base with an fp32 adapter, which is what get_peft_model makes of a bf16 model."""
    model = tiny_lora("llama_gqa_bias", torch.bfloat16)
    rows = random_rows(12, model.config.vocab_size, longest=60)
    loss, gradients = trained_gradients(tiny_lora("llama_gqa_bias"), rows)
    engine = make_engine(model, "dp2:16@32,tp2:60")
    report = engine.forward_backward(make_mini_batch(engine, rows))
    got = engine.full_gradients()
    whole = [torch.cat([found[name].double().flatten() for name in gradients]) for found in (got, gradients)]
    held = {(s.dtype, s.trainable, s.master_dtype) for s in engine.description.vector.segments}
    stored = {p.dtype for p in engine.master.parameters.values() if not p.requires_grad}
    return abs(report.loss - loss) / loss, relative_error(*whole), held, stored


def test_a_bf16_base_keeps_its_dtype_beside_an_fp32_adapter():
    for loss_error, gradient_error, held, stored in run_ranks(2, mixed_dtypes):
        assert loss_error < 5e-3
        assert gradient_error < 5e-2
        assert held == {("bfloat16", False, "bfloat16"), ("float32", True, "float32")}
        assert stored == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------- frozen weights that stay


def steps(rank, world_size, buckets, options):
    """Four mini-batches with an optimizer; the second and third also with an evaluation, and a change, before them."""
    model = tiny_lora("llama_gqa_bias", torch.float64)
    engine = make_engine(model, buckets, **options)
    optimizer = torch.optim.SGD(engine.parameter_groups(), lr=0.5)
    moved, errors = [], []
    for step in range(4):
        rows = random_rows(5, model.config.vocab_size, longest=60, seed=step)
        if step == 1:
            with engine.evaluation() as evaluation:
                evaluation.run(make_mini_batch(engine, rows))
        if step == 3:  # other frozen weights, as a checkpoint would bring them
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("up_proj.base_layer.weight"):
                        parameter.mul_(1.5)
            engine.master.fill({n: p.detach() for n, p in model.named_parameters() if not p.requires_grad})
        error, report = step_error(engine, model, rows)
        errors.append(error)
        moved.append([phase.frozen_bytes for phase in report.phases])
        assert report.frozen_bytes <= sum(phase.load_bytes for phase in report.phases)
        optimizer.step()
        engine.write_back(model)
    engine.close()
    return moved, max(errors)


STAYS = {
    "one strategy": ("pp2:60", {}, [True, False, False, True]),
    "overlap": ("pp2:60", {"overlap_load": True, "overlap_return": True}, [True, False, False, True]),
    "in place": ("dp2:16@32,cp2:60", {"overlap_load": True, "overlap_return": True}, [False] * 4),
    "two strategies, one memory": ("dp2:16@32,tp2:60", {}, [True, False, False, True]),
    "two strategies, two memories": ("dp2:16@32,tp2:60", {"second_source": True}, [True, False, False, True]),
}


def several(rank, world_size):
    return {name: steps(rank, world_size, buckets, options) for name, (buckets, options, _) in STAYS.items()}


@pytest.mark.slow
def test_frozen_weights_are_loaded_again_only_where_they_are_gone():
    for found in run_ranks(2, several, timeout=280):
        for name, (moved, error) in found.items():
            assert error <= 1e-11, name
            # of the first phase of each step; with one memory it is of the strategy that the step before ended with
            assert [first > 0 for first, *_ in moved] == STAYS[name][2], name


def different_memories(rank, world_size):
    """One rank has forgotten what its memory holds: no byte moves."""
    model = tiny_lora("llama_gqa_bias", torch.float64)
    engine = make_engine(model, "tp2:60")
    rows = random_rows(6, model.config.vocab_size, longest=60)
    engine.forward_backward(make_mini_batch(engine, rows))
    if rank == 1:
        engine._switching.arenas.forget()
    with pytest.raises(Exception, match="frozen weights that are loaded already"):
        engine.forward_backward(make_mini_batch(engine, rows))


def test_ranks_that_hold_different_weights_are_stopped_before_a_byte_moves():
    run_ranks(2, different_memories)
