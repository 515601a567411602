"""The program of a phase that streams its units: every transfer in time, no rank waits in a circle, counts of the laws."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.errors import StrategyError
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, build_vector
from hf_hotspa.packing.pipeline_order import backward_order, beats, joint_passes
from hf_hotspa.plan.units import Program, Units, make_program
from hf_hotspa.strategy import Strategy


def units_of(num_layers: int, tied: bool = False, frozen: tuple[int, ...] = ()) -> Units:
    embedding = ParameterSpec("embed", (8, 4), "float64", EMBEDDING, in_head=tied, trainable=EMBEDDING not in frozen)
    layers = [ParameterSpec(f"layer{i}", (4, 4), "float64", i, trainable=i not in frozen) for i in range(num_layers)]
    head = ParameterSpec("head", (4,), "float64", HEAD, trainable=HEAD not in frozen)
    return Units(build_vector([embedding, *layers, head], [1] * num_layers, 1))


def program_of(
    units: Units,
    strategy: str,
    replicas: list[list[list[int]]],
    is_trained: bool = True,
    most_tokens: int | None = None,
) -> Program:
    parsed = Strategy.parse(strategy)
    return make_program(units, parsed, beats(parsed, replicas, most_tokens, is_trained, 0.05))


class _Rank:
    """A rank that runs a program as the engine does: the worker's transfers in order, the computation's passes in order.

    It computes in the passes of its replica, each of which needs what the neighbouring stage's has made; the others it sits out:
    it lets go of their units at once, and the worker makes the gradients zero.
    """

    def __init__(self, program: Program, units: Units, stage: int, replica: int) -> None:
        self.passes, self.units = program.stages[stage], units
        self.own = [replica in one.replicas for one in self.passes]
        self.there = {visit.unit for one in self.passes for visit in one.visits}
        self.gates = {index for one in self.passes for visit in one.visits for index in visit.opens}
        self.of_others = {
            i for one, own in zip(self.passes, self.own, strict=True) if not own for v in one.visits for i in v.opens
        }
        self.opened, self.held, self.gradients = set[int](), set[int](), set[int]()
        self.at = self.visit = 0
        self.is_inside = False
        self.over = {False: 0, True: 0}  # passes of its own, by direction
        self.before: _Rank | None = None
        self.behind: _Rank | None = None

    def _has_message(self, index: int) -> bool:
        is_backward = self.passes[index].is_backward
        neighbour = self.behind if is_backward else self.before
        return neighbour is None or neighbour.over[is_backward] > self.over[is_backward]

    def move(self, over: int, loads: bool) -> bool:
        """Into a visit or out of it, or to the next pass, if it may; `over` transfers are."""
        if self.at == len(self.passes):
            return False
        one, own = self.passes[self.at], self.own[self.at]
        if not own:
            self.opened.update(index for visit in one.visits for index in visit.opens)
            self.at += 1
            return True
        if not self._has_message(self.at):
            return False
        if self.visit < len(one.visits):
            visit = one.visits[self.visit]
            if visit.load >= over or (one.is_backward and visit.after >= over):
                return False
            assert not loads or visit.unit in self.held
            self.is_inside = not self.is_inside
            if self.is_inside:
                return True
            if one.is_backward and visit.unit in self.units.trained:
                assert not any(self.units.share(visit.unit, other) for other in self.gradients)
                self.gradients.add(visit.unit)
            self.opened.update(visit.opens)
            self.visit += 1
        if self.visit == len(one.visits):
            self.over[one.is_backward] += 1
            self.at, self.visit = self.at + 1, 0
        return True

    def transfer(self, index: int, unit: int, is_load: bool) -> None:
        if is_load and unit in self.there:
            self.held = {unit, *(other for other in self.held if not self.units.share(unit, other))}
        elif index in self.of_others:  # zeros, written where no gradient waits to be sent
            assert not any(self.units.share(unit, other) for other in self.gradients)
        elif index in self.gates:
            self.gradients.remove(unit)


def run(program: Program, units: Units, loads: bool, dp: int, seed: int) -> None:
    """Runs all ranks until nothing is left, in some order; every visit must find its unit there, to its end, and every return
    the gradient of its own unit."""
    worlds = [[_Rank(program, units, stage, r) for stage in range(len(program.stages))] for r in range(dp)]
    for replica in worlds:
        for before, behind in pairwise(replica):
            before.behind, behind.before = behind, before
    ranks, over, rng = [rank for replica in worlds for rank in replica], 0, random.Random(seed)
    actors: list[_Rank | None] = [*ranks, None]  # None: what transfers
    while True:
        for actor in rng.sample(actors, len(actors)):
            if actor is not None and actor.move(over, loads):
                break
            if actor is None and over < len(program.transfers) and not any(over in r.gates - r.opened for r in ranks):
                for rank in ranks:
                    rank.transfer(over, *program.transfers[over])
                over += 1
                break
        else:
            break
    assert over == len(program.transfers)
    assert all(rank.at == len(rank.passes) for rank in ranks)
    assert not any(rank.gradients for rank in ranks)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_program_comes_to_its_end_with_the_right_weights(data):
    num_layers = data.draw(st.integers(1, 7))
    pp = data.draw(st.integers(1, num_layers))
    dp = data.draw(st.integers(1, 3))
    options = f"+z{data.draw(st.sampled_from([2, 3]))}"
    if data.draw(st.booleans()):
        options += data.draw(st.sampled_from(["+ck5", "+ck5+kg1"] if pp == 1 else ["+ck5", "+ck3"]))
    frozen = tuple(data.draw(st.sets(st.sampled_from([EMBEDDING, HEAD, *range(num_layers)]))))
    units = units_of(num_layers, data.draw(st.booleans()), frozen)
    pack = st.lists(st.integers(1, 14), min_size=1, max_size=3)
    replicas = [data.draw(st.lists(pack, max_size=4)) for _ in range(dp)]
    most_tokens = data.draw(st.sampled_from([None, 1, 12, 30])) if pp > 1 else None
    program = program_of(units, f"dp{dp}pp{pp}{options}", replicas, data.draw(st.booleans()), most_tokens)
    for seed in range(5):
        run(program, units, options.startswith("+z3"), dp, seed)
    for passes in program.stages:
        counts = [sum(r in p.replicas for p in passes if p.is_backward) for r in range(dp)]
        assert (
            all(a == b for a, b in pairwise(counts)) or len({len(packs) for packs in replicas}) > 1 or "ck" in options
        )


def test_replicas_in_chunks_meet_chunk_by_chunk_on_every_stage():
    """Each runs its own chunks, forward in their order and backward against it, and sits out what others have."""
    strategy, replicas = Strategy.parse("dp3pp2+ck4+z3"), [[[10], [4]], [[4, 3], [9]], []]
    joint = joint_passes(strategy, replicas, None, 0.0)
    assert joint.replicas == ((0, 1), (0,), (0,), (1,), (0, 1), (1,), (1,))
    assert joint.passes.tokens == (4, 3, 4, 3, 4, 3, 3)
    assert joint.passes.chains == (3, 1, 3)
    for stage in (0, 1):
        for replica, chains in ((0, [3, 1]), (1, [1, 1, 3]), (2, [])):
            order = joint.operations(stage, replica)
            assert [i for i, is_backward in order if not is_backward] == list(range(sum(chains)))
            assert [i for i, is_backward in order if is_backward] == backward_order(chains)
    units = units_of(5)
    for seed in range(40):
        run(make_program(units, strategy, beats(strategy, replicas)), units, True, 3, seed)


@pytest.mark.parametrize("packs", [1, 2, 5])
def test_counts_of_transfers(packs):
    """Units that are there when a pass turns round are not loaded again: the head and the last layer, and for the next pack
    the embedding and the first one."""
    units, replicas = units_of(6), [[[3]] * packs, [[2]]]
    streamed = program_of(units, "dp2+z3", replicas)
    counts = Counter(streamed.transfers)
    assert counts[HEAD, True] == packs
    assert counts[EMBEDDING, True] == packs + 1
    assert [counts[layer, True] for layer in range(6)] == [packs + 1] + [2 * packs] * 4 + [packs]
    assert all(counts[unit, False] == packs for unit in (EMBEDDING, *range(6), HEAD))
    whole = program_of(units, "dp2+z2", replicas)
    assert not any(transfer.is_load for transfer in whole.transfers)
    assert len(whole.transfers) == 8 * packs
    evaluated = program_of(units, "dp2+z3", replicas, is_trained=False)
    assert all(transfer.is_load for transfer in evaluated.transfers)
    assert len(evaluated.transfers) == 8 * packs
    assert streamed != evaluated


def test_what_is_not_fully_sharded_says_so():
    with pytest.raises(StrategyError, match="there is no .z1"):
        Strategy(z=1)


def test_tied_embeddings_stay_and_frozen_beginnings_have_no_backward():
    tied = units_of(4, tied=True)
    assert EMBEDDING not in tied.segments
    assert tied.resident == (0,)
    strategy = Strategy.parse("dp2+z3")
    assert tied.backward_of_stage(strategy, 0) == (HEAD, 3, 2, 1, 0)
    assert units_of(4, frozen=(EMBEDDING, 0)).backward_of_stage(strategy, 0) == (HEAD, 3, 2, 1)
    staged = Strategy.parse("pp2+z3")
    frozen = units_of(4, frozen=(EMBEDDING, 0, 1, 2, 3))
    assert frozen.backward_of_stage(staged, 0) == ()
    assert frozen.backward_of_stage(staged, 1)[0] == HEAD
