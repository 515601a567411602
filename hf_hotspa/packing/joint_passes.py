"""The passes of all replicas of a phase in one agreed order, in which fully sharded strategies load and return units.

All replicas load a unit's weights together and return its gradients together, so replicas with different packs must
agree in which pass they meet: the first pack of every replica, then the second, and so on; a replica with fewer packs
skips a pass. A pack in chunks of tokens is several passes; if some replicas go forward next and others backward,
forward passes come first.

In a pipeline replicas meet chunk by chunk: the first chunk of the first chain of every replica's first pack, and so on;
a replica without such a chunk skips it. Stages run them in our own 1F1B, so each replica keeps its chunk order on every
stage: forward in token order, backward in reverse (`JointPasses`).

A pure function of the plan, the same on every rank; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_hotspa.packing.bucketing import PhasePlan
from hf_hotspa.packing.cuts import cut_for, cut_into_chains
from hf_hotspa.packing.pipeline_order import Operation, Passes, Turn, at_a_time, choose_passes
from hf_hotspa.strategy import Strategy

Lengths = Sequence[int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass over the units of a stage, and the replicas (dp coordinates) that compute in it."""

    stage: int
    is_backward: bool
    replicas: tuple[int, ...]


Beat = tuple[Pass, ...]
"""Passes of different stages that run at the same time."""


def pack_lengths(phase: PhasePlan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the lengths in every pack of every replica: all that the order of passes depends on."""
    return tuple(tuple(pack.lengths for pack in packs) for packs in phase.replicas)


@dataclass(frozen=True)
class JointPasses:
    """The packs, or chunks, that all replicas of a pipeline run together: each pass as large as the largest of any
    replica, and the replicas that take part in it."""

    passes: Passes
    replicas: tuple[tuple[int, ...], ...]

    def operations(self, stage: int, replica: int) -> list[Operation]:
        """Returns what a stage of a replica runs, in order, by the replica's numbers of packs (or chunks)."""
        own: dict[int, int] = {}
        for unit, having in enumerate(self.replicas):
            if replica in having:
                own[unit] = len(own)
        return [(own[unit], is_backward) for unit, is_backward in self.passes.operations(stage) if unit in own]


def joint_passes(
    strategy: Strategy, replicas: Sequence[Sequence[Lengths]], most_tokens: int | None, pair_cost: float
) -> JointPasses:
    """Plans the passes of packs, or of their chunks, with all replicas together (arguments: see `beats`)."""
    tokens: list[int] = []
    sizes: list[int] = []
    having: list[tuple[int, ...]] = []
    for index in range(max(map(len, replicas), default=0)):
        cut = {
            r: [[stop - first for first, stop in chain] for chain in cut_for(strategy, packs[index], pair_cost)]
            if strategy.ck
            else [[sum(packs[index])]]
            for r, packs in enumerate(replicas)
            if index < len(packs)
        }
        for chain in range(max(map(len, cut.values()))):
            met = {r: chains[chain] for r, chains in cut.items() if chain < len(chains)}
            sizes.append(max(map(len, met.values())))
            for at in range(sizes[-1]):
                there = {r: chunks[at] for r, chunks in met.items() if at < len(chunks)}
                tokens.append(max(there.values()))
                having.append(tuple(there))
    chains = sizes if strategy.ck else ()
    return JointPasses(choose_passes("own", tokens, strategy.pp, most_tokens, chains), tuple(having))


def beats(
    strategy: Strategy,
    replicas: Sequence[Sequence[Lengths]],
    most_tokens: int | None = None,
    is_trained: bool = True,
    pair_cost: float = 0.0,
) -> list[Beat]:
    """Returns all passes of a phase, with backward ones if `is_trained`. See `pack_lengths` for `replicas`; for
    pipelines, `pipeline_order` for `most_tokens` and `cut_into_chains` for `pair_cost`."""
    if strategy.pp > 1:
        return _of_stages(strategy, joint_passes(strategy, replicas, most_tokens, pair_cost), is_trained)
    return _of_chunks([_passes(strategy, packs, is_trained) for packs in replicas])


def _passes(strategy: Strategy, packs: Sequence[Lengths], is_trained: bool) -> list[bool]:
    """Whether each pass of a replica is backward, as `token_chunks.PackRunner` runs every chain."""
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


def _of_stages(strategy: Strategy, joint: JointPasses, is_trained: bool) -> list[Beat]:
    forward = [(unit, False) for unit in range(len(joint.replicas))]
    orders = [
        [Turn(stage, *operation) for operation in (joint.passes.operations(stage) if is_trained else forward)]
        for stage in range(strategy.pp)
    ]
    return [
        tuple(Pass(turn.stage, turn.is_backward, joint.replicas[turn.unit]) for turn in turns)
        for turns in at_a_time(orders, strategy.pp)
    ]
