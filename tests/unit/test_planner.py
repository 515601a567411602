"""The planner: golden plans, the choice of senders, and that no wrong plan passes for a right one."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from written_plans import layout_of, plan_of, traffic_of, transfers_of  # type: ignore[import-not-found]

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError
from hf_hotspa.layout.placement import Interval, Layout, gradient_layout, master_layout, strategy_layout
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, build_vector
from hf_hotspa.plan.direct import SendLoads, choose_source
from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.plan.rounds import cut_rounds
from hf_hotspa.plan.switch_plan import (
    COLUMNS,
    INTER,
    INTRA,
    RELAY,
    SECOND,
    SOURCE,
    TARGET,
    Message,
    Slice,
    SwitchPlan,
    Transfer,
    Wire,
    canonical,
    prove,
)
from hf_hotspa.strategy import Strategy
from tests.random_models import plain, random_master_layout, random_model


def layout(name: str, *holdings: list[tuple[int, int, int, int]], sizes: tuple[int, ...] = (8,)) -> Layout:
    """A layout of given `(start, stop, segment, offset)`; every rank's buffers have the given sizes."""
    held = tuple(tuple(Interval(*interval) for interval in rank) for rank in holdings)
    return layout_of(name, held, tuple(sizes for _ in holdings))


def cut_vector(rows: int = 8, layers: int = 2) -> ParameterVector:
    """Layers of one column-parallel and one replicated parameter; an embedding and a head."""
    specs = [ParameterSpec("embed", (rows, 1), "bfloat16", EMBEDDING, 0, plain(rows))]
    for layer in range(layers):
        specs.append(ParameterSpec(f"{layer}.up", (rows, 2), "bfloat16", layer, 0, plain(rows)))
        specs.append(ParameterSpec(f"{layer}.norm", (3,), "bfloat16", layer))
    specs.append(ParameterSpec("head", (rows, 1), "bfloat16", HEAD, 0, plain(rows)))
    return build_vector(specs, [1] * layers, 0)


# ------------------------------------------------------------------------------------------------ choice of sender


@pytest.mark.parametrize(
    ("holders", "dst", "intra", "inter", "expected", "why"),
    [
        ([0, 3, 5], 3, {3: 99}, {3: 99}, 3, "itself, whatever its load"),
        ([2, 5, 7], 3, {2: 50}, {}, 2, "its own node comes before less loaded ones elsewhere"),
        ([0, 2, 3], 1, {0: 5, 2: 4, 3: 4}, {}, 2, "the least loaded of the node, the lower rank of two"),
        ([4, 5, 6], 0, {4: 0, 5: 9, 6: 9}, {4: 7, 5: 3, 6: 3}, 5, "between nodes, the load between nodes counts"),
        ([6, 4], 1, {}, {}, 4, "equal loads: the lowest rank, whatever the order of the holders"),
        ([1, 8], 9, {8: 1000}, {}, 8, "the last, smaller node is a node too"),
        ([0, 4, 7], 9, {}, {0: 2, 4: 2, 7: 1}, 7, "the short node has no holder: least loaded of all others"),
        ([2], 9, {2: 7}, {2: 7}, 2, "there is only one"),
    ],
)
def test_choice_of_sender(
    holders: list[int], dst: int, intra: dict[int, int], inter: dict[int, int], expected: int, why: str
) -> None:
    cluster = Cluster(10, 4)  # three nodes: ranks 0-3, 4-7, 8-9
    loads = SendLoads([intra.get(r, 0) for r in range(10)], [inter.get(r, 0) for r in range(10)])
    before = SendLoads(list(loads.intra_node), list(loads.inter_node))
    assert choose_source(holders, dst, loads, cluster) == expected, why
    assert loads == before


def test_loads_are_counted_by_kind_of_link() -> None:
    loads, cluster = SendLoads.zero(4), Cluster(4, 2)
    for src, dst, size in ((0, 0, 5), (0, 1, 7), (0, 2, 11), (3, 1, 13), (0, 1, 1)):
        loads.add(src, dst, size, cluster)
    assert loads == SendLoads([8, 0, 0, 0], [11, 0, 0, 13])


