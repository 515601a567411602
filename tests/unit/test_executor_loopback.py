"""The executor over the loopback transport: thousands of random switches, bit for bit."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from written_plans import traffic_of  # type: ignore[import-not-found]

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.engine.executor import SwitchExecutor, SwitchStats
from hf_hotspa.engine.switching import PlanPool
from hf_hotspa.errors import HotspaConfigError, PlanError, TransferError
from hf_hotspa.model.specs import describe_model, dtype_name
from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.plan.switch_plan import SwitchPlan
from hf_hotspa.strategy import legal_strategies
from tests.families import tiny_model
from tests.loopback import LoopbackHub
from tests.switch_cases import (
    Case,
    bits,
    check_rank,
    clone,
    drive,
    in_turn,
    make_case,
    poisoned,
    return_case,
)
from tests.unit.test_planner import layout

CHUNK = 240  # switches


def switch(seed: int) -> None:
    case = make_case(seed)
    untouched, targets = clone(case.sources), clone(case.targets)
    stats = drive(case, targets, random.Random(seed))
    for rank, found in enumerate(targets):
        check_rank(case, rank, found)
    check_stats(case, stats)
    for before, after in zip(untouched, case.sources, strict=True):
        for a, b in zip(before, after, strict=True):
            assert (a is None and b is None) or torch.equal(bits(a), bits(b))


def check_stats(case: Case, stats: list[SwitchStats]) -> None:
    sizes = [wire.itemsize if wire else 0 for wire in case.wires]
    traffic = traffic_of(case.plan, Cluster(case.world_size, 1), sizes)
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats) == traffic.wire_bytes
    assert max(s.sent_bytes for s in stats) == traffic.max_sent_bytes
    assert max(s.received_bytes for s in stats) == traffic.max_received_bytes
    assert len({s.num_rounds for s in stats}) == 1
    if not case.plan.accumulate:
        assert sum(s.local_bytes for s in stats) == traffic.local_bytes


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(2, 63))])
def test_random_switches_are_exact(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        switch(seed)


@pytest.mark.parametrize("seed", range(40))
def test_a_gradient_sum_does_not_depend_on_staging_or_arrival(seed: int) -> None:
    case = return_case(seed)
    generator = torch.Generator().manual_seed(seed)
    for buffer in (b for buffers in (*case.sources, *case.targets) for b in buffers):
        if buffer is not None and buffer.is_floating_point():
            buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64) * 100)
    results = []
    for attempt, windows in enumerate((4, 7, 1 << 16)):
        targets = clone(case.targets)
        drive(case, targets, random.Random(attempt), staging_bytes=2 * windows * 16 * max(1, case.world_size - 1))
        results.append(targets)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert all(x is None or torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------------- small cases by hand


def test_contributions_are_added_in_rank_order_with_the_local_one_in_its_place() -> None:
    # In this order the 1 is lost in 2^24. With the local contribution first, or last, the sum would be 4.
    values = [1.0, 2.0**24, -(2.0**24), 3.0]
    parts = layout("parts", *[[(0, 1, 0, 0)]] * 4, sizes=(1,))
    owner = layout("owner", [], [], [(0, 1, 0, 0)], [], sizes=(1,))
    targets: list[list[torch.Tensor | None]] = [[torch.zeros(1) if rank == 2 else None] for rank in range(4)]
    sources: list[list[torch.Tensor | None]] = [[torch.tensor([value])] for value in values]
    hub, plan = LoopbackHub(4), plan_return(parts, owner)
    executors = [SwitchExecutor(hub.transport(rank), rank) for rank in range(4)]
    runs = [one.steps(plan, sources[rank], targets[rank], [torch.float32], 0) for rank, one in enumerate(executors)]
    in_turn(runs, random.Random(0))
    assert targets[2][0] is not None
    assert targets[2][0].item() == 3.0


class Recorder:
    """A transport that keeps what is submitted, and moves nothing."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []
        self.addresses: list[tuple[str, int, int]] = []

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self.sent.append(tensor)
        self.addresses.append(("to", dst, tag))

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received.append(tensor)
        self.addresses.append(("from", src, tag))

    def start(self) -> "Recorder":
        return self

    def wait(self) -> None:
        pass


