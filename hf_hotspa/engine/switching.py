"""Everything that moves weights and gradients on a rank: plans, executor, worker and memory of a run's strategies.

Built before anything large is allocated, so that strategies that do not fit fail early. `start` begins a switch and
returns its job, which runs beside the computation or is already done.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.executor import Buffers, SegmentGate, SwitchExecutor, SwitchJob, SwitchStats, SwitchWorker, Wires
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.errors import DeviceMemoryError, check_choice
from hf_hotspa.layout.placement import (
    Layout,
    gradient_layout,
    held_in_place,
    master_layout,
    part_of_layout,
    strategy_layout,
)
from hf_hotspa.layout.stages import nested_orders
from hf_hotspa.layout.vector import ParameterVector, Segment
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.plan.planner import PLANNERS, order_phases, plan_load, plan_return
from hf_hotspa.plan.switch_plan import RELAY, SECOND, SOURCE, TARGET, SwitchPlan, overlapped_seconds
from hf_hotspa.plan.units import Room, Units, name_of_unit, sizes_of_neighbours
from hf_hotspa.strategy import Strategy

# -- the plans --------------------------------------------------------------------------------------------------------

# Strategies of equal layouts (`Strategy.layout`) have the same plans, and their consecutive phases share one load and
# one return. A load reads from the master store, and with pair plans also from the previous strategy's weights, if
# memory holds both. Plans are made on first use and kept; they are pure functions of the arguments, equal on all ranks.


_RESIDENT = "what several units use"


class PlanPool:
    """Plans of all strategies of a run. Raises `HotspaConfigError`: unknown planner."""

    def __init__(
        self,
        vector: ParameterVector,
        strategies: Sequence[Strategy],  # the pool; the order of their shards is chosen here, unless one is given
        cluster: Cluster,
        weight_sizes: Sequence[int],  # bytes per element of each segment on the wire
        gradient_sizes: Sequence[int],  # the same for gradients
        planner: str = "relay",  # one of `planner.PLANNERS`
        second_source: bool = False,  # whether a load may also draw on the previous strategy's weights
        # whether each stage's part of the master store lies on its ranks; for a single strategy. Then no transfer
        # leaves a stage, so that stages can transfer at different times: `relay`, which forwards through other stages'
        # ranks, becomes `algorithm1`.
        by_stage: bool = False,
    ) -> None:
        check_choice("the planner", planner, PLANNERS)
        planner = "algorithm1" if by_stage and planner == "relay" else planner
        # by the usual relative step times: another partition leaves every shard with its rank
        orders = nested_orders(strategies, vector.layer_costs, vector.stage_costs.with_step_times(()))
        self.strategies = tuple(each if each.shard_order else each.ordered(orders[each]) for each in strategies)
        self.second_source = second_source
        self.units = Units(vector)  # what strategies with `+z2` and `+z3` load and return one at a time
        self.master = master_layout(vector, cluster.world_size, self.strategies[0] if by_stage else None)
        self._vector, self._cluster, self._planner = vector, cluster, planner
        self._weight_sizes, self._gradient_sizes = weight_sizes, gradient_sizes
        self._layouts = {strategy: strategy_layout(vector, strategy) for strategy in self.strategies}
        self.in_place = frozenset[int]()  # segments that every rank holds once, for the master store and all strategies
        first = {own.layout: own for own in reversed(self.strategies)}
        self._twins = {own: first[own.layout] for own in self.strategies}
        self._loads: dict[tuple[Strategy | None, Strategy, bool], SwitchPlan] = {}
        self._returns: dict[Strategy, SwitchPlan] = {}
        self._of_units: dict[tuple[Strategy, int, bool], SwitchPlan] = {}
        self._orders: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}

    def hold_in_place(self) -> None:
        """Leaves the frozen weights out of all loads that every rank can hold in place: strategies then compute with the
        memory of the master store. Before any plan is made."""
        self.in_place = held_in_place(self._vector, self._layouts.values())
        if any(strategy.z == 3 for strategy in self.strategies):
            self.in_place &= set(self.units.resident)
        vars(self).pop("has_frozen", None)

    @property
    def _moved(self) -> list[Segment]:
        return [segment for segment in self._vector.segments if segment.index not in self.in_place]

    @cached_property
    def has_frozen(self) -> bool:
        """Whether loads have frozen weights and trained ones; some then have only the trained ones."""
        return {segment.trainable for segment in self._moved} == {True, False}

    @property
    def num_layouts(self) -> int:
        return len(set(self._twins.values()))

    def layout(self, strategy: Strategy) -> Layout:
        """Where a strategy's weights lie."""
        return self._layouts[strategy]

    def load(self, strategy: Strategy, previous: Strategy | None = None, trained_only: bool = False) -> SwitchPlan:
        """The plan that fills a strategy's weights; with `+z3` only those that stay for the complete phase. `previous`:
        the strategy whose weights of the same optimizer step are still in memory, for `second_source`. `trained_only`:
        leave out the frozen weights, which are already in its buffers. Those in place are always left out."""
        strategy, previous = self._twins[strategy], self._twins.get(previous) if previous else None
        streams = strategy.z == 3 or (previous is not None and previous.z == 3)
        drawn = previous if self.second_source and previous != strategy and not streams else None
        key = drawn, strategy, trained_only
        if key not in self._loads:
            sources = [self.master] if drawn is None else [self.master, self._layouts[drawn]]
            target = self._layouts[strategy]
            if trained_only or self.in_place:
                loaded = {segment.index for segment in self._moved if segment.trainable or not trained_only}
                target = part_of_layout(target, loaded, "trained weights" if trained_only else "loaded weights")
            plan = plan_load(sources, target, self._cluster, self._weight_sizes, self._planner)
            if strategy.z == 3:
                self._add_units(strategy, plan, True)
                plan = plan.only(self.units.resident, _RESIDENT)
            self._loads[key] = plan
        return self._loads[key]

    @cached_property
    def completion(self) -> SwitchPlan:
        """The plan that gives every rank all of the weights in place, from the shares of the master store."""
        target = part_of_layout(self._layouts[self.strategies[0]], self.in_place, "weights in place")
        return plan_load([self.master], target, self._cluster, self._weight_sizes, self._planner)

    def return_gradients(self, strategy: Strategy) -> SwitchPlan:
        """The plan that adds a strategy's gradients to the master store; with `+z2` and `+z3` those outside units."""
        own = self._twins[strategy]  # with the pool's shard order
        if own not in self._returns:
            contributions = gradient_layout(self._vector, own)
            plan = plan_return(contributions, self.master, self._cluster, self._gradient_sizes, self._planner)
            if own.z:
                self._add_units(own, plan, False)
                plan = plan.only(self.units.resident, _RESIDENT)
            self._returns[own] = plan
        return self._returns[own]

    def unit_plan(self, strategy: Strategy, unit: int, is_load: bool) -> SwitchPlan:
        """The plan that fills a unit's weights, or adds its gradients to the master store."""
        strategy = self._twins[strategy]
        if (strategy, unit, is_load) not in self._of_units:
            if is_load:
                self.load(strategy)
            else:
                self.return_gradients(strategy)
        return self._of_units[strategy, unit, is_load]

    def _add_units(self, strategy: Strategy, plan: SwitchPlan, is_load: bool) -> None:
        for unit, segments in (self.units.segments if is_load else self.units.trained).items():
            self._of_units[strategy, unit, is_load] = plan.only(segments, name_of_unit(unit))

    def order(self, strategies: Sequence[Strategy], step: int = 0) -> tuple[Strategy, ...]:
        """Sorts strategies so that loading them one after another costs least.

        Strategies of equal layouts stay together, in the given order. The order of layouts matters in two cases:

        * With a second source, a load costs less the more of it the previous strategy has: the fewest seconds by the
          fluid port model win.
        * With frozen weights, and memory for one strategy, the first load skips the frozen weights if the previous
          mini-batch ended with the same strategy. So mini-batches alternately begin and end with the first and the
          second strategy, which serve the shortest sequences and are seldom missing.

        Otherwise every load draws on the master store alone, and the given order stays. `step`: number of earlier
        mini-batches in the run. Nothing else decides, so a resumed run keeps the order.
        """
        given = tuple(strategies)
        layouts = self._order(tuple(dict.fromkeys(self._twins[strategy] for strategy in given)), step)
        return tuple(s for layout in layouts for s in given if self._twins[s] == layout)

    def _order(self, key: tuple[Strategy, ...], step: int) -> tuple[Strategy, ...]:
        """For strategies with different layouts."""
        if len(key) < 2:
            return key
        if not self.second_source:
            if not self.has_frozen:
                return key
            ends = key[0], *key[2:], key[1]
            return ends if step % 2 == 0 else ends[::-1]
        if key not in self._orders:
            first = [self._seconds(None, strategy) for strategy in key]
            between = [[self._seconds(a, b) if a != b else 0.0 for b in key] for a in key]
            self._orders[key] = tuple(key[index] for index in order_phases(first, between))
        return self._orders[key]

    def _seconds(self, previous: Strategy | None, strategy: Strategy) -> float:
        return overlapped_seconds(self.load(strategy, previous).loads(self._cluster, self._weight_sizes), self._cluster)

    def plans(self) -> list[SwitchPlan]:
        """Every plan that any mini-batch may need."""
        own = tuple(dict.fromkeys(self._twins.values()))
        whole = [strategy for strategy in own if strategy.z != 3]
        plans = [plan for s in own for plan in (self.load(s), self.return_gradients(s))]
        if self.in_place and self._cluster.world_size > 1:
            plans.append(self.completion)
        if self.second_source:
            plans += [self.load(b, a) for a in whole for b in whole if a != b]
        if self.has_frozen:
            plans += [self.load(s, trained_only=True) for s in whole]
        if self.has_frozen and self.second_source:
            plans += [self.load(b, a, True) for a in whole for b in whole if a != b]
        for strategy in own:
            if strategy.z == 3:
                plans += [self.unit_plan(strategy, unit, True) for unit in self.units.segments]
            if strategy.z:
                plans += [self.unit_plan(strategy, unit, False) for unit in self.units.trained]
        return plans


