"""Calibrates a model on this machine: seconds per pack by tensor-parallel degree, links, switches, memory.

`calibrate` runs the engine's replicas on two small copies of the model (few layers, real widths), all ranks at the same
time as in training. It returns the same `Calibration` on all ranks. Calibrations are cached by machine, world, model
config, dtype and library versions; a second run reads the cache.
"""

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.calibrate.probe import (
    Measuring,
    PeakMemory,
    Probe,
    context_layouts,
    freeing_at_once,
    layer_counts,
    measure_exchanges,
    measure_hop,
    measure_link,
    pack_lengths,
    small_copy,
    time_layers,
    time_packs,
    time_phases,
    with_frozen_base,
)
from hf_hotspa.costs.calibration import (
    Calibration,
    CalibrationKey,
    ExchangeSample,
    FrozenBase,
    Link,
    MemorySample,
    ModelFacts,
    cache_folder,
    config_digest,
)
from hf_hotspa.costs.memory import activation_bytes
from hf_hotspa.costs.terms import Hop
from hf_hotspa.engine.switching import device_limit
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.errors import HotspaConfigError, HotspaError, TransferError
from hf_hotspa.model.options import default_device
from hf_hotspa.model.specs import describe_model, dtype_name
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement, Mailbox, as_hotspa_error, hotspa_cause
from hf_hotspa.parallel.mesh import ProcessGroups, nodes_of
from hf_hotspa.strategy import Strategy, legal_strategies
from hf_hotspa.versions import version_of

logger = logging.getLogger(__name__)
MEASURING = "measuring"  # begins the first line about a measurement
ROUNDS = 3  # how often everything is measured, in turn. The lower quartile counts: other programs can only add seconds
LONGEST_PACK_S = 1.2  # packs grow until one takes about this long, on each of the two copies
_PACK_SHARE = 0.015  # the longest pack's share of the given seconds; about fifty packs run
_FIRST_PACK = 256
_LARGEST_PACK = 16384
_TIMEOUT = timedelta(minutes=10)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Procedure:
    """How a machine is measured."""

    rounds: int = ROUNDS
    pack_tokens: int | None = None  # tokens of the longest pack; determined by trial if None
    longest: int | None = None  # most tokens of a pack; None for no limit
    seconds: float | None = None  # about the most, if any: packs are shorter, rounds fewer, complete phases left out
    devices_per_node: int | None = None  # found if None
    progress: Progress | None = None  # called on rank 0 with each step as text


def calibrate(
    config: PreTrainedConfig,
    *,
    strategies: Iterable[Strategy] | None = None,  # strategies that must be predictable; all legal ones if None
    compute_dtype: torch.dtype | None = None,  # if None the config's, otherwise float32
    device: torch.device | None = None,  # of this rank; if None its CUDA device if present, otherwise the CPU
    cache: Path | None = None,  # folder of calibrations; `costs.calibration.cache_folder()` if None
    force: bool = False,  # whether to measure even if the cache has the calibration
    base: FrozenBase | None = None,  # a frozen base, of which only added weights are trained; None if all are trained
    procedure: Procedure | None = None,
) -> Calibration:
    """Measures a model, or reads an earlier calibration from the cache; equal on all ranks. Collective; takes seconds.
    Raises `HotspaError` on every rank: the model cannot be laid out, a file is broken, ranks differ, or one failed."""
    started = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    groups = ProcessGroups(rank, world_size, device or default_device(), _TIMEOUT)
    try:
        agreement = Agreement(groups.agreement, rank)
        session = _Session(
            config, compute_dtype or config_dtype(config), groups, agreement, procedure or Procedure(), base
        )
        calibration = session.run(strategies, cache or cache_folder(), force)
        groups.close()
        return calibration
    except Exception as failure:
        if isinstance(failure, HotspaError) and not isinstance(failure, TransferError):
            raise  # every rank raises it
        explained = Mailbox(rank, world_size).explain(hotspa_cause(failure) or failure, "calibration")
        raise as_hotspa_error(explained, "calibration") from failure


