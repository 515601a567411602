"""Switch plans: which rank sends which elements to whom, as frozen plain data that proves itself.

A plan is a table of transfers for each *kind* of segment and *hop*. Segments that are placed alike on both sides share
a table, so that a plan of a hundred equal layers is as large as one of a single layer. The hops of a segment follow
one another: what the first one lands in a relay buffer (or in a target) the second one may forward. A plan knows no
transport and no dtype. It is one of two kinds:

* a *load* copies: every element that a rank of the target layout holds is delivered to it exactly once;
* a *gradient return* adds: every contribution (source rank, element) reaches its owner exactly once. It is the adjoint
  of a load: hops run backwards, copies become sums.

`SwitchPlan.validate` proves this against the layouts, and the planner calls it on everything it builds. No torch.
"""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout
from hf_hotspa.switch.ports import PortLoads
from hf_hotspa.switch.proof import prove
from hf_hotspa.switch.table import COLUMNS, DST, LENGTH, RELAY, SRC, SegmentPlan, Transfer, adjoint

INTRA, INTER, ANY = "intra", "inter", "any"
"""Links of a hop: inside nodes only, between nodes only, or both."""

_INVERSE = "inverse of "


@dataclass(frozen=True)
class Traffic:
    """Bytes that a plan moves, by kind of link, and those of the busiest ranks (bytes inside a rank not counted there)."""

    local_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int
    max_sent_bytes: int
    max_received_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a rank."""
        return self.intra_node_bytes + self.inter_node_bytes


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """All transfers between two layouts, of all ranks. Made by the planner, which validates it.

    Args:
        name: What moves where, for messages and logs; part of the digest.
        world_size: Ranks.
        bases: Where each segment begins in the parameter vector.
        kinds: The different tables.
        kind_of: For each segment the index of its kind; -1 where the plan moves nothing of it.
        links: For each hop which links it uses: `INTRA`, `INTER` or `ANY`.
        accumulate: False copies (a load), True adds (a gradient return).
    """

    name: str
    world_size: int
    bases: tuple[int, ...]
    kinds: tuple[SegmentPlan, ...]
    kind_of: tuple[int, ...]
    links: tuple[str, ...]
    accumulate: bool

    @classmethod
    def of(cls, name: str, world_size: int, transfers: Sequence[Transfer], accumulate: bool) -> "SwitchPlan":
        """A plan written out; the transfers of a segment and hop must be in canonical order."""
        num_hops = 1 + max((t.hop for t in transfers), default=0)
        num_segments = 1 + max((t.segment for t in transfers), default=-1)
        rows: list[list[list[tuple[int, ...]]]] = [[[] for _ in range(num_hops)] for _ in range(num_segments)]
        relay = np.zeros((num_segments, world_size), np.int64)
        for t in transfers:
            row = (t.src_store, t.src, t.src_offset, t.dst_store, t.dst, t.dst_offset, t.start, t.length)
            rows[t.segment][t.hop].append(row)
            for store, rank, offset in ((t.src_store, t.src, t.src_offset), (t.dst_store, t.dst, t.dst_offset)):
                if store == RELAY and 0 <= rank < world_size:
                    relay[t.segment, rank] = max(relay[t.segment, rank], offset + t.length)
        tables = [tuple(np.array(hop, np.int64).reshape(-1, COLUMNS) for hop in hops) for hops in rows]
        kinds = tuple(SegmentPlan(hops, relay[segment]) for segment, hops in enumerate(tables))
        kind_of = tuple(range(num_segments))
        return cls(name, world_size, (0,) * num_segments, kinds, kind_of, (ANY,) * num_hops, accumulate)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers written out, by hop, source, destination and position: for small plans and for tests."""
        found = [
            Transfer(
                segment, length, src, src_offset, dst, dst_offset, self.bases[segment] + start, hop, src_in, dst_in
            )
            for segment, kind in enumerate(self.kind_of)
            if kind >= 0
            for hop, table in enumerate(self.kinds[kind].hops)
            for src_in, src, src_offset, dst_in, dst, dst_offset, start, length in table.tolist()
        ]
        return tuple(sorted(found, key=lambda t: (t.hop, t.src, t.dst, t.start)))

    def validate(self, source: Layout | Sequence[Layout], target: Layout) -> None:
        """Proves the plan against its layouts.

        Every rank holds what it sends at the offset it sends from, when its hop begins; every destination holds it at
        the offset it receives at; and each needed element (load) or each contribution (gradient return) is delivered
        exactly once.

        Args:
            source: The source layout; two of them for a plan with a second source.
            target: The target layout.

        Raises:
            PlanError: naming the first transfer, rank or interval that is wrong.
        """
        sources = [source] if isinstance(source, Layout) else list(source)
        prove(self.name, self.world_size, self.bases, self.kinds, self.kind_of, self.accumulate, sources, target)

    def digest(self) -> str:
        """SHA-256 of the whole plan: equal on two ranks exactly when they would move the same bytes the same way."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        head = [self.world_size, self.accumulate, len(self.bases), *self.bases, *self.kind_of]
        text = f"{self.name}\0{self.links}\0{head}\0{[[len(hop) for hop in kind.hops] for kind in self.kinds]}\0"
        digest = hashlib.sha256(text.encode())
        for kind in self.kinds:
            for table in (*kind.hops, kind.relay_sizes):
                little = table.byteswap() if sys.byteorder == "big" else table
                digest.update(np.ascontiguousarray(little).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwitchPlan) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def inverse(self) -> "SwitchPlan":
        """The adjoint: sources and destinations change places, hops run backwards, a copy becomes a sum and vice versa.

        The inverse of the inverse is the plan.
        """
        name = self.name.removeprefix(_INVERSE) if self.name.startswith(_INVERSE) else _INVERSE + self.name
        kinds = tuple(
            SegmentPlan(tuple(adjoint(table) for table in kind.hops[::-1]), kind.relay_sizes) for kind in self.kinds
        )
        return replace(self, name=name, kinds=kinds, links=self.links[::-1], accumulate=not self.accumulate)

    def loads(self, cluster: Cluster, element_sizes: Sequence[int]) -> list[PortLoads]:
        """The bytes through every port, for each hop; `element_sizes[segment]` is one element's bytes on the wire."""
        found = [PortLoads.zero(cluster) for _ in self.links]
        for kind, size in self._weights(element_sizes):
            for loads, table in zip(found, self.kinds[kind].hops, strict=True):
                loads.add(table[:, SRC], table[:, DST], table[:, LENGTH] * size)
        return found

    def traffic(self, cluster: Cluster, element_sizes: Sequence[int]) -> Traffic:
        """The bytes the plan moves on a cluster; `element_sizes[segment]` is the bytes of one element on the wire."""
        sent, received = np.zeros(self.world_size, np.int64), np.zeros(self.world_size, np.int64)
        local = intra = inter = 0
        for kind, size in self._weights(element_sizes):
            for table in self.kinds[kind].hops:
                src, dst, num_bytes = table[:, SRC], table[:, DST], table[:, LENGTH] * size
                moves = src != dst
                same_node = src // cluster.devices_per_node == dst // cluster.devices_per_node
                local += int(num_bytes[~moves].sum())
                intra += int(num_bytes[moves & same_node].sum())
                inter += int(num_bytes[~same_node].sum())
                np.add.at(sent, src[moves], num_bytes[moves])
                np.add.at(received, dst[moves], num_bytes[moves])
        return Traffic(local, intra, inter, int(sent.max()), int(received.max()))

    def _weights(self, element_sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """`(kind, bytes of one element summed over the segments of the kind)`."""
        weights = [0] * len(self.kinds)
        for segment, kind in enumerate(self.kind_of):
            if kind >= 0:
                weights[kind] += element_sizes[segment]
        return enumerate(weights)
