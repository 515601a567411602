"""The proof of a switch plan: that its tables deliver what its layouts promise, each element exactly once.

A load is followed hop by hop: what a rank sends must be in the named buffer when the hop begins, what arrives must be
wanted there, and what has arrived in the target buffers at the end must be all of the target layout, nothing twice. A
gradient return is proved as the load that it is the adjoint of.
"""

from collections.abc import Sequence

import numpy as np

from hf_hotspa.errors import PlanError
from hf_hotspa.layout.intervals import Numbers, Placement, place
from hf_hotspa.layout.placement import Layout
from hf_hotspa.plan.plan import SwitchPlan
from hf_hotspa.plan.table import (
    DST,
    DST_OFFSET,
    DST_STORE,
    LENGTH,
    RELAY,
    SECOND,
    SOURCE,
    SRC,
    SRC_OFFSET,
    SRC_STORE,
    START,
    TARGET,
    SegmentPlan,
    Transfer,
    adjoint,
)


def prove(plan: SwitchPlan, source: Layout | Sequence[Layout], target: Layout) -> None:
    """Proves a plan against its layouts.

    Every rank holds what it sends at the offset it sends from, when its hop begins; every destination holds it at
    the offset it receives at; and each needed element (load) or each contribution (gradient return) is delivered
    exactly once.

    Args:
        source: The source layout; two of them for a plan with a second source.

    Raises:
        PlanError: naming the first transfer, rank or interval that is wrong.
    """
    sources = [source] if isinstance(source, Layout) else list(source)
    worlds = [plan.world_size, *(source.world_size for source in sources), target.world_size]
    if len(set(worlds)) > 1:
        sizes = ", ".join(map(str, worlds))
        raise PlanError(f"plan {plan.name!r}: plan, source and target are of different worlds: {sizes}")
    layouts = [*sources, target]
    if plan.accumulate:
        layouts.reverse()
    proved = set()
    for segment in range(max(len(plan.kind_of), *(len(layout.placements) for layout in layouts))):
        base = plan.bases[segment] if segment < len(plan.bases) else 0
        placements, shifts = zip(*(_placement(layout, segment, base) for layout in layouts), strict=True)
        kind = plan.kind_of[segment] if segment < len(plan.kind_of) else -1
        key = (kind, shifts, tuple(p.key for p in placements))
        if key in proved:
            continue
        proved.add(key)
        for layout, placement, shift in zip(layouts, placements, shifts, strict=True):
            placement.check(layout.name, segment, base + shift)
        own = plan.kinds[kind] if kind >= 0 else SegmentPlan((), np.zeros(plan.world_size, np.int64))
        tables = tuple(adjoint(table) for table in reversed(own.hops)) if plan.accumulate else own.hops
        for given in own.hops:
            _check_rows(plan, given, segment, base)
        proof = _Proof(plan, segment, base)
        proof.follow(tables, own.relay_sizes, [_shifted(p, s) for p, s in zip(placements, shifts, strict=True)])


def _placement(layout: Layout, segment: int, base: int) -> tuple[Placement, int]:
    if segment >= len(layout.placements):
        return place([], [0] * layout.world_size), 0
    return layout.placements[segment], layout.bases[segment] - base


def _shifted(placement: Placement, shift: int) -> Placement:
    if shift == 0:
        return placement
    return Placement(
        placement.ranks, placement.starts + shift, placement.stops + shift, placement.offsets, placement.sizes
    )


def _text(row: Numbers, segment: int, base: int, hop: int = 0) -> str:
    src_store, src, src_offset, dst_store, dst, dst_offset, start, length = (int(value) for value in row)
    return str(Transfer(segment, length, src, src_offset, dst, dst_offset, base + start, hop, src_store, dst_store))


