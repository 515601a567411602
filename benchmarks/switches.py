"""What the switch benchmarks share: models as plain vectors, pairs of layouts, one rank's buffers, timing, tables.

A pair is written `SOURCE->TARGET`; each side is `master` (the master store) or a strategy. `STRATEGY->master` is a
gradient return: contributions are summed. Every rank computes everything from these words, and what the switch must
have delivered it can compute, too: the value of an element is a function of its position.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout, gradient_layout, master_layout, strategy_layout
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.plan.switch_plan import SwitchPlan
from hf_hotspa.strategy import Strategy

PRELOAD = ("torch", "torch.distributed.checkpoint")
"""Imported once for all ranks."""

SHAPES = {  # hidden, intermediate, layers, vocabulary, query heads, key/value heads
    "15K": (32, 64, 1, 64, 8, 8),
    "0.2M": (64, 192, 4, 256, 8, 8),
    "9M": (320, 896, 7, 1024, 8, 8),
    "narrow": (256, 704, 84, 4096, 8, 8),
    "67M": (768, 2048, 9, 8192, 12, 12),
    "137M": (1024, 2816, 9, 12288, 16, 16),
}
"""Llama-like shapes. `narrow` has as many parameters as `67M` in shards of some ten KiB: many small slices."""

ADAPTERS = "adapters"
"""The adapters of rank 8 (LoRA) on all projections of a 7B Llama: 20M parameters in 448 small matrices."""
_ADAPTED = (4096, 11008, 32, 32, 8)  # hidden, intermediate, layers, heads, rank

MODELS = (*SHAPES, ADAPTERS)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Buffers = list[torch.Tensor | None]


def model_vector(name: str, dtype: torch.dtype) -> ParameterVector:
    """The parameter vector of one of `MODELS`."""
    return _adapter_vector(dtype) if name == ADAPTERS else _llama_vector(name, dtype)


def _adapter_vector(dtype: torch.dtype) -> ParameterVector:
    """Beside a projection that is cut over its outputs, B is cut and A is whole; over its inputs, the other way."""
    hidden, width, layers, heads, rank = _ADAPTED
    specs: list[ParameterSpec] = []
    for layer in range(layers):
        for label, rows, columns, cut, items in (
            *((label, hidden, hidden, "b", heads) for label in "qkv"),
            ("o", hidden, hidden, "a", heads),
            ("gate", width, hidden, "b", width),
            ("up", width, hidden, "b", width),
            ("down", hidden, width, "a", width),
        ):
            for factor, shape, dim in (("a", (rank, columns), 1), ("b", (rows, rank), 0)):
                where = (dim, (Part(shape[dim], items, items, False),)) if factor == cut else ()
                specs.append(ParameterSpec(f"{layer}.{label}.{factor}", shape, _name(dtype), layer, *where))
    return build_vector(specs, [1] * layers, 1)


def _llama_vector(name: str, dtype: torch.dtype) -> ParameterVector:
    hidden, width, layers, vocabulary, heads, kv_heads = SHAPES[name]
    specs: list[ParameterSpec] = []

    def add(
        label: str, unit: int, rows: int, columns: int, shard_dim: int, items: int, replicate: bool = False
    ) -> None:
        cut = (rows, columns)[shard_dim]
        parts = (Part(cut, items, items, replicate),)
        specs.append(ParameterSpec(label, (rows, columns), _name(dtype), unit, shard_dim, parts))

    def norm(label: str, unit: int) -> None:
        specs.append(ParameterSpec(label, (hidden,), _name(dtype), unit))

    head = hidden // heads
    add("embed", EMBEDDING, vocabulary, hidden, 0, vocabulary)
    for layer in range(layers):
        norm(f"{layer}.norm1", layer)
        add(f"{layer}.q", layer, heads * head, hidden, 0, heads)
        for label in "kv":
            add(f"{layer}.{label}", layer, kv_heads * head, hidden, 0, kv_heads, True)
        add(f"{layer}.o", layer, hidden, heads * head, 1, heads)
        norm(f"{layer}.norm2", layer)
        for label in ("gate", "up"):
            add(f"{layer}.{label}", layer, width, hidden, 0, width)
        add(f"{layer}.down", layer, hidden, width, 1, width)
    norm("norm", HEAD)
    add("head", HEAD, vocabulary, hidden, 0, vocabulary)
    return build_vector(specs, [1] * layers, 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Pair:
    """A switch between two layouts.

    Args:
        name: As it was written.
        source: Where the elements are.
        target: Where they are needed; for a return the master store.
        is_return: Whether contributions are summed.
    """

    name: str
    source: Layout
    target: Layout
    is_return: bool

    @classmethod
    def parse(cls, text: str, vector: ParameterVector, world_size: int) -> "Pair":
        """The pair of a text such as `master->dp4` or `dp2tp2->tp4`."""
        source, _, target = text.partition("->")
        master = master_layout(vector, world_size)
        if target == "master":
            return cls(text, gradient_layout(vector, Strategy.parse(source)), master, True)
        layouts = [
            master if word == "master" else strategy_layout(vector, Strategy.parse(word)) for word in (source, target)
        ]
        return cls(text, layouts[0], layouts[1], False)

    def plan(self, cluster: Cluster, element_size: int, planner: str = "relay") -> SwitchPlan:
        """The plan of the switch; elements of all segments are of one size."""
        sizes = [element_size] * len(self.source.placements)
        plan = plan_return if self.is_return else plan_load
        return plan(self.source, self.target, cluster, sizes, planner)


@dataclass
class Store:
    """What one rank holds of a layout: one allocation, and a view of it for each segment.

    Args:
        flat: All segments end to end.
        offsets: Where each segment begins in `flat`.
        buffers: The views; None where the rank holds nothing.
    """

    flat: torch.Tensor
    offsets: list[int]
    buffers: Buffers

    @classmethod
    def empty(cls, layout: Layout, rank: int, dtype: torch.dtype) -> "Store":
        sizes = layout.rank_sizes(rank)
        flat = torch.empty(sum(sizes), dtype=dtype).fill_(0)  # touched, so that it counts as resident memory
        offsets = list(accumulate(sizes[:-1], initial=0))
        views = [flat[o : o + size] if size else None for o, size in zip(offsets, sizes, strict=True)]
        return cls(flat, offsets, views)


def values(start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements at these positions of the vector: integers that every dtype used here can hold, ever different."""
    position = torch.arange(start, stop, dtype=torch.int64)
    return ((position * 2654435761 >> 13) % 251 - 125).to(dtype)


