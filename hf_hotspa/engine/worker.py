"""The worker that runs switches (`SwitchJob`) in a separate thread, beside the computation.

* Switches run one after another in order of submission. All ranks submit the same switches in the same order, so their
  workers meet in the same one.
* A switch reads a segment only after its gate is open, and the segment may be used once `SwitchJob.wait` has returned
  for it. Nothing else couples a switch to the computation.
* An error ends its job, and everyone who waits for the job gets the same object. A cancelled job ends although its gate
  never opens. After either, no further switch is accepted: peers may hold half of one.

On CUDA the thread uses a side stream. Completed segments and opened gates are events that the other side's stream waits
for, so host waits are short and the device order is kept. Buffers that both streams use belong to arenas, master store
and executor, which keep them between phases and reuse them only after the job was joined, so the caching allocator
never reuses them too early. The executor's temporary memory is allocated, used and freed under the side stream.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

import torch

from hf_hotspa.engine.executor import SegmentGate, SwitchJob, SwitchStats
from hf_hotspa.errors import TransferError


class SwitchWorker:
    """Runs the switches of one rank in one thread, which starts with the first switch.

    While jobs run, nobody else may use the executor.

    Args:
        on_failure: Called in the thread, at once, for a switch that failed (not: was cancelled): the caller may learn
            of it only after its computation has waited in vain for a peer.
    """

    def __init__(self, device: torch.device, on_failure: Callable[[Exception], object] | None = None) -> None:
        self.device, self._on_failure = device, on_failure
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[SwitchJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._under_way: list[SwitchJob] = []
        self._end_reason: str | None = None
        self._closed = False

    def submit(self, name: str, run: Callable[[SwitchJob], SwitchStats], gate: SegmentGate | None = None) -> SwitchJob:
        """Queues a switch; it starts when earlier ones are over.

        The switch runs after the work so far in the caller's stream. Target buffers may be used once the job reports
        them complete. Source buffers may be changed until the gate opens, and after the job. Raises `TransferError`: an
        earlier switch failed or was cancelled.

        Args:
            run: Runs the switch, with the job as its progress.
            gate: When source segments may be read; by default at once.
        """

        def reporting(job: SwitchJob) -> SwitchStats:
            try:
                return run(job)
            except Exception as error:
                if self._on_failure is not None and self._end_reason is None:
                    self._on_failure(error)
                raise

        with self._lock:
            if self._end_reason is not None or self._closed:
                raise self._closed_error(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hotspa-switch", daemon=True)
                self._thread.start()
            job = SwitchJob(name, reporting, gate, self.device)
            self._under_way.append(job)
            self._queue.put(job)
        return job

    def cancel(self, reason: str) -> None:
        """Ends jobs that have not started or wait at their gate, and accepts no more. Does not wait.

        A job that waits for a peer ends when the peer does its part, or at the transport's timeout.
        """
        with self._lock:
            self._end_reason = self._end_reason or reason
            under_way = list(self._under_way)
        for job in under_way:
            job.cancel(TransferError(f"switch {job.name!r} was cancelled", why=reason))

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread after the current jobs, waiting up to `timeout` seconds; final. A thread that is stuck in a
        transfer ends with the process."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout)

    def _closed_error(self, name: str) -> TransferError:
        return TransferError(
            f"switch {name!r} cannot run: an earlier one failed or was cancelled",
            why=self._end_reason or "the worker is closed",
            fix="end the job and start it again",
        )

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            while (job := self._queue.get()) is not None:
                if self._end_reason is not None:
                    job.cancel(self._closed_error(job.name))
                succeeded = job.execute()
                with self._lock:
                    self._under_way.remove(job)
                    if not succeeded and self._end_reason is None:
                        self._end_reason = f"switch {job.name!r} failed"
