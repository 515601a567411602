"""What chunks of tokens (`+ck`, `parallel.token_chunks`) take in memory and time.

Of a sequence that is cut, each layer keeps keys and values of the tokens in chunks before the last one, in the compute
dtype, and sums of their gradients in at least fp32; the chunk that is in a graph has the former once more, joined to its
own. Everything else is one chunk's. Its tokens run forward twice, but for those of the last chunk. What `+kg` adds are the
graphs of more chunks, which run forward once; what `+kh` takes away is all that the layers keep, but for that of one and the next.
"""

from collections.abc import Iterable, Sequence

from hf_hotspa.costs.coefficients import Cost
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.chunk_cuts import cut_into_chains
from hf_hotspa.strategy import Strategy


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
    """Seconds of packs that are computed in chunks on one stage.

    Args:
        cost: Of a pack under the strategy, forward and backward.
        forward_share: The forward pass in that.
    """
    seconds = 0.0
    for lengths in packs:
        chains = cut_into_chains(lengths, strategy.ck)
        num_again = [max(len(chain) - 1 - strategy.kg, 0) for chain in chains]
        again = [chain[num][0] - chain[0][0] for chain, num in zip(chains, num_again, strict=True)]
        first_rounds = cost.a * sum(n * n for n in again) + cost.b * sum(again) + cost.c * sum(num_again)
        whole = cost.a * sum(n * n for n in lengths) + cost.b * sum(lengths) + cost.c * sum(map(len, chains))
        seconds += whole + forward_share * first_rounds
    return seconds
