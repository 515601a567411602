"""The worker that runs switches (`SwitchJob`) in a thread of its own, beside the computation.

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
from collections.abc import Callable

import torch

from hf_hotspa.engine.executor import SegmentGate, SwitchJob, SwitchStats
from hf_hotspa.errors import TransferError


class SwitchWorker:
    """Runs the switches of one rank in one thread, which starts with the first of them.

    While jobs are under way nobody else may use the executor.

    Args:
        on_failure: Told of a switch that failed (not: was cancelled), in the thread and at once: the caller may learn
            of it only after its computation has waited in vain for a peer.
    """

    def __init__(self, device: torch.device, on_failure: Callable[[Exception], object] | None = None) -> None:
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
        """Ends the thread after what is under way, waiting so many seconds; nothing may be submitted any more. A thread
        that is stuck in a transfer ends with the process."""
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
