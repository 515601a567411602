"""The rules of `tests.wire_rules` on traces written by hand, and that the recorder wraps all that torch can say."""

import random

import pytest
import torch.distributed as dist

from hf_hotspa.packing.pipeline_order import interleaved_order
from tests.wire_recorder import METHODS, SILENT, Communicator, Event, Operation, Trace
from tests.wire_rules import Fault, Proof, check

A, B = "device [0, 1] no. 1", "device [0, 1] no. 2"


class Rank:
    """A trace, written call by call; every communicator is made and begun first."""

    def __init__(self, rank, world=2, comms=(A, B), begun=True):
        self.trace, self.thread, self.calls = Trace(rank, world), 0, 0
        for comm in comms:
            self.trace.communicators[comm] = Communicator(tuple(range(world)), is_host=comm.startswith("host"))
            self.add("make", comm=comm)
        for comm in comms if begun else ():
            self.wait(self.say(comm, "all_reduce (sum)", 1))

    def add(self, kind, **values):
        self.trace.events.append(Event(kind, self.thread, **values))
        return len(self.trace.events) - 1

    def say(self, comm, kind, *sizes, peer=-1, dtype="float32", call=-1, on_host=False):
        stack = (f"{kind} of rank {self.trace.rank}",)
        op = Operation(comm, kind, sizes, dtype, peer, call=call, on_host=on_host, stack=stack)
        return self.add("issue", operation=op)

    def batch(self, comm, *messages):
        """Messages `(kind, peer, size)` as one group call."""
        self.calls += 1
        return [self.say(comm, kind, size, peer=peer, call=self.calls) for kind, peer, size in messages]

    def wait(self, *targets):
        return self.add("wait", targets=targets)


def two(**options):
    return Rank(0, **options), Rank(1, **options)


def found(*ranks):
    return check([rank.trace for rank in ranks])


def test_a_batch_of_both_directions_passes_and_two_calls_wait_for_each_other():
    a, b = two()
    for one, peer in ((a, 1), (b, 0)):
        one.wait(*one.batch(A, ("recv", peer, 4), ("send", peer, 4)))
    proof = found(a, b)
    assert isinstance(proof, Proof)
    assert (proof.operations["send"], proof.communicators, proof.most_communicators, proof.pairs) == (2, 2, 2, 0)
    a, b = two()
    for one, peer in ((a, 1), (b, 0)):
        one.batch(A, ("recv", peer, 4))
        one.wait(*one.batch(A, ("send", peer, 4)))
    fault = found(a, b)
    assert isinstance(fault, Fault)
    assert fault.rule == "ranks wait for each other"
    assert {(p.rank, p.text.split()[0]) for p in fault.places} == {(0, "recv"), (1, "recv")}
    assert {p.stack for p in fault.places} == {("recv of rank 0",), ("recv of rank 1",)}


def test_messages_match_in_order_whatever_their_sizes():
    a, b = two()
    a.batch(A, ("send", 1, 4), ("send", 1, 8))
    b.batch(A, ("recv", 0, 8), ("recv", 0, 4))
    assert "another size" in found(a, b).rule
    a, b = two()
    a.batch(A, ("send", 1, 4))
    a.batch(A, ("send", 1, 8))
    b.wait(*b.batch(A, ("recv", 0, 4), ("recv", 0, 8)))  # in one group call there, in two here: NCCL takes it
    assert isinstance(found(a, b), Proof)


def test_equal_bytes_of_another_dtype():
    a, b = two()
    a.say(A, "send", 4, peer=1, dtype="float64")
    b.say(A, "recv", 8, peer=0)
    assert "another size or dtype" in found(a, b).rule


def test_collectives_in_another_order_or_size():
    for calls in (("all_reduce (sum)", 4), ("all_reduce (max)", 2), ("barrier",)):
        a, b = two()
        a.say(A, "all_reduce (sum)", 2)
        b.say(A, *calls)
        fault = found(a, b)
        assert fault.rule == "ranks issue different collectives"
        assert [place.rank for place in fault.places] == [0, 1]


def test_parts_of_an_all_to_all():
    a, b = two()
    a.say(A, "all_to_all", 1, 2, 1, 3)  # sends 1 and 2, receives 1 and 3
    b.say(A, "all_to_all", 3, 4, 2, 4)
    assert isinstance(found(a, b), Proof)
    a, b = two()
    a.say(A, "all_to_all", 1, 2, 1, 3)
    b.say(A, "all_to_all", 3, 4, 5, 4)
    assert found(a, b).rule == "parts of an all-to-all differ in size"


def test_two_communicators_in_another_order():
    a, b = two()
    a.wait(a.say(A, "all_reduce (sum)", 2), a.say(B, "all_reduce (sum)", 2))
    b.wait(b.say(B, "all_reduce (sum)", 2), b.say(A, "all_reduce (sum)", 2))
    assert "issued in one order" in found(a, b).rule
    a, b = two()
    a.wait(a.say(A, "all_reduce (sum)", 2))
    a.say(B, "all_reduce (sum)", 2)
    b.wait(b.say(B, "all_reduce (sum)", 2))
    b.say(A, "all_reduce (sum)", 2)
    assert found(a, b).rule == "ranks wait for each other"


