"""Runs a small copy of a model with the engine's own replicas, and measures time and memory.

Owns `small_copy` (a model of few layers and real widths, made from its config), `Probe` (one engine on such a copy), and what is
measured with it: seconds of packs, switches and pipelines (`time_packs`), whole phases under every strategy (`time_phases`), and, where a
model has layers of several kinds, a layer of each kind alone, as a stage that has no other (`time_layers`); of layers that are all alike
single packs say what they take. Everything but `small_copy`, `layer_counts` and
`kinds_of_layers` is collective.

How the ranks of a calibration measure, and what goes between ranks: links, hops of pipelines, exchanges of cp.

All ranks begin at the same time, and everything runs in turn, round after round, so that what disturbs the machine for a while
disturbs all alike. What is sent goes over the transport that switches use: in `measure_link` every rank sends to one
neighbour and receives from the other at the same time, as in a switch; in `measure_hop` a message goes to the neighbour and back
while nobody else talks, as in a pipeline. The exchanges of cp are the engine's own (`parallel.context`), all groups of a strategy at
the same time, as replicas have them in training.
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
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_hotspa.costs.adapter import BLOCK, FrozenBase
from hf_hotspa.costs.calibration import ExchangeSample, LayerSample, Link, PhaseSample, SwitchSample
from hf_hotspa.costs.coefficients import Hop, Sample
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.phase import moment
from hf_hotspa.engine.transport import ProcessGroupTransport
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
    """What every measurement needs. Its methods are collective.

    Args:
        agreement: Host-side barrier and gathering.
        share: Cores for each rank. From 1 on, waiting is part of a cost; below, ranks take turns on a core.
        rounds: How often everything is measured, after one round that warms up.
        say: Told what is being done.
        until: When this rank should have finished, on the clock of `time.perf_counter`; infinite where that does not matter.
    """

    agreement: Agreement
    device: torch.device
    share: float
    rounds: int
    say: Callable[[str], object]
    until: float = math.inf

    def is_late(self) -> bool:
        """Whether any rank should have finished: then nothing is measured that something else can stand for."""
        return self.until < math.inf and bool((self.agreement.gather([time.perf_counter() - self.until]) > 0).any())

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of this rank by the clock, and those that its threads spent on a core."""
        self.agreement.barrier()
        begin, on_core = time.perf_counter(), time.process_time()
        run()
        return moment(self.device) - begin, time.process_time() - on_core

    def repeated(self, run: Callable[[], object]) -> Tensor:
        """Seconds by the clock of what runs a few times, after one that warms up: [rank, time]."""
        return self.agreement.gather([self.timed(run)[0] for _ in range(_TIMES + 1)][1:])


# -- links and hops ------------------------------------------------------------------------------------------------

_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_TOKENS = (16, 512, 4096)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """`(seconds of nothing, seconds a byte)` of messages of these bytes: least squares on relative errors, >= 0."""
    measured = np.asarray(seconds)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / measured[:, None]
    latency, each = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0].tolist()
    if latency < 0:
        latency, each = 0.0, float(np.median(measured / np.asarray(sizes)))
    return latency, max(each, 1e-15)


def measure_link(transport: ProcessGroupTransport, world_size: int, apart: int, measuring: Measuring) -> Link:
    """Latency and bandwidth while every rank sends to the rank `apart` after it. Collective.

    Args:
        apart: 1 for the neighbour on the node, the devices of a node for a neighbour on the next one.
    """
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
    """Half of the time to the rank `apart` after rank 0 and back, for a token of `token_bytes`. Collective."""
    buffer = torch.zeros(max(_TOKENS) * token_bytes, dtype=torch.uint8, device=measuring.device)

    def there_and_back(count: int) -> None:
        message = buffer[: count * token_bytes]
        if transport.rank == 0:
            transport.send(message, apart, 0)
            transport.start().wait()
            transport.recv(message, apart, 1)
            transport.start().wait()
        elif transport.rank == apart:
            transport.recv(message, 0, 0)
            transport.start().wait()
            transport.send(message, 0, 1)
            transport.start().wait()

    taken = [float(measuring.repeated(partial(there_and_back, n))[0].min()) / 2 for n in _TOKENS]
    return Hop(*line(_TOKENS, taken))


# -- exchanges of cp -----------------------------------------------------------------------------------------------

