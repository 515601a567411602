"""A switch as a job, and the worker that runs jobs in a thread of its own, beside the computation.

A switch that nothing computes beside is a job, too: one that is done (`SwitchJob.done`).

What it promises:

* Switches run one after another in order of submission. Every rank submits the same switches in the same order, so the
  workers of all ranks meet in the same one.
* A segment is read by a switch only after its gate is open, and may be used as soon as `SwitchJob.wait` has returned
  for it. Nothing else couples a switch to the computation.
* An error ends its job and is raised, the very same object, where somebody waits for the job. A cancelled job ends
  although its gate never opens. After either, no further switch is accepted: peers may hold half of one.

On CUDA the thread runs under a side stream. Completed segments and opened gates are recorded as events, for which the
other side's stream waits, so a wait on the host is short and the order on the device is kept. The buffers that both
streams use belong to arenas, master store and executor, which keep them from one phase to the next and hand them out
again only after the job was joined; so the caching allocator never reuses them behind a stream's back. What the
executor allocates in passing is allocated, used and freed under the side stream.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from hf_hotspa.engine.executor import SwitchStats
from hf_hotspa.errors import HotspaError, TransferError


class _Stamp:
    """A moment in the work of the current stream; on CPU, where work is done when a call returns, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """What the current stream does from now on comes after that moment."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class SegmentGate:
    """Keeps a switch from reading segments before the computation has finished with them.

    Args:
        closed: The segments to keep; all others are open from the start.
    """

    def __init__(self, closed: Iterable[int], device: torch.device) -> None:
        self._device, self._closed = device, set(closed)
        self._stamps: dict[int, _Stamp] = {}
        self._cancelled: HotspaError | None = None
        self._changed = threading.Condition()

    def open(self, segments: Iterable[int] | None = None) -> None:
        """What the current stream of the caller has done so far completes these segments; all that are closed when None."""
        stamp = _Stamp(self._device)
        with self._changed:
            opened = set(self._closed) if segments is None else self._closed.intersection(segments)
            self._closed -= opened
            self._stamps.update(dict.fromkeys(opened, stamp))
            self._changed.notify_all()

    def cancel(self, error: HotspaError) -> None:
        """The segments that are still closed will never be opened: whoever waits for one gets the error."""
        with self._changed:
            self._cancelled = error
            self._changed.notify_all()

    def wait(self, segments: Iterable[int]) -> None:
        """Blocks until all these segments are open; then the caller's stream comes after what completed them.

        Raises:
            HotspaError: the gate was cancelled.
        """
        wanted = set(segments)
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled is not None or not wanted & self._closed)
            if self._cancelled is not None:
                raise self._cancelled
            stamps = {self._stamps[segment] for segment in wanted if segment in self._stamps}
        for stamp in stamps:
            stamp.wait()


class SwitchJob:
    """One switch; made by `SwitchWorker.submit`, which runs it beside what follows, or by `done`.

    Args:
        run: Runs the switch with the job as its progress.
        gate: What it must wait for before it reads a segment; None when everything is ready.
    """

    def __init__(
        self, name: str, run: Callable[["SwitchJob"], SwitchStats], gate: SegmentGate | None, device: torch.device
    ) -> None:
        self.name = name
        self._run: Callable[[SwitchJob], SwitchStats] | None = run
        self._gate, self._device = gate, device
        self._submitted = _Stamp(device)
        self._complete: dict[int, _Stamp] = {}
        self._ended: _Stamp | None = None
        self._stats: SwitchStats | None = None
        self._error: BaseException | None = None
        self._exposed_s = self._busy_s = self._gated_s = 0.0
        self._changed = threading.Condition()

    @classmethod
    def done(cls, name: str, run: Callable[["SwitchJob"], SwitchStats], device: torch.device) -> "SwitchJob":
        """Runs a switch at once, in the calling thread and stream: the job of it is over.

        Raises:
            Exception: what ended it.
        """
        job = cls(name, run, None, device)
        job.execute()
        job._busy_s = 0.0  # nothing was computed beside it
        job.result()
        return job

    # -- the side of the computation ----------------------------------------------------------------------------------

    @property
    def exposed_s(self) -> float:
        """Host seconds that callers have spent blocked in `wait` and `result`.

        On CUDA, what the caller's stream then waits for the events is not in it.
        """
        return self._exposed_s

    @property
    def busy_s(self) -> float:
        """Seconds from the start of the switch to its end, without those in which it waited for its gate; 0 before, and
        where nothing was computed beside it.

        Waiting for peers counts, as it cannot be told from moving bytes.
        """
        return self._busy_s

    @property
    def succeeded(self) -> bool:
        """Whether the switch is over, and all that it had to do is done."""
        return self._ended is not None and self._error is None

    def wait(self, segments: Iterable[int]) -> None:
        """Blocks until the target buffers of these segments are complete, for the host and for the caller's stream.

        Segments that the switch does not report are complete at its end.

        Raises:
            Exception: what ended the job.
        """
        wanted = set(segments)
        self._block(lambda: wanted <= self._complete.keys())
        stamps = {self._complete[s] for s in wanted if s in self._complete}
        if self._ended is not None and not wanted <= self._complete.keys():
            stamps.add(self._ended)
        for stamp in stamps:
            stamp.wait()

    def result(self) -> SwitchStats:
        """Blocks until the switch is over; returns what it did.

        Raises:
            Exception: what ended the job.
        """
        self._block(lambda: False)
        assert self._stats is not None
        assert self._ended is not None
        self._ended.wait()
        return self._stats

    def _block(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if self._ended is None and not ready():
                begin = time.perf_counter()
                self._changed.wait_for(lambda: self._ended is not None or ready())
                self._exposed_s += time.perf_counter() - begin
            if self._error is not None:
                raise self._error

    def cancel(self, error: HotspaError) -> None:
        """Ends the job with this error where it can be ended: before it starts, or at its gate. Does not wait."""
        with self._changed:
            if self._run is not None:
                self._end(error=error)
        if self._gate is not None:
            self._gate.cancel(error)

    # -- the side of the worker: the executor's `Progress` ------------------------------------------------------------

    def await_source(self, segments: Sequence[int]) -> None:
        """Returns when these segments may be read."""
        if self._gate is not None:
            begin = time.perf_counter()
            try:
                self._gate.wait(segments)
            finally:
                self._gated_s += time.perf_counter() - begin

    def target_complete(self, segments: Sequence[int]) -> None:
        """These segments' target buffers are complete, as far as the current stream goes."""
        stamp = _Stamp(self._device)
        with self._changed:
            self._complete.update(dict.fromkeys(segments, stamp))
            self._changed.notify_all()

    def execute(self) -> bool:
        """Runs the switch in the calling thread and stream; whether it succeeded."""
        with self._changed:
            run, self._run = self._run, None
        if run is None:  # cancelled before it started
            return False
        begin = time.perf_counter()
        stats, error = None, None
        try:
            self._submitted.wait()
            stats = run(self)
        except BaseException as failure:  # also what is no Exception: the caller must not wait for ever
            error = failure
        with self._changed:
            self._busy_s = time.perf_counter() - begin - self._gated_s
            self._end(stats, error)
        return error is None

    def _end(self, stats: SwitchStats | None = None, error: BaseException | None = None) -> None:
        self._run, self._stats, self._error = None, stats, error
        self._ended = _Stamp(self._device)
        self._changed.notify_all()