def test_a_wait_of_the_host_is_part_of_a_circle():
    a, b = two(comms=(A, "host [0, 1] no. 1"))
    a.wait(a.say("host [0, 1] no. 1", "barrier"))
    a.say(A, "all_reduce (sum)", 2)
    b.wait(b.say(A, "all_reduce (sum)", 2))
    b.say("host [0, 1] no. 1", "barrier")
    fault = found(a, b)
    assert fault.rule == "ranks wait for each other"
    assert {place.rank for place in fault.places} == {0, 1}


def test_messages_on_the_host_match_by_tag_and_hold_nobody():
    a, b = two(comms=("host [0, 1] no. 1",))
    for one, peer in ((a, 1), (b, 0)):
        one.wait(one.say("host [0, 1] no. 1", "send", 4, peer=peer))
        one.wait(one.say("host [0, 1] no. 1", "recv", 4, peer=peer))
    assert isinstance(found(a, b), Proof)


def test_what_nobody_joins():
    a, b = two()
    a.say(A, "send", 4, peer=1)
    assert found(a, b).rule == "an operation is never received"
    a, b = two()
    b.wait(b.say(B, "all_reduce (sum)", 4))
    fault = found(a, b)
    assert fault.rule == "an operation is not joined"
    assert [place.rank for place in fault.places] == [1, 0]
    b.trace.error = "timed out"
    assert isinstance(found(a, b), Fault)
    a.trace.error = "an error before it came so far"
    assert isinstance(found(a, b), Proof)


def test_how_communicators_begin_and_who_makes_them():
    a, b = two(begun=False)
    a.batch(A, ("send", 1, 4))
    b.batch(A, ("recv", 0, 4))
    assert "first operation" in found(a, b).rule
    assert "not made by all ranks in one order" in found(Rank(0, comms=(A, B)), Rank(1, comms=(B, A))).rule
    assert "not made by all ranks in one order" in found(Rank(0, comms=(A, B)), Rank(1, comms=(A,))).rule


def test_a_host_tensor():
    a, b = two()
    a.say(A, "all_reduce (sum)", 4, on_host=True)
    b.say(A, "all_reduce (sum)", 4)
    fault = found(a, b)
    assert "host memory" in fault.rule
    assert [place.rank for place in fault.places] == [0]


def test_two_threads_on_one_communicator():
    for event in (True, False):
        a, b = two()
        for one in (a, b):
            one.wait(one.say(A, "all_reduce (sum)", 4))
            stamp = one.add("record")
            one.thread = 1
            if event:
                one.add("pass", targets=(stamp,))
            one.say(A, "all_reduce (sum)", 4)
        assert isinstance(found(a, b), Proof if event else Fault)
    assert "two threads" in found(a, b).rule


def test_nothing_that_torch_can_say_is_left_out():
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    assert public - SILENT - METHODS.keys() == set()
    assert not SILENT & METHODS.keys()


# -- what it costs that a receive holds its queue ---------------------------------------------------------------------------


def seconds_of(tokens, num_ranks, rounds, holds, slowness):
    """Of an interleaved run: with `holds`, a message goes when both ranks' earlier ones are through, as on one communicator."""
    last, free, queue, arrived = num_ranks * rounds - 1, [0.0] * num_ranks, [0.0] * num_ranks, {}
    for turn in interleaved_order(tokens, num_ranks, rounds, None, [], is_trained=True):
        step = -1 if turn.is_backward else 1
        rank, target = turn.stage % num_ranks, turn.stage + step
        begin = max(free[rank], arrived.get((turn.stage - step, turn.unit, turn.is_backward), 0.0))
        free[rank] = begin + tokens[turn.unit] * (2 if turn.is_backward else 1) * slowness[turn.stage]
        if 0 <= target <= last:
            ends = [rank, target % num_ranks]
            at = max([free[rank], *(queue[end] for end in ends if holds)])
            for end in ends:
                queue[end] = at
            arrived[turn.stage, turn.unit, turn.is_backward] = at
    return max(free)


@pytest.mark.parametrize(("num_ranks", "rounds", "packs"), [(2, 2, 8), (4, 2, 8), (4, 2, 16), (4, 3, 12), (8, 2, 16)])
@pytest.mark.parametrize("is_even", [True, False])
def test_receives_that_are_posted_early_delay_nothing_that_the_schedule_knows(num_ranks, rounds, packs, is_even):
    rng = random.Random(packs)
    tokens = [64 if is_even else rng.randint(8, 64) for _ in range(packs)]
    equal = [1.0] * (num_ranks * rounds)
    assert seconds_of(tokens, num_ranks, rounds, True, equal) == seconds_of(tokens, num_ranks, rounds, False, equal)
    free = held = 0.0
    for _ in range(5):  # stages of which one takes up to 30 % longer than another
        slowness = [1 + 0.3 * rng.random() for _ in equal]
        free += seconds_of(tokens, num_ranks, rounds, False, slowness)
        held += seconds_of(tokens, num_ranks, rounds, True, slowness)
    assert free <= held <= 1.03 * free
