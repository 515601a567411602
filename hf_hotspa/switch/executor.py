"""The executor: runs switch plans on one rank.

What it promises:

* One fused message per (peer, wire dtype, round). A message that is one contiguous slice is sent from and (for a copy
  of equal dtype) received into the buffers themselves; others are packed once and staged.
* Memory: at most `staging_bytes` for received and `staging_bytes` for sent messages, allocated once by `reserve`.
* A gradient return adds the contributions to an element in ascending order of the source ranks, the local one in its
  place: the result depends neither on `staging_bytes` nor on the order of arrival, bit for bit.
* Elements are converted where source, wire and target dtypes differ, once on each side; equal dtypes move bits.
* After a failure in flight the executor refuses to run again: both ends may hold half a round.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_hotspa.errors import HotspaConfigError, PlanError, TransferError
from hf_hotspa.switch.plan import SwitchPlan
from hf_hotspa.switch.rounds import WINDOW_ALIGNMENT, Message, Round, Schedule, Slice, Wire, cut_rounds
from hf_hotspa.switch.transport import TransferHandle, Transport

Buffers = Sequence[torch.Tensor | None]
"""A rank's buffers by segment: flat and contiguous; None where the rank holds nothing."""

_ROUND_TAGS, _EPOCH_TAGS, _CHANNEL_TAGS = 1 << 14, 1 << 13, 1 << 4  # 31 bits: what gloo takes as a tag


class Progress(Protocol):
    """Couples a switch to the computation around it, segment by segment. Called from the thread that runs the switch."""

    def await_source(self, segments: Sequence[int]) -> None:
        """Returns when the source buffers of these segments hold what is to be sent."""
        ...

    def target_complete(self, segments: Sequence[int]) -> None:
        """These segments' target buffers are complete on this rank."""
        ...


class _Uncoupled:
    """The progress of a switch that nothing computes beside."""

    def await_source(self, segments: Sequence[int]) -> None:
        pass

    def target_complete(self, segments: Sequence[int]) -> None:
        pass


@dataclass
class SwitchStats:
    """What one rank did in one switch. Bytes on the wire count wire dtypes, local bytes the target's dtype.

    Args:
        sent_bytes: Bytes sent to other ranks.
        received_bytes: Bytes received from other ranks.
        local_bytes: Bytes moved inside the rank.
        num_messages: Messages sent and received.
        num_rounds: Rounds, the same number on every rank.
        pack_seconds: Packing and converting what is sent.
        wire_seconds: From posting to arrival, with the local transfers of a load, which overlap.
        unpack_seconds: Unpacking, converting and adding.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    num_messages: int = 0
    num_rounds: int = 0
    pack_seconds: float = 0.0
    wire_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole switch."""
        return self.pack_seconds + self.wire_seconds + self.unpack_seconds


