"""Which schedule runs the packs of a pipeline, and in which order each stage runs them, within a number of tokens.

Owns the choice of the schedule and the order of its passes, for the stages that run them and for the cost model that
predicts what they take and hold. Stage s of p in our 1F1B (PipeDream-Flush; Narayanan et al., SC'21, section 2.2) runs
a forward pass as long as fewer than p - s packs are in flight, else the oldest backward pass. What is in flight holds
its activations; where a mini-batch has packs of very different sizes, a number of tokens limits it, too: a long pack
then goes through with few or no others beside it, and short ones follow one another closely.

Promises, for every schedule: no stage holds more tokens at a time than the limit, padding included, but for one pack
that is longer alone. GPipe runs its packs in groups that are within the limit, one group after the other; torch's 1F1B,
which knows no limit, gives way to ours where its padded packs would pass it.

In our 1F1B both passes come in the order of the packs, and without a limit that matters the order is that of the plain
schedule. No stage waits for itself, also where a message occupies both ends until it is received
(`tests/unit/test_pipeline_order.py`): the limit is the same for all stages, so a stage is ahead of the next by one
forward pass at most, and that one comes right before the backward pass that it could wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError

SCHEDULES = ("auto", "own", "1f1b", "gpipe")
"""`own`: our 1F1B, for packs of any sizes; `auto` is the same. `1f1b`, `gpipe`: those of `torch.distributed.pipelining`,
which want packs of one size: shorter ones are padded."""

Operation = tuple[int, bool]
"""A pack, and whether it is its backward pass."""


def check_schedule(schedule: str) -> None:
    """Refuses an unknown schedule.

    Raises:
        HotspaConfigError: it is not one of `SCHEDULES`.
    """
    if schedule not in SCHEDULES:
        raise HotspaConfigError(f"there is no pipeline schedule {schedule!r}", fix=f"use one of {', '.join(SCHEDULES)}")


def reaches(tokens: Sequence[int], most_tokens: int | None = None) -> list[int]:
    """How many forward passes may have begun before each backward pass.

    Args:
        most_tokens: The most tokens in flight; None for no limit.

    Returns:
        For pack j the number k of packs, j + 1 at least, so that packs j to k - 1 are within the limit together.
    """
    total = len(tokens)
    if most_tokens is None:
        return [total] * total
    ends, end, held = [], 0, 0
    for start in range(total):
        if end == start:
            held, end = tokens[start], start + 1
        while end < total and held + tokens[end] <= most_tokens:
            held, end = held + tokens[end], end + 1
        ends.append(end)
        held -= tokens[start]
    return ends


def delays(reach: Sequence[int], num_stages: int) -> bool:
    """Whether a forward pass waits that the plain schedule would not let wait.

    Args:
        reach: See `reaches`.
    """
    return any(most < min(len(reach), backward + num_stages) for backward, most in enumerate(reach))


def operations(reach: Sequence[int], num_stages: int, stage: int) -> list[Operation]:
    """What a stage runs, in order: `(pack, whether it is its backward pass)`.

    Args:
        reach: See `reaches`.
        stage: The stage, from 0.
    """
    order: list[Operation] = []
    forwards = 0
    for backward, most in enumerate(reach):
        ahead = min(most, backward + num_stages - stage)
        order += ((forward, False) for forward in range(forwards, ahead))
        forwards = max(forwards, ahead)
        order.append((backward, True))
    return order


@dataclass(frozen=True)
class Passes:
    """How the packs of a replica run through its stages.

    Args:
        kind: The schedule: `own`, `1f1b` or `gpipe`.
        tokens: Of each pack as it runs, padding included.
        reach: See `reaches`.
        replaced: Whether it is ours because the one that was asked for would pass the limit.
    """

    kind: str
    num_stages: int
    tokens: tuple[int, ...]
    reach: tuple[int, ...]
    replaced: bool = False

    @property
    def depth(self) -> int:
        """How many forward passes the first stage may be ahead: GPipe goes as far as it may, on every stage."""
        return len(self.tokens) + self.num_stages if self.kind == "gpipe" else self.num_stages

    def operations(self, stage: int) -> list[Operation]:
        """What a stage runs, in order."""
        return operations(self.reach, self.depth, stage)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The packs `[first, last + 1)` that are through before the next begin: several only with GPipe."""
        if self.kind != "gpipe":
            return [(0, len(self.tokens))] if self.tokens else []
        ends = sorted(set(self.reach))
        return list(zip([0, *ends], ends, strict=False))


def choose_passes(schedule: str, tokens: Sequence[int], num_stages: int, most_tokens: int | None = None) -> Passes:
    """How the packs of a replica will run.

    Args:
        schedule: One of `SCHEDULES`.
        most_tokens: The most tokens in flight on a stage; None for no limit.
    """
    if schedule == "gpipe" and num_stages > 1 and tokens:
        padded, reach = _groups(tokens, most_tokens)
        return Passes("gpipe", num_stages, padded, reach)
    # torch's 1F1B refuses fewer packs than stages
    if schedule == "1f1b" and len(tokens) >= num_stages:
        padded = (max(tokens),) * len(tokens)
        if not delays(reaches(padded, most_tokens), num_stages):
            return Passes("1f1b", num_stages, padded, tuple(reaches(padded)))
        return Passes("own", num_stages, tuple(tokens), tuple(reaches(tokens, most_tokens)), replaced=True)
    return Passes("own", num_stages, tuple(tokens), tuple(reaches(tokens, most_tokens)))


def _groups(tokens: Sequence[int], most_tokens: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of packs that are padded to the longest of their group, and where each pack's group ends."""
    padded: list[int] = []
    reach: list[int] = []
    begin = 0
    while begin < len(tokens):
        end, longest = begin + 1, tokens[begin]
        while end < len(tokens):
            longer = max(longest, tokens[end])
            if most_tokens is not None and (end + 1 - begin) * longer > most_tokens:
                break
            end, longest = end + 1, longer
        padded += [longest] * (end - begin)
        reach += [end] * (end - begin)
        begin = end
    return tuple(padded), tuple(reach)


def most_packs(schedule: str, num_stages: int, stage: int, num_packs: int | None) -> int | None:
    """The most packs that a stage holds at a time, where tokens do not limit them; None for any number.

    Args:
        schedule: One of `SCHEDULES`.
        stage: The stage, from 0.
        num_packs: Packs of a replica; None for any number.
    """
    if schedule == "gpipe" and num_stages > 1:
        return num_packs
    return num_stages - stage if num_packs is None else min(num_stages - stage, num_packs)
