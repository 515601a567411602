"""The three ways in which ranks of cp attend to each other's tokens: what each can do, what it moves, and which one runs.

* `ulysses`: an all-to-all gives each rank some heads of all tokens, and another one its tokens of all heads back (Jacobs et
  al., 2023, "DeepSpeed Ulysses"). Any attention; the query heads of a rank must be a multiple of cp, and key/value heads
  are repeated where there are fewer.
* `allgather`: keys and values of cut sequences are gathered, in the backward once more, and their gradients summed where
  they belong. Any attention and any heads.
* `ring`: the same keys and values go from neighbour to neighbour while those at hand are used, and partial results are
  merged by the logarithms of their sums (Liu et al., 2023, "Ring Attention"). Full attention with plain scores, on CPU.

Plain data, no torch: the engine, the cost models and `auto` ask the same functions.
"""

import math

from hf_hotspa.costs.coefficients import Exchanges, Hop
from hf_hotspa.errors import StrategyError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy

AUTO, ULYSSES, GATHER, RING = "auto", "ulysses", "allgather", "ring"
WAYS = (AUTO, ULYSSES, GATHER, RING)


def head_repeats(heads: int, kv_heads: int, cp: int) -> int:
    """How often each key/value head is repeated so that every rank of cp has those of its query heads.

    Args:
        heads: Query heads that a rank has before the exchange, a multiple of cp.
        kv_heads: Its key/value heads, a divisor of them.
    """
    group = heads // kv_heads
    return group // math.gcd(group, heads // cp)


def exchanged_elements(way: str, heads: int, kv_heads: int, cp: int) -> float:
    """What a rank sends in one layer, forward and backward, in units of tokens of the pack times the width of a head.

    Args:
        way: `ulysses`, `allgather` or `ring`.
        heads: Query heads of the rank (of a tensor-parallel shard).
        kv_heads: Its key/value heads.
    """
    if way == ULYSSES:  # queries, keys, values and the result, and the gradient of each
        repeated = kv_heads * head_repeats(heads, kv_heads, cp)
        return 2 * (2 * heads + 2 * repeated) / cp * (cp - 1) / cp
    # keys and values, the same once more in the backward, and their gradients
    return 3 * 2 * kv_heads * (cp - 1) / cp


def local_heads(strategy: Strategy, shape: ModelShape) -> tuple[int, int] | None:
    """Query and key/value heads of every tensor-parallel shard; None where shards have different numbers of them."""
    heads, kv_heads, tp = shape.num_attention_heads, shape.num_key_value_heads, strategy.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return None
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_unsupported_reason(strategy: Strategy, shape: ModelShape) -> str | None:
    """Why heads cannot be divided over the ranks of cp, or None."""
    heads = local_heads(strategy, shape)
    if heads is None:
        return f"tp{strategy.tp} does not divide the {shape.num_attention_heads} attention heads evenly"
    if heads[0] % strategy.cp:
        return f"the {heads[0]} attention heads of a rank are no multiple of cp{strategy.cp}"
    return None


def choose_way(strategy: Strategy, shape: ModelShape, way: str = AUTO) -> str:
    """The way in which a strategy with cp runs.

    Args:
        way: One of `WAYS`; `auto` is the one that moves the least: `ulysses` where heads can be divided and there are
            few enough of them for each key/value head, else `allgather`.

    Raises:
        StrategyError: the way asked for cannot run the model.
    """
    refused = {ULYSSES: ulysses_unsupported_reason(strategy, shape), RING: shape.ring_unsupported_reason, GATHER: None}
    if way == AUTO:
        heads = local_heads(strategy, shape)
        if heads is None or refused[ULYSSES]:
            return GATHER
        return min((ULYSSES, GATHER), key=lambda name: exchanged_elements(name, *heads, strategy.cp))
    if why := refused[way]:
        raise StrategyError(
            f"strategy {strategy} cannot run the way {way!r}",
            why=why,
            fix=f"leave hotspa_context_parallel (EngineOptions.context_parallel) at {AUTO!r}, or use {GATHER!r}",
        )
    return way


def gathered_bytes(strategy: Strategy, shape: ModelShape, row_tokens: int, way: str, element_bytes: int) -> float:
    """What one layer holds of all ranks' keys and values while it attends; nothing of it outlives the layer.

    Args:
        row_tokens: Tokens of the pack that a rank has.
    """
    if strategy.cp == 1 or (chosen := choose_way(strategy, shape, way)) == ULYSSES:
        return 0.0
    _, kv_heads = local_heads(strategy, shape) or (0, shape.num_key_value_heads)
    pairs = 2 * kv_heads * shape.attention_size / shape.num_attention_heads * row_tokens
    wide = max(4, element_bytes)
    if chosen == RING:  # two blocks, and the gradients of two
        return pairs * 2 * (element_bytes + wide)
    # as they come and in the order of the pieces, or with their gradients; these on their way, and in the wider dtype in
    # which they are summed
    return pairs * strategy.cp * (2 * element_bytes if wide == element_bytes else 1.5 * element_bytes + wide)


def repeated_bytes(strategy: Strategy, shape: ModelShape, way: str, element_bytes: int) -> float:
    """What a layer keeps of a token until its backward because key/value heads are repeated; nothing but with Ulysses."""
    heads = local_heads(strategy, shape)
    if strategy.cp == 1 or heads is None or choose_way(strategy, shape, way) != ULYSSES:
        return 0.0
    width = shape.attention_size / shape.num_attention_heads * element_bytes
    return 2 * heads[1] * (head_repeats(*heads, strategy.cp) - 1) * width


def exchange_seconds(
    strategy: Strategy, shape: ModelShape, way: str, hop: Hop, measured: Exchanges | None = None
) -> tuple[float, float]:
    """What a layer's exchanges add, forward and backward: seconds a token of the pack, and seconds a pack.

    Args:
        hop: Passing a hidden state between two ranks: what the ring does.
        measured: The exchanges of the other ways; each as that many hops where they were not measured.
    """
    if strategy.cp == 1:
        return 0.0, 0.0
    chosen = choose_way(strategy, shape, way)
    heads = local_heads(strategy, shape) or (shape.num_attention_heads, shape.num_key_value_heads)
    width = shape.attention_size / shape.num_attention_heads / shape.hidden_size
    tokens = exchanged_elements(chosen, *heads, strategy.cp) * width
    measured = measured or Exchanges(hop, hop)
    if chosen == ULYSSES:
        return tokens * measured.all_to_all.token_s, 4 * measured.all_to_all.latency_s
    if chosen == GATHER:  # in the forward, again in the backward, and the gradients on their way back
        again, back = measured.gather, measured.all_to_all
        return tokens * (2 * again.token_s + back.token_s) / 3, 2 * again.latency_s + back.latency_s
    return tokens * hop.token_s, 3 * (strategy.cp - 1) * hop.latency_s
