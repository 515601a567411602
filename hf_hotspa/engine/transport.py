"""Transports: how tensors get from rank to rank. Three methods, one contract.

* `send` and `recv` submit an operation; nothing moves yet.
* `start` posts everything submitted since the last start; the `wait` of its handle blocks until it is done.

Between `start` and the end of `wait` a sent tensor must not change and a received one must not be touched. Tensors are
contiguous, a rank does not talk to itself, and both ends submit the messages of a pair in the same order with equal
tags, sizes and dtypes. `ProcessGroupTransport` runs over gloo or NCCL. A transport of the tests joins ranks of one
process and checks what real ones do not (a wrong order of equal sizes is silent corruption).

gloo silently accepts a message that is shorter than its buffer, and ends the process at a longer one. It does compare
tags, so these also encode size and dtype: ends that disagree find no message, time out and raise `TransferError`. NCCL
has no tags; only the agreement on the plans protects it.
"""

import functools
import zlib
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from hf_hotspa.errors import TransferError


class TransferHandle(Protocol):
    """Operations that were started together."""

    def wait(self) -> None:
        """Returns when all are done: on CPU when the bytes have arrived, on an accelerator when later work of the
        current stream will come after their arrival. Raises `TransferError`: an operation failed; the message names
        rank, peer and tag."""


class Transport(Protocol):
    """See the module docstring."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Submits a send to a global rank."""

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        """Submits a receive from a global rank."""

    def start(self) -> TransferHandle:
        """Posts what was submitted, in the order of submission."""


class Operation(NamedTuple):
    sends: bool
    tensor: torch.Tensor
    rank: int
    peer: int
    tag: int

    def describe(self) -> str:
        verb = "send to" if self.sends else "receive from"
        return f"{verb} rank {self.peer} (tag {self.tag}, {self.tensor.numel()} x {self.tensor.dtype})"

    def error(self, what: str) -> TransferError:
        return TransferError(f"{self.describe()} {what}", where=f"rank {self.rank}, peer {self.peer}, tag {self.tag}")

    @property
    def wire_tag(self) -> int:
        """The tag, size and dtype in the 31 bits that gloo compares.

        Messages of one size and dtype keep the difference of their tags. If others coincide, their order pairs them.
        """
        return self.tag ^ _shape_word(self.tensor.numel(), self.tensor.dtype)

    def checked(self) -> "Operation":
        if self.peer == self.rank:
            raise self.error("is to itself; nothing was posted")
        if not self.tensor.is_contiguous():
            raise self.error("is not contiguous; nothing was posted")
        return self


@functools.lru_cache(maxsize=4096)
def _shape_word(numel: int, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{numel} {dtype}".encode()) & 0x7FFFFFFF


class Submissions:
    """Implements `send` and `recv`: queues operations for the next start."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._submitted: list[Operation] = []

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._submitted.append(Operation(True, tensor, self.rank, dst, tag).checked())

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._submitted.append(Operation(False, tensor, self.rank, src, tag).checked())

    def _taken(self) -> list[Operation]:
        operations, self._submitted = self._submitted, []
        return operations


class ProcessGroupTransport(Submissions):
    """Point-to-point transfers of a torch process group; one `batch_isend_irecv` per start.

    On NCCL, which has no tags, the order of submission pairs the messages. All ranks of a group must take part in its
    first operation there (`ProcessGroups.warm_up`). `group`: the group; None for the default one. Ranks are global
    ranks. `rank`: this rank; by default its rank in the default group. A single rank needs no group."""

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int | None = None) -> None:
        super().__init__(dist.get_rank() if rank is None else rank)
        self.group = group

    def start(self) -> TransferHandle:
        operations = self._taken()
        posts = [
            dist.P2POp(dist.isend if op.sends else dist.irecv, op.tensor, op.peer, self.group, op.wire_tag)
            for op in operations
        ]
        try:
            works = dist.batch_isend_irecv(posts) if posts else []
        except Exception as error:
            raise _batch_error("could not be posted", operations, error) from error
        return _ProcessGroupHandle(operations, works)


class _ProcessGroupHandle:
    def __init__(self, operations: list[Operation], works: list[dist.Work]) -> None:
        self._operations, self._works = operations, works

    def wait(self) -> None:
        for index, work in enumerate(self._works):
            try:
                work.wait()
            except Exception as error:
                if len(self._works) == len(self._operations):
                    raise self._operations[index].error(f"failed: {error}") from error
                # a coalescing backend returns one work for the whole batch
                raise _batch_error("failed", self._operations, error) from error


def _batch_error(what: str, operations: list[Operation], error: Exception) -> TransferError:
    peers, tags = sorted({op.peer for op in operations}), sorted({op.tag for op in operations})
    batch = ", ".join(op.describe() for op in operations)
    return TransferError(
        f"batch {what}: {batch}: {error}", where=f"rank {operations[0].rank}, peers {peers}, tags {tags}"
    )