_EXCHANGES: tuple[Literal["all_to_all", "gather"], ...] = ("all_to_all", "gather")
_EXCHANGED = (64 << 10, 4 << 20)
"""Bytes of the tensor that a rank takes part with in an all-to-all, and that it has after gathering."""


def context_layouts(world_size: int, degrees: Iterable[int]) -> list[Strategy]:
    """The strategies whose groups of cp are measured: every cp beside each tp of `degrees`, the rest replicas."""
    return [
        Strategy(world_size // (tp * cp), tp, cp=cp)
        for tp in sorted(set(degrees))
        for cp in range(2, world_size // tp + 1)
        if world_size // tp % cp == 0
    ]


def measure_exchanges(
    groups: ProcessGroups, layouts: Iterable[Strategy], measuring: Measuring
) -> tuple[ExchangeSample, ...]:
    """Seconds of both exchanges in two sizes, the slowest rank's; the fastest of a few rounds counts. Collective.

    Where ranks share cores, a rank's share of the seconds counts, as on a core of its own: the time model adds them up.

    Args:
        groups: Makes the groups of cp, and keeps them.
        layouts: Strategies of the whole world with cp above 1.

    Returns:
        Four samples for each layout, the same on every rank.
    """
    samples = []
    for layout in layouts:
        made = {ranks: groups.of(ranks) for ranks in layout.groups("cp")}
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
    """One exchange; afterwards `context` has counted its bytes alone."""
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
Packs = Sequence[tuple[int, ...]]
"""Packs of a replica, each the lengths of its sequences."""
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def layer_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Layers of the two copies: one, and as many as the model has or measuring allows; or one and two rounds of the
    pattern where layers take turns.

    The more layers, the truer: one alone finds its activations still in the processor's caches.
    """
    text = config.get_text_config()
    total: int = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or [])
    for period in range(2, min(_WIDEST_PATTERN, total // 2) + 1):
        if (
            len(set(kinds)) > 1
            and len(kinds) == total
            and all(a == b for a, b in zip(kinds, kinds[period:], strict=False))
        ):
            return period, 2 * period
    wide = _MANY_WEIGHTS / (12 * text.hidden_size**2)  # layers of usual proportions
    return 1, min(max(2, total), max(3, min(_MOST_LAYERS, int(wide))))


def small_copy(
    config: PreTrainedConfig, num_layers: int, dtype: torch.dtype, device: torch.device | None = None
) -> PreTrainedModel:
    """A model of `num_layers` layers with the widths of the config, and weights that are random, equal on all ranks.

    The random state of torch is left alone. Weights repeat one block: drawing billions of numbers takes minutes.

    Args:
        config: The config of the whole model; it is not changed.
        num_layers: Decoder layers of the copy.
        device: Where they lie; the CPU when None, nowhere on the meta device.
    """
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):  # timed are products of the compute dtype
        del small.quantization_config
    text = small.get_text_config()
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):  # layer_types and the like: one entry a layer
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
    """`small_copy`, changed: its decoder's linear layers in 4 bits of bitsandbytes, below an adapter of all of them.
    Codes repeat one block, as the weights do. The random state of torch is left alone."""
    from bitsandbytes.functional import QuantState, quantize_4bit
    from bitsandbytes.nn.modules import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model

    head, dtype = model.get_output_embeddings(), model.dtype
    narrow = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    block = random_block().to(model.device, narrow)
    codes, scales = quantize_4bit(block, blocksize=BLOCK, quant_type=base.kind)
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is head:
            continue
        rows, columns = linear.weight.shape
        numel = rows * columns
        state = QuantState(
            scales.absmax.repeat(-(-numel // len(block)))[: -(-numel // BLOCK)],
            shape=linear.weight.shape, code=scales.code, blocksize=BLOCK, quant_type=base.kind, dtype=narrow,
        )  # fmt: skip
        packed = Linear4bit(columns, rows, linear.bias is not None, narrow, quant_type=base.kind, device="meta")
        data = codes.reshape(-1).repeat(-(-numel // len(block)))[: -(-numel // 2), None]
        packed.weight = Params4bit(
            data, requires_grad=False, quant_state=state, blocksize=BLOCK, quant_type=base.kind, module=packed,
            bnb_quantized=True,
        )  # fmt: skip
        packed.bias, packed.quant_state = linear.bias, state
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True  # PEFT asks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = LoraConfig(r=base.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, adapter).train()


def random_block() -> Tensor:
    """Numbers that `probe_weights` repeats, fp32 on the CPU; the random state of torch is left alone."""
    return torch.empty(_BLOCK).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))


def probe_weights(shape: torch.Size, block: Tensor) -> Tensor:
    """A parameter of what is timed: matrices repeat the block, so that a router chooses all experts alike; norms are 1."""
    count = shape.numel()
    values = block.repeat(-(-count // len(block)))[:count] if len(shape) > 1 else block.new_ones(count)
    return values.view(shape)


def micro_batch(lengths: Sequence[int], vocab_size: int, device: torch.device) -> MicroBatch:
    """A pack of random tokens, each with a label but for the last of a sequence."""
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

    There it is what is alive only inside of `freeing_at_once`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, 0

    @property
    def works(self) -> bool:
        """Whether it can be measured here."""
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
        """Begins to measure, from what is held now."""
        self.restart()
        if self.device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _resident("VmRSS")

    def restart(self) -> None:
        """Forgets earlier peaks, and gives memory that is free back to the system, where it would hide a new peak."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        trim_heap()
        _CLEAR_REFS.write_text("5")

    def stop(self) -> int:
        """Bytes of the peak above those at the start."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _resident("VmHWM") - self._before


def trim_heap() -> None:
    """Gives freed memory back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Every tensor worth counting is a block of the system's own that goes back to it when it is freed (glibc only).

    So that resident pages are what is alive. Else what lies free in the heap hides some of a peak, and holes in the heap
    add to another: up to 40 % of the activations of small models. It has to be entered before the heap has grown.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    # by itself the library finds the limit as it goes, up to 32 MiB; once set, it is fixed
    for largest in (_WORTH_COUNTING, _LARGEST_DYNAMIC):
        mallopt(_MALLOC_MMAP, largest)
        mallopt(_MALLOC_TRIM, 2 * largest)
        if largest == _WORTH_COUNTING:
            yield


def _resident(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024


class Probe:
    """An engine on a small copy of a model.

    Args:
        degrees: Tensor-parallel degrees; each runs on as many replicas as fit the world.
        others: Further strategies, for whole phases.
    """

    def __init__(
        self,
        model: nn.Module,
        degrees: Sequence[int],
        compute_dtype: torch.dtype,
        measuring: Measuring,
        others: Sequence[Strategy] = (),
    ) -> None:
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.strategies = {tp: Strategy(world_size // tp, tp, 1) for tp in degrees}
        config: Any = model.config
        self.num_layers: int = config.get_text_config().num_hidden_layers
        # pipelines of two stages, where there can be any
        self.pipeline = Strategy(world_size // 2, 1, 2) if world_size % 2 == 0 and self.num_layers > 1 else None
        engines = dict.fromkeys([*self.strategies.values(), *([self.pipeline] if self.pipeline else []), *others])
        # the lengths of the buckets play no part: packs are handed to the phases directly
        buckets = [Bucket(s, edge, edge, edge - 1) for edge, s in enumerate(engines, 1)]
        self.engine = HotSPaEngine(
            model,
            buckets,
            EngineOptions(compute_dtype=compute_dtype, overlap_load=False, overlap_return=False),
            device=measuring.device,
        )
        self._measuring = measuring
        self._packs: dict[tuple[int, ...], MicroBatch] = {}

    def _pack(self, lengths: tuple[int, ...]) -> MicroBatch:
        if lengths not in self._packs:
            vocab_size = self.engine.description.shape.vocab_size
            self._packs[lengths] = micro_batch(lengths, vocab_size, self._measuring.device)
        return self._packs[lengths]

    def load(self, strategy: Strategy) -> float:
        """Makes a strategy the active one; seconds on this rank."""
        return self._measuring.timed(self.engine.phases[strategy].load)[0]

    def return_gradients(self, strategy: Strategy) -> float:
        """Returns its gradients and lets go of it; seconds on this rank."""
        return self._measuring.timed(self.engine.phases[strategy].return_gradients)[0]

    def run(self, strategy: Strategy, lengths: tuple[int, ...], times: int) -> tuple[float, float]:
        """Forward and backward of a pack on every replica, `times` in a row; the cost of one on this rank.

        Returns:
            Seconds by the clock, and those that this process's threads spent on a core.
        """
        clock, on_core = self._timed(strategy, [lengths] * times)
        return clock / times, on_core / times

    def run_phase(self, strategy: Strategy, replicas: Sequence[Packs]) -> float:
        """Forward and backward of a whole phase; each replica has some packs. Seconds on this rank."""
        return self._timed(strategy, replicas[strategy.coord(self.engine.rank).dp])[0]

    def _timed(self, strategy: Strategy, packs: Packs) -> tuple[float, float]:
        made, scale = [self._pack(lengths) for lengths in packs], 1.0 / sum(map(sum, packs))
        return self._measuring.timed(lambda: self.engine.phases[strategy].compute(made, scale))

    def peak(self, strategy: Strategy, lengths: tuple[int, ...]) -> int:
        """Bytes that forward and backward of a pack take at most on this rank, beyond weights and gradients."""
        memory, pack = PeakMemory(self._measuring.device), self._pack(lengths)
        self._measuring.agreement.barrier()
        memory.start()
        self.engine.phases[strategy].compute([pack], 1.0 / sum(lengths))
        return memory.stop()

    def close(self) -> None:
        self.engine.close()


def pack_lengths(longest: int, last: int = 0) -> tuple[tuple[int, ...], ...]:
    """The packs that tell a, b and c apart: three sequences alone, two packs of shorter ones, and the last ones.

    The last ones are longer, for one copy: kernels work in blocks, and quadratic cost shows in long sequences only.

    Args:
        longest: Tokens of the longest pack but for the last ones.
        last: Tokens of the very last one, if longer; before one of over four times comes one of about four.
    """
    middle, short = max(1, longest // 4), max(1, longest // 16)
    packs = (short,), (middle,), (longest,), (short,) * (middle // short), (middle,) * (longest // middle)
    longer = [(tokens,) for tokens in (4 * longest, last) if longest < tokens <= last]
    return (*packs, *dict.fromkeys(longer))


def repetitions(lengths: Sequence[int], longest: int) -> int:
    """How often a pack runs in a row: short ones twice, as one alone is lost in the noise."""
    return max(1, min(2, math.ceil(longest / sum(lengths))))


# -- seconds of packs, of switches and of pipelines ----------------------------------------------------------------

_PIPELINED = 2
"""Packs that a replica without stages runs to compare pipelines with, which run twice as many."""

_WARM_UP_PACKS = 2
"""Of each copy, in the round before the first: short ones do, and long ones take long."""

_GRADIENT_BYTES = 4

_MOST_IDLE = 1.5
"""By how much waiting for one another may raise the cost of packs on shared cores; beyond, others held the cores."""


@dataclass(frozen=True)
class Timing:
    """What was measured, the same on every rank; `pipeline_factor` is that of packs in stages on shared cores, or 1."""

    samples: tuple[Sample, ...]
    switches: tuple[SwitchSample, ...]
    pipeline_factor: float


def time_packs(
    probes: Sequence[Probe], degrees: Sequence[int], packs: Sequence[Sequence[tuple[int, ...]]], measuring: Measuring
) -> Timing:
    """Measures packs and switches. Collective.

    Seconds of a pack are by the slowest rank's clock; where ranks share cores on a core (`_on_shared_cores`).

    Args:
        probes: One for each copy of the model; the last has most layers.
        degrees: Tensor-parallel degrees.
        packs: The packs of each copy.
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
                values += [probe.run(strategy, pack, repetitions(pack, longest)) for pack in run]
                values.append((probe.return_gradients(strategy), 0.0))
        if pipeline:
            values += _both_ways(probes[-1], (longest // 4,) * 4)
        if index >= 0:  # the first round warms caches up
            measured.append(values)
        if measured and measuring.is_late():
            break
    gathered = torch.stack([measuring.agreement.gather([n for pair in values for n in pair]) for values in measured])
    table = gathered.unflatten(2, (-1, 2))  # [round, rank, measurement, by the clock or on a core]
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
    """Parameters that take as many bytes in a switch as a model of which all are trained: codes and scales take fewer."""
    weights, segments = dtype_bytes(dtype_name(description.compute_dtype)), description.vector.segments
    gradients = sum(segment.numel for segment in segments if segment.trainable)
    loaded = sum(segment.numel * dtype_bytes(segment.dtype) for segment in segments)
    return round((loaded + _GRADIENT_BYTES * gradients) / (weights + _GRADIENT_BYTES))


def _both_ways(probe: Probe, pack: tuple[int, ...]) -> list[tuple[float, float]]:
    """The same packs without stages, and in two stages; the cost of all of them on this rank."""
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
    """Of every measurement, over the rounds: other programs only ever make things slower."""
    return rounds.quantile(0.25, 0, interpolation="lower")


def _on_shared_cores(clock: Tensor, on_core: Tensor, share: float) -> Tensor:
    """What packs cost where ranks share cores.

    That is what a rank's threads spend on a core: the cost is then told apart from how long the rank waited for a core.
    But ranks of one tensor-parallel group also leave cores idle, while they wait for one another; this shows in the
    fastest round by the clock, and is counted up to a limit.

    Args:
        clock: Seconds by the clock of the slowest rank, [rounds, measurements].
        on_core: Seconds on a core, the mean over ranks, [rounds, measurements].
    """
    cost = _lower_quartile(on_core)
    return torch.maximum(cost, torch.minimum(clock.amin(0) * share, _MOST_IDLE * cost))


# -- whole phases under every strategy, to compare with what single packs predict ----------------------------------


def mixed_lengths(longest: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of both mini-batches; half a longest pack for every rank, and at least one."""
    short, middle = max(1, longest // 16), max(1, longest // 8)
    total = max(2, world_size // 2) * longest
    return (longest, *[short] * ((total - longest) // short)), (middle,) * (total // middle)


def time_phases(
    probe: Probe, strategies: Sequence[Strategy], longest: int, measuring: Measuring
) -> tuple[PhaseSample, ...]:
    """Measures the phases; the fastest counts. Collective."""
    if len(strategies) < 2:  # nothing to choose between
        return ()
    measuring.say(f"whole phases under {len(strategies)} strategies")
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
    slowest = torch.stack([measuring.agreement.gather(values) for values in measured[1:]]).amax(
        1
    )  # [round, measurement]
    seconds = iter(slowest.amin(0).tolist())
    return tuple(
        PhaseSample(str(s), probe.num_layers, packs, next(seconds)) for s, mine in works.items() for packs in mine
    )


# -- layers one by one, where a model has several kinds ------------------------------------------------------------

_PLACE = ("layer", "idx", "index", "number")
"""In the names of settings that say which layer it is, not what it computes."""
_WEIGHT = 0.02


def kinds_of_layers(model: nn.Module, description: ModelDescription) -> tuple[tuple[int, ...], ...]:
    """The indices of decoder layers, those of equal kind together, in the order in which kinds first appear.

    Layers are of one kind where their modules, the settings of these (a window, a number of heads) and the shapes of
    all parameters are equal. Models that no pipeline can cut have no kinds: nothing asks for them.

    Args:
        model: The whole model; on the meta device, if it likes.
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
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _settings(module: nn.Module) -> Hashable:
    """What a module was built with, as far as it may decide what is computed; a factor does not."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | str | None)
        and not name.startswith("_")
        and not (type(value) is int and any(part in name for part in _PLACE))
    )


class _Layer:
    """One decoder layer on this rank, with the arguments that its model calls it with."""

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
        """Gives it weights, and finds out how it is called. `release` lets go of them."""
        replica, device = self._replica, self._replica.device
        room = [0] * len(self._dtypes)
        for slot in replica.slots:
            room[slot.segment] = max(room[slot.segment], slot.offset + slot.numel)
        weights = [
            torch.full((n,), _WEIGHT, dtype=d, device=device) for n, (d, _) in zip(room, self._dtypes, strict=True)
        ]
        gradients = [torch.zeros(n, dtype=d, device=device) for n, (_, d) in zip(room, self._dtypes, strict=True)]
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


def _leaf(value: Any) -> Any:
    """The hidden state as a layer in the middle gets it: its gradient is wanted."""
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def time_layers(model: PreTrainedModel, longest: int, measuring: Measuring) -> tuple[LayerSample, ...]:
    """Seconds of a layer of each kind of a model on the meta device; the fastest counts. A sample for each kind, the
    same on every rank; none where all are of one kind. Collective."""
    description = describe_model(model)
    kinds = kinds_of_layers(model, description)
    if len(kinds) < 2:
        return ()
    measuring.say(f"layers of {len(kinds)} kinds, one by one")
    device, agreement = measuring.device, measuring.agreement
    pack = micro_batch((longest,), description.shape.vocab_size, device)
    # a layer in the middle where there is one: embedding and head are not to be held for it
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
    """Of one forward and backward on this rank, the second of two: the first finds its buffers. On a core, where ranks
    share cores (`timing.time_packs`)."""
    layer.prepare()
    measuring.timed(layer.run)
    clock, on_core = measuring.timed(layer.run)
    layer.release()
    return on_core if measuring.share < 1 else clock
