"""Which schedule runs the packs of a pipeline, and in which order each stage runs them, within a number of tokens.

Owns the choice of the schedule and the order of its passes, for the stages that run them and for the cost model that
predicts what they take and hold. Stage s of p in our 1F1B (PipeDream-Flush; Narayanan et al., SC'21, section 2.2) runs
a forward pass as long as fewer than p - s packs are in flight, else the oldest backward pass. What is in flight holds
its activations; where a mini-batch has packs of very different sizes, a number of tokens limits it, too: a long pack
then goes through with few or no others beside it, and short ones follow one another closely.

Promises, for every schedule: no stage holds more tokens at a time than the limit, padding included, but for one pack
that is longer alone. GPipe runs its packs in groups that are within the limit, one group after the other; torch's 1F1B,
which knows no limit, gives way to ours where its padded packs would pass it.

A pack that is cut into chunks of tokens (`+ck`) is a *chain* of them, and they are what our 1F1B runs: chains come first in,
first out, and the chunks of a chain go backward last in, first out, as each needs the gradients that later ones have for
its keys and values. All chunks of a chain are forward before the first is backward, so a stage runs n - 1 more forward
passes ahead for chains of n (Sun et al., 2024, "Seq1F1B"). Whole packs are chains of one.

In our 1F1B forward passes come in the order of the packs, and without a limit that matters the order is that of the plain
schedule. No stage waits for itself, also where a message occupies both ends until it is received
(`tests/unit/test_pipeline_order.py`): the limit is the same for all stages, so a stage is ahead of the next by one
forward pass at most, and that one comes right before the backward pass that it could wait for.

In the functions here `tokens` are those of each unit, a pack or a chunk of one; `most_tokens` the most of them in flight on
a stage (`Bucket.most_tokens`), None for no limit; `chains` how many units each chain has, in order, none where each stands alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.errors import StrategyError
from hf_hotspa.strategy import Strategy

SCHEDULES = ("auto", "own", "1f1b", "gpipe")
"""`own`: our 1F1B, for packs of any sizes; `auto` is the same. `1f1b`, `gpipe`: those of `torch.distributed.pipelining`,
which want packs of one size: shorter ones are padded. With several stages on a rank (`+v2`) both `own` and `1f1b` are interleaved."""

Operation = tuple[int, bool]
"""A pack (or chunk of one), and whether it is its backward pass."""


def runs_chunks(schedule: str) -> bool:
    """Whether a schedule runs chunks of packs (`+ck`), too."""
    return schedule in ("auto", "own")


def runs_rounds(schedule: str) -> bool:
    """Whether a schedule runs several stages on each rank (`+v`), too."""
    return schedule != "gpipe"


def check_runs(schedule: str, strategy: Strategy, flexible: bool = False) -> None:
    """Refuses a schedule that cannot run a pipeline: torch's run whole packs, its GPipe through one stage on each rank.

    Args:
        flexible: Whether ranks of tp may give work away.

    Raises:
        StrategyError: torch's schedule under `+ck` in a pipeline, GPipe under `+v`, or `+v` where ranks give work away.
    """
    if strategy.ck and strategy.pp > 1 and not runs_chunks(schedule):
        raise StrategyError(
            f"strategy {strategy} has token chunks, and the pipeline schedule is {schedule}",
            why="chunks of a pack go forward in their order and backward against it, which torch's schedules do not know",
            fix=f"use the schedule own, or leave +ck{strategy.ck} out",
        )
    if strategy.v > 1 and not runs_rounds(schedule):
        raise StrategyError(
            f"strategy {strategy} has several stages on each rank, and the pipeline schedule is {schedule}",
            why="it runs one stage on each rank",
            fix=f"use the schedule own or 1f1b, which are interleaved then, or leave +v{strategy.v} out",
        )
    if strategy.v > 1 and flexible:
        raise StrategyError(
            f"strategy {strategy} has several stages on each rank, beside ranks that give work away (hotspa_stragglers)",
            why="what a rank gives away is chosen for one stage",
            fix=f"use hotspa_stragglers=balance or watch, or leave +v{strategy.v} out",
        )


def backward_order(chains: Sequence[int]) -> list[int]:
    """Units in the order of their backward passes."""
    order: list[int] = []
    for num in chains:
        order += range(len(order) + num - 1, len(order) - 1, -1)
    return order


def most_ahead(chains: Sequence[int], depth: int) -> list[int]:
    """How many forward passes the first stage has begun before each backward pass, where nothing limits them; each stage
    behind it one less.

    A stage runs all of a chain before its first backward pass, and one forward pass at least for each backward pass: none
    is ahead of the next by more than that one, which is what keeps sends that block from waiting for each other.

    Args:
        depth: See `Passes.depth`.
    """
    aheads: list[int] = []
    most = 0
    for num in chains:
        for _ in range(num):
            most = max(most + 1, len(aheads) + num)
            aheads.append(most + depth - 1)
    return aheads


def reaches(tokens: Sequence[int], most_tokens: int | None = None, chains: Sequence[int] = ()) -> list[int]:
    """How many forward passes may have begun before each backward pass.

    Returns:
        For each backward pass, in their order, the number k of units so that 0 to k - 1, without those whose backward pass
        came before, are within the limit together; a whole chain at least.
    """
    total = len(tokens)
    if most_tokens is None:
        return [total] * total
    ends: list[int] = []
    first = end = held = 0
    for num in chains or [1] * total:
        last = first + num
        while end < last:
            held, end = held + tokens[end], end + 1
        for backward in range(last - 1, first - 1, -1):
            while end < total and held + tokens[end] <= most_tokens:
                held, end = held + tokens[end], end + 1
            ends.append(end)
            held -= tokens[backward]
        first = last
    return ends


def delays(reach: Sequence[int], num_stages: int) -> bool:
    """Whether a forward pass waits that the plain schedule would not let wait (`reach`: see `reaches`)."""
    return any(most < min(len(reach), backward + num_stages) for backward, most in enumerate(reach))


def operations(reach: Sequence[int], num_stages: int, stage: int, chains: Sequence[int] = ()) -> list[Operation]:
    """What a stage, counted from 0, runs, in order (`reach`: see `reaches`)."""
    order: list[Operation] = []
    forwards, chains = 0, chains or [1] * len(reach)
    for backward, most, ahead in zip(backward_order(chains), reach, most_ahead(chains, num_stages), strict=True):
        ahead = min(most, ahead - stage)
        order += ((forward, False) for forward in range(forwards, ahead))
        forwards = max(forwards, ahead)
        order.append((backward, True))
    return order


@dataclass(frozen=True)
class Passes:
    """How the packs of a replica run through its stages.

    Args:
        kind: The schedule: `own`, `1f1b` or `gpipe`.
        tokens: Of each unit as it runs, padding included.
        reach: See `reaches`.
        replaced: Whether it is ours because the one that was asked for would pass the limit.
    """

    kind: str
    num_stages: int
    tokens: tuple[int, ...]
    reach: tuple[int, ...]
    replaced: bool = False
    chains: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """How many forward passes the first stage may be ahead: GPipe goes as far as it may, on every stage."""
        return len(self.tokens) + self.num_stages if self.kind == "gpipe" else self.num_stages

    def operations(self, stage: int) -> list[Operation]:
        """What a stage runs, in order."""
        return operations(self.reach, self.depth, stage, self.chains)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The packs `[first, last + 1)` that are through before the next begin: several only with GPipe."""
        if self.kind != "gpipe":
            return [(0, len(self.tokens))] if self.tokens else []
        ends = sorted(set(self.reach))
        return list(zip([0, *ends], ends, strict=False))