def test_loads_persist_over_pieces_and_segments() -> None:
    # Ranks 0 and 1 hold everything; 2 and 3 need it. Three equal pieces each: the loads alternate through all six.
    everything = [(0, 2, 0, 0), (2, 4, 1, 0), (4, 6, 2, 0)]
    source = layout("a", everything, everything, [], [], sizes=(2, 2, 2))
    target = layout("b", [], [], everything, everything, sizes=(2, 2, 2))
    plan = plan_load(source, target, Cluster(4, 4), [4, 4, 4])
    assert [(t.segment, t.src, t.dst) for t in sorted(transfers_of(plan), key=lambda t: (t.start, t.dst))] == [
        (0, 0, 2), (0, 1, 3), (1, 0, 2), (1, 1, 3), (2, 0, 2), (2, 1, 3),
    ]  # fmt: skip
    plan = plan_load(source, target, Cluster(4, 4), [12, 4, 4])
    assert traffic_of(plan, Cluster(4, 4), [12, 4, 4]).max_sent_bytes == 40
    # A heavy piece for one needer: the other sender then takes all that follows.
    target = layout("b", [], [], everything, [], sizes=(2, 2, 2))
    plan = plan_load(source, target, Cluster(4, 4), [12, 4, 4])
    assert [(t.segment, t.src) for t in sorted(transfers_of(plan), key=lambda t: t.start)] == [(0, 0), (1, 1), (2, 1)]


# ---------------------------------------------------------------------------------------------------- golden plans


def test_golden_digest() -> None:
    """A change of the digest is a change of what old and new versions of the package agree on: make it knowingly."""
    plan = plan_of("golden", 2, (Transfer(0, 2, 0, 0, 1, 3, 5),), False)
    assert plan.digest == "bff1b7f6bc7397abcbde0631b61eb0bbffb04eac9f9a17cc6743bee47c3b737b"


def test_transfers_that_continue_each_other_are_merged() -> None:
    def row(length: int, src_offset: int, dst: int, dst_offset: int, start: int, dst_store: int = TARGET) -> list[int]:
        return [SOURCE, 0, src_offset, dst_store, dst, dst_offset, start, length]

    pieces = [
        row(2, 0, 1, 4, 10), row(3, 2, 1, 6, 12),  # continues on both sides
        row(1, 5, 1, 10, 15),  # a gap at the destination
        row(1, 6, 1, 11, 16, RELAY),  # another buffer
        row(1, 7, 2, 12, 17),  # another destination
    ]  # fmt: skip
    random.Random(0).shuffle(pieces)
    assert canonical(np.array(pieces)).tolist() == [
        row(5, 0, 1, 4, 10),
        row(1, 5, 1, 10, 15),
        row(1, 6, 1, 11, 16, RELAY),
        row(1, 7, 2, 12, 17),
    ]
    assert canonical(np.empty((0, COLUMNS), np.int64)).shape == (0, COLUMNS)


@pytest.mark.parametrize(
    ("first", "second"),
    [("dp4", "tp4"), ("dp4", "pp2dp2"), ("dp4", "dp2tp2"), ("dp8", "tp2pp2dp2"), ("tp4", "tp4"), ("dp2tp2", "dp2tp2")],
)
def test_what_is_held_already_moves_no_byte(first: str, second: str) -> None:
    vector = cut_vector()
    source, target = (strategy_layout(vector, Strategy.parse(name)) for name in (first, second))
    cluster, sizes = Cluster(source.world_size, 8), [2] * len(vector.segments)
    traffic = traffic_of(plan_load(source, target, cluster, sizes), cluster, sizes)
    assert traffic.wire_bytes == 0
    assert traffic.local_bytes > 0


# -------------------------------------------------------------------------------------------- validate, digest, inverse


def shifted(field: str) -> Callable[[Transfer], Transfer]:
    return lambda transfer: transfer._replace(**{field: getattr(transfer, field) + 1})


