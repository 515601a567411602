"""Process groups and device meshes: made once, at start, by all ranks in one order; and the nodes that ranks run on.

Strategies with the same groups of ranks share them. A group has one purpose: tensor parallel, context parallel, expert
parallel, pipeline, switching, forwarding inside a node, agreement. A strategy's tensor-parallel, context-parallel and pipeline
groups form a torch `DeviceMesh`. There are no data-parallel groups unless a user asks for a mesh with them: the gradient
return sums over replicas.

Nodes serve plans, per-machine measurements, and errors that name a machine. Ranks exchange them once, as soon as they can
communicate. A node is what one launcher started on one host: its host name, and the launcher if a host has several. Launchers
number ranks node by node; otherwise each rank counts as a node.
"""

import json
import logging
import os
import re
import socket
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_hotspa.parallel import backends
from hf_hotspa.strategy import Coord, Strategy


@dataclass(frozen=True)
class TensorGroup:
    """The tensor-parallel group of a rank."""

    group: dist.ProcessGroup
    size: int
    shard: int  # which shard of each weight this rank holds; not its position in the group, whose ranks are sorted
    order: tuple[int, ...]  # `order[i]` is the position in the group of the rank that holds shard i


@dataclass(frozen=True)
class ExpertGroup:
    """The `size` ranks that share a layer's experts; `shard` is this rank's shard and position in the group."""

    group: dist.ProcessGroup
    size: int
    shard: int


@dataclass(frozen=True)
class StrategyMesh:
    """A rank's coordinates in a strategy, and its groups there (None for an axis of degree 1).

    They match a torch `DeviceMesh` over the ranks of the replica.
    """

    strategy: Strategy
    rank: int
    coord: Coord
    tensor: TensorGroup | None
    pipeline: dist.ProcessGroup | None
    context: dist.ProcessGroup | None = None
    experts: ExpertGroup | None = None


