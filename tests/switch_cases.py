"""Random switches with known answers, for the loopback and the gloo tests alike.

Every rank builds the same case from a seed: layouts, plan, the buffers of all ranks before the switch and after it.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.executor import SwitchExecutor, SwitchStats
from hf_hotspa.layout.placement import Layout, gradient_layout, strategy_layout
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.plan import rounds
from hf_hotspa.plan.planner import PLANNERS, plan_load, plan_return
from hf_hotspa.plan.switch_plan import RELAY, SECOND, SOURCE, TARGET, WINDOW_ALIGNMENT, SwitchPlan
from tests.loopback import LoopbackHub
from tests.random_models import random_master_layout, random_model

Buffers = list[torch.Tensor | None]
POISON = 0xA5


@dataclass(frozen=True)
class Case:
    """A switch of a whole world: `sources[rank][segment]`, and what `targets` hold before and after it.

    `seconds` are the buffers of a second source, the weights of the strategy that ran before; `native` the stores in
    the dtype of the wire, of which stretches of `direct_bytes` go from buffer to buffer.
    """

    vector: ParameterVector
    source: Layout
    target: Layout
    plan: SwitchPlan
    sources: list[Buffers]
    targets: list[Buffers]
    expected: list[Buffers]
    wires: list[torch.dtype | None]
    staging_bytes: int
    seconds: list[Buffers] | None = None
    native: frozenset[int] = frozenset()
    direct_bytes: int = 1 << 17

    @property
    def world_size(self) -> int:
        return self.plan.world_size


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in which NaN equals itself and -0.0 differs from 0.0."""
    return tensor.view(torch.uint8)


