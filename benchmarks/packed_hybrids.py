"""A hybrid of linear attention on packs: all documents at once, beside one document at a time.

    python benchmarks/packed_hybrids.py
    python benchmarks/packed_hybrids.py --family qwen3_next --pack-tokens 4096 --json out/packed_hybrids.json

One process, fp32 on CPU, lengths of the rows that `make train` trains. Both sides have the same weights and packs and take
turns; seconds are CPU seconds of forward and backward, of a mini-batch and of one layer of linear attention alone, which
other processes do not change. The losses must agree to 1e-4. One document at a time is how
layers run whose forward is not known (`features.isolation.isolation`), and what a loop around transformers' own layers would do.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from result_file import command_line, given_options, write_json

from hf_hotspa.commands.rank_world import run_world

SIDES = ("at once", "one by one")
VOCABULARY = 8192


def demo_lengths(rows: int) -> list[int]:
    """Tokens of some rows of `examples/demo.py`."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from stdlib_corpus import build_corpus, build_tokenizer

    from hf_hotspa.data.prepare import prepare_dataset

    dataset = prepare_dataset(build_corpus(by_function=True), build_tokenizer(VOCABULARY), skips_empty=True)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:rows].tolist()
    return [min(len(dataset[index]["input_ids"]), 2048) for index in order]


def make_model(family: str, hidden: int) -> Any:
    """A hybrid of four layers, of which one attends."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
    }
    config = CONFIG_MAPPING[family](
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, pad_token_id=None, **(experts if family == "qwen3_next" else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def layer_seconds(model: Any, lengths: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """By side the CPU seconds of forward and backward of one layer of linear attention, as transformers has it and ours."""
    import torch

    from hf_hotspa.features.isolation.isolation import mix_packed
    from hf_hotspa.model.model_kind import is_linear_attention
    from hf_hotspa.parallel.attention import PackedSequences

    net: Any = next(module for module in model.modules() if is_linear_attention(module))
    hidden, alone = torch.randn(1, sum(lengths), net.hidden_size, requires_grad=True), net.forward
    mix_packed(net)
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    sides = {
        SIDES[0]: lambda: net(hidden, hotspa_pack=PackedSequences(tuple(lengths), borders)),
        SIDES[1]: lambda: torch.cat([alone(part) for part in hidden.split(tuple(lengths), 1)], 1),
    }
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds + 1):
        for side, run in sides.items():
            begin = time.process_time()
            run().sum().backward()
            found[side].append(time.process_time() - begin)
    return {side: seconds[1:] for side, seconds in found.items()}


def run_sides(rank: int, world_size: int, options: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    """By side the seconds of each mini-batch, and the loss of the last one."""
    from hf_hotspa.commands.bench.workload import make_rows
    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.model import model_kind
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.strategy import Bucket, Strategy

    bucket = Bucket(Strategy(), max(lengths), max(options.pack_tokens, *lengths))
    collate = PackedBucketCollator([bucket], rank=rank, vocab_size=VOCABULARY)
    rows = [row | {"labels": row["input_ids"]} for row in make_rows(lengths, VOCABULARY, seed=1)]
    engines = {}
    for side in SIDES:
        known = model_kind.is_linear_attention if side == SIDES[0] else lambda module: False
        with patch.object(model_kind, "is_linear_attention", known):
            engines[side] = HotSPaEngine(make_model(options.family, options.hidden), [bucket], EngineOptions())
    found: dict[str, Any] = {side: {"seconds": [], "loss": 0.0} for side in SIDES}
    for turn in range(options.rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            batch, begin = collate(rows), time.process_time()
            report = engines[side].forward_backward(batch)
            seconds = time.process_time() - begin
            found[side]["loss"] = float(report.loss)
            if turn:  # the first one warms up
                found[side]["seconds"].append(seconds)
    for engine in engines.values():
        engine.close()
    for side, seconds in layer_seconds(make_model(options.family, options.hidden), lengths, options.rounds).items():
        found[side]["layer_seconds"] = seconds
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--family", default="qwen3_5_text", choices=("qwen3_5_text", "qwen3_next"))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="documents of a mini-batch")
    parser.add_argument("--pack-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.rounds, options.pack_tokens = 64, 1, 512
    lengths = [5, 9, 130, 17, 33, 260, 8, 41] if options.quick else demo_lengths(options.rows)
    sides = run_world(1, run_sides, options, lengths)
    if abs(sides[SIDES[0]]["loss"] / sides[SIDES[1]]["loss"] - 1) > 1e-4:
        raise SystemExit(f"the losses differ: {sides}")
    tokens, ratios = sum(lengths), {}
    print(
        f"{options.family}, {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens (mean {tokens / len(lengths):.0f})"
    )
    for what, name in (("a mini-batch", "seconds"), ("a layer of linear attention", "layer_seconds")):
        medians = {side: statistics.median(each[name]) for side, each in sides.items()}
        ratios[name] = medians[SIDES[1]] / medians[SIDES[0]]
        print(
            f"{what}: {medians[SIDES[0]]:.3f} CPU s at once, {medians[SIDES[1]]:.3f} one by one: {ratios[name]:.2f} times as fast"
        )
    result = {
        "options": given_options(options),
        "lengths": lengths,
        "sides": sides,
        "ratios": ratios,
    }
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