# -- the memory -------------------------------------------------------------------------------------------------------

# Only one strategy has storage at a time, so one allocation per dtype, for the largest strategy, serves all. It is kept
# between phases: on CPU the page faults of fresh memory cost ten times as much as clearing reused memory. An arena
# records what it holds, so that a strategy that returns to its own weights need not load the frozen ones again.


_ALIGNMENT = 64  # buffers start at multiples of this many elements, which aligns vector loads and sends in every dtype


_Place = tuple[torch.dtype, int, int]  # `(dtype, start, size)` of a buffer, in elements


class Places(NamedTuple):
    """Where a strategy's buffers lie in an arena: elements needed per dtype, and each segment's place (None if empty)."""

    needed: dict[torch.dtype, int]
    of_segments: list[_Place | None]


Shared = Sequence[Room | None]  # which segments share memory (`plan.units.Rooms`); None for separate memory


def lay_out(sizes: Sequence[int], dtypes: Sequence[torch.dtype | None], rooms: Shared) -> Places:
    """Places a strategy's buffers, from each segment's elements and dtype (None for no buffer)."""
    inside: list[_Place | None] = []  # units that share memory: relative to the begin of the unit
    needed: dict[torch.dtype, int] = {}
    filled: dict[torch.dtype, dict[Room, int]] = {}
    for size, dtype, room in zip(sizes, dtypes, rooms, strict=True):
        if not size or dtype is None:
            inside.append(None)
            continue
        start = needed.get(dtype, 0) if room is None else filled.setdefault(dtype, {}).get(room, 0)
        end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        inside.append((dtype, start, size))
        if room is None:
            needed[dtype] = end
        else:
            filled[dtype][room] = end
    first: dict[tuple[torch.dtype, Room], int] = {}
    for dtype, units in filled.items():
        begin = needed.get(dtype, 0)
        end = needed[dtype] = begin + max(sizes_of_neighbours(units))
        first |= {(dtype, room): end - size if room % 2 else begin for room, size in units.items()}
    places: list[_Place | None] = []
    for place, room in zip(inside, rooms, strict=True):
        if place is not None and room is not None:
            dtype, start, size = place
            place = dtype, first[dtype, room] + start, size
        places.append(place)
    return Places(needed, places)


