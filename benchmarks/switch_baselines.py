"""What a switch is measured against: the same traffic moved in other ways, on one rank.

* `FusedRaw`: one pre-allocated contiguous buffer for each route (source rank, destination rank), sent in one
  `batch_isend_irecv`, whole or in chunks. Nothing is packed or unpacked: the speed of the wire.
* `Copies`: packing and unpacking of the slices of those routes, and the copies inside the rank; nothing is sent. A
  route that is one slice on a side needs no copy there.
* `PerSlice`: one operation for each slice of a parameter that a rank takes from another one, from source to target
  buffers, in one batch: what the plan moves, without the fusion of parameters. `as_stored`: one operation for each
  contiguous stretch of the model's own storage, where a row-parallel weight is not stored with its sharded dim
  outermost.
* `AllGather`: every rank gathers everything that any rank holds, and copies what it needs.
* `Checkpoint`: `torch.distributed.checkpoint` save and load through a file system in memory.

Each is built once and called again and again. A gradient return has the first two only: the others do not sum.
"""

import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from switches import Pair, Store
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from written_plans import transfers_of

from hf_hotspa.layout.placement import Layout
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.plan.switch_plan import SwitchPlan, Transfer

MEMORY_FILES = Path("/dev/shm")
"""Where Linux keeps files in memory."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name, and the old one

Routes = dict[int, list[Transfer]]
"""The transfers with each peer."""


def routes_of(plan: SwitchPlan, rank: int) -> tuple[Routes, Routes, list[Transfer]]:
    """What a rank sends, what it receives, and what stays inside it."""
    sends, receives, local = defaultdict(list), defaultdict(list), []
    for transfer in transfers_of(plan):
        if transfer.src == transfer.dst == rank:
            local.append(transfer)
        elif transfer.src == rank:
            sends[transfer.dst].append(transfer)
        elif transfer.dst == rank:
            receives[transfer.src].append(transfer)
    return dict(sends), dict(receives), local


def _view(store: Store, segment: int, offset: int, length: int) -> torch.Tensor:
    buffer = store.buffers[segment]
    assert buffer is not None
    return buffer.narrow(0, offset, length)


def _sources(store: Store, transfers: list[Transfer]) -> list[torch.Tensor]:
    return [_view(store, t.segment, t.src_offset, t.length) for t in transfers]


def _targets(store: Store, transfers: list[Transfer]) -> list[torch.Tensor]:
    return [_view(store, t.segment, t.dst_offset, t.length) for t in transfers]


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class FusedRaw:
    """Contiguous buffers over the wire; `send[peer]` and `receive[peer]` may be used by others in between."""

    def __init__(self, plan: SwitchPlan, rank: int, dtype: torch.dtype) -> None:
        sends, receives, _ = routes_of(plan, rank)
        self.send = {peer: torch.zeros(sum(t.length for t in found), dtype=dtype) for peer, found in sends.items()}
        self.receive = {
            peer: torch.zeros(sum(t.length for t in found), dtype=dtype) for peer, found in receives.items()
        }

    def run(self, chunk_bytes: int | None) -> None:
        """Moves everything once; in chunks of so many bytes, or whole."""
        operations = []
        for call, buffers in ((dist.irecv, self.receive), (dist.isend, self.send)):
            for peer, buffer in buffers.items():
                length = chunk_bytes // buffer.element_size() if chunk_bytes else max(1, buffer.numel())
                for index, chunk in enumerate(buffer.split(length)):
                    operations.append(dist.P2POp(call, chunk, peer, tag=index))
        _exchange(operations)


class Copies:
    """Packing, unpacking and local copies between the stores and the buffers of a `FusedRaw`."""

    def __init__(self, plan: SwitchPlan, rank: int, source: Store, target: Store, raw: FusedRaw) -> None:
        sends, receives, local = routes_of(plan, rank)
        self._adds = plan.accumulate
        self._packs = [(_sources(source, found), raw.send[peer]) for peer, found in sends.items() if len(found) > 1]
        self._unpacks = [
            (_targets(target, found), list(raw.receive[peer].split([t.length for t in found])))
            for peer, found in sorted(receives.items())
            if len(found) > 1 or self._adds
        ]
        self._local = (_targets(target, local), _sources(source, local)) if local else None

    def pack_unpack(self) -> None:
        self._pack()
        self._unpack()

    def around(self, exchange: Callable[[], object]) -> None:
        """The whole switch, one thing after the other."""
        self._pack()
        exchange()
        self.local()
        self._unpack()

    def _pack(self) -> None:
        for views, buffer in self._packs:
            torch.cat(views, out=buffer)

    def _unpack(self) -> None:
        for views, parts in self._unpacks:
            self._into(views, parts)

    def local(self) -> None:
        if self._local:
            self._into(*self._local)

    def _into(self, views: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        if self._adds:
            torch._foreach_add_(views, parts)
        else:
            torch._foreach_copy_(views, parts)


def _slices(transfers: Iterable[Transfer], vector: ParameterVector, as_stored: bool) -> list[Transfer]:
    """The transfers, cut where one parameter ends and the next one begins.

    Args:
        transfers: What moves.
        vector: The parameters.
        as_stored: Cut also where the model's own storage would: a shard of a row-parallel weight is a stretch of every
            row there, and one stretch here, where the sharded dim lies outermost.
    """
    specs = sorted(vector.specs, key=lambda spec: spec.offset)
    ends = [spec.stop for spec in specs]
    found = []
    for t in transfers:
        stop = t.start + t.length
        cuts = [t.start, *ends[bisect_right(ends, t.start) : bisect_left(ends, stop)], stop]
        for low, high in pairwise(cuts):
            spec = specs[bisect_right(ends, low)]
            rows = spec.shape[0] if as_stored and spec.shard_dim == 1 else 1
            edges = [low + (high - low) * row // rows for row in range(rows + 1)]
            for first, last in pairwise(edges):
                if first < last:
                    found.append(_cut(t, first, last))
    return found


def _cut(t: Transfer, first: int, last: int) -> Transfer:
    moved = first - t.start
    return t._replace(
        start=first, length=last - first, src_offset=t.src_offset + moved, dst_offset=t.dst_offset + moved
    )


class PerSlice:
    """One operation a slice of a parameter, as it lies here or as the model stores it."""

    def __init__(
        self,
        plan: SwitchPlan,
        vector: ParameterVector,
        rank: int,
        source: Store,
        target: Store,
        as_stored: bool = False,
    ) -> None:
        self._rank, self._source, self._target = rank, source, target
        self._slices = _slices((t for t in transfers_of(plan) if t.src != t.dst), vector, as_stored)
        self._local = routes_of(plan, rank)[2]

    @property
    def num_slices(self) -> int:
        """Operations of all ranks, sends only."""
        return len(self._slices)

    def run(self) -> None:
        operations = []
        for tag, t in enumerate(self._slices):
            if t.src == self._rank:
                view = _view(self._source, t.segment, t.src_offset, t.length)
                operations.append(dist.P2POp(dist.isend, view, t.dst, tag=tag))
            elif t.dst == self._rank:
                view = _view(self._target, t.segment, t.dst_offset, t.length)
                operations.append(dist.P2POp(dist.irecv, view, t.src, tag=tag))
        if self._local:
            torch._foreach_copy_(_targets(self._target, self._local), _sources(self._source, self._local))
        _exchange(operations)


class AllGather:
    """Everything to everybody, then the slices."""

    def __init__(self, pair: Pair, plan: SwitchPlan, rank: int, source: Store, target: Store) -> None:
        sizes = [pair.source.rank_sizes(peer) for peer in range(plan.world_size)]
        longest = max(map(sum, sizes))
        self._mine = torch.zeros(longest, dtype=source.flat.dtype)
        self._all = torch.zeros(plan.world_size * longest, dtype=source.flat.dtype)
        self._source = source.flat
        needed = [t for t in transfers_of(plan) if t.dst == rank]
        self._targets = _targets(target, needed)
        self._slices = [
            self._all.narrow(0, t.src * longest + sum(sizes[t.src][: t.segment]) + t.src_offset, t.length)
            for t in needed
        ]

    def run(self) -> None:
        mine = self._source
        if self._mine.numel() != mine.numel():  # the gathered parts must be of one size
            self._mine[: mine.numel()] = mine
            mine = self._mine
        _all_gather(self._all, mine)
        torch._foreach_copy_(self._targets, self._slices)


class _Stretches(torch.Tensor):
    """One segment of a rank as stretches of a 1-D tensor, in the protocol of `torch.distributed.checkpoint`."""

    stretches: dict[int, torch.Tensor]

    @classmethod
    def of(cls, size: int, stretches: dict[int, torch.Tensor], dtype: torch.dtype) -> "_Stretches":
        made = torch.empty(1, dtype=dtype).expand(size).as_subclass(cls)  # the right size, without memory
        made.stretches = stretches
        return made

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        size = self.size()
        return [
            WriteItem(
                MetadataIndex(name, torch.Size([start])),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(start, view), TensorProperties(dtype=view.dtype), size),
            )
            for start, view in self.stretches.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(start, view) for start, view in self.stretches.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.stretches[index.offset[0]]


def _chunk(start: int, view: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([view.numel()]))


def _state(layout: Layout, store: Store, rank: int) -> dict[str, Any]:
    """What a rank holds of a layout, by segment, from its first element on any rank to its last one.

    Checkpoints know replicas only as equal chunks: stretches are cut wherever one begins or ends on any rank.
    """
    cuts: dict[int, set[int]] = defaultdict(set)
    for holdings in layout.holdings:
        for i in holdings:
            cuts[i.segment] |= {i.start, i.stop}
    stretches: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for i in layout.holdings[rank]:
        inside = sorted(cut for cut in cuts[i.segment] if i.start <= cut <= i.stop)
        for start, stop in pairwise(inside):
            view = _view(store, i.segment, i.offset + start - i.start, stop - start)
            stretches[i.segment][start - min(cuts[i.segment])] = view
    return {
        f"segment {segment}": _Stretches.of(max(cuts[segment]) - min(cuts[segment]), found, store.flat.dtype)
        for segment, found in stretches.items()
    }


class Checkpoint:
    """Save and load.

    Args:
        folder: Where, the same for all ranks; whoever made it removes it.
    """

    def __init__(self, pair: Pair, rank: int, source: Store, target: Store, folder: str) -> None:
        self._states = [_state(layout, store, rank) for layout, store in ((pair.source, source), (pair.target, target))]
        self._folder = folder

    def run(self) -> None:
        source, target = self._states
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the last round's files are overwritten
            dcp.save(source, storage_writer=dcp.FileSystemWriter(self._folder, sync_files=False))
            dcp.load(target, storage_reader=dcp.FileSystemReader(self._folder))
