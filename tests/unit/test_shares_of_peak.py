"""Seconds from data sheets: shares of the peak by card, shape and kernel, and bytes of operations between products."""

from dataclasses import replace

import pytest

from hf_hotspa.costs.data_sheet import HALF_SIZE, SEPARATE, Kernels, between_products, layer_cost
from hf_hotspa.costs.hardware import hardware_from, load_hardware, template
from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.model_config import model_from
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.strategy import Strategy
from tests.unit.test_cost_memory import SIZES_7B

SHAPE = SIZES_7B.shape
A100, H100, B200 = (load_hardware(name) for name in ("a100-80g", "h100-80g", "b200-180g"))
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip


def test_cards_reach_their_own_shares() -> None:
    shares = [(machine.device.matmul_share, machine.device.attention_share) for machine in (A100, H100, B200)]
    assert len(set(shares)) == 3
    assert all(0.3 < share < 1 for pair in shares for share in pair)
    peak = H100.device.flops("bfloat16")
    faster = replace(H100, device=replace(H100.device, matmul_share=2 * H100.device.matmul_share))
    products = 6 * SHAPE.layer_parameters / (peak * H100.device.matmul_share)
    saved = layer_cost(SHAPE, 1, H100, "bfloat16").b - layer_cost(SHAPE, 1, faster, "bfloat16").b
    # of two blocks, sizes h x h and h x f: half of their seconds, a little more for finite sizes
    assert products / 2 < saved < products / 2 * (1 + HALF_SIZE * 2 / 4096)


def test_narrow_shards_reach_less() -> None:
    bare = replace(H100, intra_bandwidth=1e18)  # exchanges take nothing
    seconds = [tp * layer_cost(SHAPE, tp, bare, "bfloat16").b for tp in (1, 2, 4, 8, 32)]
    assert seconds == sorted(seconds)
    assert 1.1 < seconds[3] / seconds[0] < 1.6
    assert seconds[4] > 2 * seconds[0]


def test_fused_operations_move_less() -> None:
    fused = Kernels(fused=True)
    counted = 2 * (10 + 12) * 4096 + 16 * 11008 + 8 * 2 * 4096
    assert between_products(SHAPE, 1, fused) == pytest.approx(counted, rel=1e-4)
    assert between_products(SHAPE, 1, SEPARATE) > 2 * between_products(SHAPE, 1, fused)
    assert between_products(SHAPE, 4, SEPARATE) == pytest.approx(between_products(SHAPE, 1, SEPARATE) / 4)
    slow = replace(A100, device=replace(A100.device, memory_bandwidth=A100.device.memory_bandwidth / 2))
    more = [
        layer_cost(SHAPE, 1, slow, "bfloat16", kernels=k).b - layer_cost(SHAPE, 1, A100, "bfloat16", kernels=k).b
        for k in (fused, SEPARATE)
    ]
    assert more[1] / more[0] == pytest.approx(between_products(SHAPE, 1, SEPARATE) / between_products(SHAPE, 1, fused))


def test_attention_depends_on_the_kernel_and_the_width_of_heads() -> None:
    usual = layer_cost(SHAPE, 1, H100, "bfloat16")
    old = layer_cost(SHAPE, 1, H100, "bfloat16", kernels=Kernels(attention_share=H100.device.attention_share / 2))
    assert old.a == pytest.approx(2 * usual.a)
    narrow = replace(
        SHAPE, num_attention_heads=2 * SHAPE.num_attention_heads, num_key_value_heads=2 * SHAPE.num_key_value_heads
    )
    assert layer_cost(narrow, 1, H100, "bfloat16").a == pytest.approx(usual.a / 0.8)


def test_linear_attention_compares_no_pairs() -> None:
    types = ["linear_attention"] * 36 + ["full_attention"] * 12
    told = model_from({**QWEN3_NEXT, "layer_types": types}, "", "").shape
    by_interval = model_from({**QWEN3_NEXT, "full_attention_interval": 4}, "", "").shape
    whole = model_from({**QWEN3_NEXT, "layer_types": ["full_attention"] * 48}, "", "").shape
    assert told.pair_layers == by_interval.pair_layers == 0.25
    assert whole.pair_layers == 1
    assert layer_cost(told, 1, H100, "bfloat16").a == layer_cost(whole, 1, H100, "bfloat16").a / 4
    assert told.quadratic_cost == whole.quadratic_cost / 4
    # keys and values that chunks keep for each other: of a quarter of the layers
    chunked, plain = Strategy.parse("dp8+rc+ck1024"), Strategy.parse("dp8+rc")
    kept = []
    for shape in (told, whole):
        memory = MemoryModel(ModelSizes(shape), 8)
        kept.append(memory.breakdown(chunked, 8192).activations - memory.breakdown(chunked, 1024).activations)
        assert memory.breakdown(plain, 8192).activations > 0
    assert kept[0] == pytest.approx(kept[1] / 4)


def test_a_hardware_file_may_give_shares() -> None:
    assert "matmul_share: 0.66 " in template(H100)
    own = hardware_from({"base": "h100-80g", "matmul_share": 0.5})
    assert own.device.matmul_share == 0.5
    assert own.device.attention_share == H100.device.attention_share
    with pytest.raises(HotspaConfigError, match=r"matmul_share is 1\.5"):
        hardware_from({"base": "h100-80g", "matmul_share": 1.5})
