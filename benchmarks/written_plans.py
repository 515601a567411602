"""Layouts and switch plans written out, interval by interval and transfer by transfer: for baselines and tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Interval, Layout, place
from hf_hotspa.plan.switch_plan import ANY, COLUMNS, DST, LENGTH, RELAY, SRC, SegmentPlan, SwitchPlan, Transfer


def layout_of(name: str, holdings: Sequence[Sequence[Interval]], sizes: Sequence[Sequence[int]]) -> Layout:
    """A layout written out: `holdings[rank]`, and `sizes[rank][segment]` elements of each buffer."""
    world_size = len(holdings)
    num_segments = 1 + max(
        (len(sizes[0]) - 1 if world_size else -1, *(i.segment for intervals in holdings for i in intervals)), default=-1
    )
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_segments)]
    for rank, intervals in enumerate(holdings):
        for interval in intervals:
            rows[interval.segment].append((rank, interval.start, interval.stop, interval.offset))
    padded = [[*of_rank, *[0] * (num_segments - len(of_rank))] for of_rank in sizes]
    placements = tuple(place(rows[s], [of_rank[s] for of_rank in padded]) for s in range(num_segments))
    return Layout(name, world_size, (0,) * num_segments, placements)


def plan_of(name: str, world_size: int, transfers: Sequence[Transfer], accumulate: bool) -> SwitchPlan:
    """A plan from its transfers, written out; the transfers of a segment and hop must be in canonical order."""
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
    return SwitchPlan(name, world_size, (0,) * num_segments, kinds, kind_of, (ANY,) * num_hops, accumulate)


def transfers_of(plan: SwitchPlan) -> tuple[Transfer, ...]:
    """All transfers written out, by hop, source, destination and position."""
    found = [
        Transfer(segment, length, src, src_offset, dst, dst_offset, plan.bases[segment] + start, hop, src_in, dst_in)
        for segment, kind in enumerate(plan.kind_of)
        if kind >= 0
        for hop, table in enumerate(plan.kinds[kind].hops)
        for src_in, src, src_offset, dst_in, dst, dst_offset, start, length in table.tolist()
    ]
    return tuple(sorted(found, key=lambda t: (t.hop, t.src, t.dst, t.start)))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a plan moves, by kind of link, and the bytes of the busiest ranks (bytes inside a rank not counted there)."""

    local_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int
    max_sent_bytes: int
    max_received_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a rank."""
        return self.intra_node_bytes + self.inter_node_bytes


def traffic_of(plan: SwitchPlan, cluster: Cluster, element_sizes: Sequence[int]) -> Traffic:
    """The bytes the plan moves on a cluster; `element_sizes[segment]` is the bytes of one element on the wire."""
    sent, received = np.zeros(plan.world_size, np.int64), np.zeros(plan.world_size, np.int64)
    local = intra = inter = 0
    for kind, size in plan._weights(element_sizes):
        for table in plan.kinds[kind].hops:
            src, dst, num_bytes = table[:, SRC], table[:, DST], table[:, LENGTH] * size
            moves = src != dst
            same_node = src // cluster.devices_per_node == dst // cluster.devices_per_node
            local += int(num_bytes[~moves].sum())
            intra += int(num_bytes[moves & same_node].sum())
            inter += int(num_bytes[~same_node].sum())
            np.add.at(sent, src[moves], num_bytes[moves])
            np.add.at(received, dst[moves], num_bytes[moves])
    return Traffic(local, intra, inter, int(sent.max()), int(received.max()))
