"""The program of a phase that streams its units: every transfer in time, no rank waits in a circle, counts of the laws."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.errors import StrategyError
from hf_hotspa.layout.units import Units, slot_of
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, build_vector
from hf_hotspa.packing.passes import beats
from hf_hotspa.plan.units import Program, make_program
from hf_hotspa.strategy import Strategy


def units_of(num_layers: int, tied: bool = False, frozen: tuple[int, ...] = ()) -> Units:
    embedding = ParameterSpec("embed", (8, 4), "float64", EMBEDDING, in_head=tied, trainable=EMBEDDING not in frozen)
    layers = [ParameterSpec(f"layer{i}", (4, 4), "float64", i, trainable=i not in frozen) for i in range(num_layers)]
    head = ParameterSpec("head", (4,), "float64", HEAD, trainable=HEAD not in frozen)
    return Units(build_vector([embedding, *layers, head], [1] * num_layers, 1))


def program_of(units: Units, strategy: str, replicas: list[list[list[int]]], is_trained: bool = True) -> Program:
    parsed = Strategy.parse(strategy)
    return make_program(units, parsed, beats(parsed, replicas, None, is_trained))


class _Rank:
    """A rank that runs a program as the engine does: the worker's transfers in order, the computation's visits in order."""

    def __init__(self, program: Program, stage: int) -> None:
        self.visits = [(p.is_backward, v) for p in program.stages[stage] for v in p.visits]
        self.units = {visit.unit for _, visit in self.visits}
        self.gates = {index for _, visit in self.visits for index in visit.opens}
        self.opened: set[int] = set()
        self.at = 0
        self.held: dict[int, int] = {}


def run(program: Program, units: Units, loads: bool) -> None:
    """Runs all ranks, one a stage, until nothing is left; every visit must find its unit in its slot, and every return
    the gradient of its own unit."""
    ranks = [_Rank(program, stage) for stage in range(len(program.stages))]
    over, gradients = 0, [dict[int, int]() for _ in ranks]
    while True:
        moved = False
        if over < len(program.transfers) and all(over not in r.gates or over in r.opened for r in ranks):
            unit, is_load = program.transfers[over]
            for rank, gradient in zip(ranks, gradients, strict=True):
                if is_load and unit in rank.units:
                    rank.held[slot_of(unit)] = unit
                elif over in rank.gates:
                    assert gradient.pop(slot_of(unit)) == unit
            over, moved = over + 1, True
        for rank, gradient in zip(ranks, gradients, strict=True):
            if rank.at < len(rank.visits):
                is_backward, visit = rank.visits[rank.at]
                if visit.load < over and visit.after < over:
                    if loads:
                        assert rank.held[slot_of(visit.unit)] == visit.unit
                    if is_backward and visit.unit in units.trained:
                        assert slot_of(visit.unit) not in gradient
                        gradient[slot_of(visit.unit)] = visit.unit
                    rank.opened.update(visit.opens)
                    rank.at, moved = rank.at + 1, True
        if not moved:
            break
    assert over == len(program.transfers)
    assert all(rank.at == len(rank.visits) for rank in ranks)
    assert not any(gradients)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_program_comes_to_its_end_with_the_right_weights(data):
    num_layers = data.draw(st.integers(1, 7))
    pp = data.draw(st.integers(1, num_layers))
    dp = data.draw(st.integers(1, 3))
    options = f"+z{data.draw(st.sampled_from([2, 3]))}"
    if pp == 1 and data.draw(st.booleans()):
        options += "+ck5"
    frozen = tuple(data.draw(st.sets(st.sampled_from([EMBEDDING, HEAD, *range(num_layers)]))))
    units = units_of(num_layers, data.draw(st.booleans()), frozen)
    pack = st.lists(st.integers(1, 14), min_size=1, max_size=3)
    replicas = [data.draw(st.lists(pack, max_size=4)) for _ in range(dp)]
    program = program_of(units, f"dp{dp}pp{pp}{options}", replicas, data.draw(st.booleans()))
    run(program, units, options.startswith("+z3"))
    for passes in program.stages:
        counts = [sum(r in p.replicas for p in passes if p.is_backward) for r in range(dp)]
        assert (
            all(a == b for a, b in pairwise(counts)) or len({len(packs) for packs in replicas}) > 1 or "ck" in options
        )


@pytest.mark.parametrize("packs", [1, 2, 5])
def test_counts_of_transfers(packs):
    """Units that are in their slots when a pass turns round are not loaded again: the head and the last two layers, and for
    the next pack the embedding and the first two."""
    units, replicas = units_of(6), [[[3]] * packs, [[2]]]
    streamed = program_of(units, "dp2+z3", replicas)
    assert streamed.count(HEAD, True) == packs
    assert streamed.count(EMBEDDING, True) == packs + 1
    assert [streamed.count(layer, True) for layer in range(6)] == [packs + 1] * 2 + [2 * packs] * 2 + [packs] * 2
    assert all(streamed.count(unit, False) == packs for unit in (EMBEDDING, *range(6), HEAD))
    whole = program_of(units, "dp2+z2", replicas)
    assert not any(transfer.is_load for transfer in whole.transfers)
    assert len(whole.transfers) == 8 * packs
    evaluated = program_of(units, "dp2+z3", replicas, is_trained=False)
    assert all(transfer.is_load for transfer in evaluated.transfers)
    assert len(evaluated.transfers) == 8 * packs
    assert streamed.digest() != evaluated.digest()


def test_what_is_not_fully_sharded_says_so():
    for text, why in (
        ("pp2+ck8+z3", "a pipeline of token chunks"),
        ("dp2+ck8+kg2+z2", "keeps graphs"),
    ):  # fmt: skip
        with pytest.raises(StrategyError, match=why):
            Strategy.parse(text)
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
