"""What `benchmarks/one_gpu.py` counts, without a GPU."""

import one_gpu  # type: ignore[import-not-found]
import torch


def test_operations_of_a_mini_batch_are_six_a_weight_and_token_and_the_causal_half_of_attention() -> None:
    options = one_gpu.parse_options(["--quick"])
    with torch.device("meta"):
        model = one_gpu.make_model(options)
    in_products = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    products = 6 * in_products
    assert one_gpu.flops_of(options, [1]) == products + 6 * 2 * 256
    assert one_gpu.flops_of(options, [100, 100]) == 200 * products + 2 * 6 * 2 * 256 * 100**2


def test_lora_trains_adapters_on_a_frozen_base_in_bf16_whose_weights_have_no_gradient() -> None:
    options = one_gpu.parse_options(["--quick", "--lora"])
    with torch.device("meta"):
        model = one_gpu.make_adapted(options, "sdpa")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7  # two matrices on each product of two layers
    assert all("lora_" in name for name in trained)
    base = {name: p for name, p in model.named_parameters() if name not in trained}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    in_products = sum(p.numel() for name, p in base.items() if p.dim() == 2 and "embed" not in name)
    assert one_gpu.flops_of(options, [1]) == 4 * in_products + 6 * 2 * 512
    sides = one_gpu.sides_of(options)
    assert [name for name in sides if "TRL" in name or "auto" in name] == [
        "ours, auto",
        "TRL's SFTTrainer, padded, micro-batches of 1",
    ]


def test_the_peak_is_that_of_the_card() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H200": 989e12,
    }
    assert {gpu: one_gpu.peak_flops(gpu) for gpu in (*peaks, "Somebody's card")} == {**peaks, "Somebody's card": None}


def test_what_ours_cannot_switch_on_is_refused_by_name() -> None:
    found = one_gpu.unsupported_options()
    assert set(found) == {"use_liger_kernel", "torch_compile"}
    assert all(f"training argument {name}=True cannot be honoured" in text for name, text in found.items())


def test_the_table_has_mfu() -> None:
    options = one_gpu.parse_options(["--quick"])
    found = {"ours, auto": [one_gpu.Found(seconds=[9.0, 2.0, 2.0], losses=[1.0], slots=100)]}
    lines = one_gpu.table(found, options, 90, 1e12, 1e13).splitlines()
    assert "| MFU |" in lines[0]
    assert "| 5.0% |" in lines[2]
    assert "| peak unknown |" in one_gpu.table(found, options, 90, 1e12, None)
