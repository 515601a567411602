"""In which order a pipeline stage runs its packs: one forward and one backward in turn, within a number of tokens.

Owns the order of our 1F1B (PipeDream-Flush; Narayanan et al., SC'21, section 2.2), for the stages that run it and for
the cost model that foretells it. Stage s of p runs a forward pass as long as fewer than p - s packs are in flight, else
the oldest backward pass. What is in flight holds its activations; where a mini-batch has packs of very different sizes,
a number of tokens limits it, too: a long pack then goes through with few or no others beside it, and short ones follow
one another closely.

Promises: both passes come in the order of the packs, one pack may always be in flight, and without a limit that matters
the order is that of the plain schedule. No stage waits for itself, also where a message occupies both ends until it is
received (`tests/unit/test_pipeline_order.py`): the limit is the same for all stages, so a stage is ahead of the next by
one forward pass at most, and that one comes right before the backward pass that it could wait for.
"""

from collections.abc import Sequence


def reaches(tokens: Sequence[int], most_tokens: int | None = None) -> list[int]:
    """How many forward passes may have begun before each backward pass.

    Args:
        tokens: Of each pack.
        most_tokens: The most tokens in flight; None for no limit.

    Returns:
        For pack j the number k of packs, j + 1 at least, so that packs j to k - 1 are within the limit together.
    """
    total = len(tokens)
    if most_tokens is None:
        return [total] * total
    found, end, held = [], 0, 0
    for start in range(total):
        if end == start:
            held, end = tokens[start], start + 1
        while end < total and held + tokens[end] <= most_tokens:
            held, end = held + tokens[end], end + 1
        found.append(end)
        held -= tokens[start]
    return found


def delays(reach: Sequence[int], num_stages: int) -> bool:
    """Whether a forward pass waits that the plain schedule would not let wait.

    Args:
        reach: See `reaches`.
        num_stages: Stages.
    """
    return any(most < min(len(reach), backward + num_stages) for backward, most in enumerate(reach))


def operations(reach: Sequence[int], num_stages: int, stage: int) -> list[tuple[int, bool]]:
    """What a stage runs, in order: `(pack, whether it is its backward pass)`.

    Args:
        reach: See `reaches`.
        num_stages: Stages.
        stage: The stage, from 0.
    """
    found: list[tuple[int, bool]] = []
    forwards = 0
    for backward, most in enumerate(reach):
        ahead = min(most, backward + num_stages - stage)
        found += ((forward, False) for forward in range(forwards, ahead))
        forwards = max(forwards, ahead)
        found.append((backward, True))
    return found