class ProcessGroups:
    """Makes and keeps process groups. Every rank must ask for the same groups in the same order."""

    def __init__(
        self,
        rank: int,
        world_size: int,  # all ranks; with 1 no group is made
        device: torch.device,
        timeout: timedelta,  # how long an operation may wait for a peer
        switch_timeout: timedelta | None = None,  # the same for operations of switches; `timeout` when None
    ) -> None:
        self.rank, self.world_size, self.device, self.timeout = rank, world_size, device, timeout
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        everyone = list(range(world_size))
        backends.prepare_environment(device)
        switch_timeout = switch_timeout or timeout
        # all ranks, for messages between nodes in a switch
        self.switch = dist.new_group(everyone, timeout=switch_timeout) if world_size > 1 else None
        # all ranks, a separate communicator for forwarding inside a node in a switch. On NCCL a communicator that spans
        # nodes uses fewer channels between the devices of a node than they have links.
        self.forward = dist.new_group(everyone, timeout=switch_timeout) if world_size > 1 else None
        # all ranks, for small host tensors
        self.agreement = backends.host_group(everyone, timeout) if world_size > 1 else None

    def __len__(self) -> int:
        return len(self._by_ranks) + sum(group is not None for group in self._of_all_ranks())

    def _of_all_ranks(self) -> tuple[dist.ProcessGroup | None, ...]:
        return self.switch, self.forward, self.agreement

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The group of these ranks; None for one rank. A collective call for all ranks of the world."""
        key = tuple(ranks)
        if len(key) == 1:
            return None
        if key not in self._by_ranks:
            self._by_ranks[key] = dist.new_group(list(key), timeout=self.timeout)
        return self._by_ranks[key]

    def mesh(self, strategy: Strategy) -> StrategyMesh:
        """The mesh of a strategy as this rank sees it. A collective call for all ranks of the world."""
        mesh = self._device_mesh(strategy, ("pp", "cp", "tp"))
        groups = dict(zip(mesh.mesh_dim_names or (), mesh.get_all_groups(), strict=True)) if mesh is not None else {}
        tensor = None
        if mesh is not None and "tp" in groups:
            shard_of = [strategy.shard_index(t) for t in range(strategy.tp)]
            order = tuple(shard_of.index(i) for i in range(strategy.tp))
            tensor = TensorGroup(groups["tp"], strategy.tp, shard_of[mesh.get_local_rank("tp")], order)
        coord, experts = strategy.coord(self.rank), self._experts(strategy)
        return StrategyMesh(strategy, self.rank, coord, tensor, groups.get("pp"), groups.get("cp"), experts)

    def _experts(self, strategy: Strategy) -> ExpertGroup | None:
        group = self._own(strategy.expert_groups()) if strategy.ep > 1 else None
        return None if group is None else ExpertGroup(group, strategy.ep, strategy.expert_shard(self.rank))

    def _own(self, parts: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """This rank's of groups that divide all ranks."""
        groups = {ranks: self.group(ranks) for ranks in parts}
        return next(group for ranks, group in groups.items() if self.rank in ranks)

    def device_mesh(self, strategy: Strategy) -> DeviceMesh | None:
        """All ranks as a torch mesh over the axes `pp`, `dp`, `cp`, `tp` of degree above 1; None if all are 1.

        A collective call for all ranks of the world: the first call for a strategy makes the groups of replicas, which
        nothing else needs. The other groups are the strategy's own.
        """
        return self._device_mesh(strategy, ("pp", "dp", "cp", "tp"))

    def _device_mesh(self, strategy: Strategy, axes: tuple[str, ...]) -> DeviceMesh | None:
        """A torch mesh over the given axes (outermost first) of degree above 1: of all ranks, or without dp of a replica."""
        groups = {axis: group for axis in axes if (group := self._own(strategy.groups(axis))) is not None}
        if not groups:
            return None
        ranks = torch.arange(strategy.world_size).view(strategy.pp, strategy.dp, strategy.cp, strategy.tp)
        if "dp" not in axes:
            ranks = ranks[:, strategy.coord(self.rank).dp]
        mesh = ranks.reshape([size for size in ranks.shape if size > 1]).int()
        own = list(groups.values()) if len(groups) > 1 else next(iter(groups.values()))
        return DeviceMesh.from_group(own, self.device.type, mesh=mesh, mesh_dim_names=tuple(groups))

    @staticmethod
    def _joined(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
        return [g for g in groups if g is not None and g is not dist.GroupMember.NON_GROUP_MEMBER]

    def warm_up(self) -> None:
        """Connects the ranks of every group made so far. Collective.

        NCCL sets up a communicator in the first operation, which all ranks of the group must join; on gloo the first
        mini-batch then need not connect.
        """
        for group in self._joined(self.switch, self.forward, *self._by_ranks.values()):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def abort(self) -> None:
        """Aborts groups whose ranks would wait for a lost peer forever (`backends.abort`), after a failure. Not collective.

        These groups cannot be used afterwards; agreement still works.
        """
        backends.abort(self._joined(*self._by_ranks.values(), self.switch, self.forward))

    def close(self) -> None:
        """Destroys the groups made here. Collective. Nothing may be in flight."""
        for group in self._joined(*self._by_ranks.values(), *self._of_all_ranks()):
            dist.destroy_process_group(group)
        self._by_ranks.clear()
        self.switch = self.forward = self.agreement = None


# -- nodes -------------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # a peer's address as gloo writes it


class _Talks(Protocol):
    def texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run."""

    names: tuple[str, ...]  # the node of each rank
    # the network addresses of each rank's node that no other host can have (no loopback)
    addresses: tuple[frozenset[str], ...]

    @property
    def count(self) -> int:
        return len(set(self.names))

    @property
    def devices_per_node(self) -> int:
        """Ranks of a node, as in `hf_hotspa.cluster.Cluster`: the last node may have fewer."""
        blocks = [len(list(block)) for _, block in groupby(self.names)]
        if len(blocks) > self.count or len({*blocks[:-1]}) > 1 or blocks[-1] > blocks[0]:
            return 1
        return blocks[0]

    def local(self, rank: int) -> int:
        """The number of ranks on a rank's node."""
        return self.names.count(self.names[rank])

    def shown(self, ranks: Sequence[int]) -> str:
        """` (2, 3: all ranks of node node-b)`, for all nodes of these ranks; empty if the run has one node."""
        if self.count == 1:
            return ""
        parts = []
        for name in dict.fromkeys(self.names[rank] for rank in ranks):
            every = [rank for rank, other in enumerate(self.names) if other == name]
            theirs = [rank for rank in ranks if self.names[rank] == name]
            whole = "all ranks of" if every == theirs and len(every) > 1 else "on"
            parts.append(f"{', '.join(map(str, theirs))}: {whole} node {name}")
        return f" ({'; '.join(parts)})"

    def behind(self, text: str) -> str:
        """` (node node-b, ranks 2, 3)` for the peer whose address an error contains; empty if no single node has it."""
        peer = _PEER.search(text)
        if peer is None or self.count == 1:
            return ""
        names = {name for name, own in zip(self.names, self.addresses, strict=True) if peer[1] in own}
        if len(names) != 1:
            return ""
        [name] = names
        ranks = ", ".join(str(rank) for rank, other in enumerate(self.names) if other == name)
        return f" (node {name}, ranks {ranks})"


_known: weakref.WeakKeyDictionary[dist.Store, Nodes] = weakref.WeakKeyDictionary()
"""The nodes of this process's runs, by the store that all ranks share."""


def own_node() -> str:
    """This rank's description of its node, as JSON."""
    # torch's launcher sets its number; others set a rank's number on the node, which gives the launcher's first rank
    launcher = os.environ.get("GROUP_RANK")
    if launcher is None and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        launcher = f"from {int(os.environ['RANK']) - int(os.environ['LOCAL_RANK'])}"
    addresses = {entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each}
    return json.dumps(
        [socket.gethostname(), launcher or "", sorted(a for a in addresses if a != "::1" and not a.startswith("127."))]
    )


def nodes_from(texts: Sequence[str]) -> Nodes:
    """The nodes, from the description by each rank."""
    descriptions = [tuple(json.loads(text)) for text in texts]
    launchers: dict[str, list[str]] = {}
    for host, launcher, _ in descriptions:
        if launcher not in launchers.setdefault(host, []):
            launchers[host].append(launcher)
    names = [h if len(launchers[h]) == 1 else f"{h}, launcher {launchers[h].index(one)}" for h, one, _ in descriptions]
    return Nodes(tuple(names), tuple(frozenset(addresses) for *_, addresses in descriptions))


def nodes_of(agreement: _Talks) -> Nodes:
    """The nodes of this run. Collective the first time in a process group."""
    store = _store()
    if store is None:
        return nodes_from([own_node()])
    if store not in _known:
        nodes = _known[store] = nodes_from(agreement.texts(own_node()))
        if nodes.devices_per_node == 1 < max(map(nodes.local, range(len(nodes.names)))) and dist.get_rank() == 0:
            logger.warning(
                "the ranks do not lie in blocks of one size on their nodes (%s): plans treat each rank as a separate node",
                ", ".join(nodes.names),
            )
    return _known[store]


def known_nodes() -> Nodes | None:
    """The nodes of this run, if the ranks have exchanged them already. Not collective."""
    store = _store()
    return _known.get(store) if store is not None else None


def _store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # the store behind the default group: private in torch, and the same object as long as the group exists
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
