"""The executor: runs switch plans on one rank, each as a job (`SwitchJob`).

* Few messages. Long stretches that need no conversion go from buffer to buffer. Everything else is fused into one
  message per (peer, wire dtype, round), packed once and staged (unless it is a single slice in the wire's dtype).
* Two rounds are in flight: one is packed, copied and unpacked while the other is on the wire.
* Memory: `staging_bytes` each for received and sent messages, plus relay buffers for three groups of segments;
  allocated once by `prepare`, and known beforehand (`extra_bytes`).
* A gradient return adds contributions in ascending order of source ranks, the local one in its place (sums in relay
  buffers are made before, in the same order). The result depends neither on `staging_bytes` nor on the order of
  arrival, bit for bit.
* Elements are converted once on each side where source, wire and target dtypes differ; equal dtypes move bits.
* After a failure in flight the executor does not run again: both ends may hold half a round.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from hf_hotspa.engine.transport import TransferHandle, Transport
from hf_hotspa.errors import HotspaError, PlanError, TransferError
from hf_hotspa.plan.rounds import cut_rounds
from hf_hotspa.plan.switch_plan import (
    INTRA,
    RELAY,
    RELAY_SLOTS,
    SECOND,
    SOURCE,
    TARGET,
    WINDOW_ALIGNMENT,
    Message,
    Round,
    Schedule,
    Slice,
    SwitchPlan,
    Wire,
)

# -- messages ---------------------------------------------------------------------------------------------------------

# Turns the slices of a round into tensors: what is sent (packed if it is several slices or needs converting), where it
# lands, and what happens with it there. No message travels here.


Views = dict[tuple[int, int], torch.Tensor]  # the buffers of a plan, by (store, segment)


def wire_of(dtype: torch.dtype) -> Wire:
    return Wire(str(dtype).removeprefix("torch."), dtype.itemsize)


def _dtype(wire: Wire) -> torch.dtype:
    return getattr(torch, wire.dtype)


class BoundRound:
    """The tensors of a round, made once for the buffers of a switch: making a view costs more than copying a kilobyte.

    Attributes:
        local: Targets and sources of the copies inside the rank.
    """

    def __init__(
        self,
        current: Round,
        buffers: Views,  # detached from autograd
        send_staging: torch.Tensor,  # uint8, for messages that are packed
        receive_staging: torch.Tensor,  # uint8, for messages that do not land in place
        accumulate: bool,  # whether received data is added, as in a gradient return
        rank: int,
    ) -> None:
        self.outgoing: list[torch.Tensor] = []  # the tensor that each message sends, once packed
        self.incoming: list[torch.Tensor] = []  # where each message is received, if possible in the target buffer
        self._staged: dict[int, torch.Tensor] = {}
        # what is staged unconverted: `(staged, views)`; `converts` has views of another dtype or device
        self.packs: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.converts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        # messages that did not land in place: `(views, parts of the message)`
        self.unpacks: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        # contributions of a return, this rank's included, by source rank: `(source rank, views, contributions)`
        self.adds: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        for message in current.sends:
            self._bind_send(message, buffers, send_staging)
        for message in current.receives:
            views = _views(message.slices, buffers)
            in_place = not accumulate and len(views) == 1 and views[0].dtype == _dtype(message.wire)
            landing = views[0] if in_place else _staged(receive_staging, message)
            self.incoming.append(landing)
            if accumulate:
                self.adds.append((message.peer, views, _split(landing, message)))
            elif not in_place:
                self.unpacks.append((views, _split(landing, message)))
        moves = [(_view(local.target, buffers), _view(local.source, buffers)) for local in current.local]
        # frozen weights in place: the source is a part of the target
        moves = [(target, source) for target, source in moves if target.data_ptr() != source.data_ptr()]
        self.local = [target for target, _ in moves], [source for _, source in moves]
        # bytes moved inside the rank, in the target dtype
        self.local_bytes = sum(view.numel() * view.itemsize for view in self.local[0])
        self.sent_bytes = sum(message.num_bytes for message in current.sends)
        self.received_bytes = sum(message.num_bytes for message in current.receives)
        if accumulate and current.local:
            self.adds.append((rank, *self.local))
        self.adds.sort(key=lambda part: part[0])  # makes sums repeatable
        # with a master store in host memory beside an accelerator, contributions move there first
        self.host_sums = any(v.device != c.device for _, *sides in self.adds for v, c in zip(*sides, strict=True))

    def _bind_send(self, message: Message, buffers: Views, staging: torch.Tensor) -> None:
        views = _views(message.slices, buffers)
        as_it_is = len(views) == 1 and views[0].dtype == _dtype(message.wire) and views[0].device == staging.device
        if message.staging_offset < 0 or as_it_is:
            self.outgoing.append(views[0])
            return
        if message.staging_offset not in self._staged:  # messages with equal offsets are packed once
            staged = self._staged[message.staging_offset] = _staged(staging, message)
            if all((view.dtype, view.device) == (staged.dtype, staged.device) for view in views):
                self.packs.append((staged, views))
            else:
                self.converts.append((_split(staged, message), views))
        self.outgoing.append(self._staged[message.staging_offset])


Place = tuple[tuple[int, int], int, int, torch.dtype]
"""The buffer behind a view: (store, segment), address, elements, dtype."""

_KEPT = 2  # bindings kept per schedule: with a second source, weights alternate between two arenas


@dataclass(frozen=True)
class Binding:
    """The rounds of a schedule (None where empty), bound to the tensors of one set of buffers."""

    plan: SwitchPlan
    schedule: Schedule
    places: list[Place]
    buffers: Views  # with the relay buffers, detached from autograd
    rounds: list[BoundRound | None]


def _view(piece: Slice, buffers: Views) -> torch.Tensor:
    return buffers[piece.store, piece.segment].narrow(0, piece.offset, piece.length)


def _views(slices: Sequence[Slice], buffers: Views) -> list[torch.Tensor]:
    return [_view(piece, buffers) for piece in slices]


def _staged(staging: torch.Tensor, message: Message) -> torch.Tensor:
    return staging.narrow(0, message.staging_offset, message.num_bytes).view(_dtype(message.wire))


def _split(tensor: torch.Tensor, message: Message) -> list[torch.Tensor]:
    return list(tensor.split([piece.length for piece in message.slices]))


# -- moving -----------------------------------------------------------------------------------------------------------


Buffers = Sequence[torch.Tensor | None]
"""A rank's buffers by segment: flat and contiguous; None where the rank has no elements."""
Wires = Sequence[torch.dtype | None]  # the dtype in which each segment travels, the same on every rank
_ROUND_TAGS, _EPOCH_TAGS, _CHANNEL_TAGS = 1 << 12, 1 << 13, 1 << 6  # 31 bits: the limit of a gloo tag

