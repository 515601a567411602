"""What chunks of tokens (`+ck`, `parallel.token_chunks`) take in memory and time.

Of a sequence that is cut, each layer keeps keys and values of the tokens in chunks before the last one, in the compute
dtype, and sums of their gradients in at least fp32; the chunk that is in a graph has the former once more, joined to its
own. Everything else is one chunk's. Its tokens run forward twice, but for those of the last chunk.
"""

from collections.abc import Iterable, Sequence

from hf_hotspa.costs.coefficients import Cost
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.chunk_cuts import cut_into_chains
from hf_hotspa.strategy import Strategy


def tokens_at_a_time(strategy: Strategy, pack_tokens: int) -> int:
    """The most tokens of a pack whose activations exist at once."""
    return min(pack_tokens, strategy.ck) if strategy.ck else pack_tokens


def carried_bytes(strategy: Strategy, shape: ModelShape, longest: int, element_bytes: int) -> float:
    """What chunks leave for each other in one layer, in bytes.

    Args:
        strategy: The strategy.
        shape: The model's shape.
        longest: Tokens of the longest sequence.
        element_bytes: Of the compute dtype.
    """
    if not strategy.ck:
        return 0.0
    heads = max(1, -(-shape.num_key_value_heads // strategy.tp))
    width = 2 * heads * shape.attention_size / shape.num_attention_heads  # of keys and of values
    return width * (2 * element_bytes + max(4, element_bytes)) * max(0, longest - strategy.ck)


def chunked_seconds(cost: Cost, packs: Iterable[Sequence[int]], most: int, forward_share: float) -> float:
    """Seconds of packs that are computed in chunks.

    Args:
        cost: Of a pack under the strategy, forward and backward.
        packs: The lengths in each.
        most: The most tokens of a chunk.
        forward_share: The forward pass in that.
    """
    seconds = 0.0
    for lengths in packs:
        chains = cut_into_chains(lengths, most)
        again = [chain[-1][0] - chain[0][0] for chain in chains]
        first_rounds = cost.a * sum(n * n for n in again) + cost.b * sum(again)
        first_rounds += cost.c * sum(len(chain) - 1 for chain in chains)
        whole = cost.a * sum(n * n for n in lengths) + cost.b * sum(lengths) + cost.c * sum(map(len, chains))
        seconds += whole + forward_share * first_rounds
    return seconds
