"""When a plan for unknown lengths is due anew."""

import json
import random

import pytest

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.search.histogram import LengthsSeen


def drawn(draw, median, count=64):
    return [max(1, int(median * draw.lognormvariate(0.0, 0.8))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_the_same_distribution_asks_for_nothing_and_a_longer_one_does(seed):
    draw = random.Random(seed)
    seen = LengthsSeen(drawn(draw, 200, 1024))
    assert not any(seen.add(drawn(draw, 200)) for _ in range(64))
    moved = [seen.add(drawn(draw, 1000)) for _ in range(32)]
    assert any(moved)
    seen.planned()
    assert seen.distance == 0
    assert max(seen.recent) > 1000


def test_a_resumed_watch_does_as_the_whole_one_and_damage_is_said():
    def run(stops):
        draw, seen, said = random.Random(3), LengthsSeen([50, 60, 70]), []
        for step in range(40):
            if stops and step == 17:
                state, seen = json.loads(json.dumps(seen.state_dict())), LengthsSeen([1])
                seen.load_state_dict(state)
            said.append(seen.add(drawn(draw, 60 if step < 20 else 900)))
            if said[-1]:
                seen.planned()
        return said, seen.state_dict()

    assert run(True) == run(False)
    with pytest.raises(HotspaConfigError, match="lengths"):
        LengthsSeen([1]).load_state_dict({"basis": [0.5], "recent": [], "mini_batches": 0})
