"""Ranks that share one GPU: a process group `shared_gpu` whose messages go through the host.

NCCL before 2.30 wants a GPU for every rank, and gloo has no point-to-point messages for CUDA tensors. This group copies
CUDA tensors to the host, lets gloo carry them, and copies the results back, in the stream that the caller is in. It
promises the meaning of the collectives, not their speed: with it a machine with one GPU and an older NCCL can test
everything but NCCL itself.

`take_gpu` gives a rank its GPU, and says which backend fits.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu_machine import OWN, Machine, setup_of

BACKEND = "shared_gpu"


def take_gpu(rank: int, world_size: int) -> str:
    """Makes a GPU this rank's, its own where there are enough, and returns the name of the backend to use.

    Ranks that share a GPU look like nodes of one rank each, so that their local rank is the number of that GPU.
    """
    setup = setup_of(Machine.found(), world_size)
    os.environ.update(setup.environment)
    if setup.kind != OWN:
        os.environ.update(LOCAL_RANK=str(setup.devices[rank]), LOCAL_WORLD_SIZE="1")
    torch.cuda.set_device(setup.devices[rank])
    if setup.over_nccl:
        return "nccl"
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, SharedGpuGroup, devices=["cpu", "cuda"])
    return BACKEND


class _HostWork(dist.Work):
    """A transfer of host tensors by gloo, and what is to be done with them at its end."""

    def __init__(self, work: dist.Work, host: Sequence[Tensor], finish: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._work, self._host, self._finish = work, host, finish  # the tensors must live as long as the transfer
        self._finished = False

    def is_completed(self) -> bool:
        return self._finished or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._finished:
            self._work.wait(timeout) if timeout is not None else self._work.wait()
            self._finish()
            self._finished = True
        return True


class SharedGpuGroup(dist.ProcessGroup):
    """What the package uses of a process group, for tensors on any device.

    Collectives are over when they return; sends and receives when they are waited for.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:  # torch would keep it in a C++ backend, which there is none of
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._in_place([torch.zeros(1)], lambda host: self._gloo.allreduce(host, dist.AllreduceOptions()))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        received = [[_empty(tensor) for tensor in row] for row in outputs]
        self._gloo.allgather(received, [_on_host(tensor) for tensor in inputs]).wait()
        _copy([tensor for row in outputs for tensor in row], [tensor for row in received for tensor in row])
        return _done()

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather([list(output.view(self.size(), *given.shape).unbind())], [given])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> dist.Work:
        host = _on_host(given).clone()
        reduce = dist.AllreduceOptions()
        reduce.reduceOp = opts.reduceOp
        self._gloo.allreduce([host], reduce).wait()
        output.copy_(host.view(self.size(), *output.shape)[self.rank()])
        return _done()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        host = [_on_host(tensor).contiguous() for tensor in tensors]
        return _HostWork(self._gloo.send(host, peer, tag), host)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        host = [_empty(tensor) for tensor in tensors]
        return _HostWork(self._gloo.recv(host, peer, tag), host, lambda: _copy(tensors, host))

    def _in_place(self, tensors: list[Tensor], run: Callable[[list[Tensor]], dist.Work]) -> dist.Work:
        host = [_on_host(tensor).contiguous() for tensor in tensors]
        run(host).wait()
        _copy(tensors, host)
        return _done()


def _done() -> dist.Work:
    """A work that is over."""
    future: Any = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _on_host(tensor: Tensor) -> Tensor:
    """The values on the host, after what the current stream does to them."""
    return tensor.detach().cpu()


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