def arena_bytes(served: Iterable[Places]) -> int:
    """Bytes of an arena that has served all these buffers."""
    largest: dict[torch.dtype, int] = {}
    for places in served:
        for dtype, numel in places.needed.items():
            largest[dtype] = max(largest.get(dtype, 0), numel)
    return sum(numel * dtype.itemsize for dtype, numel in largest.items())


class Arenas:
    """The memory of the active strategy: its gradients, its weights, and the previous strategy's weights. `copies`:
    number of strategies whose weights are kept: 1, or 2 for a second source.

    Attributes:
        keeps_last: Whether the last strategy's weights stay while the next ones are loaded.
    """

    def __init__(self, device: torch.device, copies: int = 1) -> None:
        self.gradients = Arena(device)
        self._weights, self.keeps_last = [Arena(device) for _ in range(copies)], copies > 1
        self.last = self._weights[-1]  # the arena with the latest weights

    def reserve(self, weights: Places, gradients: Places) -> None:
        """Allocates what a strategy needs beyond earlier ones."""
        self.gradients.take(gradients)
        for arena in self._weights:
            arena.take(weights)

    def take_weights(self, places: Places, holder: Hashable) -> tuple[list[Tensor | None], bool]:
        """Buffers for the weights of the next strategy; with two copies the last strategy's weights stay valid.
        `holder`: the value of `last.holder` when the same weights were loaded before; None for no reuse. Returns as
        `Arena.take`; and whether the buffers still hold those weights. The arena counts as empty until its holder is
        set again."""
        arena, is_held = self._weights[0], False
        for other in self._weights if holder is not None else ():
            if other.holder == holder:
                arena, is_held = other, True
                break
        self._weights.remove(arena)
        self._weights.append(arena)
        arena.holder = None
        self.last = arena
        return arena.take(places), is_held

    def forget(self) -> None:
        """Marks the contents of all arenas as unknown."""
        for arena in self._weights:
            arena.holder = None

    @property
    def holders(self) -> str:
        """The known contents of the arenas; must be the same on all ranks before a switch."""
        return repr([arena.holder for arena in self._weights])

    @property
    def num_bytes(self) -> int:
        return sum(arena.num_bytes for arena in (self.gradients, *self._weights))

    def clear(self) -> None:
        for arena in (self.gradients, *self._weights):
            arena.clear()
        self.forget()


