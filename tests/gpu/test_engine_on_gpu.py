"""The engine on CUDA: every strategy and every way to switch is exact, and the variable-length kernel is as good as stock.

Four ranks, on as many GPUs where there are so many, else on one (`tests/shared_gpu.py`).
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.families import tiny_model
from tests.gloo.test_exact import SWITCHES, check, errors_of
from tests.harness import run_ranks
from tests.oracle import random_rows, reference_step, relative_error
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gpu

WORLD = 4
HOT = ["dp4:16@64,tp4:40@64", "dp2tp2:16@64,tp2pp2:40@64", "dp4:8@32,dp2pp2:16@64,pp4:40@64"]
SECOND_SOURCE = [{"second_source": second, "overlap_load": True, "overlap_return": True} for second in (False, True)]


def rank_errors(
    rank: int, world_size: int, family: str, dtype: torch.dtype, switches: list[dict[str, Any]]
) -> list[tuple[str, float, float, str]]:
    return errors_of(family, dtype, HOT * (len(switches) // 2), switches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama_uneven", "qwen3_qk_norm_tied", "phi3_fused"])
def test_hot_switched_strategies_are_exact(family: str, dtype: torch.dtype):
    check(run_ranks(WORLD, rank_errors, family, dtype, SWITCHES + SECOND_SOURCE, device="cuda", timeout=300), dtype)


def bf16_errors(rank: int, world_size: int, buckets: str) -> dict[str, Any]:
    """Relative errors to fp64 of ours in bf16 and of the stock model in bf16, and which device and kernel ours used."""
    from hf_hotspa.parallel import attention

    # heads of 8: the least that the kernel takes
    changes = {"num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 4, "attention_bias": False}
    model = tiny_model("llama_gqa_bias", torch.float64, **changes)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, exact = reference_step(model, rows)
    stock_loss, stock = reference_step(model.to(torch.bfloat16), rows)
    engine = make_engine(model, buckets)
    calls, kernel = [], attention.varlen

    def counted(*args: Any) -> Any:
        calls.append(1)
        return kernel(*args)

    with patch.object(attention, "varlen", counted):
        report = engine.forward_backward(make_mini_batch(engine, rows))
    ours = engine.full_gradients()
    found = {
        "device": engine.device.type,
        "calls": len(calls),
        "loss": abs(report.loss - loss) / loss,
        "stock_loss": abs(stock_loss - loss) / loss,
        "gradients": {name: relative_error(ours[name], exact[name]) for name in exact},
        "stock": {name: relative_error(stock[name], exact[name]) for name in exact},
    }
    engine.close()
    return found


@pytest.mark.parametrize("buckets", ["dp4:40@64", *HOT])
def test_bf16_is_as_near_to_fp64_as_the_stock_model(buckets: str):
    for found in run_ranks(WORLD, bf16_errors, buckets, device="cuda", timeout=300):
        assert found["device"] == "cuda"
        assert found["calls"] > 0
        assert found["loss"] <= max(2 * found["stock_loss"], 2e-3)
        for name, error in found["gradients"].items():
            assert error <= 2 * found["stock"][name] + 1e-3, name


def odd_heads(rank: int, world_size: int) -> float:
    """The worst gradient error in bf16 of a model whose heads (4 wide) no variable-length kernel takes."""
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    _, exact = reference_step(model, rows)
    engine = make_engine(model.to(torch.bfloat16), "dp2tp2:16@64,tp4:40@64")
    engine.forward_backward(make_mini_batch(engine, rows))
    errors = [relative_error(found, exact[name]) for name, found in engine.full_gradients().items()]
    engine.close()
    return max(errors)


def test_heads_that_the_kernel_does_not_take():
    assert max(run_ranks(WORLD, odd_heads, device="cuda", timeout=300)) < 0.1


def free_memory(rank: int, world_size: int) -> dict[str, int]:
    """Bytes that a plan may use before a large tensor lived and after, and what the device says after it."""
    from hf_hotspa.engine.switching import device_limit

    device = torch.device("cuda", 0)
    before = device_limit(device)
    large = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    del large
    return {"before": before or 0, "device": torch.cuda.mem_get_info(device)[0], "after": device_limit(device) or 0}


def test_memory_that_torch_keeps_is_free():
    (found,) = run_ranks(1, free_memory, device="cuda", init=False)
    assert found["device"] < found["before"] - (1 << 30)  # torch keeps it
    assert abs(found["after"] - found["before"]) < 1 << 28
