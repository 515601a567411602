"""Ranks that share cores: how long a phase takes when fewer processors compute at a time than ranks want to.

Four CPU ranks on two cores each run at half speed while all are busy, and at full speed while two of them wait for
others. Both functions here follow the fluid model of a fair scheduler (processor sharing): of `slots` processors, n
computing ranks get `min(1, slots / n)` each. On accelerators every rank has a processor of its own, and nothing here
is used.
"""

import heapq
from collections.abc import Sequence

from hf_hotspa.data.pipeline_order import Operation, operations


def shared_seconds(loads: Sequence[float], ranks_per_load: int, slots: float) -> float:
    """Seconds until the last of several independent loads is done, all started together.

    Args:
        loads: Processor seconds of each load on each of its ranks.
        ranks_per_load: Ranks that work on a load together.
        slots: Ranks that compute at a time.
    """
    seconds = done = 0.0
    for left, load in zip(range(len(loads), 0, -1), sorted(loads), strict=True):
        seconds += (load - done) * max(1.0, left * ranks_per_load / slots)
        done = load
    return seconds


def shared_pipelines(
    forward: Sequence[Sequence[Sequence[float]]],
    backward: Sequence[Sequence[Sequence[float]]],
    hops: Sequence[Sequence[float]],
    ranks_per_stage: int,
    slots: float,
    orders: Sequence[Sequence[Sequence[Operation]]] | None = None,
) -> float:
    """Seconds until the last of several pipelines is done: `schedule.one_forward_one_backward` on shared processors.

    All computing stages run at one speed at any moment, so the work that each has done since the start of its operation
    is the same integral of that speed; an operation ends when the integral has grown by its seconds. Events are thus
    ordered by two queues: ends of operations by the integral, arrivals of messages by time.

    Args:
        forward: `forward[replica][stage][micro-batch]` processor seconds on each rank of a stage.
        backward: The same for the backward pass.
        hops: `hops[replica][micro-batch]` seconds that a hidden state or its gradient travels between two stages.
        ranks_per_stage: Ranks that work on a stage together.
        slots: Ranks that compute at a time.
        orders: `orders[replica][stage]`: what each stage runs, in order; our 1F1B without a limit when None.
    """
    if orders is None:
        orders = [
            [operations([len(ahead[0])] * len(ahead[0]), len(ahead), stage) for stage in range(len(ahead))]
            for ahead in forward
        ]
    stages = [
        _Stage(index, stage, len(ahead), ahead[stage], back[stage], hops[index], orders[index][stage])
        for index, (ahead, back) in enumerate(zip(forward, backward, strict=True))
        for stage in range(len(ahead))
        if ahead[stage]
    ]
    place = {(stage.replica, stage.index): at for at, stage in enumerate(stages)}
    ends: list[tuple[float, int]] = []  # (integral at which the stage's operation ends, stage)
    arrivals: list[tuple[float, int, int, int]] = []  # (time, stage, micro-batch, is gradient)
    now = work = 0.0

    def start(at: int) -> None:
        seconds = stages[at].start()
        if seconds is not None:
            heapq.heappush(ends, (work + seconds, at))

    for at in range(len(stages)):
        start(at)
    while ends or arrivals:
        speed = min(1.0, slots / (len(ends) * ranks_per_stage)) if ends else 1.0
        end = now + (ends[0][0] - work) / speed if ends else float("inf")
        if arrivals and arrivals[0][0] <= end:
            time, at, micro_batch, is_gradient = heapq.heappop(arrivals)
            work += (time - now) * speed
            now = time
            (stages[at].gradients if is_gradient else stages[at].hidden).add(micro_batch)
            if not stages[at].busy:
                start(at)
            continue
        work, at = heapq.heappop(ends)
        now = end
        stage = stages[at]
        micro_batch, is_gradient = stage.finish()
        target = stage.index + (-1 if is_gradient else 1)
        if 0 <= target < stage.num_stages:
            heapq.heappush(
                arrivals, (now + stage.hops[micro_batch], place[stage.replica, target], micro_batch, is_gradient)
            )
        start(at)
    return now


class _Stage:
    """One stage of one replica: which operation of its order comes next, and what it waits for."""

    def __init__(
        self,
        replica: int,
        index: int,
        num_stages: int,
        forward: Sequence[float],
        backward: Sequence[float],
        hops: Sequence[float],
        order: Sequence[Operation],
    ) -> None:
        self.replica, self.index, self.num_stages = replica, index, num_stages
        self.forward, self.backward, self.hops = forward, backward, hops
        total = len(forward)
        self.hidden: set[int] = set(range(total)) if index == 0 else set()
        self.gradients: set[int] = set(range(total)) if index == num_stages - 1 else set()
        self._operations = order
        self._ended = 0
        self.busy = False

    def start(self) -> float | None:
        """Seconds of the operation that starts now; None when there is none, or it has to wait."""
        if self._ended == len(self._operations):
            return None
        micro_batch, is_backward = self._operations[self._ended]
        if micro_batch not in (self.gradients if is_backward else self.hidden):
            return None
        self.busy = True
        return self.backward[micro_batch] if is_backward else self.forward[micro_batch]

    def finish(self) -> tuple[int, int]:
        """Ends the running operation; `(micro-batch, whether its backward)`."""
        micro_batch, is_backward = self._operations[self._ended]
        self.busy = False
        self._ended += 1
        return micro_batch, int(is_backward)