_IN_FLIGHT = 2  # rounds in flight at a time
_STORE_NAMES = {SOURCE: "source", SECOND: "second source", TARGET: "target", RELAY: "relay"}


@dataclass
class SwitchStats:
    """What one rank did in one switch.

    Wire bytes count wire dtypes, local bytes the target's. Seconds are host time, without waiting for an accelerator:
    that would undo the overlap of rounds.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    num_messages: int = 0  # sent and received
    num_rounds: int = 0  # the same on every rank
    pack_seconds: float = 0.0  # packing and converting outgoing data
    wire_seconds: float = 0.0  # posting messages and waiting for them
    local_seconds: float = 0.0  # copies inside the rank of a load; they overlap with messages on the wire
    unpack_seconds: float = 0.0  # unpacking, converting and adding


_Flight = tuple[int, TransferHandle | None]  # a round in flight: its index, and the handle to wait for


class SwitchExecutor:
    """Runs the plans of one rank over a transport."""

    def __init__(
        self,
        transport: Transport,
        rank: int,
        # limit of each of the two staging buffers. It decides the rounds: the same on all ranks.
        staging_bytes: int = 64 << 20,
        device: torch.device | str = "cpu",
        # the transport for hops inside nodes (on NCCL a separate communicator: one that spans nodes uses fewer
        # channels); `transport` by default
        forward: Transport | None = None,
        # the stores (`SOURCE`, `SECOND`, `RELAY`, `TARGET`) that have the wire's dtype in loads on every rank: long
        # stretches from one of these to another go from buffer to buffer. The same on all ranks.
        native: Collection[int] = (),
        # whether to keep groups of segments small, for a computation beside the switch; otherwise they are as large as
        # memory allows, for fewest messages. The same on all ranks.
        by_layer: bool = False,
        # where the source of loads and the target of returns are; `device` by default. If another one, `SOURCE` is not
        # `native`.
        master_device: torch.device | str | None = None,
    ) -> None:
        self.transport, self.forward, self.rank = transport, forward or transport, rank
        self.staging_bytes, self._native, self._by_layer = staging_bytes, frozenset(native), by_layer
        self.device, self._master_device = torch.device(device), torch.device(master_device or device)
        # one slot of each per round in flight, and a relay slot per group that uses one
        self._send_staging = [self._empty(0)] * _IN_FLIGHT
        self._receive_staging = [self._empty(0)] * _IN_FLIGHT
        self._relay = [self._empty(0)] * RELAY_SLOTS
        self._schedules: dict[tuple[str, tuple[torch.dtype | None, ...]], Schedule] = {}
        self._bindings: dict[Hashable, list[Binding]] = {}
        self._failure: str | None = None

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def extra_bytes(self, switches: Iterable[tuple[SwitchPlan, Wires]]) -> int:
        """This rank's bytes beside source and target buffers to run these switches in turn. Allocates nothing."""
        slots = [self._slots(plan, wires) for plan, wires in switches]
        return sum(max(sizes) for kind in zip(*slots, strict=True) for sizes in zip(*kind, strict=True))

    def prepare(self, plan: SwitchPlan, wire_dtypes: Wires) -> None:
        """Cuts a plan into rounds and allocates their memory; running it then allocates nothing."""
        self._grow(self._slots(plan, wire_dtypes))

    def forget(self) -> None:
        """Releases the buffers of past switches, whose views are kept."""
        self._bindings.clear()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all staging and relay buffers so far."""
        return sum(slot.numel() for slot in (*self._send_staging, *self._receive_staging, *self._relay))

    def steps(
        self,
        plan: SwitchPlan,
        # the buffers of the source layout; unchanged. They overlap the target buffers only where these keep their elements
        source: Buffers,
        target: Buffers,  # the buffers of the target layout; a load copies into them, a gradient return adds to them
        # None only for segments outside the plan. Local copies are converted directly from source to target dtype.
        wire_dtypes: Wires,
        epoch: int,  # incremented by all ranks with each switch; separates the messages of switches
        # couples the switch to the computation around it, segment by segment; None if nothing is computed beside
        progress: "SwitchJob | None" = None,
        second: Buffers | None = None,  # the buffers of the second source layout, if any
    ) -> Generator[None, None, SwitchStats]:
        """Runs this rank's part of a plan; the target buffers are complete at the end. Yields once per round, between
        posting messages and waiting for them; `run` is the same in one call.

        Every rank has the same number of rounds, so one thread can drive all ranks of a loopback hub in turn. Raises
        `PlanError`: a buffer is missing or too small, or a wire dtype is missing; nothing was sent. Raises
        `TransferError`: a transfer failed; the process group must not be used again.
        """
        if self._failure:
            raise TransferError(f"switch {plan.name!r} cannot run: an earlier one failed in flight", why=self._failure)
        bound = self._bind(plan, wire_dtypes, {SOURCE: source, TARGET: target, SECOND: second or ()})
        schedule = bound.schedule
        stats = SwitchStats(num_rounds=len(schedule.rounds))
        flights: deque[_Flight] = deque()
        self._failure = f"switch {plan.name!r} did not end"  # until it does: a signal may also end this frame
        index = 0
        try:
            for index, current in enumerate(schedule.rounds):
                if bound.rounds[index] is None:
                    yield
                    continue
                while flights and (len(flights) == _IN_FLIGHT or flights[0][0] <= current.needs):
                    self._finish(bound, flights.popleft(), stats, progress)
                flights.append(self._start(bound, index, epoch, stats, progress))
                yield
            while flights:
                index = flights[0][0]
                self._finish(bound, flights.popleft(), stats, progress)
        except Exception as error:
            raise self._failed(bound, index, error) from error
        self._failure = None
        return stats

    def run(self, *args: Any, **kwargs: Any) -> SwitchStats:
        """`steps` in one call."""
        steps = self.steps(*args, **kwargs)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def _start(
        self, bound: Binding, index: int, epoch: int, stats: SwitchStats, progress: "SwitchJob | None"
    ) -> _Flight:
        """Packs and posts a round (the first of a group once its source is ready); meanwhile makes a load's local copies."""
        current, tensors, accumulate = bound.schedule.rounds[index], bound.rounds[index], bound.plan.accumulate
        assert tensors is not None
        if current.opens:
            segments = bound.schedule.groups[current.group]
            if progress is not None:
                progress.await_source(segments)
            for segment in segments if accumulate else ():
                if (relay := bound.buffers.get((RELAY, segment))) is not None:
                    relay.zero_()
        begin = time.perf_counter()
        for staged, views in tensors.packs:
            torch.cat(views, out=staged)
        for parts, views in tensors.converts:
            torch._foreach_copy_(parts, views)
        packed = time.perf_counter()
        base = (epoch % _EPOCH_TAGS * _ROUND_TAGS + index % _ROUND_TAGS) * _CHANNEL_TAGS
        transport = self.forward if bound.plan.links[current.hop] == INTRA else self.transport
        for message, tensor in zip(current.receives, tensors.incoming, strict=True):
            transport.recv(tensor, message.peer, base + message.channel)
        for message, tensor in zip(current.sends, tensors.outgoing, strict=True):
            transport.send(tensor, message.peer, base + message.channel)
        handle = transport.start() if current.receives or current.sends else None
        posted = time.perf_counter()
        if tensors.local[0] and not accumulate:
            torch._foreach_copy_(*tensors.local)
            stats.local_seconds += time.perf_counter() - posted
        stats.pack_seconds += packed - begin
        stats.wire_seconds += posted - packed
        stats.sent_bytes += tensors.sent_bytes
        stats.received_bytes += tensors.received_bytes
        stats.local_bytes += tensors.local_bytes
        stats.num_messages += len(current.sends) + len(current.receives)
        return index, handle

    def _finish(self, bound: Binding, flight: _Flight, stats: SwitchStats, progress: "SwitchJob | None") -> None:
        index, handle = flight
        current, tensors, begin = bound.schedule.rounds[index], bound.rounds[index], time.perf_counter()
        assert tensors is not None
        if handle is not None:
            handle.wait()
        arrived = time.perf_counter()
        for views, parts in tensors.unpacks:
            torch._foreach_copy_(views, parts)
        for _, views, contributions in tensors.adds:
            if tensors.host_sums:
                contributions = [c.to(view.device) for c, view in zip(contributions, views, strict=True)]
            torch._foreach_add_(views, contributions)
        stats.wire_seconds += arrived - begin
        stats.unpack_seconds += time.perf_counter() - arrived
        if progress is not None and current.closes:
            progress.target_complete(bound.schedule.groups[current.group])

    # -- memory -------------------------------------------------------------------------------------------------------

    def schedule(self, plan: SwitchPlan, wire_dtypes: Wires) -> Schedule:
        """This rank's rounds of a plan, cached."""
        wire_dtypes = tuple(wire_dtypes)
        key = plan.digest, wire_dtypes
        if key not in self._schedules:
            wires = [wire_of(dtype) if dtype else None for dtype in wire_dtypes]
            round_bytes = self.staging_bytes // _IN_FLIGHT
            # relay buffers are as large as a group
            group_bytes = round_bytes if self._by_layer or len(plan.links) > 1 else None
            self._schedules[key] = cut_rounds(plan, self.rank, wires, round_bytes, group_bytes, self._native)
        return self._schedules[key]

    def _slots(self, plan: SwitchPlan, wire_dtypes: Wires) -> tuple[list[int], list[int], list[int]]:
        """Bytes of each send staging, receive staging and relay slot."""
        schedule = self.schedule(plan, wire_dtypes)
        sends, receives, relays = [0] * _IN_FLIGHT, [0] * _IN_FLIGHT, [0] * RELAY_SLOTS
        for index, current in enumerate(r for r in schedule.rounds if not r.is_empty):
            slot = index % _IN_FLIGHT
            sends[slot] = max(sends[slot], current.send_bytes)
            receives[slot] = max(receives[slot], current.receive_bytes)
        for group in range(len(schedule.groups)):
            slot = group % RELAY_SLOTS
            places = _relay_places(plan, schedule, group, wire_dtypes)
            relays[slot] = max(relays[slot], max((end for _, _, end, _ in places), default=0))
        return sends, receives, relays

    def _bind(self, plan: SwitchPlan, wire_dtypes: Wires, stores: dict[int, Buffers]) -> Binding:
        """The rounds with their tensors, cached for the latest sets of buffers: arenas reuse the same ones."""
        key, schedule = (plan.digest, tuple(wire_dtypes)), self.schedule(plan, wire_dtypes)
        buffers, places = self._checked(plan, schedule, stores)
        for binding in self._bindings.get(key, ()):
            if binding.places == places:
                return binding
        self._grow(self._slots(plan, wire_dtypes))
        views = {place: buffer.detach() for place, buffer in buffers.items()}
        for group in range(len(schedule.groups)):
            for segment, start, end, dtype in _relay_places(plan, schedule, group, wire_dtypes):
                views[RELAY, segment] = self._relay[group % RELAY_SLOTS][start:end].view(dtype)
        stagings = cycle(zip(self._send_staging, self._receive_staging, strict=True))  # for non-empty rounds
        rounds = [
            None if current.is_empty else BoundRound(current, views, *next(stagings), plan.accumulate, self.rank)
            for current in schedule.rounds
        ]
        binding = Binding(plan, schedule, places, views, rounds)
        self._bindings[key] = [*self._bindings.get(key, ()), binding][-_KEPT:]
        return binding

    def _grow(self, slots: tuple[list[int], list[int], list[int]]) -> None:
        for memory, wanted in zip((self._send_staging, self._receive_staging, self._relay), slots, strict=True):
            for slot, num_bytes in enumerate(wanted):
                if memory[slot].numel() < num_bytes:
                    self._bindings.clear()  # they hold the old slot
                    memory[slot] = self._empty(0)  # freed first, or both exist at once
                    memory[slot] = self._empty(num_bytes)

    def _checked(self, plan: SwitchPlan, schedule: Schedule, stores: dict[int, Buffers]) -> tuple[Views, list[Place]]:
        """The buffers of the plan, and where they are. A transport does not check them."""
        checked, places = Views(), list[Place]()
        for (store, segment), extent in schedule.extents.items():
            if store == RELAY:
                continue
            buffers, role = stores[store], _STORE_NAMES[store]
            buffer = buffers[segment] if segment < len(buffers) else None
            device = self._master_device if store == (TARGET if plan.accumulate else SOURCE) else self.device
            problem = ""
            if buffer is None or buffer.dim() != 1 or buffer.numel() < extent or not buffer.is_contiguous():
                actual = "none" if buffer is None else f"{tuple(buffer.shape)} with strides {buffer.stride()}"
                problem = f" needs a flat {role} buffer of {extent} elements for segment {segment}, found {actual}"
            elif buffer.device.type != device.type:
                problem = f": the {role} buffer of segment {segment} is on {buffer.device}, not {device}"
            if buffer is None or problem:
                raise PlanError(f"switch {plan.name!r}{problem}", where=f"rank {self.rank}", why="nothing was sent")
            checked[store, segment] = buffer
            places.append(((store, segment), buffer.data_ptr(), buffer.numel(), buffer.dtype))
        return checked, places

    def _failed(self, bound: Binding, index: int, error: Exception) -> TransferError:
        current = bound.schedule.rounds[index]
        peers = sorted({message.peer for message in (*current.sends, *current.receives)})
        what = f"switch {bound.plan.name!r} failed in round {index + 1} of {len(bound.schedule.rounds)}: {error}"
        self._failure = what
        return TransferError(
            what,
            where=f"rank {self.rank}, in exchange with ranks {peers}",
            why="messages may be in flight: the process group must not be used again",
            fix="end the job and start it again",
        )


