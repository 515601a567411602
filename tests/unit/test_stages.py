"""The cut of stages: PipeDream's programme against all cuts there are, and what decides it."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.features.pipedream.partition import Partition, partition
from hf_hotspa.layout.stages import StageCosts


def cuts(num_layers: int, num_stages: int) -> Iterator[tuple[range, ...]]:
    """Every way to cut the layers in stages."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = (*inner, num_layers)
        yield tuple(range(a, b) for a, b in zip((0, *inner), ends, strict=True))


def shares(machines: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide machines among stages, each of which gets one."""
    for inner in combinations(range(1, machines), stages - 1):
        yield tuple(b - a for a, b in zip((0, *inner), (*inner, machines), strict=True))


def seconds_of(
    stages: Sequence[range], replicas: Sequence[int], layers: Sequence[int], sends: Sequence[int],
    syncs: Sequence[Sequence[int]],
) -> float:  # fmt: skip
    """The slowest stage, or pass, straight from the definition."""
    slowest = 0.0
    for layers_of, m in zip(stages, replicas, strict=True):
        work = sum(layers[layer] for layer in layers_of)
        sync = sum(syncs[layer][m - 1] for layer in layers_of) if syncs else 0
        slowest = max(slowest, max(work, sync) / m)
        if layers_of.start and sends:
            slowest = max(slowest, 2 * sends[layers_of.start - 1])
    return slowest


def brute_force(
    layers: Sequence[int], machines: int, sends: Sequence[int] = (), syncs: Sequence[Sequence[int]] = ()
) -> float:
    return min(
        seconds_of(stages, replicas, layers, sends, syncs)
        for count in range(1, min(len(layers), machines) + 1)
        for stages in cuts(len(layers), count)
        for replicas in shares(machines, count)
    )


def check(
    found: Partition, layers: Sequence[int], machines: int, sends: Sequence[int], syncs: Sequence[Sequence[int]]
) -> None:
    stages, replicas = zip(*found.stages, strict=True)
    assert [layer for stage in stages for layer in stage] == list(range(len(layers)))
    assert sum(replicas) == machines
    assert all(replicas)
    assert found.seconds == seconds_of(stages, replicas, layers, sends, syncs)
    assert found.seconds == brute_force(layers, machines, sends, syncs)


@pytest.mark.parametrize(
    ("layers", "machines", "seconds"),
    [
        ((1, 1, 1, 1), 2, 2),
        ((4, 1, 1, 1, 1), 2, 4),
        ((4, 1, 1, 1, 1), 3, 8 / 3),
        ((1, 1, 1, 1), 1, 4),
        ((1, 1, 1, 1), 4, 1),
    ],
)
def test_worked_instances(layers: tuple[int, ...], machines: int, seconds: float) -> None:
    found = partition(layers, machines)
    assert found.seconds == pytest.approx(seconds)
    check(found, layers, machines, (), ())


def test_worked_instances_without_replication() -> None:
    assert StageCosts((1, 1, 1, 1)).stages(2) == (range(2), range(2, 4))
    heavy = StageCosts((4, 1, 1, 1, 1))
    assert heavy.stages(2) == (range(1), range(1, 5))
    assert heavy.slowest(heavy.stages(3)) == 4


@pytest.mark.parametrize("seed", range(500))
def test_random_instances_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    count, machines = rng.randint(1, 7), rng.randint(1, 5)
    layers = [rng.randint(0, 12) * rng.choice((1, 1, 5)) for _ in range(count)]
    sends = [rng.randint(0, 6) for _ in range(count)] if rng.random() < 0.7 else []
    syncs = (
        [[0, *(rng.randint(0, 30) for _ in range(machines - 1))] for _ in range(count)] if rng.random() < 0.5 else []
    )
    check(partition(layers, machines, sends, syncs), layers, machines, sends, syncs)


@pytest.mark.parametrize("seed", range(500))
def test_cuts_for_one_rank_a_stage_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    costs = StageCosts(
        tuple(rng.randint(0, 20) * rng.choice((1, 1, 8)) for _ in range(count)),
        rng.choice((0, rng.randint(0, 60))),
        rng.choice((0, rng.randint(0, 20))),
        tuple(rng.randint(0, 12) for _ in range(count - 1)) if rng.random() < 0.6 else (),
    )
    for num_stages in range(1, count + 1):
        stages = costs.stages(num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(count))
        assert all(stages)
        assert costs.slowest(stages) == min(costs.slowest(cut) for cut in cuts(count, num_stages))


def test_a_dear_pass_is_not_cut_at() -> None:
    costs = StageCosts((3, 3, 3, 3), sends=(0, 9, 0))
    assert costs.stages(2) in ((range(1), range(1, 4)), (range(3), range(3, 4)))
    assert StageCosts((3, 3, 3, 3), sends=(9, 9, 9)).stages(2) == (range(2), range(2, 4))  # all alike: nothing to avoid


def test_the_ends_count() -> None:
    assert StageCosts((2, 2, 2, 2), head=4).stages(2) == (range(3), range(3, 4))
    assert StageCosts((2, 2, 2, 2), embedding=4).stages(2) == (range(1), range(1, 4))


def test_what_cannot_be() -> None:
    with pytest.raises(StrategyError, match="cannot share"):
        StageCosts((1, 1)).stages(3)
    with pytest.raises(HotspaConfigError, match="sends between"):
        StageCosts((1, 1, 1), sends=(1,))
    with pytest.raises(HotspaConfigError, match="negative"):
        StageCosts((1, -1))
    for layers, machines in (((), 2), ((1,), 0)):
        with pytest.raises(HotspaConfigError, match="do not form a pipeline"):
            partition(layers, machines)