class Arena:
    """Provides flat buffers by segment; `holder` names their contents, set by the user, or None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.holder: Hashable = None
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, places: Places) -> list[Tensor | None]:
        """1-D buffers with undefined contents, None for segments without one; invalidates earlier buffers."""
        for dtype, total in places.needed.items():
            if dtype not in self._memory or self._memory[dtype].numel() < total:
                self._memory.pop(dtype, None)  # freed first, or both exist at once
                self._memory[dtype] = torch.empty(total, dtype=dtype, device=self.device)
        buffers: list[Tensor | None] = [None] * len(places.of_segments)
        for segment, place in enumerate(places.of_segments):
            if place is not None:
                dtype, start, size = place
                buffers[segment] = self._memory[dtype][start : start + size]
        return buffers

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def clear(self) -> None:
        self._memory.clear()


_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one rank."""

    master_weights: int  # the rank's share of the master store
    master_gradients: int  # of the same share
    # in the largest strategy of the pool; of two strategies with a second source. Includes all versions if stages
    # update by themselves.
    weights: int
    gradients: int  # in the largest strategy
    switch: int  # staging and relay buffers: everything beside source and target

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name.replace('_', ' ')} {getattr(self, f.name) / _MIB:,.1f}" for f in fields(self))
        return f"{self.total / _MIB:,.1f} MiB ({parts})"

    def check(self, limit_bytes: int | None, rank: int) -> None:
        """Raises `DeviceMemoryError`, with the parts of the total, if it is above the limit; None for no limit."""
        if limit_bytes is not None and self.total > limit_bytes:
            raise DeviceMemoryError(
                f"the strategies need {self} and the device has {limit_bytes / _MIB:,.1f} MiB",
                where=f"rank {rank}",
                why="activations and optimizer state come on top",
                fix="use strategies with more tp or pp, a smaller hotspa_staging_mb, no second source, or on GPUs hotspa_offload=master",
            )


