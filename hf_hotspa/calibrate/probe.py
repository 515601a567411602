"""Measures time and memory of small copies of a model with the engine's replicas, and communication between ranks.

`small_copy` makes a model of few layers and real widths from a config; `Probe` is an engine on such a copy.
Measurements: packs, switches and pipelines (`time_packs`); complete phases under every strategy (`time_phases`); if a
model has layers of several kinds, a layer of each kind alone, as a one-layer stage (`time_layers`); links, pipeline
hops and cp exchanges. Everything except `small_copy`, `layer_counts` and `kinds_of_layers` is collective.

All ranks start at the same time, and measurements take turns in rounds, so that disturbances affect all equally.
Messages use the transport of switches. `measure_link`: every rank sends to one neighbour and receives from the other at
the same time, as in a switch. `measure_hop`: one message goes to the neighbour and back without other traffic, as in a
pipeline. cp exchanges are the engine's (`parallel.context`), all groups of a strategy at the same time, as in training.
"""

import copy
import ctypes
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_hotspa.costs.calibration import ExchangeSample, FrozenBase, LayerSample, Link, PhaseSample, SwitchSample
from hf_hotspa.costs.fit import Sample
from hf_hotspa.costs.sizes import MASTER_BYTES, dtype_bytes
from hf_hotspa.costs.terms import Hop, form_of
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.phase import moment
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.layout.vector import BESIDE
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import ModelDescription, describe_model, dtype_name
from hf_hotspa.packing.bucketing import pack_sequences
from hf_hotspa.parallel.agreement import Agreement, as_hotspa_error
from hf_hotspa.parallel.context import ContextGroup, gathered, scattered_sum
from hf_hotspa.parallel.mesh import ProcessGroups, StrategyMesh
from hf_hotspa.strategy import Bucket, Strategy

_TIMES = 5


@dataclass(frozen=True)
class Measuring:
    """The context of all measurements. Its methods are collective."""

    agreement: Agreement  # host-side barrier and gather
    device: torch.device
    share: float  # cores per rank. From 1 on, waiting is part of a cost; below, ranks take turns on a core
    rounds: int  # how often everything is measured, after one warm-up round
    say: Callable[[str], object]  # called with each step as text
    until: float = math.inf  # deadline of this rank on the clock of `time.perf_counter`; infinite for none

    def is_late(self) -> bool:
        """Whether any rank is past its deadline; then optional measurements are skipped."""
        return self.until < math.inf and bool((self.agreement.gather([time.perf_counter() - self.until]) > 0).any())

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Returns this rank's seconds by the clock, and the core time of its threads."""
        self.agreement.barrier()
        begin, on_core = time.perf_counter(), time.process_time()
        run()
        return moment(self.device) - begin, time.process_time() - on_core

    def repeated(self, run: Callable[[], object]) -> Tensor:
        """Runs `run` a few times after one warm-up; returns seconds by the clock, [rank, run]."""
        return self.agreement.gather([self.timed(run)[0] for _ in range(_TIMES + 1)][1:])


# -- links and hops ------------------------------------------------------------------------------------------------

