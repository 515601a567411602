"""Faults inside a switch: every rank that survives ends with a clear error, soon, and nothing incomplete is used.

Clear means: the class says what kind of failure it is, the text names this rank, the other end, the operation and the
switch. Soon means within the timeout of the process group, here some seconds.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from written_plans import layout_of  # type: ignore[import-not-found]

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.executor import SwitchExecutor
from hf_hotspa.engine.transport import ProcessGroupTransport, TransferHandle
from hf_hotspa.errors import HotspaError, TransferError
from hf_hotspa.layout.placement import Interval
from hf_hotspa.plan.planner import plan_load
from hf_hotspa.plan.switch_plan import LENGTH, SwitchPlan
from tests.families import tiny_model
from tests.harness import Outcome, run_ranks
from tests.switch_cases import poisoned
from tests.worlds import make_engine

pytestmark = pytest.mark.gloo

TIMEOUT_S = 4.0
"""Of the process group that switches."""
NUM_SEGMENTS, NUMEL = 6, 3 * 1024
"""Segments of the switch, and elements of each."""
VICTIM = 1
WHAT = "the buffer is of another dtype"


class TransportWithFault(ProcessGroupTransport):
    """Something happens to this rank when it is about to start a round."""

    def __init__(self, group: dist.ProcessGroup, fault_at: int | None, kind: str) -> None:
        super().__init__(group)
        self._fault_at, self._kind, self._starts = fault_at, kind, 0

    def start(self) -> TransferHandle:
        self._starts += 1
        if self._starts == self._fault_at:
            if self._kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._kind == "asleep":
                time.sleep(TIMEOUT_S + 4.0)
            if self._kind in SIZES:
                self._submitted = [op._replace(tensor=SIZES[self._kind](op.tensor)) for op in self._submitted]
        return super().start()


SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shorter": lambda tensor: tensor[:-8],
    "longer": lambda tensor: torch.cat([tensor, tensor[:8]]),
    "of another dtype": lambda tensor: tensor.view(torch.int32),
}
"""What one rank sends and expects in place of what was planned; gloo alone would take two of them without a word, and
end the process without one at the third."""


class Recorder:
    """The computation beside the switch: keeps what it is told, and may fail at it."""

    def __init__(self, fails_at: int | None) -> None:
        self.complete: list[int] = []
        self._fails_at = fails_at

    def await_source(self, segments: Sequence[int]) -> None:
        pass

    def target_complete(self, segments: Sequence[int]) -> None:
        self.complete += segments
        if self._fails_at in segments:
            raise RuntimeError(WHAT)


def evenly_to_all(world_size: int) -> SwitchPlan:
    """Segments cut evenly over all ranks, gathered on every rank."""
    share = NUMEL // world_size
    cut, whole = [], []
    for rank in range(world_size):
        starts = [segment * NUMEL for segment in range(NUM_SEGMENTS)]
        cut.append([Interval(s + rank * share, s + (rank + 1) * share, i, 0) for i, s in enumerate(starts)])
        whole.append([Interval(s, s + NUMEL, i, 0) for i, s in enumerate(starts)])
    source = layout_of("cut", cut, [[share] * NUM_SEGMENTS] * world_size)
    target = layout_of("whole", whole, [[NUMEL] * NUM_SEGMENTS] * world_size)
    return plan_load(source, target, Cluster(world_size, world_size), [4] * NUM_SEGMENTS)


def broken_switch(rank: int, world_size: int, kind: str) -> dict[str, object]:
    """One switch of several rounds in which something happens to one rank; what this rank saw of it."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.zeros(1), group=group)
    fault_at = 3 if rank == VICTIM else None
    plan = evenly_to_all(world_size)
    share, wires = NUMEL // world_size, [torch.float32] * NUM_SEGMENTS
    # half of it, for one round in flight, holds what one segment brings in, and not that of two: a segment is a round
    staging_bytes = 3 * (world_size - 1) * share * 4
    executor = SwitchExecutor(TransportWithFault(group, fault_at, kind), rank, staging_bytes, by_layer=True)
    full = [torch.arange(NUMEL, dtype=torch.float32) + segment for segment in range(NUM_SEGMENTS)]
    source = [values[rank * share : (rank + 1) * share].clone() for values in full]
    target = [poisoned(NUMEL, torch.float32) for _ in full]
    recorder = Recorder(2 if rank == VICTIM and kind == "computation" else None)
    with pytest.raises(HotspaError) as caught:
        executor.run(plan, source, target, wires, 5, recorder)
    assert all(torch.equal(target[segment], full[segment]) for segment in recorder.complete)
    with pytest.raises(TransferError, match="cannot run.*earlier one failed"):
        executor.run(plan, source, target, wires, 6, recorder)
    return {
        "error": str(caught.value),
        "type": type(caught.value).__name__,
        "complete": list(recorder.complete),
    }