def _relay_places(
    plan: SwitchPlan, schedule: Schedule, group: int, wire_dtypes: Wires
) -> list[tuple[int, int, int, torch.dtype]]:
    """`(segment, first byte, last byte, dtype)` of a group's relay buffers in their slot. Forwarded data keeps the wire
    dtype; sums have at least fp32."""
    places, end = [], 0
    for segment, extent in schedule.relay_extents(group).items():
        dtype = wire_dtypes[segment]
        assert dtype is not None
        if plan.accumulate and dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        start = -(-end // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
        end = start + extent * dtype.itemsize
        places.append((segment, start, end, dtype))
    return places


# -- jobs -------------------------------------------------------------------------------------------------------------

# * Switches run one after another in order of submission. All ranks submit the same switches in the same order, so their
#   workers meet in the same one.
# * A switch reads a segment only after its gate is open, and the segment may be used once `SwitchJob.wait` has returned
#   for it. Nothing else couples a switch to the computation.
# * An error ends its job, and everyone who waits for the job gets the same object. A cancelled job ends although its gate
#   never opens. After either, no further switch is accepted: peers may hold half of one.
#
# On CUDA the thread uses a side stream. Completed segments and opened gates are events that the other side's stream waits
# for, so host waits are short and the device order is kept. Buffers that both streams use belong to arenas, master store
# and executor, which keep them between phases and reuse them only after the job was joined, so the caching allocator
# never reuses them too early. The executor's temporary memory is allocated, used and freed under the side stream.


class _Stamp:
    """A moment in the current stream's work. No-op on CPU, where work is done when a call returns."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device is not None and device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Makes later work of the current stream wait for that moment."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class SegmentGate:
    """Keeps a switch from reading `closed` segments before the computation is done with them."""

    def __init__(self, closed: Iterable[int], device: torch.device) -> None:
        self._device, self._closed = device, set(closed)
        self._stamps: dict[int, _Stamp] = {}
        self._cancelled: HotspaError | None = None
        self._changed = threading.Condition()

    def open(self, segments: Iterable[int] | None = None) -> None:
        """Opens segments (by default all), complete with the work so far in the caller's current stream."""
        stamp = _Stamp(self._device)
        with self._changed:
            opened = set(self._closed) if segments is None else self._closed.intersection(segments)
            self._closed -= opened
            self._stamps.update(dict.fromkeys(opened, stamp))
            self._changed.notify_all()

    def cancel(self, error: HotspaError) -> None:
        """Raises the error in everyone who waits for a closed segment: it will never open."""
        with self._changed:
            self._cancelled = error
            self._changed.notify_all()

    def wait(self, segments: Iterable[int]) -> None:
        """Blocks until all these segments are open; the caller's stream then waits for what completed them. Raises
        `HotspaError`: the gate was cancelled."""
        wanted = set(segments)
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled is not None or not wanted & self._closed)
            if self._cancelled is not None:
                raise self._cancelled
            stamps = {self._stamps[segment] for segment in wanted if segment in self._stamps}
        for stamp in stamps:
            stamp.wait()


