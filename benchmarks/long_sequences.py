"""Memory and time of one long sequence on one device: stock with gradient checkpointing, `+rc`, chunks of tokens, and whole.

    python benchmarks/long_sequences.py
    python benchmarks/long_sequences.py --tokens 4096 16384 --chunk 2048 --json out/long.json

One process, one run, all sides in turn on the same weights and tokens: a Llama with the proportions of Llama-3.2-1B
(hidden : MLP : keys and values : vocabulary), in fp32 on CPU. The peak is of resident memory above what was held before
the step, without an optimizer; with `+kh` less the bytes that the keys, values and sums of their gradients take, as their
owner counts them: on an accelerator they are in host memory. All of our sides compute the head in pieces of the same size.
The losses must agree to 1e-4, or the program stops. `--quick` takes seconds.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from hf_hotspa.calibrate.probe import PeakMemory, freeing_at_once
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import Bucket, Strategy

STOCK = "stock, checkpointing"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--chunk", type=int, default=2048, help="the most tokens of a chunk")
    parser.add_argument("--head", type=int, default=1024, help="tokens whose logits our sides have at a time")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 256; 2048 is Llama-3.2-1B")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.chunk, options.layers, options.head = [512, 1024], 128, 2, 64
    return options


def make_model(hidden: int, layers: int, longest: int) -> LlamaForCausalLM:
    """A Llama with the proportions of Llama-3.2-1B, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        vocab_size=hidden * 128256 // 2048,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    model.config.use_cache = False
    return model


def stock_step(model: LlamaForCausalLM, ids: list[int]) -> float:
    """Loss and gradients of the plain model with gradient checkpointing."""
    tokens = torch.tensor([ids])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(options: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Peak, seconds and loss by side and tokens."""
    longest = max(options.tokens)
    model = make_model(options.hidden, options.layers, longest)
    # lengths of the engine's buckets only tell the sides apart; packs are made by hand
    chunks = Strategy(ck=options.chunk)
    strategies = [
        Strategy(),
        Strategy(rc=1),
        chunks,
        replace(chunks, kh=True),
        replace(chunks, kg=-(-longest // options.chunk)),  # all graphs are kept
    ]
    buckets = [Bucket(s, longest + i, longest + i) for i, s in enumerate(strategies, 1 - len(strategies))]
    engine = HotSPaEngine(model, buckets, EngineOptions(loss_chunk_tokens=options.head))
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def ours(ids: list[int], strategy: Strategy) -> float:
        collate = PackedBucketCollator(
            [Bucket(strategy, longest, longest)], rank=0, vocab_size=model.config.vocab_size, quadratic_cost=0.0
        )
        return float(engine.forward_backward(collate([{"input_ids": ids, "labels": ids}])).loss)

    sides: dict[str, partial[float]] = {STOCK: partial(stock_step, model)}
    sides |= {str(strategy): partial(ours, strategy=strategy) for strategy in strategies}
    memory, found = PeakMemory(torch.device("cpu")), {name: dict[int, dict[str, float]]() for name in sides}
    generator = torch.Generator().manual_seed(0)
    for tokens in (64, *options.tokens):  # the first only warms up
        ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=generator).tolist()
        for name, step in sides.items():
            memory.start()
            begin = time.perf_counter()
            loss = step(ids)
            seconds = time.perf_counter() - begin
            strategy = sides[name].keywords["strategy"] if name != STOCK else Strategy()
            host = engine.phases[strategy].host_bytes if name != STOCK else 0
            peak = memory.stop() - host
            found[name][tokens] = {"peak_bytes": float(peak), "host_bytes": host, "seconds": seconds, "loss": loss}
        losses = [of_side[tokens]["loss"] for of_side in found.values()]
        if max(losses) - min(losses) > 1e-4 * losses[0]:
            raise SystemExit(f"the losses of {tokens} tokens differ: {dict(zip(sides, losses, strict=True))}")
    engine.close()
    for of_side in found.values():
        del of_side[64]
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    with freeing_at_once():
        found = measure(options)
    print(f"{'tokens':>8}" + "".join(f"{name:>32}" for name in found))
    for tokens in options.tokens:
        cells = [f"{of[tokens]['peak_bytes'] / 2**20:,.0f} MiB {of[tokens]['seconds']:,.1f} s" for of in found.values()]
        print(f"{tokens:>8}" + "".join(f"{cell:>32}" for cell in cells))
    low, high = min(options.tokens), max(options.tokens)
    growth = {name: (of[high]["peak_bytes"] - of[low]["peak_bytes"]) / max(high - low, 1) for name, of in found.items()}
    shape = make_shape(options)
    width = shape.num_key_value_heads * shape.attention_size / shape.num_attention_heads
    carried = options.layers * 2 * width * (4 + 4)  # keys and values, and the sums of their gradients, in fp32
    print("bytes a further token: " + ", ".join(f"{name} {size:,.0f}" for name, size in growth.items()))
    print(f"keys, values and their gradients by the formula: {carried:,.0f}")
    chunked, hosted, kept = (name for name in found if "+ck" in name)
    for tokens in options.tokens:
        seconds = {name: of[tokens]["seconds"] for name, of in found.items()}
        whole, recomputed = (seconds[str(strategy)] for strategy in (Strategy(), Strategy(rc=1)))
        print(
            f"{tokens:>8} tokens: {chunked} takes {seconds[chunked] / recomputed:.2f} of the time of +rc,"
            f" {hosted} {seconds[hosted] / recomputed:.2f}, and {kept} {seconds[kept] / whole:.2f} of that of no chunks"
        )
    limit = found[hosted][high]["peak_bytes"]
    lengths = {name: length_within(of, limit, growth[name]) for name, of in found.items()}
    print(f"within {limit / 2**20:,.0f} MiB: " + ", ".join(f"{name} {n:,.0f} tokens" for name, n in lengths.items()))
    result = {
        "options": {k: v for k, v in vars(options).items() if k != "json"},
        "sides": found,
        "growth": growth,
        "carried": carried,
        "within": {"bytes": limit, "tokens": lengths},
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def length_within(of_side: dict[int, dict[str, float]], limit: float, growth: float) -> float:
    """Tokens whose peak is the limit: between those measured, or beyond by what a further token takes."""
    measured = sorted((tokens, each["peak_bytes"]) for tokens, each in of_side.items())
    for (low, of_low), (high, of_high) in pairwise(measured):
        if of_low <= limit <= of_high:
            return low + (high - low) * (limit - of_low) / max(of_high - of_low, 1.0)
    tokens, peak = measured[0] if limit < measured[0][1] else measured[-1]
    return max(0.0, tokens + (limit - peak) / max(growth, 1.0))


def make_shape(options: argparse.Namespace) -> Any:
    """What the memory model knows of the model."""
    from hf_hotspa.model.specs import describe_model

    with torch.device("meta"):
        return describe_model(make_model(options.hidden, options.layers, max(options.tokens))).shape


if __name__ == "__main__":
    main()
