"""What it takes to divide the tokens of a pack: over ranks (`cp`), to the ranks of their experts (`ep`), in chunks (`+ck`).

Ranks of cp attend to each other's tokens in one of three ways: what each can do, what it moves, and which one runs.

* `ulysses`: an all-to-all gives each rank some heads of all tokens, and another one its tokens of all heads back (Jacobs et
  al., 2023, "DeepSpeed Ulysses"). Any attention; the query heads of a rank must be a multiple of cp, and key/value heads
  are repeated where there are fewer.
* `allgather`: keys and values of cut sequences are gathered, in the backward once more, and their gradients summed where
  they belong. Any attention and any heads.
* `ring`: the same keys and values go from neighbour to neighbour while those at hand are used, and partial results are
  merged by the logarithms of their sums (Liu et al., 2023, "Ring Attention"). Full attention with plain scores, on CPU.

In `ep` a rank sends each of its tokens to the ranks of its k experts, and gets k rows back: twice forward, twice backward. Loads are
taken as equal, as the balance losses of families make them: how unequal a router is shows in the report of a step only.

Of a sequence that is cut into chunks (`parallel.token_chunks`), each layer keeps keys and values of the tokens in chunks before the last one, in the compute
dtype, and sums of their gradients in at least fp32; the chunk that is in a graph has the former once more, joined to its
own. Everything else is one chunk's. Its tokens run forward twice, but for those of the last chunk. What `+kg` adds are the
graphs of more chunks, which run forward once; what `+kh` takes away is all that the layers keep, but for that of one and the next.

Plain data, no torch: the engine, the cost models and `auto` ask the same functions.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from hf_hotspa.costs.coefficients import Cost, Exchanges, Hop
from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import cut_into_chains
from hf_hotspa.strategy import Strategy

AUTO, ULYSSES, GATHER, RING = "auto", "ulysses", "allgather", "ring"
WAYS = (AUTO, ULYSSES, GATHER, RING)


def head_repeats(heads: int, kv_heads: int, cp: int) -> int:
    """How often each key/value head is repeated so that every rank of cp has those of its query heads: of a rank's
    query heads before the exchange, a multiple of cp, and key/value heads, a divisor of them."""
    group = heads // kv_heads
    return group // math.gcd(group, heads // cp)


def exchanged_elements(way: str, heads: int, kv_heads: int, cp: int) -> float:
    """What a rank sends in one layer by `ulysses`, `allgather` or `ring`, forward and backward, in units of tokens of
    the pack times the width of a head. Heads are those of a tensor-parallel shard."""
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
    """What one layer holds of all ranks' keys and values for a row of tokens while it attends, and not after."""
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
    """What a layer's exchanges add, forward and backward: seconds a token of the pack, and seconds a pack. The ring
    makes hops of a hidden state; other ways count as that many hops where they were not `measured`."""
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


_EXCHANGES = 4
_MESSAGES = _EXCHANGES + 1  # and the counts, forward


def expert_exchange_seconds(
    strategy: Strategy, shape: ModelShape, token_s: float, latency_s: float
) -> tuple[float, float]:
    """What a layer's exchanges add, forward and backward: seconds a token of the pack, and seconds a pack. A token's
    hidden state passes between two ranks in `token_s`, a message in `latency_s` more."""
    if strategy.ep == 1:
        return 0.0, 0.0
    away = (strategy.ep - 1) / strategy.ep * shape.experts_per_token / (strategy.cp * strategy.tp)
    return _EXCHANGES * away * token_s, _MESSAGES * latency_s


def layer_exchanges(
    strategy: Strategy, shape: ModelShape, way: str, hop: Callable[[int], Hop], measured: Exchanges | None = None
) -> tuple[float, float]:
    """What all exchanges of a layer add, forward and backward: seconds a token of the pack, and seconds a pack.

    Args:
        hop: Between the ranks of a group of so many neighbours.
        measured: Those of cp, where they were.
    """
    context = exchange_seconds(strategy, shape, way, hop(strategy.cp * strategy.tp), measured)
    link = hop(strategy.ep)
    experts = expert_exchange_seconds(strategy, shape, link.token_s, link.latency_s)
    return context[0] + experts[0], context[1] + experts[1]


def returned_bytes(strategy: Strategy, shape: ModelShape, element_bytes: int) -> float:
    """Bytes that a layer keeps of a token of a rank's row until its backward: what came back from its experts.

    What the experts themselves keep is as much, in the mean, as where they are not divided.
    """
    if strategy.ep == 1:
        return 0.0
    return shape.experts_per_token * shape.hidden_size * element_bytes / strategy.tp


def check_capacity(factor: float | None) -> None:
    """Refuses a capacity factor that is none.

    Raises:
        HotspaConfigError: it is not a number above 0.
    """
    if factor is not None and not 0 < factor < math.inf:
        raise HotspaConfigError(
            f"the capacity factor of experts is {factor}",
            where="hotspa_expert_capacity",
            fix="use a number such as 1.25, or leave it out: no token is dropped",
        )


def tokens_at_a_time(strategy: Strategy, pack_tokens: int) -> int:
    """The most tokens of a pack whose activations exist at once on a rank: those of a chunk, and its share of cp's."""
    return -(-(min(pack_tokens, strategy.ck) if strategy.ck else pack_tokens) // strategy.cp)


def carried_bytes(strategy: Strategy, shape: ModelShape, num_layers: int, longest: int, element_bytes: int) -> float:
    """What chunks leave for each other on the device in the layers of a stage, in bytes."""
    if not strategy.ck:
        return 0.0
    heads = max(1, -(-shape.num_key_value_heads // strategy.tp))
    width = 2 * heads * shape.attention_size / shape.num_attention_heads  # of keys and of values
    before = max(0, longest - strategy.ck)
    if strategy.kh:  # those of one layer: fetched, joined, and the gradients of both; and those of the next one
        return 5 * width * element_bytes * before / strategy.cp
    chunks = -(-longest // strategy.ck)
    # of each graph, what its chunk attends to
    joined = (chunks + 1) / 2 if strategy.pp > 1 else min(1 + strategy.kg, chunks)
    return num_layers * width * (element_bytes * (1 + joined) + max(4, element_bytes)) * before / strategy.cp


def chunked_seconds(cost: Cost, packs: Iterable[Sequence[int]], strategy: Strategy, forward_share: float) -> float:
    """Seconds of packs in chunks on one stage; `cost` is of a pack, `forward_share` what of it is forward."""
    seconds = 0.0
    for lengths in packs:
        chains = cut_into_chains(lengths, strategy.ck)
        num_again = [max(len(chain) - 1 - strategy.kg, 0) for chain in chains]
        again = [chain[num][0] - chain[0][0] for chain, num in zip(chains, num_again, strict=True)]
        first_rounds = cost.a * sum(n * n for n in again) + cost.b * sum(again) + cost.c * sum(num_again)
        whole = cost.a * sum(n * n for n in lengths) + cost.b * sum(lengths) + cost.c * sum(map(len, chains))
        seconds += whole + forward_share * first_rounds
    return seconds
