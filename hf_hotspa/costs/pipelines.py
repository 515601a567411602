"""How long pipelines take: an exact simulation of a schedule, ours or another, with unequal micro-batches.

Follows `hf_hotspa/parallel/pipeline.py`: each stage runs the operations of `packing.pipeline_order`. Sends do not block; a
stage waits for what it needs next. The usual closed form `sum(t) + (p - 1) * max(t)` ignores that packs differ and that
the last stage also runs the head.

Where ranks have several stages each (`+v2`), they run the one order of `packing.interleaved_order`.

Two ways to the same answer. Where every rank has a processor of its own, as accelerators do, each operation begins when
what it needs is there, and one walk through the operations is enough (`pipeline_seconds`). Ranks that share cores follow
the fluid model of a fair scheduler (processor sharing): of `slots` processors, n computing ranks get `min(1, slots / n)`
each (`shared_pipelines`, `shared_seconds`); four CPU ranks on two cores run at half speed while all are busy, and at
full speed while two of them wait for others.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.packing.pipeline_order import Turn, backward_order, most_ahead, operations


@dataclass(frozen=True)
class Pipeline:
    """The packs (or chunks) of one replica and the way they go through its stages.

    Args:
        forward: `forward[stage][pack]` seconds, of a rank with a processor of its own.
        backward: The same for the backward pass.
        hops: Seconds that the hidden state of each pack, or its gradient, travels between two stages.
        reach: See `pipeline_order.reaches`: how far forward passes may be ahead.
        depth: Stages that the schedule counts with, see `Passes.depth`; as many as there are when None.
        chains: How many chunks each chain has, see `pipeline_order`; empty for whole packs.
        rounds: Stages on each rank.
        order: The order of all ranks where they have several stages each; else it follows from what is above.
    """

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    hops: Sequence[float]
    reach: Sequence[int]
    depth: int | None = None
    chains: Sequence[int] = ()
    rounds: int = 1
    order: Sequence[Turn] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.forward) // self.rounds

    def turns(self, rank: int) -> list[Turn]:
        """What a rank runs, in order."""
        if self.rounds > 1:
            return [turn for turn in self.order if turn.stage % self.num_ranks == rank]
        depth = self.depth or len(self.forward)
        return [Turn(rank, *operation) for operation in operations(self.reach, depth, rank, self.chains)]

    def seconds(self, turn: Turn) -> float:
        """Seconds of one pass."""
        return (self.backward if turn.is_backward else self.forward)[turn.stage][turn.unit]


def pipeline_seconds(pipeline: Pipeline) -> float:
    """Seconds until the last operation of a replica has ended, every rank on a processor of its own.

    Operations are looked at in an order in which nothing is needed before it is known: for each backward pass, first
    the forward passes that may begin before it, from the first stage to the last, then that pass, from the last to the
    first.
    """
    forward, backward, hops, reach = pipeline.forward, pipeline.backward, pipeline.hops, pipeline.reach
    num_stages, total = len(forward), len(forward[0])
    if num_stages == 1:
        return sum(forward[0]) + sum(backward[0])
    if pipeline.rounds > 1:
        return max((event.end for event in interleaved_events(pipeline)), default=0.0)
    depth = pipeline.depth or num_stages
    clock, begun = [0.0] * num_stages, [0] * num_stages
    ready = [0.0] * total  # when the stage that a pack comes to next has its hidden state
    rising, falling = range(num_stages), range(num_stages - 1, -1, -1)
    backwards: Sequence[int] = backward_order(pipeline.chains) if pipeline.chains else range(total)
    aheads: Sequence[int] = most_ahead(pipeline.chains, depth) if pipeline.chains else range(depth, depth + total)
    for pack, most, ahead in zip(backwards, reach, aheads, strict=True):
        for stage in rising:
            end = ahead - stage
            if end > most:
                end = most
            at = begun[stage]
            if at < end:
                now, seconds = clock[stage], forward[stage]
                while at < end:
                    if ready[at] > now:
                        now = ready[at]
                    now += seconds[at]
                    ready[at] = now + hops[at]
                    at += 1
                begun[stage], clock[stage] = end, now
        gradient, hop = 0.0, hops[pack]
        for stage in falling:
            now = clock[stage]
            if gradient > now:
                now = gradient
            now += backward[stage][pack]
            clock[stage] = now
            gradient = now + hop
    return max(clock)


class Event(NamedTuple):
    """One pass on a rank."""

    turn: Turn
    rank: int
    start: float
    end: float


def interleaved_events(pipeline: Pipeline) -> list[Event]:
    """When each pass of a replica runs whose ranks have several stages each, every rank on a processor of its own."""
    num_ranks, last = pipeline.num_ranks, len(pipeline.forward) - 1
    clock, ready = [0.0] * num_ranks, dict[Turn, float]()
    events = []
    for turn in pipeline.order:
        rank, start = turn.stage % num_ranks, clock[turn.stage % num_ranks]
        if not turn.is_backward and turn.stage:
            start = max(start, ready[Turn(turn.stage - 1, turn.unit, False)])
        if turn.is_backward and turn.stage < last:
            start = max(start, ready[Turn(turn.stage + 1, turn.unit, True)])
        clock[rank] = end = start + pipeline.seconds(turn)
        ready[turn] = end + pipeline.hops[turn.unit]
        events.append(Event(turn, rank, start, end))
    return events


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


def shared_pipelines(pipelines: Sequence[Pipeline], ranks_per_stage: int, slots: float) -> float:
    """Seconds until the last of several pipelines is done: `pipeline_seconds` on shared processors.

    All computing stages run at one speed at any moment, so the work that each has done since the start of its operation
    is the same integral of that speed; an operation ends when the integral has grown by its seconds. Events are thus
    ordered by two queues: ends of operations by the integral, arrivals of messages by time.

    Args:
        ranks_per_stage: Ranks that work on a stage together.
        slots: Ranks that compute at a time.
    """
    ranks = [
        _Rank(replica, rank, pipeline)
        for replica, pipeline in enumerate(pipelines)
        for rank in range(pipeline.num_ranks)
        if pipeline.forward[rank]
    ]
    place = {(rank.replica, rank.index): at for at, rank in enumerate(ranks)}
    ends: list[tuple[float, int]] = []  # (integral at which the rank's operation ends, rank)
    arrivals: list[tuple[float, int, Turn]] = []  # (time, rank, what it was made for)
    now = work = 0.0

    def start(at: int) -> None:
        seconds = ranks[at].start()
        if seconds is not None:
            heapq.heappush(ends, (work + seconds, at))

    for at in range(len(ranks)):
        start(at)
    while ends or arrivals:
        speed = min(1.0, slots / (len(ends) * ranks_per_stage)) if ends else 1.0
        end = now + (ends[0][0] - work) / speed if ends else float("inf")
        if arrivals and arrivals[0][0] <= end:
            time, at, turn = heapq.heappop(arrivals)
            work += (time - now) * speed
            now = time
            ranks[at].ready.add(turn)
            if not ranks[at].busy:
                start(at)
            continue
        work, at = heapq.heappop(ends)
        now = end
        rank = ranks[at]
        turn = rank.finish()
        target = turn.stage + (-1 if turn.is_backward else 1)
        if 0 <= target < rank.num_stages:
            to = place[rank.replica, target % rank.num_ranks]
            heapq.heappush(arrivals, (now + rank.hops[turn.unit], to, turn._replace(stage=target)))
        start(at)
    return now


class _Rank:
    """One rank of one replica: which pass of its order comes next, and what it waits for."""

    def __init__(self, replica: int, index: int, pipeline: Pipeline) -> None:
        self.replica, self.index, self.num_ranks = replica, index, pipeline.num_ranks
        self.num_stages, self.hops = len(pipeline.forward), pipeline.hops
        self.ready: set[Turn] = set()  # of the passes that need what another stage makes
        self._seconds, self._turns = pipeline.seconds, pipeline.turns(index)
        self._ended = 0
        self.busy = False

    def start(self) -> float | None:
        """Seconds of the pass that starts now; None when there is none, or it has to wait."""
        if self._ended == len(self._turns):
            return None
        turn = self._turns[self._ended]
        is_end = turn.stage == (self.num_stages - 1 if turn.is_backward else 0)
        if not is_end and turn not in self.ready:
            return None
        self.busy = True
        return self._seconds(turn)

    def finish(self) -> Turn:
        """Ends the running pass."""
        turn = self._turns[self._ended]
        self.busy = False
        self._ended += 1
        return turn
