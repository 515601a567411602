"""Costs of dividing the tokens of a pack: over ranks (`cp`), in chunks (`+ck`).

The cp method is one of three:

* `ulysses`: one all-to-all gives each rank some heads of all tokens, a second one returns all heads of its tokens
  (Jacobs et al., 2023, "DeepSpeed Ulysses"). Any attention. The query heads of a rank must be a multiple of cp;
  key/value heads are repeated if fewer.
* `allgather`: keys and values of cut sequences are gathered, and again in the backward pass; their gradients are summed
  on the ranks that own the tokens. Any causal attention and any heads.
* `ring`: keys and values travel from neighbour to neighbour during computation, and partial results are merged by the
  logarithms of their sums (Liu et al., 2023, "Ring Attention"). Full attention with plain scores, on CPU.

`+ck`: all tokens run forward twice, except the last chunk; with `+kg`, the last chunks.

The engine, the cost models and `auto` share these functions.
"""

import math
from collections.abc import Iterable, Sequence

from hf_hotspa.costs.terms import Cost, Exchanges, Hop
from hf_hotspa.errors import StrategyError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import cut_into_chains
from hf_hotspa.strategy import Strategy

AUTO, ULYSSES, GATHER, RING = "auto", "ulysses", "allgather", "ring"
WAYS = (AUTO, ULYSSES, GATHER, RING)


def head_repeats(heads: int, kv_heads: int, cp: int) -> int:
    """Returns how often key/value heads are repeated so that every cp rank has them for its query heads. `heads`: query
    heads of a rank before the exchange, a multiple of cp. `kv_heads`: key/value heads, a divisor of `heads`."""
    group = heads // kv_heads
    return group // math.gcd(group, heads // cp)


def exchanged_elements(way: str, heads: int, kv_heads: int, cp: int) -> float:
    """Returns what a rank sends in one layer, forward and backward, in units of pack tokens times head width. The heads
    are of a tensor-parallel shard."""
    if way == ULYSSES:  # queries, keys, values, the result, and their gradients
        repeated = kv_heads * head_repeats(heads, kv_heads, cp)
        return 2 * (2 * heads + 2 * repeated) / cp * (cp - 1) / cp
    # keys and values, again in the backward pass, and their gradients
    return 3 * 2 * kv_heads * (cp - 1) / cp


def local_heads(strategy: Strategy, shape: ModelShape) -> tuple[int, int] | None:
    """Returns query and key/value heads of every tensor-parallel shard; None if shards differ."""
    heads, kv_heads, tp = shape.num_attention_heads, shape.num_key_value_heads, strategy.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        return None
    return heads // tp, max(kv_heads // tp, 1)


def ulysses_unsupported_reason(strategy: Strategy, shape: ModelShape) -> str | None:
    """Returns why heads cannot be divided over the cp ranks, or None."""
    heads = local_heads(strategy, shape)
    if heads is None:
        return f"tp{strategy.tp} does not divide the {shape.num_attention_heads} attention heads evenly"
    if heads[0] % strategy.cp:
        return f"the {heads[0]} attention heads of a rank are not a multiple of cp{strategy.cp}"
    return None


def choose_way(strategy: Strategy, shape: ModelShape, way: str = AUTO) -> str:
    """Returns the cp method of a strategy. Raises `StrategyError`: the requested method cannot run the model. `way`:
    one of `WAYS`; `auto` moves the least: `ulysses` if heads can be divided and each key/value head has few enough
    query heads, otherwise `allgather`."""
    later = "tokens also see later ones, and each rank has the keys before its tokens" if shape.both_ways else None
    reasons = {ULYSSES: ulysses_unsupported_reason(strategy, shape), RING: shape.ring_unsupported_reason, GATHER: later}
    if way == AUTO and (shape.both_ways or (shape.both_ways_in_blocks and not reasons[ULYSSES])):
        way = ULYSSES
    if way == AUTO:
        heads = local_heads(strategy, shape)
        if heads is None or reasons[ULYSSES]:
            return GATHER
        return min((ULYSSES, GATHER), key=lambda name: exchanged_elements(name, *heads, strategy.cp))
    if why := reasons[way]:
        raise StrategyError(
            f"strategy {strategy} cannot use the cp method {way!r}",
            why=why,
            fix=f"leave hotspa_context_parallel (EngineOptions.context_parallel) at {AUTO!r}, or use "
            + repr(ULYSSES if shape.both_ways else GATHER),
        )
    return way


