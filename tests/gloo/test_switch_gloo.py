"""Switches over real process groups: one contract for all transports, random switches, and the agreement on plans."""

import os

import pytest
import torch
import torch.distributed as dist
from written_plans import layout_of, plan_of, transfers_of  # type: ignore[import-not-found]

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.executor import SwitchExecutor
from hf_hotspa.engine.transport import ProcessGroupTransport, Transport
from hf_hotspa.errors import PlanMismatchError, TransferError
from hf_hotspa.layout.placement import Interval
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.plan.planner import plan_load
from hf_hotspa.plan.switch_plan import SwitchPlan
from tests.harness import run_ranks
from tests.switch_cases import bits, check_rank, direct_messages, make_case, random_bits

pytestmark = pytest.mark.gloo

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)

# ------------------------------------------------------------------------------------------ the contract of a transport


def message(src: int, dst: int, tag: int, dtype: torch.dtype) -> torch.Tensor:
    """A message that says where it belongs, of any bits and of a size of its own."""
    generator = torch.Generator().manual_seed(src * 1000 + dst * 100 + tag)
    return random_bits(generator, 1 + (src * 7 + dst * 3 + tag) % 11, dtype)


def everyone_exchanges_everything(transport: Transport, rank: int, world_size: int) -> None:
    """Several messages a pair and start, told apart by tags alone where the transport has them."""
    peers = [peer for peer in range(world_size) if peer != rank]
    for first in (0, 1 << 20):
        received = []
        for index, dtype in enumerate(DTYPES):
            for peer in peers:
                received.append((peer, index, torch.zeros_like(message(peer, rank, index, dtype))))
                transport.recv(received[-1][2], peer, first + index)
                transport.send(message(rank, peer, index, dtype), peer, first + index)
        transport.start().wait()
        for peer, index, tensor in received:
            assert torch.equal(bits(tensor), bits(message(peer, rank, index, DTYPES[index])))