def test_one_contiguous_message_is_sent_and_received_in_place_and_replicas_share_a_packed_one() -> None:
    source = layout("a", [(0, 2, 0, 0), (4, 6, 0, 2)], [(2, 4, 0, 0), (6, 8, 0, 2)], [], [])
    target = layout("b", *[[(0, 8, 0, 0)]] * 4)
    plan = plan_load(source, target, Cluster(4, 4), [4], "algorithm1")
    weights, into = torch.arange(4.0), torch.zeros(8)
    transport = Recorder()
    SwitchExecutor(transport, 0).run(plan, [weights], [into], [torch.float32], 0)
    assert [t.data_ptr() for t in transport.sent] == [weights.data_ptr()] * 3  # contiguous at the sender: no copy
    assert [t.numel() for t in transport.received] == [4]  # two intervals at the receiver: staged
    transport = Recorder()
    SwitchExecutor(transport, 0).run(plan, [weights], [into.bfloat16()], [torch.bfloat16], 0)
    assert len({t.data_ptr() for t in transport.sent}) == 1  # converted once for three peers
    whole = plan_load(layout("c", [(0, 8, 0, 0)], [], sizes=(8,)), layout("d", [], [(0, 8, 0, 0)]), Cluster(2, 2), [4])
    transport = Recorder()
    SwitchExecutor(transport, 1).run(whole, [None], [into], [torch.float32], 0)
    assert [t.data_ptr() for t in transport.received] == [into.data_ptr()]


def test_no_two_messages_of_some_rounds_and_epochs_have_one_address() -> None:
    for seed in range(60):
        case = make_case(seed)
        if case.world_size > 1:
            transport = Recorder()
            executor = SwitchExecutor(transport, 1, case.staging_bytes)
            for epoch in (0, 1, 8191):
                second = case.seconds[1] if case.seconds else None
                executor.run(case.plan, case.sources[1], case.targets[1], case.wires, epoch, second=second)
            assert len(set(transport.addresses)) == len(transport.addresses)
            assert all(0 <= tag < 1 << 31 for _, _, tag in transport.addresses)