# -- moving -----------------------------------------------------------------------------------------------------------


Switch = tuple[SwitchPlan, Wires]  # a plan, and the dtype in which each segment travels


class Switching:
    """The switches of one rank."""

    def __init__(
        self,
        vector: ParameterVector,
        strategies: Sequence[Strategy],
        cluster: Cluster,
        groups: ProcessGroups,
        options: EngineOptions,
        on_failure: Callable[[Exception], object],  # called for a switch that fails beside the computation
    ) -> None:
        device, rank, runner = groups.device, groups.rank, options.runner
        # by segment: weights in strategies and on the wire, gradients as accumulated (None if frozen), and as sent
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
            by_stage=runner is not None and runner.by_stage,
        )
        master_device = options.master_device(device)
        self._is_apart = apart = master_device.type != device.type
        self.pool = self._pool_of(vector)
        largest = max(arena_bytes([self._weight_places(s, r)]) for s in strategies for r in range(cluster.world_size))
        # decided once the layouts are known, before any plan is made
        self.pool.second_source = options.uses_second_source(device, self.pool.num_layouts, largest)
        alone = groups.switch is None
        transport = ProcessGroupTransport(groups.switch, rank)
        forward = None if alone else ProcessGroupTransport(groups.forward)
        masters = [getattr(torch, s.master_dtype) for s in vector.segments]
        native = {SECOND, RELAY, TARGET} | ({SOURCE} if masters == self.weight_dtypes and not apart else set())
        overlap = options.overlap(device)
        self.executor = SwitchExecutor(
            transport, rank, options.staging_bytes, device, forward, native, bool(overlap), master_device
        )
        self._rank, self._runner = rank, runner
        self.arenas = Arenas(device, 2 if self.pool.second_source else 1)
        self.forecast = self._forecast(vector)  # the memory that this rank will need
        self._frozen_sizes = [
            0 if segment.trainable else size for segment, size in zip(vector.segments, weight_sizes, strict=True)
        ]
        self._frozen_bytes: dict[str, int] = {}
        self._limit = options.memory_limit or device_limit(device)
        streams = any(strategy.z for strategy in strategies)
        self.worker = SwitchWorker(device, on_failure) if overlap or streams else None  # beside the computation
        self._epoch = 0

    def _pool_of(self, vector: ParameterVector) -> PlanPool:
        pool = self._make_pool(vector)
        if not self._is_apart:
            pool.hold_in_place()
        return pool

    def _forecast(self, vector: ParameterVector) -> MemoryForecast:
        """This rank's memory with the current pool of plans."""
        strategies, rank, runner = self.pool.strategies, self._rank, self._runner
        own = [0] * len(vector.segments) if self._is_apart else self.pool.master.rank_sizes(rank)
        own = [s.numel if s.index in self.pool.in_place else n for s, n in zip(vector.segments, own, strict=True)]
        masters = [getattr(torch, segment.master_dtype) for segment in vector.segments]
        of_weights, of_gradients = zip(*map(self.places, strategies), strict=True)
        weights = (2 if self.pool.second_source else 1) * arena_bytes(of_weights)
        if runner is not None:  # there may be more versions of the trained weights
            versions = runner.weight_copies(strategies[0], rank)
            sizes = self.pool.layout(strategies[0]).rank_sizes(rank)
            weights += (versions - 1) * _num_bytes(sizes, _only_trained(self.weight_dtypes, vector))
        return MemoryForecast(
            _num_bytes(own, masters),
            _num_bytes(own, _only_trained(masters, vector)),
            weights,
            arena_bytes(of_gradients),
            self.executor.extra_bytes(self.switches()),
        )

    def take_cut(self, vector: ParameterVector) -> None:
        """Makes all plans anew for another stage partition; no switch may be running. Not collective. Raises
        `DeviceMemoryError`: the device cannot hold the strategies; `pool` and `forecast` are already the new ones."""
        second_source = self.pool.second_source
        self.pool = self._pool_of(vector)
        self.pool.second_source = second_source
        self.forecast = self._forecast(vector)
        self.check_memory()

    def switches(self) -> list[Switch]:
        """Every switch that a mini-batch may need."""
        return [(plan, self.return_dtypes if plan.accumulate else self.weight_dtypes) for plan in self.pool.plans()]

    def places(self, strategy: Strategy) -> tuple[Places, Places]:
        """Where the buffers of a strategy's weights and of its gradients lie on this rank."""
        sizes, rooms = self.pool.layout(strategy).rank_sizes(self._rank), self.pool.units.rooms(strategy)
        return self._weight_places(strategy, self._rank), lay_out(sizes, self.gradient_dtypes, rooms.gradients)

    def _weight_places(self, strategy: Strategy, rank: int) -> Places:
        own = [None if i in self.pool.in_place else dtype for i, dtype in enumerate(self.weight_dtypes)]
        return lay_out(self.pool.layout(strategy).rank_sizes(rank), own, self.pool.units.rooms(strategy).weights)

    def check_memory(self) -> None:
        """Raises `DeviceMemoryError` if the forecast is above the given limit, or above the device's free memory."""
        self.forecast.check(self._limit, self._rank)

    def prepare(self) -> None:
        """Allocates everything; buffers never move afterwards. Invalidates their contents."""
        self.arenas.forget()
        self.executor.forget()
        for plan, dtypes in self.switches():
            self.executor.prepare(plan, dtypes)
        for strategy in self.pool.strategies:
            self.arenas.reserve(*self.places(strategy))

    def frozen_bytes(self, plan: SwitchPlan) -> int:
        """Bytes of frozen weights that a load moves between ranks, summed over ranks."""
        if plan.digest not in self._frozen_bytes:
            self._frozen_bytes[plan.digest] = plan.wire_bytes(self._frozen_sizes)
        return self._frozen_bytes[plan.digest]

    def load_facts(self) -> dict[str, str]:
        """What ranks must agree on before a load (`Agreement.check`): it decides what is loaded again."""
        return {"frozen weights that are loaded already": self.arenas.holders}

    def start(
        self,
        plan: SwitchPlan,
        source: Buffers,
        target: Buffers,
        second: Buffers | None = None,  # the previous strategy's weights, if the plan draws on them
        gate: SegmentGate | None = None,  # when the strategy's buffers may be read or written; by default at once
        beside: bool = False,  # whether to run in the worker's thread; otherwise the job is done on return
        cleared: Sequence[int] = (),  # source buffers to zero before they are sent, in the worker's thread
    ) -> SwitchJob:
        """Fills a strategy's weights from the master store, or adds its gradients to the store's. Collective."""
        self._epoch += 1
        epoch = self._epoch  # the same on every rank: all run the same switches
        dtypes = self.return_dtypes if plan.accumulate else self.weight_dtypes
        if not beside:
            stats = self.executor.run(plan, source, target, dtypes, epoch, None, second)
            return SwitchJob(plan.name, stats=stats)

        def run(job: SwitchJob) -> SwitchStats:
            if cleared:
                job.await_source(cleared)
            for segment in cleared:
                gradient = source[segment]
                if gradient is not None:
                    gradient.zero_()
            return self.executor.run(plan, source, target, dtypes, epoch, job, second)

        assert self.worker is not None
        return self.worker.submit(plan.name, run, gate)

    def close(self) -> None:
        """Ends the worker's thread and releases the buffers."""
        if self.worker is not None:
            self.worker.close()
        self.executor.forget()


def _only_trained(dtypes: Wires, vector: ParameterVector) -> Wires:
    return [dtype if segment.trainable else None for dtype, segment in zip(dtypes, vector.segments, strict=True)]


def _num_bytes(sizes: Sequence[int], dtypes: Wires) -> int:
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True) if dtype)


# -- the memory of a device --------------------------------------------------------------------------------------------


def device_limit(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on an accelerator; None on the CPU, where the limit is unknown.

    First returns torch's cached memory (of a calibration, say) to the device: otherwise a plan made after a calibration
    would have less memory than one that reads its file.
    """
    if device.type != "cuda":
        return None
    gc.collect()  # a model has reference cycles
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
