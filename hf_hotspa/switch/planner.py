"""The planner: from two layouts to a validated switch plan.

Algorithm 1 of HotSPa (SOSP'24), the choice of senders:

    cut the parameter vector at every boundary of both layouts: no atomic piece is cut further by any rank
    for each atomic piece, in vector order:
        for each rank that needs it, in rank order:
            if it holds the piece itself:           copy inside the rank, no load
            else if holders live on its node:       the one with the least bytes to send inside the node
            else:                                   the one with the least bytes to send between nodes
            add the piece's bytes to the chosen sender's load (loads persist over all pieces)
    join the transfers that continue each other on both sides

On regular layouts no plan of direct transfers is faster (the fractional bound is met). Layouts are all it sees, never
degrees. Everything here is a deterministic pure function of plain data, so every rank computes the same plan.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError
from hf_hotspa.layout.placement import Layout
from hf_hotspa.switch.plan import SwitchPlan, Transfer, held_runs, merge_transfers


@dataclass
class SendLoads:
    """Bytes that each rank has been given to send so far, inside its node and to other nodes."""

    intra_node: list[int]
    inter_node: list[int]

    @classmethod
    def zero(cls, world_size: int) -> "SendLoads":
        return cls([0] * world_size, [0] * world_size)

    def add(self, src: int, dst: int, size: int, cluster: Cluster) -> None:
        """Counts one transfer; one inside a rank is free."""
        if src != dst:
            (self.intra_node if cluster.node(src) == cluster.node(dst) else self.inter_node)[src] += size


def choose_source(holders: Collection[int], dst: int, loads: SendLoads, cluster: Cluster) -> int:
    """Which holder sends a piece to `dst`: itself, else the least loaded on its node, else the least loaded of all.

    Ties go to the lowest rank. `loads` is read, not changed.
    """
    if dst in holders:
        return dst
    node = cluster.node(dst)
    near = [rank for rank in holders if cluster.node(rank) == node]
    load = loads.intra_node if near else loads.inter_node
    return min(near or holders, key=lambda rank: (load[rank], rank))


class _Piece(NamedTuple):
    """An atomic piece: elements `[start, start + length)`, and the buffer offset at each rank of either layout."""

    start: int
    length: int
    segment: int
    sources: dict[int, int]
    targets: dict[int, int]


def _atomic_pieces(source: Layout, target: Layout) -> Iterator[_Piece]:
    """Cuts the vector at all boundaries of both layouts; the pieces that some rank holds, in vector order."""
    layouts = held_runs(source), held_runs(target)
    cuts = sorted({cut for runs_of in layouts for runs in runs_of for run in runs for cut in (run.start, run.stop)})
    index_of = {cut: index for index, cut in enumerate(cuts)}
    segments: list[int | None] = [None] * len(cuts)
    offsets: tuple[list[dict[int, int]], ...] = [{} for _ in cuts], [{} for _ in cuts]
    for runs_of, held in zip(layouts, offsets, strict=True):
        for rank, runs in enumerate(runs_of):
            for run in runs:
                for index in range(index_of[run.start], index_of[run.stop]):
                    held[index][rank] = run.offset + cuts[index] - run.start
                    segments[index] = run.segment
    for index, segment in enumerate(segments):
        if segment is not None:
            start = cuts[index]
            yield _Piece(start, cuts[index + 1] - start, segment, offsets[0][index], offsets[1][index])


def plan_load(source: Layout, target: Layout, cluster: Cluster, element_sizes: Sequence[int]) -> SwitchPlan:
    """Plans a load: everything that the target layout holds, from ranks that hold it in the source layout.

    Args:
        source: Where the parameters are.
        target: Where they are needed. It may leave out elements.
        cluster: Which ranks share a node.
        element_sizes: Bytes of one element of each segment on the wire, for balancing the senders.

    Raises:
        PlanError: the source does not hold all that the target needs.
    """
    loads = SendLoads.zero(source.world_size)
    transfers = []
    for start, length, segment, sources, targets in _atomic_pieces(source, target):
        if targets and not sources:
            raise PlanError(
                f"no rank of layout {source.name!r} holds elements [{start}, {start + length})",
                where=f"rank {min(targets)} of layout {target.name!r}",
            )
        size = length * element_sizes[segment]
        for dst, dst_offset in targets.items():
            src = choose_source(sources, dst, loads, cluster)
            loads.add(src, dst, size, cluster)
            transfers.append(Transfer(segment, length, src, sources[src], dst, dst_offset, start))
    plan = SwitchPlan(f"load {source.name} -> {target.name}", source.world_size, merge_transfers(transfers), False)
    plan.validate(source, target)
    return plan


def plan_return(contributions: Layout, master: Layout) -> SwitchPlan:
    """Plans a gradient return: every contribution of every rank, to the one owner of its element.

    Args:
        contributions: What each rank has to add to which element.
        master: Where each element is owned, exactly once.

    Raises:
        PlanError: an element that somebody contributes to has no owner, or more than one.
    """
    transfers = []
    for start, length, segment, sources, targets in _atomic_pieces(contributions, master):
        if sources and len(targets) != 1:
            raise PlanError(
                f"elements [{start}, {start + length}) have {len(targets)} owners in layout {master.name!r}",
                where=f"rank {min(sources)} of layout {contributions.name!r}",
            )
        for dst, dst_offset in targets.items():
            transfers += [
                Transfer(segment, length, src, src_offset, dst, dst_offset, start)
                for src, src_offset in sources.items()
            ]
    name = f"return {contributions.name} -> {master.name}"
    plan = SwitchPlan(name, contributions.world_size, merge_transfers(transfers), True)
    plan.validate(contributions, master)
    return plan