def choose_passes(
    schedule: str,
    tokens: Sequence[int],
    num_stages: int,
    most_tokens: int | None = None,
    chains: Sequence[int] = (),
) -> Passes:
    """How the packs of a replica will run, by one of `SCHEDULES`."""
    reach = tuple(reaches(tokens, most_tokens, chains))
    own = Passes("own", num_stages, tuple(tokens), reach, chains=tuple(chains))
    if chains:
        return own
    if schedule == "gpipe" and num_stages > 1 and tokens:
        padded, reach = _groups(tokens, most_tokens)
        return Passes("gpipe", num_stages, padded, reach)
    # torch's 1F1B refuses fewer packs than stages
    if schedule == "1f1b" and len(tokens) >= num_stages:
        padded = (max(tokens),) * len(tokens)
        if not delays(reaches(padded, most_tokens), num_stages):
            return Passes("1f1b", num_stages, padded, tuple(reaches(padded)))
        return replace(own, replaced=True)
    return own


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


def most_packs(
    schedule: str, num_stages: int, stage: int, num_packs: int | None, chain: int = 1, rounds: int = 1
) -> int | None:
    """The most units that a stage, counted from 0, holds at a time, where tokens do not limit them; None for any number.

    A rank with several stages holds a pack on some of them only: it counts by their share, rounded up in all.

    Args:
        num_packs: Units of a replica; None for any number.
        chain: Units of the longest chain.
        rounds: Stages on each rank; then `stage` is the rank, of `num_stages`.
    """
    if rounds > 1:  # see `interleaved_order`: no group is larger than 2 p - 1
        passes = 2 * (num_stages - 1 - stage) + (rounds - 1) * (2 * num_stages - 1) + chain
        most = -(passes // -rounds)
    elif schedule == "gpipe" and num_stages > 1:
        return num_packs
    else:
        most = num_stages - stage + chain - 1
    return most if num_packs is None else min(most, num_packs)