def mutants(plan: SwitchPlan, rng: random.Random) -> dict[str, tuple[Transfer, ...]]:
    """Wrong versions of a plan; each changes what is delivered, whatever the plan."""
    transfers, index = list(transfers_of(plan)), rng.randrange(len(transfers_of(plan)))
    chosen, rest = transfers[index], transfers[:index] + transfers[index + 1 :]
    halves = chosen.length // 2
    wrong = {
        "dropped": rest,
        "duplicated": [*transfers, chosen],
        "reordered": transfers[::-1],
        "emptied": [*rest, chosen._replace(length=0)],
        "no such segment": [*rest, chosen._replace(segment=chosen.segment + 99)],
        "no such rank": [*rest, chosen._replace(dst=plan.world_size)],
        "negative rank": [*rest, chosen._replace(src=-1)],
        "of a relay buffer that nothing landed in": [*rest, chosen._replace(src_store=RELAY)],
        "of a second source that does not exist": [*rest, chosen._replace(src_store=SECOND)],
        "into a source": [*rest, chosen._replace(dst_store=SOURCE)],
        "in a hop of its own, twice": [*transfers, chosen._replace(hop=1)],
    }
    if all((a.segment, a.hop) != (b.segment, b.hop) for a, b in itertools.combinations(transfers, 2)):
        del wrong["reordered"]
    for field in ("length", "src_offset", "dst_offset", "start"):
        wrong[f"{field} shifted"] = [*rest, shifted(field)(chosen)]
    if chosen.src_store == RELAY:
        del wrong["of a relay buffer that nothing landed in"]
    if halves:
        wrong["shortened"] = [*rest, chosen._replace(length=halves)]
        first = chosen._replace(length=halves + 1)
        offsets = {"src_offset": chosen.src_offset + halves, "dst_offset": chosen.dst_offset + halves}
        second = chosen._replace(length=chosen.length - halves, start=chosen.start + halves, **offsets)
        wrong["one element twice"] = [*rest, first, second]
    other = rng.choice(transfers)
    if (other.dst, other.dst_offset) != (chosen.dst, chosen.dst_offset) and other != chosen:
        kept = [t for t in transfers if t not in (chosen, other)]
        swap = {"dst": other.dst, "dst_offset": other.dst_offset}, {"dst": chosen.dst, "dst_offset": chosen.dst_offset}
        pair = [chosen._replace(**swap[0]), other._replace(**swap[1])]
        if sorted(pair) != sorted([chosen, other]) and chosen.start != other.start:
            wrong["destinations swapped"] = [*kept, *pair]
    ordered = {name: sorted(bad, key=lambda t: (t.hop, t.src, t.dst, t.start)) for name, bad in wrong.items()}
    if "reordered" in wrong:
        ordered["reordered"] = wrong["reordered"]
    return {name: tuple(bad) for name, bad in ordered.items()}


def is_valid(plan: SwitchPlan, source: Layout, target: Layout) -> bool:
    try:
        prove(plan, source, target)
    except PlanError as error:
        return "transfer" not in str(error)
    return True


@pytest.mark.parametrize("seed", range(30))
def test_no_mutant_of_a_plan_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    model, world_size = random_model(rng), rng.randint(1, 8)
    strategy = rng.choice(model.strategies(world_size))
    master, weights = random_master_layout(rng, model.vector, world_size), strategy_layout(model.vector, strategy)
    gradients = gradient_layout(model.vector, strategy)
    sizes = [4] * len(model.vector.segments)
    plans = [(plan_load(master, weights, Cluster(world_size, 2), sizes), master, weights)]
    if any(gradients.holdings):
        plans.append((plan_return(gradients, master), gradients, master))
    for made, source, target in plans:
        plan = plan_of(made.name, made.world_size, transfers_of(made), made.accumulate)
        prove(plan, source, target)
        for name, transfers in mutants(plan, rng).items():
            mutant = plan_of(plan.name, plan.world_size, transfers, plan.accumulate)
            assert not is_valid(mutant, source, target), f"a transfer {name}"
            assert mutant.digest != plan.digest, f"a transfer {name}"