class SwitchWorker:
    """Runs the switches of one rank in one thread, which starts with the first of them.

    While jobs are under way nobody else may use the executor.

    Args:
        on_failure: Told of a switch that failed (not: was cancelled), in the thread and at once: the caller may learn
            of it only after its computation has waited in vain for a peer.
    """

    def __init__(
        self,
        device: torch.device,
        on_failure: Callable[[Exception], object] | None = None,
    ) -> None:
        self.device, self._on_failure = device, on_failure
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[SwitchJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._under_way: list[SwitchJob] = []
        self._refusal: str | None = None
        self._closed = False

    def submit(self, name: str, run: Callable[[SwitchJob], SwitchStats], gate: SegmentGate | None = None) -> SwitchJob:
        """Queues a switch; it starts when those submitted before are over.

        What the caller's stream has done so far comes before the switch. The target buffers may be used as the job says
        they are complete, the source buffers may be changed until the gate opens and after the end of the job.

        Args:
            run: Runs the switch, with the job as its progress.
            gate: Says when source segments may be read; None when all may.

        Raises:
            TransferError: an earlier switch failed or was cancelled.
        """

        def told(job: SwitchJob) -> SwitchStats:
            try:
                return run(job)
            except Exception as error:
                if self._on_failure is not None and self._refusal is None:
                    self._on_failure(error)
                raise

        with self._lock:
            if self._refusal is not None or self._closed:
                raise self._refused(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hotspa-switch", daemon=True)
                self._thread.start()
            job = SwitchJob(name, told, gate, self.device)
            self._under_way.append(job)
            self._queue.put(job)
        return job

    def cancel(self, reason: str) -> None:
        """Ends the jobs that have not started or wait at their gate, and accepts no more. Does not wait.

        A job that waits for a peer ends when the peer does its part, or by the timeout of the transport.
        """
        with self._lock:
            self._refusal = self._refusal or reason
            under_way = list(self._under_way)
        for job in under_way:
            job.cancel(TransferError(f"switch {job.name!r} was cancelled", why=reason))

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread after what is under way; nothing may be submitted any more.

        Args:
            timeout: Seconds to wait for it. A thread that is stuck in a transfer ends with the process.
        """
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)

    def _refused(self, name: str) -> TransferError:
        return TransferError(
            f"switch {name!r} refused: an earlier one did not end well",
            why=self._refusal or "the worker is closed",
            fix="end the job and start it again",
        )

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            while (job := self._queue.get()) is not None:
                if self._refusal is not None:
                    job.cancel(self._refused(job.name))
                succeeded = job.execute()
                with self._lock:
                    self._under_way.remove(job)
                    if not succeeded and self._refusal is None:
                        self._refusal = f"switch {job.name!r} failed"