def poisoned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of bytes that no test expects."""
    return torch.full((numel * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype)


def random_bits(generator: torch.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern of the dtype: NaN payloads, infinities, denormals, -0.0."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    values = raw.view(dtype)
    if dtype.is_floating_point and numel > 2:
        values[0], values[1] = -0.0, float("nan")
    return values


def random_values(generator: torch.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes, -0.0 and infinity: conversions of these are defined to the bit, those of NaN are not."""
    if not dtype.is_floating_point:
        return random_bits(generator, numel, dtype)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(
        -20, 14, (numel,), generator=generator
    )
    values[: numel // 10] = -0.0
    values[numel // 2 : numel // 2 + 1] = float("inf")
    return values.to(dtype)


def scatter(vector: ParameterVector, layout: Layout, full: Sequence[torch.Tensor]) -> list[Buffers]:
    """The buffers of all ranks, given the whole segments; the places that the layout does not list are poisoned."""
    world: list[Buffers] = []
    for holdings, sizes in zip(layout.holdings, layout.sizes, strict=True):
        buffers: Buffers = [
            poisoned(size, tensor.dtype) if size else None for size, tensor in zip(sizes, full, strict=True)
        ]
        for interval in holdings:
            segment, buffer = vector.segments[interval.segment], buffers[interval.segment]
            assert buffer is not None
            values = full[interval.segment][interval.start - segment.start : interval.stop - segment.start]
            buffer[interval.offset : interval.offset + interval.length] = values
        world.append(buffers)
    return world


def random_staging(rng: random.Random, world_size: int, numel: int) -> int:
    """From windows of one or two elements to everything in one round."""
    peers = max(1, world_size - 1)
    return 2 * peers * WINDOW_ALIGNMENT * rng.choice((max(1, numel // 256), rng.randint(2, 64), 1 << 20)) + rng.randint(
        0, 15
    )


def load_case(seed: int, kind: str, world_size: int | None = None) -> Case:
    """A load: `master` -> strategy (which converts fp32 to the model's dtype), `strategy` -> strategy (any bits), or
    `pair`: from the master store and the strategy before."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model = random_model(rng)
    vector, world_size = model.vector, world_size or rng.randint(1, 8)
    strategies = model.strategies(world_size)
    target = strategy_layout(vector, rng.choice(strategies))
    dtypes = [torch_dtype(segment.dtype) for segment in vector.segments]
    if kind in ("master", "pair"):
        source = random_master_layout(rng, vector, world_size)
        held = [torch_dtype(segment.master_dtype) for segment in vector.segments]
    else:
        source = strategy_layout(vector, rng.choice(strategies))
        held = dtypes
    full = [
        (random_bits if held_dtype == dtype else random_values)(generator, segment.numel, held_dtype)
        for segment, dtype, held_dtype in zip(vector.segments, dtypes, held, strict=True)
    ]
    cast = [tensor.to(dtype) for tensor, dtype in zip(full, dtypes, strict=True)]
    current = strategy_layout(vector, rng.choice(strategies)) if kind == "pair" else None
    plan = plan_load(
        [source, current] if current else source,
        target,
        random_cluster(rng, world_size),
        [d.itemsize for d in dtypes],
        random_planner(rng),
    )
    after = scatter(vector, target, cast)
    before: list[Buffers] = [[None if b is None else poisoned(b.numel(), b.dtype) for b in rank] for rank in after]
    staging = random_staging(rng, world_size, vector.numel)
    seconds = scatter(vector, current, cast) if current else None
    sources = scatter(vector, source, full)
    native = frozenset({SECOND, RELAY, TARGET} | (set() if kind in ("master", "pair") else {SOURCE}))
    direct = rng.choice((16, 64, 1 << 17))
    return Case(vector, source, target, plan, sources, before, after, list(dtypes), staging, seconds, native, direct)


@contextmanager
def direct_messages(case: Case) -> Iterator[None]:
    """Rounds are cut with the case's idea of a long stretch while this lasts."""
    with patch.multiple(rounds, DIRECT_BYTES=case.direct_bytes, DIRECT_LIMIT=max(case.direct_bytes, 64)):
        yield


def random_cluster(rng: random.Random, world_size: int) -> Cluster:
    """Nodes of any size, each device with its own NIC or all sharing one."""
    return Cluster(world_size, rng.randint(1, world_size), nics_per_node=rng.choice((None, 1)))


def random_planner(rng: random.Random) -> str:
    """Any planner, the default one most often."""
    return rng.choice((PLANNERS[0], *PLANNERS))


def return_case(seed: int, world_size: int | None = None) -> Case:
    """A gradient return of small integers, whose sums are exact in every dtype and every order.

    What a rank must not send (the other tp coordinates' parts of a replicated gradient) is NaN.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model = random_model(rng)
    vector, world_size = model.vector, world_size or rng.randint(1, 8)
    contributions = gradient_layout(vector, rng.choice(model.strategies(world_size)))
    master = random_master_layout(rng, vector, world_size)
    narrow = rng.random() < 0.5  # gradients in the model's dtype, else in that of the master store
    wires, totals, accumulated = [], [], []
    for segment in vector.segments:
        gradient = segment.dtype if narrow else segment.master_dtype
        wires.append(torch_dtype(gradient) if segment.trainable else None)
        start = torch.randint(-4, 5, (segment.numel,), generator=generator).to(torch_dtype(segment.master_dtype))
        accumulated.append(start)
        totals.append(start.clone())
    sources = []
    for holdings, sizes in zip(contributions.holdings, contributions.sizes, strict=True):
        buffers: Buffers = [
            torch.full((size,), float("nan"), dtype=wire) if size and wire is not None else None
            for size, wire in zip(sizes, wires, strict=True)
        ]
        for interval in holdings:
            segment, buffer = vector.segments[interval.segment], buffers[interval.segment]
            assert buffer is not None
            values = torch.randint(-8, 9, (interval.length,), generator=generator)
            buffer[interval.offset : interval.offset + interval.length] = values
            totals[interval.segment][interval.start - segment.start : interval.stop - segment.start] += values
        sources.append(buffers)
    return Case(
        vector,
        contributions,
        master,
        plan_return(
            contributions,
            master,
            random_cluster(rng, world_size),
            [wire.itemsize if wire else 1 for wire in wires],
            random_planner(rng),
        ),
        sources,
        scatter(vector, master, accumulated),
        scatter(vector, master, totals),
        wires,
        random_staging(rng, world_size, vector.numel),
    )


def make_case(seed: int, world_size: int | None = None) -> Case:
    """One case of every kind in turn."""
    kind = ("master", "return", "strategy", "pair")[seed % 4]
    return return_case(seed, world_size) if kind == "return" else load_case(seed, kind, world_size)


def check_rank(case: Case, rank: int, found: Buffers) -> None:
    """Compares one rank's target buffers with the expected ones, bit for bit."""
    for segment, (expected, buffer) in enumerate(zip(case.expected[rank], found, strict=True)):
        assert (expected is None) == (buffer is None)
        if expected is not None and buffer is not None:
            assert torch.equal(bits(expected), bits(buffer)), f"{case.plan.name}: rank {rank}, segment {segment}"


def clone(world: list[Buffers]) -> list[Buffers]:
    return [[None if buffer is None else buffer.clone() for buffer in buffers] for buffers in world]


def drive(
    case: Case,
    targets: list[Buffers],
    rng: random.Random,
    *,
    staging_bytes: int | None = None,
    progress: Callable[[int], Any] | None = None,  # what stands for a `SwitchJob`, by rank
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> list[SwitchStats]:
    """Runs a switch of all ranks in this thread, and checks that memory is bounded, predicted, and allocated once.

    `devices` are those of the computation and of the master store.
    """
    hub, epoch = LoopbackHub(case.world_size), rng.randint(0, 1 << 20)
    executors, runs, staging = [], [], staging_bytes or case.staging_bytes
    for rank in range(case.world_size):
        executor = SwitchExecutor(
            hub.transport(rank),
            rank,
            staging,
            devices[0],
            native=case.native,
            by_layer=epoch % 2 == 0,
            master_device=devices[1],
        )
        with direct_messages(case):
            predicted = executor.extra_bytes([(case.plan, case.wires)])
        assert executor.reserved_bytes == 0
        executor.prepare(case.plan, case.wires)
        relayed = sum(buffer.numel() for buffer in executor._relay)
        assert executor.reserved_bytes == predicted <= 2 * staging + relayed
        assert relayed == 0 or len(case.plan.links) > 1
        second = case.seconds[rank] if case.seconds else None
        given = case.wires, epoch, progress(rank) if progress else None, second
        runs.append(executor.steps(case.plan, case.sources[rank], targets[rank], *given))
        executors.append((executor, predicted))
    stats = in_turn(runs, rng)
    hub.close()
    assert all(executor.reserved_bytes == predicted for executor, predicted in executors), "running allocates"
    return stats


def in_turn(runs: Sequence[Generator[None, None, SwitchStats]], rng: random.Random) -> list[SwitchStats]:
    """Steps all ranks of a switch in this thread until all have ended, in another random order in every step."""
    stats: dict[int, SwitchStats] = {}
    while not stats:
        for rank in rng.sample(range(len(runs)), len(runs)):
            try:
                next(runs[rank])
            except StopIteration as end:
                stats[rank] = end.value
        assert not stats or len(stats) == len(runs), "ranks have different numbers of rounds"
    return [stats[rank] for rank in range(len(runs))]
