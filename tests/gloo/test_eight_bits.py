"""Bases in 8 bits: gradients of every strategy equal those of PEFT and the library in one process, and codes travel bit for bit."""

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params, Linear8bitLt

from hf_hotspa.features.eight_bit.llm_int8 import read_llm_int8
from hf_hotspa.model.specs import describe_model
from tests.families import MIXTURE
from tests.gloo.test_qlora import step_errors
from tests.harness import run_ranks
from tests.qlora import EIGHT_BITS, MIXES, WIDE, every_strategy, tiny_qlora

pytestmark = pytest.mark.gloo


def stays(weight, *args, move=Int8Params.to, **kwargs):
    """On CPUs PEFT's DoRA moves weights to their own device in every forward, and bitsandbytes loses the scales then."""
    return weight if weight.dtype == torch.int8 else move(weight, *args, **kwargs)


def in_double(model):
    """Trained and plain frozen weights in fp64; codes and scales as they are, and multiplied in fp64."""
    Int8Params.to = stays
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.data = parameter.data.double()
    model.config.dtype = torch.float64
    model.config._experts_implementation = "eager"  # fused ones take no fp64
    return model


LLAMA, QWEN, GEMMA = "llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps"


def case(family, form, buckets, sizes, **lora):
    return family, buckets, sizes, {"quantization": EIGHT_BITS[form], "lora": lora}


CASES = {
    "sp, ck": case(GEMMA, "int8", "tp2+sp+rc:16@32,pp2+ck20:60", WIDE),
    "z3, v2": case(LLAMA, "int8_weight_only", "dp2+z3:16@32,pp2+v2:60", WIDE),
    "DoRA": case(LLAMA, "int8_weight_only", "dp2:16@32,tp2:60", WIDE, use_dora=True),
    "DoRA, LLM.int8": case(LLAMA, "int8", "tp2+sp:60", WIDE, use_dora=True),
    "experts in plain weights": case(MIXTURE, "int8", "dp2ep2:16@32,tp2:60", {}, target_modules=["q_proj", "o_proj"]),
    "uneven": case("llama_uneven", "int8_weight_only", "tp2:20@40,tp2+sp:60", {}),
}


QUICK = ("sp, ck", "z3, v2", "DoRA", "experts in plain weights")


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_gradients(names):
    errors = run_ranks(2, step_errors, {name: CASES[name] for name in names}, in_double)[0]
    print(errors)
    assert min(errors.values()) > 0
    # PEFT takes DoRA's norms from weights that are dequantized in fp32
    assert all(error <= (1e-6 if "DoRA" in case else 1e-10) for case, error in errors.items()), errors


def whole_and_shard(rank, world_size, threshold):
    """For a cut of rows, and of columns: this rank's outputs and gradients of LLM.int8 in evaluation, the library's of the
    whole layer, and the shard."""
    torch.manual_seed(0)
    columns, rows, tokens = 48, 20, 7
    plain = torch.nn.Linear(columns, rows, bias=False)
    x, seed = torch.randn(tokens, columns), torch.randn(tokens, rows)
    x[2, 5], x[4, 30] = 9.0, -7.5
    whole = Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=threshold)
    whole.load_state_dict(plain.state_dict())
    whole = whole.to("cpu").eval()
    [(_, layer)] = read_llm_int8(torch.nn.Sequential(whole)).items()
    codes, scales = layer.tensors(whole)
    inputs = x.clone().requires_grad_()
    expected = whole(inputs)
    expected.backward(seed)
    found = {"whole": (expected.detach(), inputs.grad)}
    for dim in (0, 1):
        holder = torch.nn.Sequential(torch.nn.Identity())
        layer.put(holder, "0")
        [module] = holder
        size = layer.shape[dim] // world_size
        place = (rank * size, (rank + 1) * size)
        module.weight = torch.nn.Parameter(codes.narrow(dim, place[0], size).clone(), False)
        module.scales = torch.nn.Parameter(scales.narrow(0, place[0], size) if dim == 0 else scales, False)
        product = layer.product(module.eval())
        product.cut(dim, [place], False, torch.distributed.group.WORLD)
        own = (x if dim == 0 else x.narrow(1, place[0], size)).clone().requires_grad_()
        out = product(own)
        out.backward(seed.narrow(1, place[0], size) if dim == 0 else seed)
        found[dim] = out.detach(), own.grad
    return found


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_int8_activations_are_those_of_whole_rows(threshold):
    ranks = run_ranks(2, whole_and_shard, threshold)
    out, grad = ranks[0]["whole"]
    shards = torch.cat([found[0][0] for found in ranks], 1)
    # a code more or less of an activation would change outputs by 1e-3
    assert torch.equal(shards, out) if not threshold else torch.allclose(shards, out, rtol=0, atol=2e-6)
    assert torch.allclose(sum(found[0][1] for found in ranks), grad, rtol=0, atol=2e-6)
    assert torch.allclose(sum(found[1][0] for found in ranks), out, rtol=0, atol=2e-6)
    assert torch.equal(torch.cat([found[1][1] for found in ranks], 1), grad)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [(LLAMA, "int8"), (QWEN, "int8_weight_only"), (GEMMA, "int8_weight_only")])
def test_every_strategy(family, form):
    shape = describe_model(tiny_qlora(family, model=WIDE, quantization=EIGHT_BITS[form])).shape
    pools = [*(f"{s}:60@64" for s in every_strategy(shape)), *MIXES]
    errors = run_ranks(
        4, step_errors, {pool: case(family, form, pool, WIDE) for pool in pools}, in_double, timeout=500
    )[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-10, errors