def _check_rows(plan: SwitchPlan, table: Numbers, segment: int, base: int) -> None:
    ends = table[:, [SRC, DST]]
    bad = ((ends < 0) | (ends >= plan.world_size)).any(1) | (table[:, LENGTH] < 1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        what = "names a rank that does not exist or moves nothing"
        raise PlanError(f"plan {plan.name!r}: transfer {i} {what}", where=_text(table[i], segment, base))
    keys = table[:, [SRC, DST, START]]
    step = np.diff(keys, axis=0)
    rises = (step[:, 0] > 0) | ((step[:, 0] == 0) & ((step[:, 1] > 0) | ((step[:, 1] == 0) & (step[:, 2] > 0))))
    if not rises.all():
        i = int(np.flatnonzero(~rises)[0]) + 1
        raise PlanError(
            f"plan {plan.name!r}: transfer {i} is out of the canonical order", where=_text(table[i], segment, base)
        )


class _Proof:
    """Follows the tables of one segment."""

    def __init__(self, plan: SwitchPlan, segment: int, base: int) -> None:
        self._name, self._world_size, self._segment, self._base = plan.name, plan.world_size, segment, base
        self._sends, self._gets = ("delivers", "sends") if plan.accumulate else ("sends", "delivers")
        self._receives = "sends" if plan.accumulate else "receives"

    def follow(self, hops: Sequence[Numbers], relay_sizes: Numbers, placements: Sequence[Placement]) -> None:
        *sources, target = placements
        stores = {SOURCE: sources[0]}
        if len(sources) > 1:
            stores[SECOND] = sources[1]
        arrived: dict[int, list[Numbers]] = {RELAY: [], TARGET: []}
        for hop, table in enumerate(hops):
            for store in np.unique(table[:, SRC_STORE]).tolist():
                rows = table[table[:, SRC_STORE] == store]
                held = stores.get(store) or place([], [0] * self._world_size)
                self._check_held(held, rows, SRC, SRC_OFFSET, hop, self._sends)
            for store, into in arrived.items():
                rows = table[table[:, DST_STORE] == store]
                if store == TARGET:
                    self._check_held(target, rows, DST, DST_OFFSET, hop, self._gets)
                into.append(rows)
            if not np.isin(table[:, DST_STORE], (RELAY, TARGET)).all():
                row = table[~np.isin(table[:, DST_STORE], (RELAY, TARGET))][0]
                raise self._error(row, hop, "writes into a source buffer")
            for store, into in arrived.items():
                rows = np.concatenate(into)
                self._check_single(rows, hop)
                runs = np.column_stack((rows[:, DST], rows[:, START], rows[:, START] + rows[:, LENGTH]))
                sizes = relay_sizes if store == RELAY else target.sizes
                stores[store] = place(np.column_stack((runs, rows[:, DST_OFFSET])), sizes)
                if store == RELAY:
                    stores[store].check(f"transfers into relay buffers of {self._name}", self._segment, self._base)
        self._check_complete(stores.get(TARGET) or place([], [0] * self._world_size), target)

    def _check_held(self, held: Placement, rows: Numbers, end: int, at: int, hop: int, verb: str) -> None:
        """Each row must lie inside one interval of its rank, at the matching offset."""
        if len(rows) == 0:
            return
        span = 1 + max(int((rows[:, START] + rows[:, LENGTH]).max()), int(held.stops.max(initial=0)))
        lowest = min(0, int(rows[:, START].min()), int(held.starts.min(initial=0)))
        span -= lowest
        index = np.searchsorted(
            held.ranks * span + held.starts - lowest, rows[:, end] * span + rows[:, START] - lowest, side="right"
        )
        index -= 1
        fits = index >= 0
        index = np.maximum(index, 0)
        if len(held.ranks):
            fits &= held.ranks[index] == rows[:, end]
            fits &= rows[:, START] + rows[:, LENGTH] <= held.stops[index]
            fits &= rows[:, at] - held.offsets[index] == rows[:, START] - held.starts[index]
        if not fits.all():
            row = rows[~fits][0]
            raise self._error(row, hop, f"{verb} what rank {row[end]} does not hold there")

    def _check_single(self, rows: Numbers, hop: int) -> None:
        order = np.lexsort((rows[:, START], rows[:, DST]))
        rows = rows[order]
        twice = (rows[1:, DST] == rows[:-1, DST]) & (rows[1:, START] < rows[:-1, START] + rows[:-1, LENGTH])
        if twice.any():
            row = rows[1:][twice][0]
            element = self._base + int(row[START])
            raise self._error(row, hop, f"{self._receives} element {element} a second time at rank {row[DST]}")

    def _check_complete(self, arrivals: Placement, target: Placement) -> None:
        """All that arrived lies in the target and nothing arrived twice: so the sums tell whether all of it did."""
        missing = np.zeros(self._world_size, np.int64)
        np.add.at(missing, target.ranks, target.stops - target.starts)
        np.subtract.at(missing, arrivals.ranks, arrivals.stops - arrivals.starts)
        if not missing.any():
            return
        rank = int(np.flatnonzero(missing)[0])
        arrived = [(start, stop) for r, start, stop, _ in arrivals.rows() if r == rank]
        for r, start, stop, _ in target.rows():
            position = start
            for low, high in arrived:
                if r == rank and low <= position < high:
                    position = high
            if r == rank and position < stop:
                end = min([low for low, _ in arrived if low > position] + [stop])
                raise PlanError(
                    f"plan {self._name!r}: no transfer {self._receives} elements "
                    f"[{self._base + position}, {self._base + end})",
                    where=f"rank {rank}, segment {self._segment}",
                )

    def _error(self, row: Numbers, hop: int, what: str) -> PlanError:
        where = _text(row, self._segment, self._base, hop)
        return PlanError(f"plan {self._name!r}: a transfer {what}", where=where)
