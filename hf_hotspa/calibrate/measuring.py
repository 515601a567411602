"""How the ranks of a calibration measure: all begin at the same time, and everything runs in turn, round after round, so that
what disturbs the machine for a while disturbs all alike."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_hotspa.engine.phase import synchronize
from hf_hotspa.parallel.agreement import Agreement

_TIMES = 5


@dataclass(frozen=True)
class Measuring:
    """What every measurement needs. Its methods are collective.

    Args:
        agreement: Host-side barrier and gathering.
        device: Where this rank computes.
        share: Cores for each rank. From 1 on, waiting is part of a cost; below, ranks take turns on a core.
        rounds: How often everything is measured, after one round that warms up.
        say: Told what is being done.
        until: When this rank should have finished, on the clock of `time.perf_counter`; infinite where that does not matter.
    """

    agreement: Agreement
    device: torch.device
    share: float
    rounds: int
    say: Callable[[str], object]
    until: float = math.inf

    def is_late(self) -> bool:
        """Whether any rank should have finished: then nothing is measured that something else can stand for."""
        return self.until < math.inf and bool((self.agreement.gather([time.perf_counter() - self.until]) > 0).any())

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of this rank by the clock, and those that its threads spent on a core."""
        self.agreement.barrier()
        begin, on_core = time.perf_counter(), time.process_time()
        run()
        synchronize(self.device)
        return time.perf_counter() - begin, time.process_time() - on_core

    def repeated(self, run: Callable[[], object]) -> Tensor:
        """Seconds by the clock of what runs a few times, after one that warms up: [rank, time]."""
        return self.agreement.gather([self.timed(run)[0] for _ in range(_TIMES + 1)][1:])