def check_survivor(outcome: Outcome, world_size: int) -> str:
    """What must hold for every rank that is still there; returns its message."""
    assert outcome.returned, outcome.describe()
    seen, text = outcome.value, outcome.value["error"]
    assert seen["type"] == "TransferError"
    assert len(seen["complete"]) < NUM_SEGMENTS, "the switch was reported as complete"
    assert "'load cut -> whole'" in text
    assert re.search(rf"failed in round \d of {NUM_SEGMENTS}", text), text
    assert f"rank {outcome.rank}" in text, text
    assert "must not be used again" in text
    return text


def check_operation(text: str, rank: int, world_size: int) -> None:
    """A survivor that lost a peer names the operation, its two ends and its size."""
    peers = "".join(str(peer) for peer in range(world_size) if peer != rank)
    assert re.search(rf"(send to|receive from) rank [{peers}] \(tag \d+, \d+ x torch.float32\)", text), text
    assert re.search(rf"rank {rank}, peers? \[?[{peers}]", text), text


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_peer(world_size: int) -> None:
    outcomes = run_ranks(world_size, broken_switch, "killed", expect_failure=True, timeout=280)
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    texts = {o.rank: check_survivor(o, world_size) for o in outcomes if o.rank != VICTIM}
    for rank, text in texts.items():
        check_operation(text, rank, world_size)
    # others may lose each other first; somebody has seen who was killed
    assert any(f"rank {VICTIM} (tag" in text for text in texts.values()), texts


def test_an_exception_on_one_rank() -> None:
    for outcome in run_ranks(3, broken_switch, "computation", expect_failure=True, timeout=280):
        text = check_survivor(outcome, 3)
        if outcome.rank == VICTIM:
            assert WHAT in text
            assert "in exchange with ranks" in text
        else:
            check_operation(text, outcome.rank, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_sleeps_longer_than_the_timeout(world_size: int) -> None:
    outcomes = run_ranks(world_size, broken_switch, "asleep", expect_failure=True, timeout=280)
    texts = {o.rank: check_survivor(o, world_size) for o in outcomes}
    for rank, text in texts.items():
        check_operation(text, rank, world_size)
    awake = [text for rank, text in texts.items() if rank != VICTIM]
    assert any(re.search(r"[Tt]imed out", text) and f"rank {VICTIM} (tag" in text for text in awake), awake


@pytest.mark.parametrize(
    "kind",
    [
        "shorter",
        pytest.param("longer", marks=pytest.mark.slow),
        pytest.param("of another dtype", marks=pytest.mark.slow),
    ],
)
def test_a_message_that_is_not_as_planned_is_noticed(kind: str) -> None:
    outcomes = run_ranks(2, broken_switch, kind, expect_failure=True, timeout=280)
    texts = {o.rank: check_survivor(o, 2) for o in outcomes}
    check_operation(texts[1 - VICTIM], 1 - VICTIM, 2)


def perturbed_plan(rank: int, world_size: int) -> None:
    """One rank's planner gives another plan; nobody may start a transfer."""
    patch = pytest.MonkeyPatch()  # never undone: the process ends

    def other_plan(*args: Any, **kwargs: Any) -> SwitchPlan:
        plan = plan_load(*args, **kwargs)
        tables = [table.copy() for table in plan.kinds[0].hops]
        tables[0][0, LENGTH] -= 1
        return replace(plan, kinds=(plan.kinds[0]._replace(hops=tuple(tables)), *plan.kinds[1:]))

    def refused(self: ProcessGroupTransport) -> TransferHandle:
        raise AssertionError("a transfer was started")

    patch.setattr(ProcessGroupTransport, "start", refused)
    if rank == VICTIM:
        users = [m for name, m in sys.modules.items() if name.startswith("hf_hotspa.") and hasattr(m, "plan_load")]
        for module in users:  # whoever plans
            patch.setattr(module, "plan_load", other_plan)
    make_engine(tiny_model("llama_gqa_bias"), "dp2:16@32,tp2:64")


def test_a_plan_that_differs_on_one_rank_is_refused_before_a_byte_moves() -> None:
    outcomes = run_ranks(2, perturbed_plan, expect_failure=True, timeout=280)
    for outcome in outcomes:
        assert outcome.error_type == "PlanMismatchError", outcome.describe()
        assert outcome.error is not None
        for fragment in (
            "Where: set-up",
            "plan 'load master store -> dp2': ranks [0] agree, ranks [1] agree",
            "nothing was sent",
        ):
            assert fragment in outcome.error, outcome.error
