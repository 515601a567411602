"""A transport that joins the ranks of one process, and checks what real transports do not."""

import threading
from collections import deque

import torch

from hf_hotspa.engine.transport import Operation, Submissions, TransferHandle
from hf_hotspa.errors import TransferError


class LoopbackHub:
    """The wires between the loopback transports of one process.

    Ranks may run in one thread each, or be stepped in turn by a single thread, which starts a round on every rank
    before it waits on any.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that a wait lets other threads catch up; 0 when a single thread drives all ranks.
    """

    def __init__(self, world_size: int, timeout: float = 0.0) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def transport(self, rank: int) -> "LoopbackTransport":
        return LoopbackTransport(self, rank)

    def post(self, src: int, dst: int, tag: int, tensor: torch.Tensor) -> None:
        with self._changed:
            self._mail.setdefault((src, dst, tag), deque()).append(tensor)
            self._changed.notify_all()

    def take(self, src: int, dst: int, tag: int) -> torch.Tensor | None:
        """The oldest message with this address; None when there is none within the timeout."""
        key = (src, dst, tag)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._mail, self.timeout):
                return None
            messages = self._mail[key]
            message = messages.popleft()
            if not messages:
                del self._mail[key]
            return message

    def close(self) -> None:
        """Checks that every message was received.

        Raises:
            TransferError: naming the messages that nobody received.
        """
        left = [f"{src} -> {dst} (tag {tag})" for src, dst, tag in sorted(self._mail)]
        if left:
            raise TransferError(f"messages that nobody received: {', '.join(left)}")


class LoopbackTransport(Submissions):
    """The transport of one rank of a `LoopbackHub`."""

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        super().__init__(rank)
        self.hub = hub

    def start(self) -> TransferHandle:
        operations = self._taken()
        snapshots = [op.tensor.detach().clone() for op in operations if op.sends]
        sends = [op for op in operations if op.sends]
        for op, snapshot in zip(sends, snapshots, strict=True):
            self.hub.post(op.rank, op.peer, op.tag, snapshot)
        return _LoopbackHandle(self.hub, operations, snapshots)


class _LoopbackHandle:
    def __init__(self, hub: LoopbackHub, operations: list[Operation], snapshots: list[torch.Tensor]) -> None:
        self._hub, self._operations, self._snapshots = hub, operations, snapshots

    def wait(self) -> None:
        snapshots = iter(self._snapshots)
        for op in self._operations:
            if op.sends:
                if not torch.equal(op.tensor.view(torch.uint8), next(snapshots).view(torch.uint8)):
                    raise op.error("was changed while it was in flight")
                continue
            message = self._hub.take(op.peer, op.rank, op.tag)
            if message is None:
                raise op.error("found no message")
            if (message.numel(), message.dtype) != (op.tensor.numel(), op.tensor.dtype):
                raise op.error(f"found a message of {message.numel()} x {message.dtype}")
            op.tensor.copy_(message.view_as(op.tensor))
