"""A calibration: the measurements of one model on one machine, and the cost models fitted to them.

Defines its key and measurements with valid ranges, its JSON file and the file's place in the cache. Raw measurements
are stored and models are fitted on demand, so a better fit needs no new measurement. `calibrate/model_calibration.py`
measures.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Literal

import msgspec

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.fit import Sample, fit_costs, fit_relative
from hf_hotspa.costs.hardware import Device, Hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import MASTER_BYTES, ModelSizes, dtype_bytes
from hf_hotspa.costs.switch_time import port_seconds
from hf_hotspa.costs.terms import Cost, Exchanges, Hop
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Count, NotNegative, Positive, PositiveCount, typed
from hf_hotspa.whole_file import read_json, write_json

REMEDY = "delete the file and calibrate again (hf-hotspa calibrate)"


@dataclass(frozen=True)
class FrozenBase:
    """The frozen base of a calibration: its form (`terms.form_names`), with an adapter of that rank on all linears."""

    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind}, LoRA r={self.rank}"


@dataclass(frozen=True)
class CalibrationKey:
    """The case that a calibration is valid for: all fields must match."""

    device: str  # name of the processor or accelerator
    kind: str  # `cpu` or `cuda`
    cores: PositiveCount  # cores that a node's processes may use
    memory_bytes: PositiveCount  # of a device; on CPU, of a node
    world_size: PositiveCount
    devices_per_node: PositiveCount
    threads: PositiveCount  # compute threads of a rank
    backend: str
    dtype: str
    model: str  # digest of the config
    versions: Mapping[str, str] = field(default_factory=dict)
    base: str = ""  # the frozen base and its adapter (`FrozenBase`); empty if the model is trained

    @property
    def slots(self) -> float:
        """How many ranks compute at the same time: on CPU, as many as have cores for their threads."""
        if self.kind != "cpu":
            return math.inf
        return self.cores / self.threads * self.world_size / self.devices_per_node

    def digest(self) -> str:
        """16 hexadecimal digits, the file's name in the cache."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: "CalibrationKey") -> list[str]:
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name} {mine!r} instead of {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


_LEFT_OUT = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"),
    "quantization_config",
)


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a model config's `to_dict` without names, versions and dtypes (the key has the compute dtype)."""
    kept = {key: value for key, value in config.items() if key not in _LEFT_OUT and not key.endswith("_token_id")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelFacts:
    """The measured model, for readers and `hf-hotspa plan`. `family` is its `model_type`."""

    family: str
    hidden_size: PositiveCount
    layer_parameters: PositiveCount
    vocab_size: PositiveCount
    num_attention_heads: PositiveCount


@dataclass(frozen=True)
class MemorySample:
    """Memory of the busiest rank beyond weights and gradients during forward and backward of one pack."""

    tp: PositiveCount
    num_layers: PositiveCount
    tokens: PositiveCount
    num_bytes: Positive


@dataclass(frozen=True)
class _OfStrategy:
    strategy: str  # such as `dp2pp2`; an invalid one raises `StrategyError`

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)


@dataclass(frozen=True)
class SwitchSample(_OfStrategy):
    """One load and one return of gradients of the busiest rank."""

    num_parameters: PositiveCount
    load_s: NotNegative
    return_s: Positive


@dataclass(frozen=True)
class PhaseSample(_OfStrategy):
    """One complete phase as in training: packs of mixed lengths, all replicas at the same time."""

    num_layers: PositiveCount  # decoder layers of the measured copy
    replicas: tuple[tuple[tuple[PositiveCount, ...], ...], ...]  # packs of each replica, as sequence lengths
    seconds: Positive  # until the last rank finished, without the switch


@dataclass(frozen=True)
class LayerSample:
    """Forward and backward of one decoder layer alone, without tp, all ranks at the same time. `layers` are the indices
    of all layers of its kind; `seconds` are of one layer (core time if ranks share cores)."""

    layers: tuple[Count, ...]
    lengths: tuple[PositiveCount, ...]
    seconds: Positive


@dataclass(frozen=True)
class ExchangeSample:
    """One exchange of cp ranks, all groups of a strategy at the same time."""

    name: Literal["all_to_all", "gather"]
    cp: PositiveCount
    tp: PositiveCount  # tensor-parallel degree, the distance between the ranks of a group
    num_bytes: PositiveCount  # bytes that each rank sends to the others
    seconds: Positive  # until the last rank finishes; core time if ranks share cores