class SwitchJob:
    """One switch: run by `SwitchWorker.submit` beside later work, or already over.

    Attributes:
        exposed_s: Host seconds that callers were blocked in `wait` and `result`; on CUDA without the time that the
            caller's stream waits for events.
        succeeded: Whether the switch is over and did all of its work; `stats` is then final.
        busy_s: Seconds from start to end of the switch, without waiting for its gate; 0 before the end, and if nothing
            was computed beside it. Includes waiting for peers, which cannot be distinguished from moving bytes.
    """

    def __init__(
        self,
        name: str,
        # runs the switch with the job as its progress; None if it has run in the caller's thread and stream
        run: Callable[["SwitchJob"], SwitchStats] | None = None,
        gate: SegmentGate | None = None,  # what it waits for before it reads a segment; None if everything is ready
        device: torch.device | None = None,  # where it runs, beside the computation
        stats: SwitchStats | None = None,  # of a switch that has run
    ) -> None:
        self.name, self._run, self._gate, self._device = name, run, gate, device
        self._submitted = None if run is None else _Stamp(device)
        self._complete: dict[int, _Stamp] = {}
        self._ended: _Stamp | None = None
        self.succeeded, self.stats = run is None, stats or SwitchStats()
        self._error: BaseException | None = None
        self.exposed_s = self.busy_s = self._gated_s = 0.0
        self._changed = threading.Condition()

    # -- the side of the computation ----------------------------------------------------------------------------------

    def wait(self, segments: Iterable[int]) -> None:
        """Blocks until these segments' target buffers are complete, for the host and for the caller's stream.

        Segments that the switch does not report are complete at its end. Raises `Exception`: what ended the job.
        """
        wanted = set(segments)
        self._block(lambda: wanted <= self._complete.keys())
        stamps = {self._complete[s] for s in wanted if s in self._complete}
        if self._ended is not None and not wanted <= self._complete.keys():
            stamps.add(self._ended)
        for stamp in stamps:
            stamp.wait()

    def result(self) -> SwitchStats:
        """Blocks until the switch is over; returns its statistics. Raises `Exception`: what ended the job."""
        if not self.succeeded:
            self._block(lambda: False)
        if self._ended is not None:
            self._ended.wait()
        return self.stats

    def _block(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if not (self.succeeded or self._error or ready()):
                begin = time.perf_counter()
                self._changed.wait_for(lambda: self.succeeded or self._error or ready())
                self.exposed_s += time.perf_counter() - begin
            if self._error is not None:
                raise self._error

    def cancel(self, error: HotspaError) -> None:
        """Ends the job with this error if possible: before it starts, or at its gate. Does not wait."""
        with self._changed:
            if self._run is not None:
                self._end(error=error)
        if self._gate is not None:
            self._gate.cancel(error)

    # -- the side of the worker: the executor's progress ------------------------------------------------------------

    def await_source(self, segments: Sequence[int]) -> None:
        """Returns when these segments may be read."""
        if self._gate is not None:
            begin = time.perf_counter()
            try:
                self._gate.wait(segments)
            finally:
                self._gated_s += time.perf_counter() - begin

    def target_complete(self, segments: Sequence[int]) -> None:
        """Reports that these segments' target buffers are complete after the current stream's work so far."""
        stamp = _Stamp(self._device)
        with self._changed:
            self._complete.update(dict.fromkeys(segments, stamp))
            self._changed.notify_all()

    def execute(self) -> bool:
        """Runs the switch in the calling thread and stream; returns whether it succeeded."""
        with self._changed:
            run, self._run = self._run, None
        if run is None:  # cancelled before it started
            return False
        begin = time.perf_counter()
        stats, error = None, None
        try:
            assert self._submitted is not None
            self._submitted.wait()
            stats = run(self)
        except BaseException as failure:  # not only Exception: the caller must not wait forever
            error = failure
        with self._changed:
            self.busy_s = time.perf_counter() - begin - self._gated_s
            self._end(stats, error)
        return error is None

    def _end(self, stats: SwitchStats | None = None, error: BaseException | None = None) -> None:
        self._ended, self._run, self._error, self.stats = _Stamp(self._device), None, error, stats or self.stats
        self.succeeded = error is None  # last: `result` then takes no lock
        self._changed.notify_all()


class SwitchWorker:
    """Runs the switches of one rank in one thread, which starts with the first switch.

    While jobs run, nobody else may use the executor. `on_failure`: called in the thread, at once, for a switch that
    failed (not: was cancelled): the caller may learn of it only after its computation has waited in vain for a peer."""

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
        them complete. Source buffers may be changed until the gate opens, and after the job. `run`: runs the switch,
        with the job as its progress. `gate`: when source segments may be read; by default at once. Raises
        `TransferError`: an earlier switch failed or was cancelled.
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