class SwitchExecutor:
    """Runs the plans of one rank over a transport.

    Args:
        transport: How messages travel.
        rank: This rank.
        staging_bytes: Bound of each of the two staging buffers. Every rank must have the same: it decides the rounds.
        device: Where the buffers are.
    """

    def __init__(
        self, transport: Transport, rank: int, staging_bytes: int = 64 << 20, device: torch.device | str = "cpu"
    ) -> None:
        self.transport, self.rank, self.staging_bytes = transport, rank, staging_bytes
        self.device = torch.device(device)
        self._send_staging = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._receive_staging = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._schedules: dict[tuple[str, tuple[torch.dtype | None, ...]], Schedule] = {}
        self._failure: str | None = None

    def window(self, world_size: int) -> int:
        """Bytes that a round moves between two ranks in one direction, at most.

        Raises:
            HotspaConfigError: the staging buffers are too small for one window per peer.
        """
        peers = max(1, world_size - 1)
        window = self.staging_bytes // peers // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
        if window == 0:
            raise HotspaConfigError(
                f"staging buffers of {self.staging_bytes} bytes are too small for {world_size} ranks",
                fix=f"use at least {peers * WINDOW_ALIGNMENT} bytes; some MiB per rank are fast",
            )
        return window

    def reserve(self, plans: Sequence[SwitchPlan]) -> None:
        """Allocates the staging buffers for the largest round of all these plans, in any dtype of up to 8 bytes."""
        sent = received = 0
        for plan in plans:
            cap = self.window(plan.world_size) * (plan.world_size - 1)
            crossing = [t for t in plan.transfers if t.src != t.dst]
            sent = max(sent, min(cap, 8 * sum(t.length for t in crossing if t.src == self.rank)))
            received = max(received, min(cap, 8 * sum(t.length for t in crossing if t.dst == self.rank)))
        self._grow(sent, received)

    def run(
        self,
        plan: SwitchPlan,
        source: Buffers,
        target: Buffers,
        wire_dtypes: Sequence[torch.dtype | None],
        epoch: int,
        progress: Progress | None = None,
    ) -> SwitchStats:
        """Runs this rank's part of a plan and returns when its target buffers are complete.

        Args:
            plan: The plan; agreed on by all ranks before.
            source: The buffers of the source layout. Not changed; must not overlap the target buffers.
            target: The buffers of the target layout; copied into by a load, added to by a gradient return.
            wire_dtypes: The dtype in which each segment travels, the same on every rank; None only for segments that
                the plan does not move. Local copies are converted straight from source to target dtype.
            epoch: A number that all ranks count up with each switch; keeps the messages of switches apart.
            progress: Told of segments that are complete, and asked to wait for segments that are not ready to be sent.

        Raises:
            PlanError: a buffer is missing or too small, or a wire dtype is missing; nothing was sent.
            TransferError: a transfer failed; the process group must not be used again.
        """
        steps = self.steps(plan, source, target, wire_dtypes, epoch, progress)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(
        self,
        plan: SwitchPlan,
        source: Buffers,
        target: Buffers,
        wire_dtypes: Sequence[torch.dtype | None],
        epoch: int,
        progress: Progress | None = None,
    ) -> Generator[None, None, SwitchStats]:
        """`run` as a generator that yields once a round, between posting its messages and waiting for them.

        Every rank has the same number of rounds, so a single thread can drive all ranks of a loopback hub in turn.
        """
        if self._failure:
            raise TransferError(f"switch {plan.name!r} refused: an earlier one failed in flight", why=self._failure)
        schedule = self._schedule(plan, tuple(wire_dtypes))
        sources = self._checked(plan, "source", source, schedule.source_extents)
        targets = self._checked(plan, "target", target, schedule.target_extents)
        self._grow(
            max((r.send_bytes for r in schedule.rounds), default=0),
            max((r.receive_bytes for r in schedule.rounds), default=0),
        )
        stats = SwitchStats(num_rounds=len(schedule.rounds))
        progress = progress or _Uncoupled()
        progress.await_source(list(schedule.source_extents))
        self._failure = f"switch {plan.name!r} did not end"  # until it has: also when a signal ends this frame
        for index, current in enumerate(schedule.rounds):
            try:
                clock = time.perf_counter()
                outgoing = self._pack(current, sources)
                incoming = [self._landing(plan, message, targets) for message in current.receives]
                clock = self._lap(stats, "pack_seconds", clock)
                handle = self._post(schedule, index, outgoing, incoming, epoch)
                yield
                if not plan.accumulate:
                    _copy_local(current, sources, targets)
                handle.wait()
                clock = self._lap(stats, "wire_seconds", clock)
                if plan.accumulate:
                    self._add(current, incoming, sources, targets)
                else:
                    _unpack(current, incoming, targets)
                self._lap(stats, "unpack_seconds", clock)
            except Exception as error:
                raise self._failed(plan, schedule, index, error) from error
            _count(stats, current, targets)
        progress.target_complete(list(schedule.target_extents))
        self._failure = None
        return stats

    def _schedule(self, plan: SwitchPlan, wire_dtypes: tuple[torch.dtype | None, ...]) -> Schedule:
        key = plan.digest(), wire_dtypes
        if key not in self._schedules:
            wires = [_wire(dtype) if dtype else None for dtype in wire_dtypes]
            self._schedules[key] = cut_rounds(plan, self.rank, wires, self.window(plan.world_size))
        return self._schedules[key]

    def _checked(
        self, plan: SwitchPlan, role: str, buffers: Buffers, extents: dict[int, int]
    ) -> dict[int, torch.Tensor]:
        """The buffers that the plan touches, detached from autograd; checked, because a transport would not."""
        checked = {}
        for segment, extent in extents.items():
            buffer = buffers[segment] if segment < len(buffers) else None
            if buffer is None or buffer.dim() != 1 or buffer.numel() < extent or not buffer.is_contiguous():
                found = "none" if buffer is None else f"{tuple(buffer.shape)} with strides {buffer.stride()}"
                raise PlanError(
                    f"switch {plan.name!r} needs a flat {role} buffer of {extent} elements for segment {segment}, found {found}",
                    where=f"rank {self.rank}",
                    why="nothing was sent",
                )
            if buffer.device.type != self.device.type:
                raise PlanError(
                    f"switch {plan.name!r}: the {role} buffer of segment {segment} is on {buffer.device}, not {self.device}",
                    where=f"rank {self.rank}",
                    why="nothing was sent",
                )
            checked[segment] = buffer.detach()
        return checked

    def _grow(self, send_bytes: int, receive_bytes: int) -> None:
        if self._send_staging.numel() < send_bytes:
            self._send_staging = torch.empty(send_bytes, dtype=torch.uint8, device=self.device)
        if self._receive_staging.numel() < receive_bytes:
            self._receive_staging = torch.empty(receive_bytes, dtype=torch.uint8, device=self.device)

    def _pack(self, current: Round, sources: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The tensor that each message sends; messages with one place in staging share it, packed once."""
        packed: dict[int, torch.Tensor] = {}
        outgoing = []
        for message in current.sends:
            views, dtype = _views(message.slices, sources), _dtype(message.wire)
            if len(views) == 1 and views[0].dtype == dtype:
                outgoing.append(views[0])
                continue
            if message.staging_offset not in packed:
                staged = _staged(self._send_staging, message)
                if all(view.dtype == dtype for view in views):
                    torch.cat(views, out=staged)
                else:
                    torch._foreach_copy_(_split(staged, message), views)
                packed[message.staging_offset] = staged
            outgoing.append(packed[message.staging_offset])
        return outgoing

    def _landing(self, plan: SwitchPlan, message: Message, targets: dict[int, torch.Tensor]) -> torch.Tensor:
        """Where a message is received: in the target buffer itself when it can be."""
        if not plan.accumulate and _lands_in_place(message, targets):
            return _views(message.slices, targets)[0]
        return _staged(self._receive_staging, message)

    def _post(
        self, schedule: Schedule, index: int, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], epoch: int
    ) -> TransferHandle:
        current = schedule.rounds[index]
        base = (epoch % _EPOCH_TAGS * _ROUND_TAGS + index % _ROUND_TAGS) * _CHANNEL_TAGS
        for message, tensor in zip(current.receives, incoming, strict=True):
            self.transport.recv(tensor, message.peer, base + schedule.channels[message.wire])
        for message, tensor in zip(current.sends, outgoing, strict=True):
            self.transport.send(tensor, message.peer, base + schedule.channels[message.wire])
        return self.transport.start()

    def _add(
        self,
        current: Round,
        incoming: list[torch.Tensor],
        sources: dict[int, torch.Tensor],
        targets: dict[int, torch.Tensor],
    ) -> None:
        """Adds a round's contributions in ascending order of the source ranks: the order that makes sums repeatable."""
        parts = [
            (message.peer, _views(message.slices, targets), _split(tensor, message))
            for message, tensor in zip(current.receives, incoming, strict=True)
        ]
        if current.local:
            parts.append((self.rank, *_local_views(current, sources, targets)))
        for _, into, contributions in sorted(parts, key=lambda part: part[0]):
            torch._foreach_add_(into, contributions)

    def _lap(self, stats: SwitchStats, field: str, clock: float) -> float:
        """Adds the time since `clock` to a field of the statistics; returns the new clock."""
        _synchronize(self.device)
        now = time.perf_counter()
        setattr(stats, field, getattr(stats, field) + now - clock)
        return now

    def _failed(self, plan: SwitchPlan, schedule: Schedule, index: int, error: Exception) -> TransferError:
        current = schedule.rounds[index]
        peers = sorted({message.peer for message in (*current.sends, *current.receives)})
        what = f"switch {plan.name!r} failed in round {index + 1} of {len(schedule.rounds)}: {error}"
        self._failure = what
        return TransferError(
            what,
            where=f"rank {self.rank}, in exchange with ranks {peers}",
            why="messages may be in flight: the process group must not be used again",
            fix="end the job and start it again",
        )


def _synchronize(device: torch.device) -> None:
    """Waits until the device has done what was queued; nothing to do on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _wire(dtype: torch.dtype) -> Wire:
    return Wire(str(dtype).removeprefix("torch."), dtype.itemsize)


def _dtype(wire: Wire) -> torch.dtype:
    return getattr(torch, wire.dtype)


def _views(slices: Sequence[Slice], buffers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return [buffers[piece.segment].narrow(0, piece.offset, piece.length) for piece in slices]


def _staged(staging: torch.Tensor, message: Message) -> torch.Tensor:
    """The message's place in a staging buffer, as a tensor of its dtype."""
    return staging.narrow(0, message.staging_offset, message.num_bytes).view(_dtype(message.wire))


def _split(tensor: torch.Tensor, message: Message) -> list[torch.Tensor]:
    return list(tensor.split([piece.length for piece in message.slices]))


def _lands_in_place(message: Message, targets: dict[int, torch.Tensor]) -> bool:
    return len(message.slices) == 1 and targets[message.slices[0].segment].dtype == _dtype(message.wire)


def _unpack(current: Round, incoming: list[torch.Tensor], targets: dict[int, torch.Tensor]) -> None:
    for message, tensor in zip(current.receives, incoming, strict=True):
        if not _lands_in_place(message, targets):
            torch._foreach_copy_(_views(message.slices, targets), _split(tensor, message))


def _local_views(
    current: Round, sources: dict[int, torch.Tensor], targets: dict[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Target and source views of the local transfers."""
    return (
        [targets[t.segment].narrow(0, t.dst_offset, t.length) for t in current.local],
        [sources[t.segment].narrow(0, t.src_offset, t.length) for t in current.local],
    )


def _copy_local(current: Round, sources: dict[int, torch.Tensor], targets: dict[int, torch.Tensor]) -> None:
    if current.local:
        torch._foreach_copy_(*_local_views(current, sources, targets))


def _count(stats: SwitchStats, current: Round, targets: dict[int, torch.Tensor]) -> None:
    stats.sent_bytes += sum(message.num_bytes for message in current.sends)
    stats.received_bytes += sum(message.num_bytes for message in current.receives)
    stats.local_bytes += sum(t.length * targets[t.segment].itemsize for t in current.local)
    stats.num_messages += len(current.sends) + len(current.receives)