def messages_keep_their_order_and_tags_their_own(transport: Transport, rank: int, world_size: int) -> None:
    """Equal tags arrive in order; different tags may be received in any order."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    values = [torch.full((4,), float(10 * rank + i)) for i in range(4)]
    for value, tag in zip(values, (5, 5, 6, 7), strict=True):
        transport.send(value, after, tag)
    received = [torch.zeros(4) for _ in range(4)]
    for index, tag in ((3, 7), (0, 5), (2, 6), (1, 5)):
        transport.recv(received[index], before, tag)
    transport.start().wait()
    assert [tensor[0].item() for tensor in received] == [10 * before + i for i in range(4)]


def starts_may_overlap_and_be_empty(transport: Transport, rank: int, world_size: int) -> None:
    """A rank may have nothing in a start, and may start again before it waits."""
    transport.start().wait()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    handles, received = [], [torch.zeros(3), torch.zeros(3)]
    for index, tensor in enumerate(received):
        transport.send(torch.full((3,), float(rank + 100 * index)), after, index)
        transport.recv(tensor, before, index)
        handles.append(transport.start())
    for handle in handles:
        handle.wait()
    assert [tensor[2].item() for tensor in received] == [before, before + 100]
    if rank == 0:
        transport.send(torch.ones(2), 1, 9)
    if rank == 1:
        transport.recv(into := torch.zeros(2), 0, 9)
    transport.start().wait()
    assert rank != 1 or into.sum() == 2


def what_no_transport_can_do_is_refused(transport: Transport, rank: int, world_size: int) -> None:
    """Before anything is posted; what was submitted before stays as it was."""
    for submit in (transport.send, transport.recv):
        with pytest.raises(TransferError, match=f"rank {rank}.*is to itself"):
            submit(torch.ones(2), rank, 1)
        with pytest.raises(TransferError, match="not contiguous"):
            submit(torch.ones(4)[::2], (rank + 1) % world_size, 1)
    transport.start().wait()


CONTRACT = (
    everyone_exchanges_everything,
    messages_keep_their_order_and_tags_their_own,
    starts_may_overlap_and_be_empty,
    what_no_transport_can_do_is_refused,
)


def contract_over_gloo(rank: int, world_size: int) -> None:
    for clause in CONTRACT:
        clause(ProcessGroupTransport(), rank, world_size)
        clause(ProcessGroupTransport(dist.new_group(list(range(world_size)))), rank, world_size)
    # ranks are global ranks, in a group that starts at rank 1 too
    group = dist.new_group(list(range(1, world_size)))
    if rank > 0:
        transport = ProcessGroupTransport(group)
        received = {peer: torch.zeros(2) for peer in range(1, world_size) if peer != rank}
        for peer, tensor in received.items():
            transport.send(torch.full((2,), float(rank)), peer, 0)
            transport.recv(tensor, peer, 0)
        transport.start().wait()
        assert all(tensor.tolist() == [peer, peer] for peer, tensor in received.items())


def test_contract_of_the_process_group_transport() -> None:
    run_ranks(4, contract_over_gloo)


def loses_its_peer(rank: int, world_size: int) -> str:
    """Rank 1 dies while rank 0 waits for its message."""
    if rank == 1:
        os._exit(3)
    transport = ProcessGroupTransport()
    transport.recv(torch.zeros(4), 1, 17)
    with pytest.raises(TransferError) as caught:
        transport.start().wait()
    return str(caught.value)


def test_a_lost_peer_is_named() -> None:
    outcome = run_ranks(2, loses_its_peer, expect_failure=True)[0]
    assert outcome.returned, outcome.describe()
    assert "receive from rank 1 (tag 17, 4 x torch.float32)" in outcome.value
    assert "Where: rank 0, peer" in outcome.value


# ---------------------------------------------------------------------------------------------------- random switches


def random_switches(rank: int, world_size: int, seeds: range) -> int:
    """All kinds in turn, one executor for all of them, as in training."""
    executors: dict[tuple[int, frozenset[int]], SwitchExecutor] = {}
    transport, agreement = ProcessGroupTransport(), Agreement(dist.group.WORLD, rank)
    for epoch, seed in enumerate(seeds):
        case = make_case(seed, world_size)
        agreement.check({"plan": case.plan.digest, "staging": str(case.staging_bytes)}, None, f"switch {epoch}")
        key = case.staging_bytes, case.native
        executor = executors.setdefault(key, SwitchExecutor(transport, rank, case.staging_bytes, native=case.native))
        with direct_messages(case):
            executor.prepare(case.plan, case.wires)
        second = case.seconds[rank] if case.seconds else None
        executor.run(case.plan, case.sources[rank], case.targets[rank], case.wires, epoch, second=second)
        check_rank(case, rank, case.targets[rank])
    return len(seeds)


@pytest.mark.parametrize(("world_size", "switches"), [(2, 40), (4, 20)])
def test_random_switches_are_exact(world_size: int, switches: int) -> None:
    seeds = range(1000 * world_size, 1000 * world_size + switches)
    assert run_ranks(world_size, random_switches, seeds) == [switches] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_many_random_switches_are_exact(world_size: int) -> None:
    run_ranks(world_size, random_switches, range(10_000, 10_900), timeout=280)


# ---------------------------------------------------------------------------------------------------------- agreement


def small_plan() -> SwitchPlan:
    source = layout_of("a", ((Interval(0, 8, 0, 0),), ()), ((8,), (8,)))
    target = layout_of("b", ((), (Interval(0, 8, 0, 0),)), ((8,), (8,)))
    return plan_load(source, target, Cluster(2, 2), [4])


def disagreeing(rank: int, world_size: int) -> list[str]:
    """One rank differs, in one thing after another; every rank must say so, and then still be able to work."""
    agreement = Agreement(backends.world_for_host_tensors(), rank)
    plan = small_plan()
    other = plan_of(plan.name, 2, (transfers_of(plan)[0]._replace(src_offset=1, length=7),), False)
    odd = rank == 2
    attempts = [
        {"first plan": plan.digest, "second plan": (other if odd else plan).digest},
        {"model": "m", "configuration": "x" if odd else "y"},
        {"model": "m"} if odd else {"model": "m", "plan": plan.digest},
        {"one": str(rank), "two": "equal", "three": str(rank // 2)},
        {f"plan {i}": str(i) + ("!" if odd else "") for i in range(9)},
    ]
    messages = []
    for digests in attempts:
        with pytest.raises(PlanMismatchError) as caught:
            agreement.check(digests, None, "set-up")
        messages.append(str(caught.value))
    agreement.check({"model": "m"}, None, "set-up")
    agreement.check({}, None, "set-up")
    return messages


def one_has_an_error(rank: int, world_size: int) -> list[str]:
    agreement = Agreement(backends.world_for_host_tensors(), rank)
    messages = []
    for failing in ((1,), (3, 2)):
        error = TransferError(f"broken on {rank}", where="here", fix="mend it") if rank in failing else None
        with pytest.raises(TransferError) as caught:
            agreement.check({"model": "m"}, error, "set-up")
        messages.append(str(caught.value))

    def read() -> int | None:
        if rank == 3:
            raise OSError("no such file")
        return rank or None

    with pytest.raises(TransferError) as caught:
        agreement.run("reading", read, otherwise=lambda failure: TransferError(str(failure), where="a file"))
    messages.append(str(caught.value))
    with pytest.raises(PlanMismatchError) as differs:
        agreement.run("reading", lambda: rank, lambda value: {"value": str(value // 3)})
    messages.append(str(differs.value))
    # and the value, which may be None, where all have one
    assert agreement.run("reading", lambda: rank or None, lambda _: {"model": "m"}) == (rank or None)
    return messages


def disagreements(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    return disagreeing(rank, world_size), one_has_an_error(rank, world_size)


def test_a_difference_is_an_error_on_every_rank_before_anything_is_sent() -> None:
    for messages, of_one in run_ranks(4, disagreements):
        assert all("Where: set-up" in text and "nothing was sent" in text for text in messages)
        plans, configuration, names, several, renamed = messages
        assert "second plan: ranks [0, 1, 3] agree, ranks [2] agree" in plans
        assert "first plan" not in plans
        assert "configuration: ranks [0, 1, 3] agree" in configuration
        assert "model" not in configuration.split("Where:")[0]
        assert "list of what to compare: ranks [0, 1, 3] agree" in names
        assert "one: ranks [0] agree" in several
        assert "three: ranks [0, 1] agree" in several
        assert "two" not in several.split("Where:")[0]
        assert "plan 4" in renamed
        assert "(and 4 more)" in renamed
        first, second, raised, differs = of_one
        assert "broken on 1 | Where: rank 1, here | Fix: mend it" in first
        assert "broken on 2" in second
        assert "no such file | Where: rank 3, a file" in raised
        assert "rank 3 differs from the others in the value" in differs