def gathered_bytes(strategy: Strategy, shape: ModelShape, way: str, element_bytes: int) -> float:
    """Returns the bytes of all ranks' keys and values that a layer holds during attention, for a token of a row."""
    if strategy.cp == 1 or (chosen := choose_way(strategy, shape, way)) == ULYSSES:
        return 0.0
    _, kv_heads = local_heads(strategy, shape) or (0, shape.num_key_value_heads)
    pairs = 2 * kv_heads * shape.attention_size / shape.num_attention_heads
    wide = max(4, element_bytes)
    if chosen == RING:  # two blocks, and the gradients of two
        return pairs * 2 * (element_bytes + wide)
    # as received and in the order of the pieces; or with their gradients, in transit and in the wider dtype of the sums
    return pairs * strategy.cp * (2 * element_bytes if wide == element_bytes else 1.5 * element_bytes + wide)


def repeated_bytes(strategy: Strategy, shape: ModelShape, way: str, element_bytes: int) -> float:
    """Returns the bytes per token that a layer keeps until its backward pass for repeated heads (Ulysses only)."""
    heads = local_heads(strategy, shape)
    if strategy.cp == 1 or heads is None or choose_way(strategy, shape, way) != ULYSSES:
        return 0.0
    width = shape.attention_size / shape.num_attention_heads * element_bytes
    return 2 * heads[1] * (head_repeats(*heads, strategy.cp) - 1) * width


def exchange_seconds(
    strategy: Strategy, shape: ModelShape, way: str, hop: Hop, measured: Exchanges | None
) -> tuple[float, float]:
    """Returns what a layer's cp exchanges add, forward and backward: seconds per pack token, and seconds per pack. Uses
    hops of a hidden state for the ring, and for the other methods unless `measured`."""
    chosen = choose_way(strategy, shape, way)
    heads = local_heads(strategy, shape) or (shape.num_attention_heads, shape.num_key_value_heads)
    width = shape.attention_size / shape.num_attention_heads / shape.hidden_size
    tokens = exchanged_elements(chosen, *heads, strategy.cp) * width
    measured = measured or Exchanges(hop, hop)
    if chosen == ULYSSES:
        return tokens * measured.all_to_all.token_s, 4 * measured.all_to_all.latency_s
    if chosen == GATHER:  # forward, again in the backward pass, and the gradients
        again, back = measured.gather, measured.all_to_all
        return tokens * (2 * again.token_s + back.token_s) / 3, 2 * again.latency_s + back.latency_s
    return tokens * hop.token_s, 3 * (strategy.cp - 1) * hop.latency_s


def tokens_at_a_time(strategy: Strategy, pack_tokens: int) -> int:
    """Returns the most tokens of a pack whose activations exist at once on a rank: of one chunk, divided by cp."""
    return -(-(min(pack_tokens, strategy.ck) if strategy.ck else pack_tokens) // strategy.cp)


def chunked_seconds(cost: Cost, packs: Iterable[Sequence[int]], strategy: Strategy, forward_share: float) -> float:
    """Returns the seconds of packs in chunks on one stage. `forward_share` is the forward pass's share of `cost`."""
    seconds = 0.0
    for lengths in packs:
        chains = cut_into_chains(lengths, strategy.ck)
        num_again = [max(len(chain) - 1 - strategy.kg, 0) for chain in chains]
        again = [chain[num][0] - chain[0][0] for chain, num in zip(chains, num_again, strict=True)]
        first_rounds = cost.a * sum(n * n for n in again) + cost.b * sum(again) + cost.c * sum(num_again)
        whole = cost.a * sum(n * n for n in lengths) + cost.b * sum(lengths) + cost.c * sum(map(len, chains))
        seconds += whole + forward_share * first_rounds
    return seconds
