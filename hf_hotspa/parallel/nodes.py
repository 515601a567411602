"""Which machine each rank runs on: for plans, for what is measured by machine, and for errors that name one.

Ranks tell each other once, as soon as they can talk. A node is what one launcher started on one host: its host name, and the
launcher where a host has several. Launchers number ranks node by node; where they did not, each rank counts as a node.
"""

import json
import logging
import os
import re
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

logger = logging.getLogger(__name__)

_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")
"""The address of a peer as gloo writes it."""


class _Talks(Protocol):
    def texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run.

    Args:
        names: The node of each rank.
        addresses: The network addresses of each rank's node that no other host can have: not those of loopback.
    """

    names: tuple[str, ...]
    addresses: tuple[frozenset[str], ...]

    @property
    def count(self) -> int:
        return len(set(self.names))

    @property
    def devices_per_node(self) -> int:
        """Ranks of a node, as `hf_hotspa.cluster.Cluster` has them: the last node may have fewer."""
        blocks = [len(list(block)) for _, block in groupby(self.names)]
        if len(blocks) > self.count or len({*blocks[:-1]}) > 1 or blocks[-1] > blocks[0]:
            return 1
        return blocks[0]

    def local(self, rank: int) -> int:
        """How many ranks there are on the node of a rank."""
        return self.names.count(self.names[rank])

    def shown(self, ranks: Sequence[int]) -> str:
        """` (2, 3: all ranks of node node-b)`, for all nodes of these ranks; empty in a run on one node."""
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
        """` (node node-b, ranks 2, 3)` for the peer that an error names by its address; empty where no node is known by it."""
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
"""Of the process, by the store that all ranks share."""


def own_node() -> str:
    """What this rank says of its node, as JSON."""
    # the number of the launcher, from torch's; other launchers tell a rank its number on the node, and so the first one there
    launcher = os.environ.get("GROUP_RANK")
    if launcher is None and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        launcher = f"from {int(os.environ['RANK']) - int(os.environ['LOCAL_RANK'])}"
    addresses = {entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each}
    return json.dumps([socket.gethostname(), launcher or "", sorted(a for a in addresses if not _is_loopback(a))])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def nodes_from(texts: Sequence[str]) -> Nodes:
    """The nodes, from what each rank has said."""
    said = [tuple(json.loads(text)) for text in texts]
    launchers: dict[str, list[str]] = {}
    for host, launcher, _ in said:
        if launcher not in launchers.setdefault(host, []):
            launchers[host].append(launcher)
    names = [h if len(launchers[h]) == 1 else f"{h}, launcher {launchers[h].index(one)}" for h, one, _ in said]
    return Nodes(tuple(names), tuple(frozenset(addresses) for *_, addresses in said))


def nodes_of(agreement: _Talks) -> Nodes:
    """The nodes of this run. Collective the first time in a process group."""
    store = _store()
    if store is None:
        return nodes_from([own_node()])
    if store not in _known:
        nodes = _known[store] = nodes_from(agreement.texts(own_node()))
        if nodes.devices_per_node == 1 < max(map(nodes.local, range(len(nodes.names)))) and dist.get_rank() == 0:
            logger.warning(
                "the ranks do not lie in blocks of one size on their nodes (%s): plans take each rank for a node of its own",
                ", ".join(nodes.names),
            )
    return _known[store]


def known_nodes() -> Nodes | None:
    """The nodes of this run, if the ranks have told each other already. Not collective."""
    store = _store()
    return _known.get(store) if store is not None else None


def _store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # the store behind the default group: private in torch, and the same object as long as the group is there
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