def test_a_load_and_a_return_prove_different_things() -> None:
    both = layout("both", [(0, 8, 0, 0)], [(0, 8, 0, 0)])
    halves = layout("halves", [(0, 4, 0, 0)], [(4, 8, 0, 0)])
    gathered = plan_return(both, halves)
    with pytest.raises(PlanError, match="a second time"):
        prove(replace(gathered, accumulate=False), both, halves)  # two copies into one place
    with pytest.raises(PlanError, match="no transfer sends"):
        prove(replace(plan_load(both, halves, Cluster(2, 2), [4]), accumulate=True), both, halves)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (layout("a", [(0, 4, 0, 0)], []), layout("b", [(0, 8, 0, 0)], []), r"holds elements \[4, 8\)"),
        (layout("a", [(0, 4, 0, 0)]), layout("b", [(0, 4, 0, 0)], []), "different worlds"),
        (layout("a", [(0, 4, 0, 0), (3, 8, 0, 4)]), layout("b", [(0, 8, 0, 0)]), "holds element 3 twice"),
        (layout("a", [(0, 4, 0, 0), (4, 8, 0, 3)]), layout("b", [(0, 8, 0, 0)]), "overlap in the buffer"),
        (layout("a", [(0, 4, 0, 5)]), layout("b", [(0, 4, 0, 0)]), "leaves its buffer of 8"),
        (
            layout("a", [(0, 4, 0, 0)], sizes=(8, 0)),
            layout("b", [(0, 4, 1, 0)], sizes=(0, 4)),
            r"holds elements \[0, 4\)",
        ),
    ],
)
def test_layouts_that_cannot_be_right_are_refused(source: Layout, target: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_load(source, target, Cluster(source.world_size, 2), [4, 4])


@pytest.mark.parametrize(("owners", "count"), [(([(0, 8, 0, 0)], [(4, 8, 0, 0)]), 2), (([(0, 4, 0, 0)], []), 0)])
def test_a_gradient_needs_exactly_one_owner(owners: tuple[list[tuple[int, int, int, int]], ...], count: int) -> None:
    with pytest.raises(PlanError, match=rf"\[4, 8\) have {count} owners"):
        plan_return(layout("parts", [(0, 8, 0, 0)], []), layout("master", *owners))


def test_the_inverse_is_the_adjoint() -> None:
    rng = random.Random(3)
    for _ in range(60):
        model, world_size = random_model(rng), rng.randint(1, 8)
        source = random_master_layout(rng, model.vector, world_size)
        target = strategy_layout(model.vector, rng.choice(model.strategies(world_size)))
        plan = plan_load(source, target, Cluster(world_size, 2), [4] * len(model.vector.segments))
        inverse = plan.inverse()
        assert inverse.accumulate
        prove(inverse, target, source)  # every copy that was made adds its gradient once
        assert inverse.inverse() == plan
        assert inverse.inverse().digest == plan.digest != inverse.digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"}, {"world_size": 3}, {"accumulate": True}, {"kinds": (), "kind_of": (-1,)}, {"bases": (1,)},
        {"links": (INTER,)},
    ],
)  # fmt: skip
def test_the_digest_covers_every_field(change: dict[str, object]) -> None:
    plan = plan_of("golden", 2, (Transfer(0, 2, 0, 0, 1, 3, 5),), False)
    assert replace(plan, **change).digest != plan.digest  # type: ignore[arg-type]
    assert replace(plan).digest == plan.digest
    for column in Transfer._fields[1:]:
        wrong = transfers_of(plan)[0]._replace(**{column: getattr(transfers_of(plan)[0], column) + 1})
        assert plan_of("golden", 2, (wrong,), False).digest != plan.digest, column


# ---------------------------------------------------------------------------------------------------------- rounds


SINGLE, DOUBLE = Wire("float32", 4), Wire("float64", 8)


