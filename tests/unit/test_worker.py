"""The switch thread: order, gates, errors, cancelling, what is counted as exposed; and real switches through it."""

import threading
import time
from functools import partial

import pytest
import torch

from hf_hotspa.engine import executor
from hf_hotspa.engine.executor import SegmentGate, SwitchExecutor, SwitchJob, SwitchStats, SwitchWorker
from hf_hotspa.errors import PlanError, TransferError
from tests.loopback import LoopbackHub
from tests.switch_cases import check_rank, clone, load_case, return_case

CPU = torch.device("cpu")


class ScriptedWorker(SwitchWorker):
    """A worker whose switches are functions of the progress, by name."""

    def __init__(self, on_failure=None, **switches):
        super().__init__(CPU, on_failure)
        self.switches, self.ran = switches, []

    def start(self, name: str, epoch: int = 0, gate: SegmentGate | None = None) -> SwitchJob:
        def run(job: SwitchJob) -> SwitchStats:
            self.ran.append((name, threading.current_thread().name))
            self.switches[name](job)
            return SwitchStats(sent_bytes=epoch)

        return self.submit(name, run, gate)


def until(condition) -> None:
    """Waits until another thread has made it so."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


class Clock:
    """The seconds that the module of jobs reads: they pass only where a test says so.

    Attributes:
        asked: Set when the main thread has asked for the time: it is about to wait.
    """

    def __init__(self) -> None:
        self.now, self.asked = 0.0, threading.Event()

    def perf_counter(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.asked.set()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(executor, "time", made)
    return made


@pytest.fixture
def make_worker():
    workers = []

    def make(**switches):
        workers.append(ScriptedWorker(**switches))
        return workers[-1]

    yield make
    for worker in workers:
        worker.cancel("the test is over")
        worker.close()
        assert worker._under_way == []


def test_switches_run_one_after_another_in_order_of_submission(make_worker):
    log, go = [], threading.Event()

    def slow(progress):
        go.wait(10)
        log.append("slow")

    worker = make_worker(slow=slow, fast=lambda progress: log.append("fast"))
    assert worker._thread is None  # without a switch there is no thread
    jobs = [worker.start(name, epoch) for epoch, name in enumerate(["slow", "fast", "slow", "fast"])]
    assert not log
    go.set()
    assert [job.result().sent_bytes for job in jobs] == [0, 1, 2, 3]
    assert log == ["slow", "fast"] * 2
    assert {thread for _, thread in worker.ran} == {"hotspa-switch"}


def test_a_switch_waits_for_its_gate(make_worker):
    order = []

    def return_gradients(progress):
        for segment in (2, 0, 1):  # 2 is not behind the gate
            progress.await_source([segment])
            order.append(segment)

    worker = make_worker(return_gradients=return_gradients)
    gate = SegmentGate([0, 1], CPU)
    job = worker.start("return_gradients", gate=gate)
    until(lambda: order == [2])
    time.sleep(0.01)
    assert order == [2]
    gate.open([0])
    until(lambda: order == [2, 0])
    gate.open()
    job.result()
    assert order == [2, 0, 1]
    gate.open()
    gate.wait([0, 1, 5])


def test_seconds_at_the_gate_are_not_busy(make_worker, clock):
    class LateGate(SegmentGate):
        def wait(self, segments):
            clock.now += 8.0

    def return_gradients(progress):
        clock.now += 1.0
        progress.await_source([0])
        clock.now += 2.0

    job = make_worker(return_gradients=return_gradients).start("return_gradients", gate=LateGate([0], CPU))
    job.result()
    assert job.busy_s == 3.0


def test_a_segment_can_be_used_before_the_end_and_exposed_seconds_are_those_of_a_blocked_caller(make_worker, clock):
    computing, go_on = threading.Event(), threading.Event()

    def load(progress):
        clock.now += 3.0
        computing.set()
        clock.asked.wait(200)  # the caller is about to wait
        clock.now += 4.0
        progress.target_complete([0])
        go_on.wait(200)
        clock.now += 5.0

    worker = make_worker(load=load)
    job = worker.start("load")
    computing.wait(200)
    assert job.exposed_s == 0.0
    job.wait([0])
    assert job.exposed_s == 4.0
    job.wait([0])
    assert job.exposed_s == 4.0
    assert not job.succeeded
    go_on.set()
    until(lambda: job.succeeded)
    job.wait([7])  # nobody reports it: complete at the end
    job.result()
    assert job.exposed_s == 4.0
    assert job.busy_s == 12.0


@pytest.mark.parametrize("error", [PlanError("buffers"), RuntimeError("wire"), KeyboardInterrupt()])
def test_an_error_is_raised_as_it_is_where_somebody_waits(make_worker, error):
    def broken(progress):
        progress.target_complete([0])
        raise error

    worker = make_worker(broken=broken, fine=lambda progress: None)
    job, later = worker.start("broken"), worker.start("fine")
    for wait in (job.result, lambda: job.wait([1]), lambda: job.wait([0])):
        with pytest.raises(type(error)) as caught:
            wait()
        assert caught.value is error
    assert not job.succeeded
    with pytest.raises(TransferError, match="'fine' cannot run.*'broken' failed"):
        later.result()
    with pytest.raises(TransferError, match="cannot run"):
        worker.start("fine")
    assert [name for name, _ in worker.ran] == ["broken"]


def test_cancel_ends_what_waits_at_a_gate_or_has_not_started(make_worker):
    worker = make_worker(return_gradients=lambda progress: progress.await_source([3]), load=lambda progress: None)
    gate = SegmentGate([3], CPU)
    at_gate, queued = worker.start("return_gradients", gate=gate), worker.start("load")
    until(lambda: worker.ran)
    threading.Timer(0.05, worker.cancel, ["the forward failed"]).start()
    for job in (at_gate, queued):
        with pytest.raises(TransferError, match="was cancelled.*the forward failed"):
            job.result()
    assert [name for name, _ in worker.ran] == ["return_gradients"]
    with pytest.raises(TransferError, match="the forward failed"):
        worker.start("load")


def test_a_failure_is_told_at_once_and_a_cancelled_switch_is_none():
    def broken(progress):
        progress.await_source([0])
        raise error

    error, told = RuntimeError("wire"), []
    worker = ScriptedWorker(told.append, broken=broken)
    worker.start("broken")
    worker.close()
    assert told == [error]
    worker = ScriptedWorker(told.append, broken=broken)
    worker.start("broken", gate=SegmentGate([0], CPU))
    time.sleep(0.05)
    worker.cancel("compute")
    worker.close()
    assert told == [error]


def test_close_lets_queued_switches_end():
    worker = ScriptedWorker(load=lambda progress: time.sleep(0.05))
    jobs = [worker.start("load") for _ in range(3)]
    thread = worker._thread
    worker.close()
    assert not thread.is_alive()
    assert all(job.succeeded for job in jobs)
    worker.close()
    with pytest.raises(TransferError, match="closed"):
        worker.start("load")


@pytest.mark.parametrize("seed", range(12))
def test_real_switches_run_through_workers(seed):
    """A load and a return of one world, submitted by all ranks; every rank has its own thread."""
    cases = [load_case(seed, "master", 4), return_case(seed, 4)]
    hub = LoopbackHub(4, timeout=20.0)
    targets = [clone(case.targets) for case in cases]
    staging = min(case.staging_bytes for case in cases)
    executors = [SwitchExecutor(hub.transport(rank), rank, staging) for rank in range(4)]
    workers = [SwitchWorker(CPU) for _ in executors]
    gates = [SegmentGate(range(len(cases[1].wires)), CPU) for _ in workers]
    jobs = [
        [
            worker.submit(
                case.plan.name,
                partial(executors[rank].run, case.plan, case.sources[rank], target[rank], case.wires, epoch),
                gate,
            )
            for epoch, (case, target, gate) in enumerate(zip(cases, targets, (None, gates[rank]), strict=True))
        ]
        for rank, worker in enumerate(workers)
    ]
    for load, _ in jobs:
        load.result()
    for gate in gates:
        for segment in reversed(range(len(cases[1].wires))):
            gate.open([segment])
    for _, return_gradients in jobs:
        return_gradients.result()
    for worker in workers:
        worker.close()
    hub.close()
    for case, found in zip(cases, targets, strict=True):
        for rank in range(4):
            check_rank(case, rank, found[rank])
