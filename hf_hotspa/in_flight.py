"""How many tokens a pipeline may hold at a time. Plain data, no torch."""

from typing import Any


def most_in_flight(strategy: Any, pack_tokens: int, longest: int) -> int:
    """The most tokens in flight on a rank of a replica: a full pipeline, or one sequence longer than all of it.

    With several stages on a rank, tokens count by the share of its stages that hold them: pp + (pp - 1) / v packs, which is
    what the first rank holds in a full pipeline (`packing.interleaved_order`). With chunks in a pipeline, all chunks of the
    longest sequence and one for each other stage; the last chunk of a sequence may be filled with short ones. What is given
    is the `Strategy`, `pack_tokens` and `longest` of a `Bucket`.
    """
    if not strategy.ck or strategy.pp == 1:
        return max(_full(strategy, pack_tokens), longest)
    longest = longest or pack_tokens
    if longest > strategy.ck:
        return _full(strategy, strategy.ck) + longest
    return _full(strategy, min(strategy.ck, pack_tokens))


def _full(strategy: Any, tokens: int) -> int:
    """Tokens on the first rank of a full pipeline of packs, or chunks, of so many."""
    pp, v = int(strategy.pp), int(strategy.v)
    return pp * tokens - ((pp - 1) * tokens // -v if v > 1 else 0)