def test_golden_rounds_of_a_load() -> None:
    source = layout("a", [(0, 8, 0, 0)], [(8, 12, 1, 0)], [], sizes=(8, 4))
    target = layout("b", [], [(0, 8, 0, 0)], [(0, 8, 0, 0), (8, 12, 1, 0)], sizes=(8, 4))
    plan = plan_load(source, target, Cluster(3, 3), [4, 8])
    first = cut_rounds(plan, 0, [SINGLE, DOUBLE], 32)
    assert [(r.sends, r.receives, r.local, r.send_bytes, r.receive_bytes) for r in first.rounds] == [
        (
            tuple(Message(peer, SINGLE, (Slice(SOURCE, 0, at, 4),), 4, 0) for peer in (1, 2)), (), (), 16, 0
        )
        for at in (0, 4)
    ]  # fmt: skip  # the two peers get the same: one place in staging
    last = cut_rounds(plan, 2, [SINGLE, DOUBLE], 32)
    assert [[(m.peer, m.wire, m.slices, m.staging_offset) for m in r.receives] for r in last.rounds] == [
        [(1, DOUBLE, (Slice(TARGET, 1, 0, 2),), 0), (0, SINGLE, (Slice(TARGET, 0, 0, 4),), 16)],
        [(1, DOUBLE, (Slice(TARGET, 1, 2, 2),), 0), (0, SINGLE, (Slice(TARGET, 0, 4, 4),), 16)],
    ]  # the nearest lower rank first; wide elements first in staging
    assert last.extents == {(TARGET, 0): 8, (TARGET, 1): 4}


def test_groups_follow_the_order_of_need_and_the_byte_cap() -> None:
    vector = cut_vector(layers=6)
    plan = plan_load(master_layout(vector, 2), strategy_layout(vector, Strategy(dp=2)), Cluster(2, 2), [2] * 8)
    wires = [Wire("bfloat16", 2)] * 8
    assert cut_rounds(plan, 0, wires, 1 << 20).groups == (tuple(range(8)),)
    assert cut_rounds(plan, 0, wires, 1 << 20, 0).groups == tuple((segment,) for segment in range(8))
    assert cut_rounds(plan.inverse(), 0, wires, 1 << 20, 0).groups == tuple((s,) for s in reversed(range(8)))
    rounds = cut_rounds(plan, 0, wires, 1 << 20, 0).rounds
    assert [(r.group, r.opens, r.closes) for r in rounds] == [(group, True, True) for group in range(8)]


def test_the_hops_of_a_relay_are_interleaved_and_wait_for_what_they_forward() -> None:
    vector = cut_vector(rows=2048, layers=6)
    target = strategy_layout(vector, Strategy(dp=8))
    plan = plan_load(master_layout(vector, 8), target, Cluster(8, 4), [2] * 8)
    assert plan.links == (INTER, INTRA)
    rounds = cut_rounds(plan, 0, [Wire("bfloat16", 2)] * 8, 1 << 20, 0).rounds
    assert [(r.group, r.hop) for r in rounds][:5] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]
    at = {(r.group, r.hop): index for index, r in enumerate(rounds)}
    for r in rounds:
        expected = [at[r.group, 0]] if r.hop else []
        expected += [at[r.group - 3, 1]] if r.group >= 3 else []
        assert r.needs == max(expected, default=-1)


def test_a_round_has_few_operations_in_large_worlds() -> None:
    vector = cut_vector(rows=1 << 15, layers=1)
    for world_size, blocks in ((32, 1), (33, 1), (34, 2), (100, 4)):
        plan = plan_load(
            master_layout(vector, world_size),
            strategy_layout(vector, Strategy(dp=world_size)),
            Cluster(world_size, 200),
            [2] * 3,
        )
        schedules = [cut_rounds(plan, rank, [Wire("bfloat16", 2)] * 3, 1 << 20) for rank in (0, world_size - 1)]
        for schedule in schedules:
            assert len(schedule.rounds) == blocks
            assert max(len(r.sends) + len(r.receives) for r in schedule.rounds) <= 64
        assert sum(len(r.receives) for r in schedules[0].rounds) == world_size - 1
