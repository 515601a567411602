"""The passes of all replicas of a phase in one agreed order: what fully sharded strategies load and return units by.

A unit's weights come to all replicas at a time, and its gradients leave all of them at a time, so replicas that run
different packs must agree in which pass they meet. Here their passes are merged: the first pack of every replica, the
second one, and so on; one that has fewer packs, or none, sits a pass out. A pack in chunks of tokens is several passes;
where some replicas go forward next and others backward, forward passes are met first. Stages of a pipeline run
the passes of the longest replica in our own 1F1B. A pure function of the plan, the same on every rank; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_hotspa.packing.chunk_cuts import cut_into_chains
from hf_hotspa.packing.mini_batch import PhasePlan
from hf_hotspa.packing.pipeline_order import Passes, choose_passes
from hf_hotspa.strategy import Strategy

Lengths = Sequence[int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the units of a stage, forward or backward.

    Args:
        replicas: Those that compute in it, by dp coordinate.
    """

    stage: int
    is_backward: bool
    replicas: tuple[int, ...]


Beat = tuple[Pass, ...]
"""Passes of different stages that run at a time."""


def pack_lengths(phase: PhasePlan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The lengths in every pack of every replica: all that the order of passes depends on."""
    return tuple(tuple(pack.lengths for pack in packs) for packs in phase.replicas)


def joint_passes(replicas: Sequence[Sequence[Lengths]], num_stages: int, most_tokens: int | None) -> Passes:
    """How packs run through stages where all replicas keep step: a replica leaves out what it does not have."""
    most = max((len(packs) for packs in replicas), default=0)
    tokens = [max(sum(packs[i]) for packs in replicas if i < len(packs)) for i in range(most)]
    return choose_passes("own", tokens, num_stages, most_tokens)


def beats(
    strategy: Strategy, replicas: Sequence[Sequence[Lengths]], most_tokens: int | None = None, is_trained: bool = True
) -> list[Beat]:
    """All passes of a phase.

    Args:
        replicas: See `pack_lengths`.
        most_tokens: The most tokens in flight on a stage; None for no limit.
        is_trained: Whether there are backward passes.
    """
    if strategy.pp > 1:
        return _of_stages(strategy, replicas, most_tokens, is_trained)
    return _of_chunks([_passes(strategy, packs, is_trained) for packs in replicas])


def _passes(strategy: Strategy, packs: Sequence[Lengths], is_trained: bool) -> list[bool]:
    """The passes of a replica, whether each is backward: those of `token_chunks.run_chain` for every chain of a pack."""
    passes: list[bool] = []
    for lengths in packs:
        for chunks in map(len, cut_into_chains(lengths, strategy.ck)) if strategy.ck else (1,):
            again = max(chunks - 1 - strategy.kg, 0)
            passes += [False] * chunks
            if is_trained:
                passes += [True] * (chunks - again) + [False, True] * again
    return passes


def _of_chunks(replicas: Sequence[Sequence[bool]]) -> list[Beat]:
    beats: list[Beat] = []
    at = [0] * len(replicas)
    while left := [r for r, passes in enumerate(replicas) if at[r] < len(passes)]:
        forward = [r for r in left if not replicas[r][at[r]]]
        now = tuple(forward or left)
        beats.append((Pass(0, not forward, now),))
        for r in now:
            at[r] += 1
    return beats


def _of_stages(
    strategy: Strategy, replicas: Sequence[Sequence[Lengths]], most_tokens: int | None, is_trained: bool
) -> list[Beat]:
    passes = joint_passes(replicas, strategy.pp, most_tokens)
    total = len(passes.tokens)
    left = [
        passes.operations(stage) if is_trained else [(i, False) for i in range(total)] for stage in range(strategy.pp)
    ]
    done: set[tuple[int, int, bool]] = set()
    beats: list[Beat] = []
    while any(left):
        now: list[tuple[int, int, bool]] = []
        for stage, operations in enumerate(left):
            if operations:
                pack, is_backward = operations[0]
                neighbour = stage + 1 if is_backward else stage - 1
                if not 0 <= neighbour < strategy.pp or (neighbour, pack, is_backward) in done:
                    now.append((stage, pack, is_backward))
        assert now, f"the stages of {strategy} wait for one another"
        for stage, _, _ in now:
            left[stage] = left[stage][1:]
        done.update(now)
        beats.append(
            tuple(
                Pass(stage, is_backward, tuple(r for r, packs in enumerate(replicas) if pack < len(packs)))
                for stage, pack, is_backward in now
            )
        )
    return beats
