"""The cut of stages against all cuts there are, and what decides it."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.layout.stages import StageCosts


def slowest(costs: StageCosts, stages: Sequence[range]) -> int:
    """The cost of the slowest stage, or of the slowest send, there and back."""
    return max(*costs.partition_costs(stages), *costs.passes(stages), 0)


def cuts(num_layers: int, num_stages: int) -> Iterator[tuple[range, ...]]:
    """Every way to cut the layers in stages."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = (*inner, num_layers)
        yield tuple(range(a, b) for a, b in zip((0, *inner), ends, strict=True))


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
        assert slowest(costs, stages) == min(slowest(costs, cut) for cut in cuts(count, num_stages))


def test_ties_go_to_the_smallest_sum_of_squares() -> None:
    """In these draws; the programme keeps one best cut of each prefix, and the sum of another may be smaller in the end."""
    rng = random.Random(0)
    for _ in range(300):
        costs = StageCosts(tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 8))), rng.randint(0, 12))
        num_stages = rng.randint(1, len(costs.layers))
        every = [costs.partition_costs(cut) for cut in cuts(len(costs.layers), num_stages)]
        best = min((max(sums), sum(cost * cost for cost in sums)) for sums in every)
        sums = costs.partition_costs(costs.stages(num_stages))
        assert (max(sums), sum(cost * cost for cost in sums)) == best


def test_what_cannot_be() -> None:
    for number in (0, 3):
        with pytest.raises(StrategyError, match="cannot share 2 layers"):
            StageCosts((1, 1)).stages(number)
    with pytest.raises(HotspaConfigError, match="sends between"):
        StageCosts((1, 1, 1), sends=(1,))
    with pytest.raises(HotspaConfigError, match="negative"):
        StageCosts((1, -1))