def test_plans_of_one_name_are_told_apart() -> None:
    executor = SwitchExecutor(LoopbackHub(1).transport(0), 0)
    for low in (0, 4):
        source = layout("a", [(0, 8, 0, 0)])
        plan = plan_load(source, layout("b", [(low, low + 4, 0, 0)]), Cluster(1, 1), [4])
        executor.run(plan, [torch.arange(8.0)], [into := torch.zeros(4)], [torch.float32], 0)
        assert into.tolist() == [low, low + 1, low + 2, low + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_model_counts_enough_for_the_buffers_of_a_pool(dtype: torch.dtype) -> None:
    description = describe_model(tiny_model("llama_gqa_bias"), dtype)
    sizes = ModelSizes(description.shape, dtype_name(dtype), vector=description.vector)
    memory = MemoryModel(sizes, 4, MemoryOptions(switch_bytes=1 << 40))
    legal = legal_strategies(4, description.shape)
    for strategies in ([s] for s in legal), itertools.combinations(legal, 2), [legal]:
        for pool in map(list, strategies):
            arena = max(map(memory.arena_bytes, pool))
            counted = min(memory.breakdown(s, 1, arena_bytes=arena).switch for s in pool)
            segments = len(description.vector.segments)
            plans = PlanPool(description.vector, pool, Cluster(4, 4), [dtype.itemsize] * segments, [4] * segments)
            switches = [(plan, [torch.float32 if plan.accumulate else dtype] * segments) for plan in plans.plans()]
            for rank in range(4):
                executor = SwitchExecutor(LoopbackHub(4).transport(rank), rank, 1 << 30)
                assert executor.extra_bytes(switches) <= counted


class Recording:
    """A progress that notes what it is told, and makes sources ready only when they are asked for."""

    def __init__(self, sources: list[torch.Tensor | None], hidden: list[torch.Tensor | None]) -> None:
        self.sources, self.hidden = sources, hidden
        self.asked: list[int] = []
        self.complete: list[int] = []

    def await_source(self, segments: Sequence[int]) -> None:
        for segment in segments:
            buffer, values = self.sources[segment], self.hidden[segment]
            if buffer is not None and values is not None:
                buffer.copy_(values)
        self.asked += segments

    def target_complete(self, segments: Sequence[int]) -> None:
        self.complete += segments


@pytest.mark.parametrize("seed", range(120))
def test_a_switch_asks_for_each_segment_once_and_reports_it_complete(seed: int) -> None:
    """Sources hold poison until they are asked for: nothing may be read before."""
    case = make_case(seed)
    hidden = clone(case.sources)
    for buffers in case.sources:
        for buffer in buffers:
            if buffer is not None:
                buffer.copy_(poisoned(buffer.numel(), buffer.dtype))
    targets = clone(case.targets)
    told = [Recording(case.sources[rank], hidden[rank]) for rank in range(case.world_size)]
    drive(case, targets, random.Random(seed), progress=lambda rank: told[rank])
    moved = [segment for segment, kind in enumerate(case.plan.kind_of) if kind >= 0]
    for rank, found in enumerate(targets):
        check_rank(case, rank, found)
        order = moved[::-1] if case.plan.accumulate else moved
        assert sorted(told[rank].asked) == sorted(told[rank].complete) == moved
        if len(case.plan.links) == 1:  # with two hops a group that needs one of them only may overtake another
            assert told[rank].asked == told[rank].complete == order


# ------------------------------------------------------------------------------------------------------- refusals


def two_ranks() -> SwitchPlan:
    return plan_load(layout("a", [(0, 8, 0, 0)], []), layout("b", [], [(0, 8, 0, 0)]), Cluster(2, 2), [4])


@pytest.mark.parametrize(
    ("source", "wires", "message"),
    [
        (torch.zeros(7), [torch.float32], "8 elements"),
        (None, [torch.float32], "found none"),
        (torch.zeros(2, 4), [torch.float32], "flat source buffer"),
        (torch.zeros(16)[::2], [torch.float32], "strides"),
        (torch.zeros(8, device="meta"), [torch.float32], "is on meta"),
        (torch.zeros(8), [None], "no wire dtype"),
        (torch.zeros(8), [], "no wire dtype"),
    ],
)
def test_a_wrong_buffer_is_refused_before_anything_is_sent(
    source: torch.Tensor | None, wires: list[torch.dtype | None], message: str
) -> None:
    hub = LoopbackHub(2)
    executor = SwitchExecutor(hub.transport(0), 0)
    with pytest.raises(PlanError, match=message):
        executor.run(two_ranks(), [source], [None], wires, 0)
    hub.close()  # nothing is on the wire


def test_staging_that_cannot_hold_a_window_per_peer_is_refused() -> None:
    with pytest.raises(HotspaConfigError, match="too small for 1 peers"):
        SwitchExecutor(LoopbackHub(2).transport(0), 0, staging_bytes=31).prepare(two_ranks(), [torch.float32])


def test_a_failure_in_flight_names_the_switch_and_ends_the_executor() -> None:
    plan, executor = two_ranks(), SwitchExecutor(LoopbackHub(2).transport(1), 1)
    into: list[torch.Tensor | None] = [torch.zeros(8)]
    with pytest.raises(
        TransferError, match="load a -> b.*round 1 of 1.*receive from rank 0.*found no message.*not be used again"
    ):
        executor.run(plan, [None], into, [torch.float32], 0)
    with pytest.raises(TransferError, match="cannot run: an earlier one failed"):
        executor.run(plan, [None], into, [torch.float32], 1)


def test_a_switch_that_was_broken_off_ends_the_executor() -> None:
    executor = SwitchExecutor(LoopbackHub(2).transport(0), 0)
    steps = executor.steps(two_ranks(), [torch.zeros(8)], [None], [torch.float32], 0)
    next(steps)
    steps.close()
    with pytest.raises(TransferError, match="did not end"):
        executor.run(two_ranks(), [torch.zeros(8)], [None], [torch.float32], 1)


def test_messages_of_other_epochs_do_not_match() -> None:
    hub = LoopbackHub(2)
    sender = SwitchExecutor(hub.transport(0), 0)
    sender.run(two_ranks(), [torch.zeros(8)], [None], [torch.float32], 5)
    with pytest.raises(TransferError, match="found no message"):
        SwitchExecutor(hub.transport(1), 1).run(two_ranks(), [None], [torch.zeros(8)], [torch.float32], 6)
    with pytest.raises(TransferError, match="nobody received"):
        hub.close()


def test_an_empty_plan_has_no_round() -> None:
    empty = plan_load(layout("a", [(0, 8, 0, 0)]), layout("b", []), Cluster(1, 1), [4])
    executor = SwitchExecutor(LoopbackHub(1).transport(0), 0)
    executor.prepare(empty, [None])
    assert executor.run(empty, [torch.zeros(8)], [None], [None], 0).num_rounds == 0