_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_TOKENS = (16, 512, 4096)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits `(latency, seconds per byte)` to messages of these sizes: least squares on relative errors, >= 0."""
    measured = np.asarray(seconds)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / measured[:, None]
    latency, each = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0].tolist()
    if latency < 0:
        latency, each = 0.0, float(np.median(measured / np.asarray(sizes)))
    return latency, max(each, 1e-15)


def measure_link(transport: ProcessGroupTransport, world_size: int, apart: int, measuring: Measuring) -> Link:
    """Measures latency and bandwidth while every rank sends to the rank `apart` after it. Collective. `apart`: 1 for
    the neighbour on the node; the devices of a node for the neighbour on the next node."""
    rank = transport.rank
    peer, source = (rank + apart) % world_size, (rank - apart) % world_size
    out, into = (torch.zeros(max(_SIZES), dtype=torch.uint8, device=measuring.device) for _ in range(2))

    def both(size: int) -> None:
        transport.send(out[:size], peer, 0)
        transport.recv(into[:size], source, 0)
        transport.start().wait()

    latency, each = line(_SIZES, [float(measuring.repeated(partial(both, n)).amax(0).min()) for n in _SIZES])
    return Link(latency, 1 / each)


def measure_hop(transport: ProcessGroupTransport, apart: int, token_bytes: int, measuring: Measuring) -> Hop:
    """Measures half of the time from rank 0 to rank `apart` and back, for tokens of `token_bytes`. Collective."""
    buffer = torch.zeros(max(_TOKENS) * token_bytes, dtype=torch.uint8, device=measuring.device)

    def there_and_back(count: int) -> None:
        message, is_first = buffer[: count * token_bytes], transport.rank == 0
        for channel in (0, 1) if transport.rank in (0, apart) else ():
            move = transport.send if is_first == (channel == 0) else transport.recv
            move(message, apart if is_first else 0, channel)
            transport.start().wait()

    taken = [float(measuring.repeated(partial(there_and_back, n))[0].min()) / 2 for n in _TOKENS]
    return Hop(*line(_TOKENS, taken))


# -- exchanges of cp -----------------------------------------------------------------------------------------------

_EXCHANGES: tuple[Literal["all_to_all", "gather"], ...] = ("all_to_all", "gather")
_EXCHANGED = (64 << 10, 4 << 20)  # bytes of a rank's tensor in an all-to-all, and of its result of a gather


def context_layouts(world_size: int, degrees: Iterable[int]) -> list[Strategy]:
    """Returns the strategies whose cp groups are measured: every cp with each tp of `degrees`, the rest replicas."""
    return [
        Strategy(world_size // (tp * cp), tp, cp=cp)
        for tp in sorted(set(degrees))
        for cp in range(2, world_size // tp + 1)
        if world_size // tp % cp == 0
    ]


def measure_exchanges(
    groups: ProcessGroups, layouts: Iterable[Strategy], measuring: Measuring
) -> tuple[ExchangeSample, ...]:
    """Measures both exchanges in two sizes: the slowest rank's seconds in the fastest of a few runs. Collective.

    If ranks share cores, a rank's share of the seconds counts, as on its own core: the time model adds them up. There
    are four samples for each layout, a strategy of the complete world with cp above 1; the same on every rank.
    """
    samples = []
    for layout in layouts:
        made = {ranks: groups.group(ranks) for ranks in layout.groups("cp")}
        group = made[layout.group_of(groups.rank, "cp")]
        assert group is not None
        context = ContextGroup(group, layout.cp, dist.get_rank(group))
        for size in _EXCHANGED:
            own = torch.zeros(layout.cp, max(1, size // 4 // layout.cp), device=groups.device)
            for name in _EXCHANGES:
                seconds = measuring.repeated(partial(_exchange, name, own, context))
                seconds_each = float(seconds.amax(0).min()) * min(1.0, measuring.share)
                samples.append(ExchangeSample(name, layout.cp, layout.tp, context.sent_bytes, seconds_each))
    return tuple(samples)


def _exchange(name: str, own: Tensor, context: ContextGroup) -> None:
    """Afterwards `context.sent_bytes` is of this exchange alone."""
    context.sent_bytes = 0
    work, _ = scattered_sum(own, context) if name == "all_to_all" else gathered(own[0], own.shape[1], context)
    work.wait()


# -- the probe --------------------------------------------------------------------------------------------------------


_BLOCK = 1 << 16
_WIDEST_PATTERN = 6
_MOST_LAYERS, _MANY_WEIGHTS = 8, 1 << 28
_TRIAL_BYTES = 64 << 20
_MALLOC_TRIM, _MALLOC_MMAP = -1, -3  # names of mallopt's parameters in glibc
_WORTH_COUNTING, _LARGEST_DYNAMIC = 1 << 16, 32 << 20
Packs = Sequence[tuple[int, ...]]  # packs of a replica, as sequence lengths
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def layer_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns the layers of the two copies: one, and as many as the model has or measuring allows. If kinds of layers
    alternate: one and two periods of the pattern.

    More layers are more realistic: a single layer still has its activations in the processor's caches.
    """
    text = config.get_text_config()
    total: int = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or [])
    if len(set(kinds)) > 1 and len(kinds) == total:
        for period in range(2, min(_WIDEST_PATTERN, total // 2) + 1):
            if kinds[period:] == kinds[:-period]:
                return period, 2 * period
    wide = _MANY_WEIGHTS / (12 * text.hidden_size**2)  # a usual layer has 12 h^2 weights
    return 1, min(max(2, total), max(3, min(_MOST_LAYERS, int(wide))))


def small_copy(
    config: PreTrainedConfig, num_layers: int, dtype: torch.dtype, device: torch.device | None = None
) -> PreTrainedModel:
    """Makes a model of `num_layers` layers with the config's widths and random weights, equal on all ranks.

    Does not change the config or torch's random state. Weights repeat one block: drawing billions of numbers takes
    minutes. `device`: the CPU if None. On the meta device weights are not allocated.
    """
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):  # products of the compute dtype are measured
        del small.quantization_config
    text = small.get_text_config()
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):  # fields with one entry per layer, such as layer_types
        if isinstance(value, list) and len(value) == total and name != "architectures":
            setattr(text, name, value[:num_layers] + value[: max(0, num_layers - total)])
    text.num_hidden_layers = num_layers
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=dtype)
    device = device or torch.device("cpu")
    if device.type == "meta":
        return model.train()
    block = random_block().to(device, dtype)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(probe_weights(parameter.shape, block))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, made[id(parameter)])
    return model.train()


