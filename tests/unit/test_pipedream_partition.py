"""PipeDream's partition against all cuts and replications there are."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.pipedream.unequal_stages import Partition, of_formulas, partition
from hf_hotspa.search.setup import Setup
from tests.unit.test_stages import cuts


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


def test_what_cannot_be() -> None:
    for layers, machines in (((), 2), ((1,), 0)):
        with pytest.raises(HotspaConfigError, match="do not form a pipeline"):
            partition(layers, machines)


def test_the_partition_of_pipedream_is_at_least_as_good_as_what_layouts_can_run() -> None:
    for nodes in ("1x2", "1x8", "1x5"):
        found = of_formulas(Setup.read("llama2-7b", nodes, "a100-80g"), 1, 2048)
        assert found.best.seconds <= found.equal_seconds * (1 + 1e-6)
        assert sum(replicas for _, replicas in found.best.stages) == found.equal[0] * found.equal[1]
    data = found.to_dict()["pipedream"]
    assert data["stages"][0]["layers"][0] == 0
    assert "with one d for all stages" in str(found)
