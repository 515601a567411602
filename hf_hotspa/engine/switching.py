"""What moves weights and gradients on a rank: plans, executor, worker and memory of all strategies of a run.

Built before anything large is allocated, so that what does not fit is refused while it is still cheap. `load` and
`return_gradients` start a switch, and give its job: of one that runs beside the computation, or of one that is done.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.arena import Arenas, arena_bytes
from hf_hotspa.engine.executor import Buffers, SwitchExecutor, SwitchStats, Wires
from hf_hotspa.engine.memory import MemoryForecast, device_limit
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.engine.worker import SegmentGate, SwitchJob, SwitchWorker
from hf_hotspa.layout.units import Rooms
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.plan.plan import SwitchPlan
from hf_hotspa.plan.pool import PlanPool
from hf_hotspa.plan.table import RELAY, SECOND, SOURCE, TARGET
from hf_hotspa.strategy import Strategy

Switch = tuple[SwitchPlan, Wires]
"""A plan, and the dtype in which each segment travels."""


class Switching:
    """The switches of one rank.

    Args:
        groups: The process groups; made by all ranks.
        on_failure: Told of a switch that fails beside the computation.

    Attributes:
        worker: Runs them beside the computation; None where none does.
        arenas: The memory of the active strategy.
        weight_dtypes: The dtype of the weights of each segment, in strategies and on the wire.
        gradient_dtypes: The dtype in which its gradients accumulate in strategies; None for frozen segments.
        return_dtypes: The dtype in which they travel to the master store.
        forecast: The memory that this rank will take.
    """

    def __init__(
        self,
        vector: ParameterVector,
        strategies: Sequence[Strategy],
        cluster: Cluster,
        groups: ProcessGroups,
        options: EngineOptions,
        on_failure: Callable[[Exception], object],
    ) -> None:
        device, rank = groups.device, groups.rank
        self.weight_dtypes = [getattr(torch, s.dtype) for s in vector.segments]
        trained = [segment.dtype if segment.trainable else None for segment in vector.segments]
        self.gradient_dtypes = [dtype and getattr(torch, options.gradients.accumulated(dtype)) for dtype in trained]
        self.return_dtypes = [dtype and getattr(torch, options.gradients.moved(dtype)) for dtype in trained]
        self.frozen_segments = frozenset(i for i, dtype in enumerate(self.gradient_dtypes) if dtype is None)
        weight_sizes = [dtype.itemsize for dtype in self.weight_dtypes]
        gradient_sizes = [dtype.itemsize if dtype else 1 for dtype in self.return_dtypes]

        self._make_pool = partial(
            PlanPool,
            strategies=strategies,
            cluster=cluster,
            weight_sizes=weight_sizes,
            gradient_sizes=gradient_sizes,
            planner=options.planner,
            by_stage=options.pipedream is not None,
        )
        self.pool = self._make_pool(vector)
        largest = max(
            arena_bytes([self.pool.layout(s).rank_sizes(r)], self.weight_dtypes, [self.rooms(s).weights])
            for s in strategies
            for r in range(cluster.world_size)
        )
        # decided when the layouts are known, before a plan is made
        self.pool.second_source = options.uses_second_source(device, self.pool.num_layouts, largest)
        alone = groups.switch is None
        transport = ProcessGroupTransport(groups.switch, rank)
        forward = None if alone else ProcessGroupTransport(groups.forward)
        masters = [getattr(torch, s.master_dtype) for s in vector.segments]
        master_device = options.master_device(device)
        self._is_apart = apart = master_device.type != device.type
        native = {SECOND, RELAY, TARGET} | ({SOURCE} if masters == self.weight_dtypes and not apart else set())
        overlap = options.overlap(device)
        self.executor = SwitchExecutor(
            transport, rank, options.staging_bytes, device, forward, native, bool(overlap), master_device
        )
        self._rank, self._pipedream = rank, options.pipedream
        self.arenas = Arenas(device, 2 if self.pool.second_source else 1)
        self.forecast = self._forecast(vector)
        self._frozen_sizes = [
            0 if segment.trainable else size for segment, size in zip(vector.segments, weight_sizes, strict=True)
        ]
        self._frozen_bytes: dict[str, int] = {}
        self._limit = options.memory_limit or device_limit(device)
        streams = any(strategy.z for strategy in strategies)
        self.worker = SwitchWorker(device, on_failure) if overlap or streams else None
        self._epoch = 0

    def _forecast(self, vector: ParameterVector) -> MemoryForecast:
        """What this rank will take with the pool of plans that is there."""
        strategies, rank, mode = self.pool.strategies, self._rank, self._pipedream
        segments, rooms = vector.segments, [self.rooms(s) for s in strategies]
        sizes = [self.pool.layout(s).rank_sizes(rank) for s in strategies]
        own = [0] * len(segments) if self._is_apart else self.pool.master.rank_sizes(rank)
        masters = [getattr(torch, segment.master_dtype) for segment in segments]
        weights = (2 if self.pool.second_source else 1) * arena_bytes(
            sizes, self.weight_dtypes, [room.weights for room in rooms]
        )
        if mode is not None:  # of the trained weights there are more versions
            versions = mode.most_versions(strategies[0].pp, strategies[0].coord(rank).pp)
            weights += (versions - 1) * max(_num_bytes(s, _of_trained(self.weight_dtypes, vector)) for s in sizes)
        return MemoryForecast(
            _num_bytes(own, masters),
            _num_bytes(own, _of_trained(masters, vector)),
            weights,
            arena_bytes(sizes, self.gradient_dtypes, [room.gradients for room in rooms]),
            self.executor.extra_bytes(self.switches()),
        )

    def take_cut(self, vector: ParameterVector) -> None:
        """Makes all plans anew for another cut of stages; nothing may be under way. Not collective.

        Raises:
            DeviceMemoryError: the device cannot hold the strategies with it; `pool` and `forecast` are the new ones.
        """
        second_source = self.pool.second_source
        self.pool = self._make_pool(vector)
        self.pool.second_source = second_source
        self.forecast = self._forecast(vector)
        self.check_memory()

    def switches(self) -> list[Switch]:
        """Every switch that a mini-batch may need."""
        return [(plan, self.return_dtypes if plan.accumulate else self.weight_dtypes) for plan in self.pool.plans()]

    def rooms(self, strategy: Strategy) -> Rooms:
        """Which segments of a strategy share memory."""
        return self.pool.units.rooms(strategy)

    def check_memory(self) -> None:
        """Refuses what the device cannot hold.

        Raises:
            DeviceMemoryError: the forecast is above the limit given, or above what is free on the device.
        """
        self.forecast.check(self._limit, self._rank)

    def prepare(self) -> None:
        """Allocates everything, so that buffers stay where they are from the first mini-batch on. What they held is void."""
        self.arenas.forget()
        self.executor.forget()
        for plan, dtypes in self.switches():
            self.executor.prepare(plan, dtypes)
        for strategy in self.pool.strategies:
            sizes = self.pool.layout(strategy).rank_sizes(self._rank)
            self.arenas.reserve(sizes, self.weight_dtypes, self.gradient_dtypes, self.rooms(strategy))

    def frozen_bytes(self, plan: SwitchPlan) -> int:
        """Bytes of frozen weights that a load moves between ranks, summed over ranks."""
        if plan.digest() not in self._frozen_bytes:
            self._frozen_bytes[plan.digest()] = plan.wire_bytes(self._frozen_sizes)
        return self._frozen_bytes[plan.digest()]

    def held(self) -> dict[str, str]:
        """What ranks must have in common before a load, for `Agreement.check`: it decides what is loaded again."""
        return {"frozen weights that are loaded already": self.arenas.holders}

    def load(
        self, plan: SwitchPlan, master: Buffers, weights: Buffers, second: Buffers | None = None, beside: bool = False
    ) -> SwitchJob:
        """Fills the weights of a strategy. Collective.

        Args:
            second: The weights of the strategy before, where the plan draws on them.
            beside: Whether it runs in the worker's thread; else the job is done.
        """
        return self._start(plan, master, weights, self.weight_dtypes, second, None, beside)

    def nothing(self, name: str) -> SwitchJob:
        """In the place of a switch where there is nothing to move: its job, which is done. Not collective."""
        return SwitchJob.done(name, lambda _: SwitchStats(), self.executor.device)

    def return_gradients(
        self, strategy: Strategy, gradients: Buffers, master: Buffers, gate: SegmentGate | None = None
    ) -> SwitchJob:
        """Adds the gradients of a strategy to those of the master store. Collective.

        Args:
            gate: Says which gradients are final: the return runs in the worker's thread. None: all are, and the job is
                done.
        """
        plan = self.pool.return_gradients(strategy)
        return self._start(plan, gradients, master, self.return_dtypes, None, gate, gate is not None)

    def move_unit(
        self,
        strategy: Strategy,
        unit: int,
        is_load: bool,
        buffers: Buffers,
        master: Buffers,
        gate: SegmentGate | None,
        clears: bool = False,
    ) -> SwitchJob:
        """Fills the weights of a unit, or adds its gradients to those of the master store, in the worker's thread.
        Collective.

        Args:
            buffers: The strategy's weights, or gradients.
            gate: Says when the unit's buffers may be written, or read; None: they may.
            clears: Whether its gradients on this rank, which made none, are set to zero before they leave.
        """
        plan = self.pool.of_unit(strategy, unit, is_load)
        source, target = (master, buffers) if is_load else (buffers, master)
        dtypes = self.weight_dtypes if is_load else self.return_dtypes
        cleared = self.pool.units.trained.get(unit, ()) if clears else ()
        return self._start(plan, source, target, dtypes, None, gate, True, cleared)

    def _start(
        self,
        plan: SwitchPlan,
        source: Buffers,
        target: Buffers,
        dtypes: Wires,
        second: Buffers | None,
        gate: SegmentGate | None,
        beside: bool,
        cleared: Sequence[int] = (),
    ) -> SwitchJob:
        self._epoch += 1
        epoch = self._epoch  # the same on every rank, which all run the same switches

        def run(job: SwitchJob) -> SwitchStats:
            if cleared:
                job.await_source(cleared)
            for segment in cleared:
                gradient = source[segment]
                if gradient is not None:
                    gradient.zero_()
            return self.executor.run(plan, source, target, dtypes, epoch, job, second)

        if not beside:
            return SwitchJob.done(plan.name, run, self.executor.device)
        assert self.worker is not None
        return self.worker.submit(plan.name, run, gate)

    def close(self) -> None:
        """Ends the thread of the worker and lets go of the buffers."""
        if self.worker is not None:
            self.worker.close()
        self.executor.forget()


def _of_trained(dtypes: Wires, vector: ParameterVector) -> Wires:
    return [dtype if segment.trainable else None for dtype, segment in zip(dtypes, vector.segments, strict=True)]


def _num_bytes(sizes: Sequence[int], dtypes: Wires) -> int:
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True) if dtype)