@dataclass(frozen=True)
class Link:
    """Messages between neighbours, all ranks at once. Latency of the shortest; bytes per second and direction."""

    latency_s: NotNegative
    bandwidth: Positive


KIND = "hf_hotspa calibration"
SCHEMA_VERSION = 1
CACHE_VARIABLE = "HF_HOTSPA_CACHE"
_NANOSECOND = 1e-9
_LARGEST_FACTOR = 2.0
"""Largest factor by which phases are scaled up or down; larger ones are due to disturbed measurements."""
_NOT_IN_OLDER_FILES = ("phases", "layers", "exchanges")


def cache_folder() -> Path:
    """Returns `$HF_HOTSPA_CACHE/calibration`, or `~/.cache/hf_hotspa/calibration`."""
    folder = os.environ.get(CACHE_VARIABLE)
    return (Path(folder).expanduser() if folder else Path.home() / ".cache" / "hf_hotspa") / "calibration"


@dataclass(frozen=True)
class Calibration:
    """Measurements of one model on one machine. `calibrate/model_calibration.py` takes them."""

    key: CalibrationKey
    model: ModelFacts
    samples: tuple[Sample, ...]  # packs with embedding, head and loss, all ranks busy; core time if ranks share cores
    # how many ranks compute at the same time; infinite if each has its own core or device
    slots: Annotated[float, msgspec.Meta(gt=0)]
    intra: Link
    hop_intra: Hop  # sending a hidden state inside a node
    inter: Link | None = None  # links between nodes; None with one node
    hop_inter: Hop | None = None  # the same between nodes; None with one node
    fixed_s: NotNegative = 0.0  # seconds of a phase besides its packs and its switch
    pipeline_factor: Positive = 1.0  # relative cost of packs in stages
    # complete phases under several strategies, which correct predictions from single packs
    phases: tuple[PhaseSample, ...] = ()
    switches: tuple[SwitchSample, ...] = ()
    memory: tuple[MemorySample, ...] = ()  # empty if it could not be measured
    layers: tuple[LayerSample, ...] = ()  # layers of each kind, timed one by one; empty if all layers are of one kind
    # all-to-all and gather in cp groups; empty in older files and with one rank
    exchanges: tuple[ExchangeSample, ...] = ()
    measured_at: str = ""  # UTC, ISO 8601
    seconds: NotNegative = 0.0  # duration of the calibration
    notes: tuple[str, ...] = ()  # what could not be measured, in words

    def __post_init__(self) -> None:
        indices = sorted(index for sample in self.layers for index in sample.layers)
        if indices != list(range(len(indices))) or not all(sample.layers for sample in self.layers):
            raise HotspaConfigError(f"the kinds have layers {indices} instead of each layer once", fix=REMEDY)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted({sample.tp for sample in self.samples}))

    def covers(self, strategies: Iterable[Strategy]) -> bool:
        return {s.tp for s in strategies} <= set(self.degrees)

    # ------------------------------------------------------------------------------------------------ the cost models

    @cached_property
    def layer_weights(self) -> tuple[float, ...]:
        """Seconds of each layer relative to the mean; empty if layers are equal or were not measured separately."""
        seconds = {index: sample.seconds for sample in self.layers for index in sample.layers}
        mean = sum(seconds.values()) / max(1, len(seconds))
        return tuple(seconds[index] / mean for index in sorted(seconds))

    def depth(self, num_layers: int) -> float:
        """Converts the first `num_layers` layers (the layers of a small copy) to a multiple of the mean layer."""
        first = self.layer_weights[:num_layers]
        return sum(first) + num_layers - len(first)

    @cached_property
    def fitted(self) -> tuple[dict[int, Cost], dict[int, Cost]]:
        """Costs of the mean layer, and of embedding, head and loss together, by tp; see `fit_costs`."""
        return fit_costs(self.samples, self.depth)

    def stage_costs(self, layer_costs: Sequence[int]) -> StageCosts:
        """Returns the costs of the stage partition in nanoseconds, for the largest measured pack.

        Layers are weighed by their separate measurements if present, otherwise by `layer_costs`. Head, loss and
        embedding were measured together and count for the head. Uses the least measured tp: one partition serves all.
        Raises `HotspaConfigError`: too few or impossible samples, or samples of a model with another number of layers.
        `layer_costs`: relative cost of each layer, by its parameters.
        """
        if len(self.layer_weights) not in (0, len(layer_costs)):
            raise HotspaConfigError(
                f"a calibration of {len(self.layer_weights)} layers for a model of {len(layer_costs)}", fix=REMEDY
            )
        layers, ends = self.fitted
        tp = min(layers)
        largest = max(
            (sample.lengths for sample in self.samples if sample.tp == tp), key=lambda pack: (sum(pack), pack)
        )
        weights = self.layer_weights or layer_costs
        mean = max(sum(weights) / len(weights), 1e-9)
        layer = layers[tp].of(largest) / _NANOSECOND
        send = round(self.hop_intra.seconds(sum(largest)) / _NANOSECOND)
        return StageCosts(
            tuple(round(layer * weight / mean) for weight in weights),
            round(ends[tp].of(largest) / _NANOSECOND) if tp in ends else 0,
            sends=(send,) * (len(layer_costs) - 1),
        )

    def time_model(self, sizes: ModelSizes, world_size: int | None = None) -> TimeModel:
        """Returns the time model of the complete model. Raises `HotspaConfigError`: too few or impossible measurements.
        `world_size`: ranks, on nodes like the measured ones; the measured number if None."""
        key = self.key
        nodes = (world_size or key.world_size) / key.world_size
        of_packs = TimeModel.fit(
            self.samples,
            sizes,
            self.depth,
            source=f"measured on {key.device}, {key.dtype}, {self.measured_at}",
            hop_intra=self.hop_intra,
            hop_inter=self.hop_inter or self.hop_intra,
            devices_per_node=key.devices_per_node,
            fixed_s=self.fixed_s,
            slots=self.slots,
            pipeline_factor=self.pipeline_factor,
            forward_share=1 / 2 if key.base else 1 / 3,
            context_exchanges=self.context_exchanges,
        )
        return replace(of_packs, slots=self.slots * nodes, phase_factors=self._phase_factors(of_packs))

    def _phase_factors(self, of_packs: TimeModel) -> dict[tuple[int, int, int], float]:
        """Returns the correction of seconds by (tp, cp, pp): the geometric mean of measured over predicted phases.

        Predictions sum packs that were measured with the same pack on all ranks, and exchanges that were measured
        alone. They miss waiting for other ranks and shared cores and caches with packs of different lengths, which
        depend on dp, pp, tp and cp. Samples are of copies with few layers, cut into stages like the complete model;
        those without coefficients are skipped.
        """
        ratios: dict[tuple[int, int, int], list[float]] = {}
        for sample in self.phases:
            strategy, num_layers = Strategy.parse(sample.strategy), sample.num_layers
            if of_packs.knows(strategy):
                cut = StageCosts(
                    (self.model.layer_parameters,) * num_layers, self.model.vocab_size * self.model.hidden_size
                )
                share = self.depth(num_layers) / num_layers
                layers = {tp: cost * share for tp, cost in of_packs.layers.items()}
                predicted = replace(of_packs, cut=cut, layers=layers).phase_seconds(strategy, sample.replicas)
                ratios.setdefault((strategy.tp, strategy.cp, strategy.pp), []).append(sample.seconds / predicted)
        means = {key: geometric_mean(of_key) for key, of_key in ratios.items()}
        return {key: min(max(mean, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR) for key, mean in means.items()}

    @cached_property
    def context_exchanges(self) -> dict[tuple[int, int], Exchanges]:
        """Cost of cp exchanges by (cp, tp): latency, and seconds for the bytes of one token's hidden state."""
        token_bytes = self.model.hidden_size * dtype_bytes(self.key.dtype)
        hops: dict[tuple[int, int], dict[str, Hop]] = {}
        for cp, tp, name in sorted({(s.cp, s.tp, s.name) for s in self.exchanges}):
            samples = [s for s in self.exchanges if (s.cp, s.tp, s.name) == (cp, tp, name)]
            if len({s.num_bytes for s in samples}) < 2:
                continue
            latency, each = fit_relative([[1.0, s.num_bytes] for s in samples], [s.seconds for s in samples])
            hops.setdefault((cp, tp), {})[name] = Hop(latency, each * token_bytes)
        return {key: Exchanges(**both) for key, both in hops.items() if len(both) == 2}

    def memory_model(
        self, sizes: ModelSizes, options: MemoryOptions | None = None, world_size: int | None = None
    ) -> MemoryModel:
        """Returns the memory model with measured activations, if any; for the measured number of ranks if None."""
        options = options or MemoryOptions()
        layers, ends = self.memory_per_token
        options = replace(options, compute_dtype=self.key.dtype, activation_bytes=layers, end_bytes=ends)
        return MemoryModel(sizes, world_size or self.key.world_size, options)

    @cached_property
    def memory_per_token(self) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes per token in one layer, and beyond the layers, by tp."""
        layers, ends = {}, {}
        for tp in sorted({sample.tp for sample in self.memory}):
            samples = [sample for sample in self.memory if sample.tp == tp]
            depths = sorted({s.num_layers for s in samples})
            if len(depths) < 2 or len({s.tokens for s in samples}) < 2:
                continue
            # each copy has a separate constant: memory that does not grow with the tokens, such as free heap
            rows = [
                [s.tokens * s.num_layers, s.tokens, *(float(s.num_layers == depth) for depth in depths)]
                for s in samples
            ]
            layer, end, *_ = fit_relative(rows, [s.num_bytes for s in samples])
            if layer > 0:
                layers[tp], ends[tp] = layer, end
        return layers, ends

    def cluster(self, world_size: int | None = None) -> Cluster:
        """Returns the links of `world_size` ranks, for the planner and for estimates of switches."""
        return self.hardware().cluster(world_size or self.key.world_size)

    def hardware(self) -> Hardware:
        """Returns the machine for `hf-hotspa plan`; device speeds are those measured with a layer at tp 1."""
        key, inter = self.key, self.inter or self.intra
        layer, _ = self.fitted
        tp = min(layer)
        token_s = max(layer[tp].b * tp, 1e-15)
        memory = key.memory_bytes // (1 if key.kind != "cpu" else key.devices_per_node)
        speed = (4 if key.base else 6) * self.model.layer_parameters / token_s
        device = Device(memory, {key.dtype: speed}, self.intra.bandwidth)
        return Hardware(
            f"{key.device} (calibrated)", device, key.devices_per_node, self.intra.bandwidth, inter.bandwidth, None,
            self.intra.latency_s, inter.latency_s,
        )  # fmt: skip

    @cached_property
    def switch_fit(self) -> tuple[float, float]:
        """`(efficiency, fixed_s)` of switches for `costs.switch_time`: speed relative to the port model, fixed
        seconds."""
        if not self.switches:
            return 1.0, 0.0
        cluster, each = self.cluster(), dtype_bytes(self.key.dtype) + MASTER_BYTES
        rows = [
            [port_seconds(Strategy.parse(s.strategy), s.num_parameters * each, cluster), 1.0] for s in self.switches
        ]
        slope, fixed = fit_relative(rows, [s.load_s + s.return_s for s in self.switches])
        return min(1.0, 1.0 / slope) if slope > 0 else 1.0, fixed

    # ------------------------------------------------------------------------------------------------- as a JSON file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as JSON, atomically."""
        write_json(path, KIND, SCHEMA_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: CalibrationKey | None = None) -> "Calibration":
        """Reads a file of `save`. Raises `HotspaConfigError`: the file is missing, truncated, of another kind or
        version, has impossible numbers, or has another key. `key`: the key that it must have; any if None."""
        calibration = cls.from_dict(read_json(path, KIND, SCHEMA_VERSION, REMEDY), str(path))
        if key is not None and (differences := calibration.key.differences(key)):
            raise HotspaConfigError(
                f"the calibration is for another case: {', '.join(differences)}", where=str(path), fix=REMEDY
            )
        return calibration

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain data; infinite slots become None."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return {**data, "slots": None if math.isinf(self.slots) else self.slots}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = KIND) -> "Calibration":
        """The inverse of `to_dict`; older files have no `phases`. Raises `HotspaConfigError`: a field is missing or
        impossible."""
        try:
            if missing := [f.name for f in fields(cls) if f.name not in data and f.name not in _NOT_IN_OLDER_FILES]:
                raise ValueError(f"the field {missing[0]!r} is missing")
            calibration = typed({**data, "slots": math.inf if data["slots"] is None else data["slots"]}, cls)
            dtype_bytes(calibration.key.dtype)
            _ = calibration.fitted  # raises if samples are missing
        except ValueError as error:
            what = error.what if isinstance(error, HotspaConfigError) else str(error)
            raise HotspaConfigError(what, where=where, fix=REMEDY) from None
        return calibration
