"""Memory and time of one long sequence on one device: stock with gradient checkpointing, `+rc`, chunks of tokens, and whole.

    python benchmarks/long_sequences.py
    python benchmarks/long_sequences.py --tokens 4096 16384 --chunk 2048 --json out/long.json

One process, one run, all sides in turn on the same weights and tokens, in fp32 on one core: Llamas with the proportions of
Llama-3.2-1B (hidden : MLP : keys and values : vocabulary), two of them. Memory is measured on a narrow one, because attention
to 64K tokens takes an hour on a wide one: the peak of resident memory above what was held before the step, without an
optimizer; with `+kh` less the bytes that keys, values and the sums of their gradients take, as their owner counts them: on an
accelerator they are in host memory. Time is measured on a wide one, in rounds in which every side has its turn; what
is printed is the ratio of medians. All of our sides compute the head in pieces of the same size. The losses must agree to
1e-4, or the program stops. Each aim is printed with what was measured, and whether it is met. `--quick` takes seconds.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from result_file import command_line, given_options, write_json
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from hf_hotspa.calibrate.probe import PeakMemory, freeing_at_once
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import Bucket, Strategy

STOCK = "stock, checkpointing"
WHOLE, RECOMPUTED = Strategy(), Strategy(rc=1)
KV_SHARE = 4  # query heads to a key/value head, and hidden size to MLP
HEADS = 4  # at least
VOCABULARY = 128256 / 2048  # rows to a hidden element

OfSide = dict[int, dict[str, float]]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="for memory")
    parser.add_argument("--long", type=int, default=65536, help="tokens for the memory of the sides in chunks alone")
    parser.add_argument("--hidden", type=int, default=64, help="of the model for memory; 2048 is Llama-3.2-1B")
    parser.add_argument("--layers", type=int, default=2, help="of the model for memory")
    parser.add_argument("--chunk", type=int, default=1024, help="the most tokens of a chunk, for memory")
    parser.add_argument("--head", type=int, default=256, help="tokens whose logits our sides have at a time")
    parser.add_argument("--timed-tokens", type=int, default=8192)
    parser.add_argument("--timed-hidden", type=int, default=256)
    parser.add_argument("--timed-layers", type=int, default=4)
    parser.add_argument("--timed-chunk", type=int, default=2048)
    parser.add_argument("--timed-head", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="in which every side is timed once")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.long, options.chunk, options.head = [256, 512], 1024, 128, 64
        options.timed_tokens, options.timed_chunk, options.timed_layers, options.rounds = 512, 128, 2, 1
    return options


def make_model(hidden: int, layers: int, longest: int, vocabulary: int | None = None) -> LlamaForCausalLM:
    """A Llama with the proportions of Llama-3.2-1B, or with another vocabulary, with random weights."""
    torch.manual_seed(0)
    heads = max(HEADS, hidden // 64)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=KV_SHARE * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // KV_SHARE,
        vocab_size=vocabulary or int(hidden * VOCABULARY),
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    model.config.use_cache = False
    return model


def carried_bytes(options: argparse.Namespace) -> float:
    """Keys and values of a token in all layers, and the sums of their gradients, in fp32. The token itself (its id, position
    and label, 24 bytes) is beside them."""
    width = options.hidden / KV_SHARE
    return options.layers * 2 * width * (4 + 4)


@dataclass(frozen=True)
class Sides:
    """The plain model and an engine on it, and how a step of each side is made.

    Args:
        model: With gradient checkpointing on.
        engine: Knows all strategies.
        strategies: Ours.
    """

    model: LlamaForCausalLM
    engine: HotSPaEngine
    strategies: tuple[Strategy, ...]

    @classmethod
    def of(cls, model: LlamaForCausalLM, strategies: Sequence[Strategy], head: int) -> "Sides":
        """An engine with these strategies. Lengths of its buckets only tell them apart; packs are made by hand."""
        first = model.config.max_position_embeddings + 1 - len(strategies)
        buckets = [Bucket(strategy, tokens, tokens) for tokens, strategy in enumerate(strategies, first)]
        engine = HotSPaEngine(model, buckets, EngineOptions(loss_chunk_tokens=head))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return cls(model, engine, tuple(strategies))

    def steps(self, ids: list[int]) -> dict[str, Callable[[], float]]:
        """By side, what computes loss and gradients of a sequence and returns the loss."""
        steps: dict[str, Callable[[], float]] = {STOCK: lambda: self._stock(ids)}
        return steps | {str(s): (lambda s=s: self._ours(ids, s)) for s in self.strategies}  # type: ignore[misc]

    def host_bytes(self, side: str) -> int:
        """Bytes that a side held in host memory at most."""
        return 0 if side == STOCK else self.engine.phases[Strategy.parse(side)].host_bytes

    def _stock(self, ids: list[int]) -> float:
        tokens = torch.tensor([ids])
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _ours(self, ids: list[int], strategy: Strategy) -> float:
        bucket = Bucket(strategy, len(ids), len(ids))
        collate = PackedBucketCollator([bucket], rank=0, vocab_size=self.model.config.vocab_size, quadratic_cost=0.0)
        return float(self.engine.forward_backward(collate([{"input_ids": ids, "labels": ids}])).loss)


def random_ids(tokens: int, vocab_size: int) -> list[int]:
    """Random tokens, the same in every run."""
    return torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def check_losses(losses: dict[str, float], tokens: int) -> None:
    """Stops where sides do not agree."""
    if max(losses.values()) - min(losses.values()) > 1e-4 * min(losses.values()):
        raise SystemExit(f"the losses of {tokens} tokens differ: {losses}")


def measure_memory(options: argparse.Namespace) -> dict[str, OfSide]:
    """Peak, seconds and loss by side and tokens."""
    chunks = Strategy(ck=options.chunk)
    model = make_model(options.hidden, options.layers, max(*options.tokens, options.long))
    sides = Sides.of(model, [RECOMPUTED, chunks, replace(chunks, kh=True)], options.head)
    memory, found = PeakMemory(torch.device("cpu")), dict[str, OfSide]()
    for tokens in (64, *options.tokens, options.long):  # the first only warms up
        losses = {}
        for name, step in sides.steps(random_ids(tokens, model.config.vocab_size)).items():
            if tokens == options.long and "+ck" not in name:
                continue
            memory.start()
            begin = time.perf_counter()
            losses[name] = step()
            seconds, host = time.perf_counter() - begin, sides.host_bytes(name)
            peak = memory.stop() - host
            if tokens > 64:
                each = {"peak_bytes": float(peak), "host_bytes": host, "seconds": seconds, "loss": losses[name]}
                found.setdefault(name, {})[tokens] = each
        check_losses(losses, tokens)
        if tokens == 64:
            print(f"memory, hidden {options.hidden}, {options.layers} layers, chunks of {options.chunk}:")
            print(f"{'tokens':>8}" + "".join(f"{name:>32}" for name in losses))
        else:
            each = [found[name].get(tokens) for name in found]
            cells = [f"{of['peak_bytes'] / 2**20:,.1f} MiB {of['seconds']:,.1f} s" if of else "" for of in each]
            print(f"{tokens:>8}" + "".join(f"{cell:>32}" for cell in cells), flush=True)
    sides.engine.close()
    return found


def measure_time(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round by side."""
    tokens, chunks = options.timed_tokens, Strategy(ck=options.timed_chunk)
    model = make_model(options.timed_hidden, options.timed_layers, tokens)
    kept = replace(chunks, kg=-(-tokens // options.timed_chunk) - 1)  # all graphs
    sides = Sides.of(model, [WHOLE, RECOMPUTED, chunks, kept], options.timed_head)
    steps = sides.steps(random_ids(tokens, model.config.vocab_size))
    del steps[STOCK]
    check_losses({name: step() for name, step in sides.steps(random_ids(256, model.config.vocab_size)).items()}, 256)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        losses = {}
        for name, step in steps.items():
            begin = time.perf_counter()
            losses[name] = step()
            found[name].append(time.perf_counter() - begin)
        check_losses(losses, tokens)
    sides.engine.close()
    return found


def growth_of(of_side: OfSide) -> float:
    """Bytes that a further token took, from the shortest sequence to the longest."""
    low, high = min(of_side), max(of_side)
    return (of_side[high]["peak_bytes"] - of_side[low]["peak_bytes"]) / (high - low)


def length_within(of_side: OfSide, limit: float) -> float:
    """Tokens whose peak is the limit, between those measured; beyond them, by what a further token took."""
    measured = sorted((tokens, each["peak_bytes"]) for tokens, each in of_side.items())
    pairs = list(pairwise(measured))
    low, high = next((p for p in pairs if limit <= p[1][1]), pairs[-1])
    return max(0.0, low[0] + (high[0] - low[0]) * (limit - low[1]) / max(high[1] - low[1], 1.0))


@dataclass(frozen=True)
class Aim:
    """What was to be reached, and what was measured."""

    text: str
    measured: float
    bound: float
    is_at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the figure is on the right side of the bound."""
        return self.measured >= self.bound if self.is_at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.is_at_least else "<="
        return f"{'yes' if self.is_met else 'NO '}  {self.text}: {self.measured:.2f} (aim {sign} {self.bound:.2f})"


def memory_aims(options: argparse.Namespace, found: dict[str, OfSide], growth: dict[str, float]) -> list[Aim]:
    """Lengths within one limit that all sides share, and what a further token takes beside the formula."""
    chunked, hosted = (name for name in found if "+ck" in name)
    low, high = min(options.tokens), options.long
    limit = memory_limit(found, high)
    holds = float(high) if found[hosted][high]["peak_bytes"] <= limit else length_within(found[hosted], limit)
    of_rc, of_stock = (length_within(found[name], limit) for name in (str(RECOMPUTED), STOCK))
    carried = carried_bytes(options)
    kept = (found[hosted][high]["host_bytes"] - found[hosted][low]["host_bytes"]) / (high - low)
    return [
        Aim("tokens with +ck+kh, measured, to tokens with +rc within the limit", holds / of_rc, 4, True),
        Aim("tokens with +ck+kh, measured, to tokens of stock within the limit", holds / of_stock, 8, True),
        Aim("growth a token with +ck, off its formula by", abs(growth[chunked] / carried - 1), 0.10),
        Aim("growth a token in host memory with +ck+kh, off its formula by", abs(kept / carried - 1), 0.10),
        Aim("growth a token on the device with +ck+kh, part of that with +ck", growth[hosted] / carried, 0.10),
    ]


def memory_limit(found: dict[str, OfSide], longest: int) -> float:
    """The limit of device memory within which lengths are compared: what +rc takes for a quarter of the longest sequence,
    or stock for an eighth, whichever is less; of the lengths that were measured."""
    peaks = [
        min((abs(tokens - longest / share), each["peak_bytes"]) for tokens, each in found[name].items())[1]
        for name, share in ((str(RECOMPUTED), 4), (STOCK, 8))
    ]
    return min(peaks)


def time_aims(seconds: dict[str, float]) -> list[Aim]:
    """How long chunks take beside what they replace."""
    chunked, kept = (name for name in seconds if "+ck" in name)
    return [
        Aim("time of +ck to time of +rc", seconds[chunked] / seconds[str(RECOMPUTED)], 1.10),
        Aim("time with all graphs kept to time without chunks", seconds[kept] / seconds[str(WHOLE)], 1.05),
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    with freeing_at_once():
        found = measure_memory(options)
    rounds = measure_time(options)
    seconds = {name: median(each) for name, each in rounds.items()}
    growth = {name: growth_of(of) for name, of in found.items()}
    print("bytes a further token: " + ", ".join(f"{name} {size:,.0f}" for name, size in growth.items()))
    print(f"keys, values and the sums of their gradients by the formula: {carried_bytes(options):,.0f}")
    limit = memory_limit(found, options.long)
    lengths = {name: length_within(of, limit) for name, of in found.items()}
    print(
        f"within {limit / 2**20:,.1f} MiB: "
        + ", ".join(_length(n, max(found[name]), name) for name, n in lengths.items())
    )
    print(f"time, hidden {options.timed_hidden}, {options.timed_layers} layers, chunks of {options.timed_chunk}:")
    print(f"{options.timed_tokens:>8}  " + ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items()))
    aims = [*memory_aims(options, found, growth), *time_aims(seconds)]
    print("\n".join(map(str, aims)))
    result = {
        "options": given_options(options),
        "sides": found,
        "growth": growth,
        "carried": carried_bytes(options),
        "within": {"bytes": limit, "tokens": lengths},
        "rounds": rounds,
        "aims": [{**vars(aim), "is_met": aim.is_met} for aim in aims],
    }
    write_json(options.json, result)
    return result


def _length(tokens: float, measured: int, name: str) -> str:
    if tokens > measured:
        return f"{name} {measured:,} tokens measured and {tokens:,.0f} by its growth"
    return f"{name} {tokens:,.0f} tokens"


if __name__ == "__main__":
    main()
