"""What a backend of torch's process groups can do: one table, and functions that read it.

No other file knows backends by name (a contract test looks for their names), so the same code runs over NCCL on GPUs, over
gloo on CPU processes, and over a test's backend. The transport of switches uses tags and batches for all of them: a backend
without them ignores them.
"""

import os
import socket
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Abilities:
    """What the code may expect of a backend."""

    host_tensors: bool  # whether collectives take tensors in host memory
    tags: bool  # whether tags distinguish point-to-point messages; else their order pairs them
    # whether an operation ends with an error when a peer is gone. Otherwise the waiting ranks stay inside a kernel of
    # their device until the communicator is aborted.
    wakes_ranks: bool
    # variables to set before a group is made, unless the user has set them
    environment: tuple[tuple[str, str], ...] = ()


BACKENDS = {
    "gloo": Abilities(host_tensors=True, tags=True, wakes_ranks=True),
    # 2 of `TORCH_NCCL_ASYNC_ERROR_HANDLING`: after a timeout the watchdog aborts the communicator, and the process can still
    # report why. torch's default, 3, ends the process before a typed error can be raised.
    "nccl": Abilities(
        host_tensors=False, tags=False, wakes_ranks=False, environment=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),)
    ),
}
_UNKNOWN = Abilities(host_tensors=False, tags=False, wakes_ranks=True)
"""For a backend registered by others: nothing is assumed, and nothing is aborted."""

HOST = next(name for name, abilities in BACKENDS.items() if abilities.host_tensors)
"""The backend of groups for small host tensors, whatever the others are."""


def backend_for(device_type: str) -> str:
    """The backend for ranks that compute on devices of a type, `cuda` or `cpu`."""
    return "nccl" if device_type == "cuda" else HOST


def gpu_has_bf16() -> bool:
    """Whether this process has a GPU that computes in bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def abilities(group: dist.ProcessGroup | None = None) -> Abilities:
    """What the backend of a group can do; of the default group when None. Not collective."""
    return BACKENDS.get(name_of(group), _UNKNOWN)


def name_of(group: dist.ProcessGroup | None = None) -> str:
    """The name of a group's backend, for reports; of the default group when None. Not collective."""
    return str(dist.get_backend(group))


def prepare_environment(device: torch.device) -> None:
    """Sets the variables that a device's groups read when made; existing values stay. Not collective."""
    for name, value in BACKENDS[backend_for(device.type)].environment:
        os.environ.setdefault(name, value)


def host_group(ranks: Iterable[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Makes a group of these ranks, or all, for tensors in host memory; with torch's timeout when None. A collective call
    for all ranks of the world."""
    made: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=HOST)
    return made


def bound_default_group(timeout: timedelta) -> None:
    """Sets the default group's timeout, whoever made it: transformers omits `ddp_timeout` on CPU, and the stock Trainer's own
    collectives use this group. Not collective."""
    # private in torch, which has no other way once the group exists
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)


def world_for_host_tensors(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """All ranks, for tensors in host memory: the default group if it takes them, else a new one. Collective."""
    world = dist.group.WORLD
    if world is not None and abilities(world).host_tensors:
        return world
    return host_group(timeout=timeout)


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Aborts the groups whose ranks would wait for a peer forever, after a failure. Not collective.

    Such a group cannot be used afterwards. Groups that wake their ranks are not changed.
    """
    for group in groups:
        if not abilities(group).wakes_ranks:
            group.abort()


def prefer_loopback(environment: MutableMapping[str, str]) -> None:
    """Makes gloo use this machine's loopback interface, unless one is chosen already; else it would listen at the
    address of the host's name. Does nothing if that interface has an unusual name. `environment`: the environment of
    the processes to start."""
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