def calibration_key(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    world_size: int,
    devices_per_node: int,
    base: FrozenBase | None = None,
) -> CalibrationKey:
    """Returns the key of a calibration of this model on these ranks, as this rank sees it."""
    on_gpu = device.type == "cuda"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CalibrationKey(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        kind=device.type,
        cores=usable_cores(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else memory,
        world_size=world_size,
        devices_per_node=devices_per_node,
        threads=torch.get_num_threads(),
        backend=backends.name_of() if world_size > 1 else "none",
        dtype=dtype_name(dtype),
        model=config_digest(config.to_dict()),
        versions={name: version_of(name) or "" for name in ("torch", "transformers", "hf-hotspa")},
        base="" if base is None else str(base),
    )


def config_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Returns a config's dtype, otherwise float32. After `save_pretrained` the config of a live model has its name."""
    dtype: torch.dtype | str = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def cached_calibration(key: CalibrationKey, folder: Path | None = None) -> Calibration | None:
    """Returns the cached calibration of a key, or None, from a folder (None: the user's cache). Does not measure or
    communicate. A broken file raises `HotspaConfigError`."""
    path = (folder or cache_folder()) / f"{key.digest()}.json"
    return Calibration.load(path, key) if path.exists() else None


def _of_any_kind(failure: Exception) -> HotspaError:
    """Converts any failure, as the other ranks must not start without this one."""
    return as_hotspa_error(failure, "calibration")


def _same(facts: tuple[CalibrationKey, ModelShape, list[int], list[Strategy]]) -> dict[str, str]:
    key, _, degrees, whole = facts
    return {
        "calibration's degrees": repr(degrees),
        "calibration's strategies": repr(whole),
        "model config": key.model,
        "versions of libraries": repr(key.versions),
        "dtype": key.dtype,
    }


@dataclass
class _Session:
    """One call of `calibrate`."""

    config: PreTrainedConfig
    dtype: torch.dtype
    groups: ProcessGroups
    agreement: Agreement
    procedure: Procedure
    base: FrozenBase | None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.world_size, self.device = self.groups.rank, self.groups.world_size, self.groups.device
        self.devices_per_node = self.procedure.devices_per_node or nodes_of(self.agreement).devices_per_node
        self.say: Progress = (self.procedure.progress if self.rank == 0 else None) or logger.debug

    def run(self, strategies: Iterable[Strategy] | None, folder: Path, force: bool) -> Calibration:
        key, shape, degrees, whole = self.agreement.run(
            "calibration", lambda: self._described(strategies), _same, otherwise=_of_any_kind
        )
        key = CalibrationKey(**self._from_first(vars(key)))
        whole = whole if self.procedure.seconds is None else []
        path = folder / f"{key.digest()}.json"
        calibration = None if force else self._cached(folder, key)
        if calibration is not None:
            had = [Strategy.parse(sample.strategy) for sample in calibration.phases]
            if set(degrees) <= set(calibration.degrees) and (len(whole) < 2 or set(whole) <= set(had)):
                self.say(f"read {path}")
                return calibration
            degrees, whole = sorted({*degrees, *calibration.degrees}), sorted({*whole, *had})
        measured = Calibration.from_dict(self._from_first(self._measure(key, shape, degrees, whole).to_dict()))
        if self.rank == 0:
            try:
                measured.save(path)
                self.say(f"wrote {path}")
            except OSError as error:
                logger.warning("the calibration could not be saved to %s: %s", path, error.strerror or error)
        return measured

    # -- before measuring ---------------------------------------------------------------------------------------------

    def _described(
        self, strategies: Iterable[Strategy] | None
    ) -> tuple[CalibrationKey, ModelShape, list[int], list[Strategy]]:
        """Returns this rank's key, model shape, degrees and strategies for complete phases."""
        if not isinstance(self.config, PreTrainedConfig):
            what = f"calibrate needs a transformers config, but got a {type(self.config).__name__}"
            raise HotspaConfigError(what, fix="pass model.config, or AutoConfig.from_pretrained(...)")
        copies = (self._copy(count, torch.device("meta")) for count in layer_counts(self.config))
        shape, copied = (describe_model(model, self.dtype).shape for model in copies)
        strategies = legal_strategies(self.world_size, copied) if strategies is None else list(strategies)
        # tp 1 is always measured: it determines the longest pack
        degrees = sorted({1, *(s.tp for s in strategies)})
        plain = {Strategy(s.dp * s.cp, s.tp, s.pp) for s in strategies if s.world_size == self.world_size}
        # the complete model may have more stages than a copy has layers
        both = [*plain, *(context_layouts(self.world_size, degrees) if len(plain) > 1 else ())]
        whole = sorted(s for s in both if s.unsupported_reason(copied) is None)
        for tp in degrees:
            why = Strategy(1, tp).unsupported_reason(shape) or (
                f"{self.world_size} ranks cannot be divided by it" if self.world_size % tp else None
            )
            if why:
                raise HotspaConfigError(f"tp{tp} cannot be measured", why=why, fix="leave its strategies out")
        machine = self.device, self.world_size, self.devices_per_node
        return calibration_key(self.config, self.dtype, *machine, self.base), shape, degrees, whole

    def _copy(self, num_layers: int, device: torch.device) -> PreTrainedModel:
        return small_copy(self.config, num_layers, self.dtype, device)

    def _trained(self, num_layers: int) -> nn.Module:
        model = self._copy(num_layers, self.device)
        return model if self.base is None else with_frozen_base(model, self.base)

    def _from_first(self, data: object) -> Any:
        return json.loads(self.agreement.texts(json.dumps(data) if self.rank == 0 else "")[0])

    def _cached(self, folder: Path, key: CalibrationKey) -> Calibration | None:
        """Returns the calibration in rank 0's cache; a broken file raises on all ranks."""
        calibration = self.agreement.run(
            "calibration", lambda: cached_calibration(key, folder) if self.rank == 0 else None
        )
        data = self._from_first(calibration.to_dict() if calibration is not None else None)
        return None if data is None else Calibration.from_dict(data, str(folder))

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(
        self, key: CalibrationKey, shape: ModelShape, degrees: list[int], whole: list[Strategy]
    ) -> Calibration:
        begin = time.perf_counter()
        until = math.inf if self.procedure.seconds is None else begin + self.procedure.seconds
        measuring = Measuring(
            self.agreement, self.device, key.slots / self.world_size, self.procedure.rounds, self.say, until
        )
        self.say(f"{MEASURING} tp {', '.join(map(str, degrees))} on {self.world_size} x {key.device}, {key.dtype}")
        with freeing_at_once():
            few, more = self.agreement.run(
                "calibration", lambda: list(map(self._trained, layer_counts(self.config))), otherwise=_of_any_kind
            )
            # an engine on each copy; complete phases run on the copy with more layers
            probes = [Probe(few, degrees, self.dtype, measuring), Probe(more, degrees, self.dtype, measuring, whole)]
            most = self._most_tokens(probes[-1], shape)
            longest = self.procedure.pack_tokens or self._longest(probes[-1], most)
            memory = self._memory(probes, degrees, longest, most)
        links, exchanges = self._links(shape, measuring), tuple[ExchangeSample, ...]()
        layouts = [s for s in context_layouts(self.world_size, degrees) if s.unsupported_reason(shape) is None]
        if layouts and not measuring.is_late():
            self.say("exchanges of context parallelism")
            exchanges = measure_exchanges(self.groups, layouts, measuring)
        last = min(4 * longest, most) if self.procedure.pack_tokens else self._longest(probes[0], most, 2 * longest)
        packs = [pack_lengths(longest, last), pack_lengths(longest)]
        timing = time_packs(probes, degrees, packs, measuring)
        phases = time_phases(probes[-1], whole, longest, measuring)
        for probe in probes:
            probe.close()
        whole_model = self._copy(self.config.get_text_config().num_hidden_layers, torch.device("meta"))
        layers = () if measuring.is_late() else time_layers(whole_model, longest, measuring)
        return Calibration(
            key=key,
            model=ModelFacts(
                shape.family, shape.hidden_size, shape.layer_parameters, shape.vocab_size, shape.num_attention_heads
            ),
            samples=timing.samples,
            slots=key.slots if key.slots < self.world_size else math.inf,
            **links,
            pipeline_factor=timing.pipeline_factor,
            phases=phases,
            switches=timing.switches,
            memory=tuple(memory),
            layers=layers,
            exchanges=exchanges,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - begin, 3),
            notes=tuple(self.notes),
        )

    def _links(self, shape: ModelShape, measuring: Measuring) -> dict[str, Any]:
        if self.world_size == 1:
            return {"intra": Link(0.0, 1e12), "hop_intra": Hop()}
        self.say("links")
        transport, links = ProcessGroupTransport(self.groups.switch), dict[str, Any]()
        between_nodes = {"inter": self.devices_per_node} if self.world_size > self.devices_per_node else {}
        for name, apart in {"intra": 1, **between_nodes}.items():
            links[name] = measure_link(transport, self.world_size, apart, measuring)
            links[f"hop_{name}"] = measure_hop(transport, apart, shape.hidden_size * self.dtype.itemsize, measuring)
        return links

    def _most_tokens(self, probe: Probe, shape: ModelShape) -> int:
        most = min(
            shape.max_position_embeddings or _LARGEST_PACK, _LARGEST_PACK, self.procedure.longest or _LARGEST_PACK
        )
        if (free := device_limit(self.device)) is not None:
            layer = activation_bytes(shape, 1, element_bytes=self.dtype.itemsize)
            each = layer * probe.num_layers + 12 * shape.vocab_size
            most = min(most, int(self.agreement.gather([free]).min()) // 2 // int(each))
        return max(1, most)

    def _longest(self, probe: Probe, most: int, first: int = _FIRST_PACK) -> int:
        """Returns the tokens of the longest pack: doubles them until a pack takes long enough, or memory is full."""
        longest, strategy = min(first, most), Strategy(self.world_size)
        enough = LONGEST_PACK_S if self.procedure.seconds is None else _PACK_SHARE * self.procedure.seconds
        probe.load(strategy)
        while True:
            probe.run(strategy, (longest,), 1)
            # on CPU use core time: with the clock, other programs would make packs short on a busy machine
            both = probe.run(strategy, (longest,), 1)
            seconds = both[self.device.type == "cpu"] if self.procedure.seconds is None else max(both)
            if longest * 2 > most or self._most(seconds) >= enough / 2:
                break
            longest *= 2
        probe.return_gradients(strategy)
        return longest

    def _most(self, value: float) -> float:
        return float(self.agreement.gather([value]).max())

    def _memory(self, probes: list[Probe], degrees: list[int], longest: int, most: int) -> list[MemorySample]:
        """Measures peaks of packs of half, once and twice the tokens of `longest`, at most `most`."""
        works = PeakMemory(self.device).works
        if not bool(self.agreement.gather([float(works)]).all()):
            self.notes.append("memory was not measured: this system does not reset a process's peak")
            return []
        self.say("memory")
        samples = []
        for probe in probes:
            for tp in degrees:
                strategy = probe.strategies[tp]
                probe.load(strategy)
                for tokens in sorted({max(1, longest // 2), longest, min(2 * longest, most)}):
                    peak = self._most(probe.peak(strategy, (tokens,)))
                    samples.append(MemorySample(tp, probe.num_layers, tokens, max(1.0, peak)))
                probe.return_gradients(strategy)
        return samples


def usable_cores() -> int:
    """Returns the cores that processes of this node may use at a time, by affinity and by the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
