"""Where a pack is cut into chunks of tokens (`+ck`): plain numbers.

A sequence that is no longer than a chunk stays whole, and several share one; a longer one is cut, and the chunks that it is
in are a *chain*: each needs the keys and values of those before it. A chain holds parts of one sequence only, and what is
left of its last chunk is filled with the short ones that follow, so that no more than one sequence's keys and values are
kept at a time. Huang et al. (2025, "ChunkFlow") cut and fill in this way.
"""

from collections.abc import Sequence

Chain = tuple[tuple[int, int], ...]
"""Chunks as tokens `[first, last + 1)` of their pack: one that stands alone, or those of a sequence that is cut."""


def cut_into_chains(lengths: Sequence[int], most: int) -> list[Chain]:
    """Cuts a pack into chunks of at most `most` tokens.

    Args:
        lengths: Tokens of each sequence, each at least 1.
        most: At least 1.

    Returns:
        Chains in the order of the row: together their chunks are the row. Only the last chunk of a chain holds more than
        one sequence.
    """
    chains: list[list[tuple[int, int]]] = []
    end = 0
    for length in lengths:
        begin, end = end, end + length
        if chains and length <= most and end - chains[-1][-1][0] <= most:
            chains[-1][-1] = chains[-1][-1][0], end
        else:
            chains.append([(at, min(at + most, end)) for at in range(begin, end, most)])
    return [tuple(chain) for chain in chains]
