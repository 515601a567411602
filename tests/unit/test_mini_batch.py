"""The plan types: counts, digests, and what they refuse."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from hf_hotspa.packing.bucketing import MiniBatchPlan, Pack, PhasePlan, Sequence
from hf_hotspa.strategy import parse_buckets

SHORT, LONG = parse_buckets("dp2:8@16,tp2:64")


def make_plan():
    first = Pack((Sequence(4, 0, 8, 7), Sequence(1, 0, 5, 2)))
    second = Pack((Sequence(0, 0, 3, 2),))
    third = Pack((Sequence(7, 64, 100, 35),))
    return MiniBatchPlan((PhasePlan(SHORT, ((first,), (second,))), PhasePlan(LONG, ((third,),))), 46, 5, num_split=1)


def test_counts():
    plan = make_plan()
    assert (plan.num_tokens, plan.num_sequences, plan.num_labels) == (8 + 5 + 3 + 36, 4, 46)
    short = plan.phases[0]
    assert (short.num_tokens, short.num_sequences, short.num_packs, short.num_labels) == (16, 3, 2, 11)
    pack = short.replicas[0][0]
    assert (pack.lengths, pack.num_tokens, pack.num_labels) == ((8, 5), 13, 9)
    assert [s.row for s in plan.sequences()] == [4, 1, 0, 7]


def test_digest_is_stable_and_survives_a_trip_between_processes():
    digest = make_plan().digest()
    assert digest == make_plan().digest() == pickle.loads(pickle.dumps(make_plan())).digest()
    assert len(digest) == 64
    assert int(digest, 16) >= 0
    # Pinned: ranks may run different builds of Python, and must still agree.
    assert digest == "a4e9376902eacac764c71cc5a6248c098946df6a9ef96d5b3d5ee9c45a4430d0"


def changed(path, value):
    """A plan in which one number differs, built without the checks of a plan."""
    plan = copy.deepcopy(make_plan())
    target = plan
    for step in path[:-1]:
        target = getattr(target, step) if isinstance(step, str) else target[step]
    object.__setattr__(target, path[-1], value)
    return plan


SEQUENCE = ("phases", 0, "replicas", 0, 0, "sequences", 1)


@pytest.mark.parametrize(
    "path",
    [(*SEQUENCE, name) for name in ("row", "start", "stop", "num_labels")]
    + [(name,) for name in ("num_labels", "num_rows", "num_truncated", "num_split", "num_dropped", "num_empty")],
)
def test_digest_sees_every_number(path):
    assert changed(path, 3).digest() != make_plan().digest()


def test_digest_sees_placement_and_strategy():
    plan = make_plan()
    short, long = plan.phases
    others = [
        replace(plan, phases=(long, short)),
        replace(plan, phases=(replace(short, replicas=short.replicas[::-1]), long)),
        replace(plan, phases=(short, replace(long, bucket=replace(LONG, longest=65)))),
        replace(plan, phases=(short, replace(long, bucket=replace(LONG, strategy=type(LONG.strategy)(1, 1, 2))))),
    ]
    assert len({p.digest() for p in [plan, *others]}) == 5


def test_plans_are_frozen_and_check_themselves():
    plan = make_plan()
    with pytest.raises(FrozenInstanceError):
        plan.num_labels = 3
    with pytest.raises(AssertionError, match="46 label tokens and N is 45"):
        replace(plan, num_labels=45)
    with pytest.raises(AssertionError, match="1 replicas planned for dp2"):
        PhasePlan(SHORT, ((),))