def with_frozen_base(model: PreTrainedModel, base: FrozenBase) -> nn.Module:
    """Converts the decoder's linear layers of a `small_copy` to the base's form and adds an adapter on all of them.
    Packed weights repeat one block, like the weights. Does not change torch's random state."""
    from peft import LoraConfig, get_peft_model

    form_of(base.kind).convert(model, base.kind, random_block())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = LoraConfig(r=base.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, adapter).train()


def random_block() -> Tensor:
    """Returns the numbers that `probe_weights` repeats, fp32 on the CPU. Does not change torch's random state."""
    return torch.empty(_BLOCK).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))


def probe_weights(shape: torch.Size, block: Tensor) -> Tensor:
    """Returns a probe's parameter: matrices repeat the block, so a router chooses all experts equally; norms are 1."""
    count = shape.numel()
    values = block.repeat(-(-count // len(block)))[:count] if len(shape) > 1 else block.new_ones(count)
    return values.view(shape)


def micro_batch(lengths: Sequence[int], vocab_size: int, device: torch.device) -> MicroBatch:
    """Returns a pack of random tokens; all but the last token of each sequence have labels."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    ids = torch.randint(0, vocab_size, (1, total), generator=generator)
    ends = torch.tensor(lengths).cumsum(0)
    labels = ids.roll(-1, 1)
    labels[0, ends - 1] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    return MicroBatch(ids, positions, labels, cu_seqlens, tuple(lengths), total - len(lengths)).to(device)


class PeakMemory:
    """The peak of this process's memory between `start` and `stop`: allocator statistics, or resident pages on CPU.

    On CPU it counts live memory only inside `freeing_at_once`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, 0

    @property
    def works(self) -> bool:
        """Whether this system can measure it."""
        if self.device.type == "cuda":
            return True
        try:
            self.start()
            block = torch.ones(_TRIAL_BYTES, dtype=torch.uint8)
            del block
            first = self.stop()
            self.start()
            return first >= _TRIAL_BYTES * 0.9 and self.stop() < _TRIAL_BYTES / 2
        except (OSError, KeyError):
            return False

    def start(self) -> None:
        self.restart()
        if self.device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _resident("VmRSS")

    def restart(self) -> None:
        """Resets the peak, and returns free memory to the system, as it would hide a new peak."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        trim_heap()
        _CLEAR_REFS.write_text("5")

    def stop(self) -> int:
        """Returns the bytes of the peak above the start."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _resident("VmHWM") - self._before


def trim_heap() -> None:
    """Returns freed memory to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Makes large tensors system allocations that are returned when freed: resident pages are live memory (glibc only).

    Otherwise free heap memory hides parts of a peak, and holes in the heap add to it: up to 40 % of the activations of
    small models. Enter it before the heap grows.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    # by default glibc adapts the limit up to 32 MiB; setting it fixes it
    for largest in (_WORTH_COUNTING, _LARGEST_DYNAMIC):
        mallopt(_MALLOC_MMAP, largest)
        mallopt(_MALLOC_TRIM, 2 * largest)
        if largest == _WORTH_COUNTING:
            yield


def _resident(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024


class Probe:
    """An engine on a small copy of a model."""

    def __init__(
        self,
        model: nn.Module,
        degrees: Sequence[int],  # tensor-parallel degrees; each runs on as many replicas as fit the world
        compute_dtype: torch.dtype,
        measuring: Measuring,
        others: Sequence[Strategy] = (),  # strategies for complete phases
    ) -> None:
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.strategies = {tp: Strategy(world_size // tp, tp, 1) for tp in degrees}
        self.num_layers: int = cast(PreTrainedConfig, model.config).get_text_config().num_hidden_layers
        # a pipeline of two stages, if possible
        self.pipeline = Strategy(world_size // 2, 1, 2) if world_size % 2 == 0 and self.num_layers > 1 else None
        engines = dict.fromkeys([*self.strategies.values(), *([self.pipeline] if self.pipeline else []), *others])
        # bucket lengths do not matter: packs go directly to the phases
        buckets = [Bucket(s, edge, edge, edge - 1) for edge, s in enumerate(engines, 1)]
        options = EngineOptions(compute_dtype=compute_dtype, overlap_load=False, overlap_return=False)
        self.engine = HotSPaEngine(model, buckets, options, device=measuring.device)
        self._measuring = measuring
        self._packs: dict[tuple[int, ...], MicroBatch] = {}

    def _pack(self, lengths: tuple[int, ...]) -> MicroBatch:
        if lengths not in self._packs:
            vocab_size = self.engine.description.shape.vocab_size
            self._packs[lengths] = micro_batch(lengths, vocab_size, self._measuring.device)
        return self._packs[lengths]

    def load(self, strategy: Strategy) -> float:
        """Makes a strategy active; returns seconds on this rank."""
        return self._measuring.timed(self.engine.phases[strategy].load)[0]

    def return_gradients(self, strategy: Strategy) -> float:
        """Returns its gradients and releases it; returns seconds on this rank."""
        return self._measuring.timed(self.engine.phases[strategy].return_gradients)[0]

    def run(self, strategy: Strategy, lengths: tuple[int, ...], times: int) -> tuple[float, float]:
        """Runs forward and backward of a pack on every replica, `times` in a row. Returns cost of one run on this rank:
        seconds by the clock, and core time of this process's threads."""
        clock, on_core = self._timed(strategy, [lengths] * times)
        return clock / times, on_core / times

    def run_phase(self, strategy: Strategy, replicas: Sequence[Packs]) -> float:
        """Runs forward and backward of a complete phase with packs for each replica; returns seconds on this rank."""
        return self._timed(strategy, replicas[strategy.coord(self.engine.rank).dp])[0]

    def _timed(self, strategy: Strategy, packs: Packs) -> tuple[float, float]:
        made, scale = [self._pack(lengths) for lengths in packs], 1.0 / sum(map(sum, packs))
        return self._measuring.timed(lambda: self.engine.phases[strategy].compute(made, scale))

    def peak(self, strategy: Strategy, lengths: tuple[int, ...]) -> int:
        """Returns the peak bytes of forward and backward of a pack on this rank, beyond weights and gradients."""
        memory, pack = PeakMemory(self._measuring.device), self._pack(lengths)
        self._measuring.agreement.barrier()
        memory.start()
        self.engine.phases[strategy].compute([pack], 1.0 / sum(lengths))
        return memory.stop()

    def close(self) -> None:
        self.engine.close()


def pack_lengths(longest: int, last: int = 0) -> tuple[tuple[int, ...], ...]:
    """Returns packs that determine a, b and c: three single sequences, two packs of shorter ones, and longer sequences.

    The longer sequences are for one copy: kernels work in blocks, and quadratic cost shows only in long sequences.
    `longest` and `last`: tokens of the longest pack before these, and of the last of them, which is there if it is
    longer than `longest`; one of `4 * longest` precedes a longer one.
    """
    middle, short = max(1, longest // 4), max(1, longest // 16)
    packs = (short,), (middle,), (longest,), (short,) * (middle // short), (middle,) * (longest // middle)
    longer = [(tokens,) for tokens in (4 * longest, last) if longest < tokens <= last]
    return (*packs, *dict.fromkeys(longer))


# -- seconds of packs, of switches and of pipelines ----------------------------------------------------------------

_PIPELINED = 2  # packs of a replica without stages in the comparison with pipelines, which run twice as many
_WARM_UP_PACKS = 2  # packs of each copy in the warm-up round; the first packs are short and fast
_MOST_IDLE = 1.5
"""Largest factor of waiting for other ranks on the cost of packs on shared cores; more is due to other programs."""


@dataclass(frozen=True)
class Timing:
    """Measurements, equal on all ranks. `pipeline_factor`: relative cost of packs in stages on shared cores, or 1."""

    samples: tuple[Sample, ...]
    switches: tuple[SwitchSample, ...]
    pipeline_factor: float


def time_packs(
    probes: Sequence[Probe], degrees: Sequence[int], packs: Sequence[Sequence[tuple[int, ...]]], measuring: Measuring
) -> Timing:
    """Measures packs and switches. Collective.

    Seconds of a pack are by the slowest rank's clock; core time if ranks share cores (`_on_shared_cores`). `probes` and
    `packs`: of each copy of the model; the last has the most layers.
    """
    share, rounds = measuring.share, measuring.rounds
    longest = max(map(max, packs[-1]))
    pipeline = probes[-1].pipeline if share < 1 else None
    measured: list[list[tuple[float, float]]] = []
    for index in range(-1, rounds):
        measuring.say(f"round {index + 1} of {rounds}, packs of up to {max(map(max, packs[0]))} tokens")
        values: list[tuple[float, float]] = []
        for probe, mine in zip(probes, packs, strict=True):
            for strategy in map(probe.strategies.__getitem__, degrees):
                values.append((probe.load(strategy), 0.0))
                run = mine if index >= 0 else mine[:_WARM_UP_PACKS]
                # short packs run twice in a row, to stand out from noise
                values += [probe.run(strategy, pack, 2 if sum(pack) < longest else 1) for pack in run]
                values.append((probe.return_gradients(strategy), 0.0))
        if pipeline:
            values += _both_ways(probes[-1], (longest // 4,) * 4)
        if index >= 0:  # the first round is the warm-up
            measured.append(values)
        if measured and measuring.is_late():
            break
    gathered = torch.stack([measuring.agreement.gather([n for pair in values for n in pair]) for values in measured])
    table = gathered.unflatten(2, (-1, 2))  # [round, rank, measurement, clock or core time]
    clock, on_core = table[..., 0].amax(1), table[..., 1].mean(1)
    slowest = _lower_quartile(clock)
    factor = 1.0
    if pipeline:
        flat, staged = _lower_quartile(on_core[:, -2:]).tolist()
        factor = min(max(1.0, staged / flat), _MOST_IDLE)
    costs = iter((slowest if share >= 1 else _on_shared_cores(clock, on_core, share)).tolist())
    by_clock = iter(slowest.tolist())
    samples, switches = [], []
    for probe, mine in zip(probes, packs, strict=True):
        for tp in degrees:
            load_s, *_, return_s = [next(by_clock) for _ in range(len(mine) + 2)]
            _, *pack_s, _ = [next(costs) for _ in range(len(mine) + 2)]
            samples += [Sample(tp, probe.num_layers, p, s, with_ends=True) for p, s in zip(mine, pack_s, strict=True)]
            numel = _moved(probe.engine.description)
            switches.append(SwitchSample(str(probe.strategies[tp]), numel, load_s, return_s))
    return Timing(tuple(samples), tuple(switches), factor)


def _moved(description: ModelDescription) -> int:
    """Parameters of a fully trained model that moves the same bytes in a switch; codes and scales are smaller."""
    weights = dtype_bytes(dtype_name(description.compute_dtype))
    segments = [segment for segment in description.vector.segments if segment.unit != BESIDE]
    gradients = sum(segment.numel for segment in segments if segment.trainable)
    loaded = sum(segment.numel * dtype_bytes(segment.dtype) for segment in segments)
    return round((loaded + MASTER_BYTES * gradients) / (weights + MASTER_BYTES))


def _both_ways(probe: Probe, pack: tuple[int, ...]) -> list[tuple[float, float]]:
    """Costs of the same packs without stages and in two stages, on this rank."""
    assert probe.pipeline is not None
    pairs = []
    for strategy in (probe.strategies[1], probe.pipeline):
        times = _PIPELINED * strategy.pp  # half the replicas, so each has twice the packs
        probe.load(strategy)
        clock, on_core = probe.run(strategy, pack, times)
        probe.return_gradients(strategy)
        pairs.append((clock * times, on_core * times))
    return pairs


def _lower_quartile(rounds: Tensor) -> Tensor:
    """Over the rounds, for each measurement: other programs can only make it slower."""
    return rounds.quantile(0.25, 0, interpolation="lower")


def _on_shared_cores(clock: Tensor, on_core: Tensor, share: float) -> Tensor:
    """Returns the cost of packs if ranks share cores.

    The cost is the core time of a rank's threads, which excludes waiting for a core. But ranks of a tensor-parallel
    group also leave cores idle while they wait for each other. The fastest round by the clock shows this, and it counts
    up to a limit. Both are [rounds, measurements]: seconds by the clock of the slowest rank, and the mean over ranks of
    core time.
    """
    cost = _lower_quartile(on_core)
    return torch.maximum(cost, torch.minimum(clock.amin(0) * share, _MOST_IDLE * cost))


# -- complete phases under every strategy, to compare with predictions from single packs ----------------------------


def mixed_lengths(longest: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the sequence lengths of the two mini-batches: half a longest pack per rank, at least two in all."""
    short, middle = max(1, longest // 16), max(1, longest // 8)
    total = max(2, world_size // 2) * longest
    return (longest, *[short] * ((total - longest) // short)), (middle,) * (total // middle)


def time_phases(
    probe: Probe, strategies: Sequence[Strategy], longest: int, measuring: Measuring
) -> tuple[PhaseSample, ...]:
    """Measures complete phases; the fastest run counts. Collective."""
    if len(strategies) < 2:  # there is no choice to make
        return ()
    measuring.say(f"complete phases under {len(strategies)} strategies")
    world_size, quadratic = strategies[0].world_size, probe.engine.description.shape.quadratic_cost
    works: dict[Strategy, list[tuple[tuple[tuple[int, ...], ...], ...]]] = {s: [] for s in strategies}
    for lengths in mixed_lengths(longest, world_size):
        for s, mine in works.items():
            replicas = pack_sequences(lengths, capacity=longest, dp=s.dp, pp=s.pp, quadratic_cost=quadratic)
            if all(replicas):
                mine.append(tuple(tuple(tuple(lengths[i] for i in pack) for pack in packs) for packs in replicas))
    measured = []
    for _ in range(measuring.rounds + 1):
        values = []
        for strategy, mine in works.items():
            probe.load(strategy)
            values += [probe.run_phase(strategy, packs) for packs in mine]
            probe.return_gradients(strategy)
        measured.append(values)
    gathered = torch.stack(
        [measuring.agreement.gather(values) for values in measured[1:]]
    )  # [round, rank, measurement]
    seconds = iter(gathered.amax(1).amin(0).tolist())
    return tuple(
        PhaseSample(str(s), probe.num_layers, packs, next(seconds)) for s, mine in works.items() for packs in mine
    )


# -- layers one by one, where a model has several kinds ------------------------------------------------------------

_PLACE = ("layer", "idx", "index", "number")
"""Parts of the names of settings that identify a layer and do not affect its computation."""
_WEIGHT = 0.02


def kinds_of_layers(model: nn.Module, description: ModelDescription) -> tuple[tuple[int, ...], ...]:
    """Groups the indices of decoder layers by kind, in order of first appearance.

    Layers are of one kind if their modules, module settings (a window, a number of heads) and parameter shapes are
    equal. Returns no kinds for models without pipeline support, which do not need them. The complete model may be on
    the meta device.
    """
    shape = description.shape
    if shape.num_layers < 2 or Strategy(pp=shape.num_layers).unsupported_reason(shape) is not None:
        return ()
    layers = model.get_submodule(description.base).get_submodule(description.layers[0])
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((description.layer_kinds[index], _signature(layer)), []).append(index)
    return tuple(map(tuple, kinds.values()))


def _signature(layer: nn.Module) -> Hashable:
    modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _settings(module: nn.Module) -> Hashable:
    """The settings of a module that may affect the cost of its computation; float factors do not."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | str | None)
        and not name.startswith("_")
        and not (type(value) is int and any(part in name for part in _PLACE))
    )


class _Layer:
    """One decoder layer on this rank, with the arguments of its model's call."""

    def __init__(self, description: ModelDescription, index: int, pack: MicroBatch, device: torch.device) -> None:
        one_each = Strategy(pp=description.shape.num_layers)  # the stage of this index has this layer
        mesh = StrategyMesh(one_each, index, one_each.coord(index), None, None)
        options = EngineOptions(compute_dtype=description.compute_dtype)
        self._replica = Replica(description, mesh, device, {}, options)
        self._layer, self._pack = self._replica.layers[index], pack
        self._dtypes = [
            (getattr(torch, s.dtype), getattr(torch, options.gradients.accumulated(s.dtype)))
            for s in description.vector.segments
        ]
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def prepare(self) -> None:
        """Allocates weights, and records the arguments of the layer's call. `release` frees both."""
        replica, device = self._replica, self._replica.device
        weights, gradients = list[Tensor](), list[Tensor]()
        for segment, (dtype, of_gradients) in enumerate(self._dtypes):
            numel = max((s.offset + s.numel for s in replica.slots if s.segment == segment), default=0)
            weights.append(torch.full((numel,), _WEIGHT, dtype=dtype, device=device))
            gradients.append(torch.zeros(numel, dtype=of_gradients, device=device))
        replica.bind(weights, gradients)
        block = random_block()
        with torch.no_grad():
            for parameter, _ in replica.parameters:
                parameter.copy_(probe_weights(parameter.shape, block))
        shape = replica.hidden_shape(self._pack)
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, replica.compute_dtype)
        caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handle = self._layer.register_forward_pre_hook(
            lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            replica.forward(self._pack, None if replica.is_first else hidden, 1.0, with_loss=False)
        handle.remove()
        (self._call,) = caught

    def run(self) -> None:
        args, kwargs = self._call
        args, kwargs = tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}
        out = self._layer(*args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))

    def release(self) -> None:
        self._call = ((), {})
        self._replica.release()


def _leaf(value: object) -> object:
    """Makes a hidden state require a gradient, as for a layer in the middle."""
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def time_layers(model: PreTrainedModel, longest: int, measuring: Measuring) -> tuple[LayerSample, ...]:
    """Measures a layer of each kind of a model on the meta device; the fastest run counts. Returns one sample per kind,
    the same on every rank; none if all layers are of one kind. Collective."""
    description = describe_model(model)
    kinds = kinds_of_layers(model, description)
    if len(kinds) < 2:
        return ()
    measuring.say(f"layers of {len(kinds)} kinds, one by one")
    device, agreement = measuring.device, measuring.agreement
    pack = micro_batch((longest,), description.shape.vocab_size, device)
    # prefer a layer in the middle, whose stage has no embedding or head
    chosen = [kind[len(kind) // 2] for kind in kinds]
    layers = agreement.run(
        "calibration",
        lambda: [_Layer(description, index, pack, device) for index in chosen],
        otherwise=lambda failure: as_hotspa_error(failure, "calibration"),
    )
    measured = [[_seconds(layer, measuring) for layer in layers] for _ in range(measuring.rounds + 1)]
    gathered = torch.stack([agreement.gather(values) for values in measured[1:]])  # [round, rank, kind]
    seconds = (gathered.mean(1) if measuring.share < 1 else gathered.amax(1)).amin(0).tolist()
    return tuple(LayerSample(kind, (longest,), s) for kind, s in zip(kinds, seconds, strict=True))


def _seconds(layer: _Layer, measuring: Measuring) -> float:
    """Seconds of one forward and backward on this rank, after a first run that allocates buffers. Core time if ranks
    share cores (see `time_packs`)."""
    layer.prepare()
    measuring.timed(layer.run)
    clock, on_core = measuring.timed(layer.run)
    layer.release()
    return on_core if measuring.share < 1 else clock