def fill(pair: Pair, store: Store, rank: int) -> None:
    """What a rank holds before a switch; a contribution is `values % 8 + rank`."""
    for interval, view in _views(pair.source, store, rank):
        found = values(interval[0], interval[1], store.flat.dtype)
        view.copy_(found % 8 + rank if pair.is_return else found)


def check(pair: Pair, store: Store, rank: int) -> None:
    """Raises when a switch (a return: into zeros) has not delivered exactly what it should."""
    for (start, stop), view in _views(pair.target, store, rank):
        if not pair.is_return:
            expected = values(start, stop, torch.float32)
        else:
            expected = torch.zeros(stop - start)
            own = values(start, stop, torch.float32) % 8
            for peer, holdings in enumerate(pair.source.holdings):
                for i in holdings:
                    low, high = max(i.start, start), min(i.stop, stop)
                    if low < high:
                        expected[low - start : high - start] += own[low - start : high - start] + peer
        if not torch.equal(view.to(torch.float32), expected):
            raise AssertionError(f"{pair.name}: rank {rank} holds wrong elements in [{start}, {stop})")


def _views(layout: Layout, store: Store, rank: int) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """`((start, stop), view)` of everything that a rank holds."""
    found = []
    for interval in layout.holdings[rank]:
        buffer = store.buffers[interval.segment]
        assert buffer is not None
        view = buffer[interval.offset : interval.offset + interval.length]
        found.append(((interval.start, interval.stop), view))
    return found


# -- timing -----------------------------------------------------------------------------------------------------------


def over_ranks(number: float, how: Any = dist.ReduceOp.MAX) -> float:
    """A number of every rank made one; a collective call."""
    value = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(value, op=how)
    return float(value)


def timed(work: Callable[[], object]) -> float:
    """Seconds of the slowest rank for a piece of work that all begin together; a collective call."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return over_ranks(time.perf_counter() - begin)


def interleaved(works: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of several pieces of work that take turns (A, B, C, A, B, C, ...); a collective call."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for index in range(-warmup, rounds):
        for name, work in works.items():
            took = timed(work)
            if index >= 0:
                seconds[name].append(took)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(of_name) for name, of_name in seconds.items()}


# -- results ----------------------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, aligned for reading as text."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])
