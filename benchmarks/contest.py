"""What `step.py` and its parts share: model shapes, the mini-batch, and the sides of the contest."""

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, parse_buckets, strategies_of

MODELS = {  # hidden, intermediate, layers, vocabulary; 8 heads, 4 key/value heads
    "0.9M": (128, 384, 4, 512),
    "7M": (256, 768, 8, 2048),
    "46M": (512, 1536, 12, 8192),
}


@dataclass(frozen=True)
class Side:
    """One contestant: a bucket list, static when it has one bucket.

    Args:
        packed: Whether sequences share packs.
    """

    name: str
    buckets: tuple[Bucket, ...]
    packed: bool = True

    @property
    def is_static(self) -> bool:
        return len(self.buckets) == 1


def with_context(strategy: Strategy) -> Iterator[Strategy]:
    """The strategies that divide tokens over some or all of the ranks that a strategy has replicas on."""
    for cp in range(2, strategy.dp + 1):
        if strategy.dp % cp == 0:
            yield replace(strategy, dp=strategy.dp // cp, cp=cp)


PAPER_STATIC = {"packed to the context": True, "not packed": False}
"""The paper's baselines, and whether they pack: packs no longer than the longest sequence; each sequence a separate pack."""


def one_each(lengths: Sequence[int], *, dp: int = 1, quadratic_cost: float = 0.0, **_: Any) -> Any:
    """In the place of `pack_sequences`: every sequence is a pack, the longest first to the replica with the least to do."""
    replicas: list[tuple[float, int, list[tuple[int, ...]]]] = [(0.0, replica, []) for replica in range(dp)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        load, replica, packs = replicas[0]
        packs.append((index,))
        cost = lengths[index] + quadratic_cost * lengths[index] ** 2
        heapq.heapreplace(replicas, (load + cost, replica, packs))
    return tuple(tuple(packs) for _, _, packs in sorted(replicas, key=lambda each: each[1]))


def pack_limit(strategy: Strategy, budget: int, rule: str) -> int:
    """The largest pack of a strategy: the tokens that the ranks which share its activations may hold together."""
    return budget * strategy.tp * strategy.cp * (strategy.pp if rule == "tp-pp" else 1)


def make_sides(options: argparse.Namespace, lengths: Sequence[int]) -> tuple[list[Side], list[str]]:
    """The contestants, and a line for each static strategy that is not legal for the model, or does not fit."""
    longest = max(lengths)
    shape = describe(options).shape
    sides, left_out = [], []
    contestants = list(strategies_of(options.ranks))
    if options.cp:
        contestants += [context for strategy in contestants for context in with_context(strategy)]
    for strategy in contestants:
        limit = pack_limit(strategy, options.budget, options.budget_rule)
        if why := strategy.unsupported_reason(shape):
            left_out.append(f"{strategy} is not legal: {why}")
        elif limit < longest:
            left_out.append(f"{strategy} does not fit: its packs of {limit} tokens cannot hold a sequence of {longest}")
        else:
            sides.append(Side(f"static {strategy}", (Bucket(strategy, longest, limit),)))
            short = (Bucket(strategy, longest, longest),)
            sides += [Side(f"static {strategy}, {how}", short, packed) for how, packed in PAPER_STATIC.items()]
    texts = options.hot or default_hot(options, longest, sides)
    for text in texts:
        buckets = parse_buckets(text)
        check_buckets(buckets, options.ranks, shape)
        over = [str(b) for b in buckets if b.pack_tokens > pack_limit(b.strategy, options.budget, options.budget_rule)]
        name = "hot " + " + ".join(str(b.strategy) for b in buckets)
        if any(side.name == name for side in sides):
            name = f"hot {text}"  # the same strategies with other packs
        sides.append(Side(name + (" (over budget)" if over else ""), buckets))
    return sides, left_out


def default_hot(options: argparse.Namespace, longest: int, fitting: Sequence[Side]) -> list[str]:
    """Pure data parallelism up to the budget, then each static strategy that fits."""
    wide = Strategy(dp=options.ranks)
    if longest <= options.budget:
        return []
    return [
        f"{wide}:{options.budget},{bucket.strategy}:{bucket.longest}@{bucket.pack_tokens}"
        for side in fitting
        for bucket in side.buckets
        if bucket.strategy != wide and "," not in side.name
    ]


# -- the model and its data -------------------------------------------------------------------------------------------


def model_config(name: str) -> Any:
    """A Llama of the given size."""
    from transformers import LlamaConfig

    hidden, intermediate, layers, vocabulary = MODELS[name]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )


def describe(options: argparse.Namespace) -> Any:
    """The description of the model, without its weights."""
    import torch
    from transformers import LlamaForCausalLM

    from hf_hotspa.model.specs import describe_model

    with torch.device("meta"):
        found = describe_model(LlamaForCausalLM(model_config(options.model)))
    check_runs_everywhere(found.shape)
    return found


def check_runs_everywhere(shape: ModelShape) -> None:
    """Stops where the model would be kept from tp or pp: the strongest sides would be missing, and nobody would see it.

    Raises:
        SystemExit: saying why. A Llama runs under every strategy that its heads and layers allow.
    """
    plans = shape.has_tp_plan and shape.has_pp_plan
    if (
        unsupported := shape.tp_unsupported_reason
        or shape.pp_unsupported_reason
        or (None if plans else "a parallel plan is missing")
    ):
        raise SystemExit(f"sides that are legal cannot run: {unsupported}")


def make_model(name: str, seed: int = 0) -> Any:
    """Random weights in fp32, the same on every rank."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(model_config(name))


def mini_batch_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each sequence of the mini-batch."""
    if options.lengths:
        lengths = [int(length) for length in json.loads(Path(options.lengths).read_text())]
        if not lengths:
            raise SystemExit(f"{options.lengths} holds no lengths")
        return lengths
    return [min(256, options.budget)] * options.num_short + [options.long]
