"""What a calibration is made of: its key, single measurements, and the checked reading of them from JSON.

Plain data without torch; `calibration.py` puts it together, `calibrate/calibration.py` measures it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hf_hotspa.costs.coefficients import Hop
from hf_hotspa.costs.fitting import Sample
from hf_hotspa.costs.json_file import number
from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.strategy import Strategy

REMEDY = "delete the file and calibrate again (hf-hotspa calibrate)"
_KEY_COUNTS = ("cores", "memory_bytes", "world_size", "devices_per_node", "threads")


@dataclass(frozen=True)
class CalibrationKey:
    """What a calibration holds for. Another value of any field is another calibration.

    Args:
        device: Name of the processor or accelerator.
        kind: `cpu` or `cuda`.
        cores: Processor cores that a node's processes may use.
        memory_bytes: Memory of a device; on CPU that of a node.
        devices_per_node: Ranks of a node.
        threads: Compute threads of a rank.
        backend: Of the process group.
        dtype: Of computation.
        model: Digest of the model's config.
        versions: Versions of the libraries, by name.
    """

    device: str
    kind: str
    cores: int
    memory_bytes: int
    world_size: int
    devices_per_node: int
    threads: int
    backend: str
    dtype: str
    model: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> float:
        """How many ranks compute at the same time: on CPU as many as have cores for their threads."""
        if self.kind != "cpu":
            return math.inf
        return self.cores / self.threads * self.world_size / self.devices_per_node

    def digest(self) -> str:
        """16 hexadecimal digits that name the file in the cache."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: "CalibrationKey") -> list[str]:
        """What differs, in words."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name} {mine!r} instead of {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a model config as `to_dict` gives it, without what changes no cost.

    Args:
        config: The config's fields. Names, versions and dtypes are left out (the dtype of computation is a field of
            the key).
    """
    left_out = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
    kept = {key: value for key, value in config.items() if key not in left_out and not key.endswith("_token_id")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelFacts:
    """What a reader, or `hf-hotspa plan`, must know of the model that was measured.

    Args:
        family: The transformers `model_type`.
        hidden_size: Width of the residual stream.
        layer_parameters: Parameters of one decoder layer.
        vocab_size: Rows of the embedding.
        num_attention_heads: Query heads.
    """

    family: str
    hidden_size: int
    layer_parameters: int
    vocab_size: int
    num_attention_heads: int


@dataclass(frozen=True)
class MemorySample:
    """Memory that the busiest rank took beyond weights and gradients during forward and backward of one pack.

    Args:
        tp: Tensor-parallel degree.
        num_layers: Decoder layers.
        tokens: Tokens of the pack.
        num_bytes: The peak.
    """

    tp: int
    num_layers: int
    tokens: int
    num_bytes: float


@dataclass(frozen=True)
class SwitchSample:
    """One load and one return of gradients, of the busiest rank.

    Args:
        strategy: The strategy, `dp4tp1pp1`.
        num_parameters: Parameters of the model that was switched.
        load_s: Seconds of the load.
        return_s: Seconds of the return.
    """

    strategy: str
    num_parameters: int
    load_s: float
    return_s: float


@dataclass(frozen=True)
class PhaseSample:
    """One whole phase, as training has them: packs of mixed lengths, all replicas at the same time.

    Args:
        strategy: The strategy, `dp2tp1pp2`.
        num_layers: Decoder layers of the model that ran.
        replicas: The packs of each replica, each the lengths of its sequences.
        seconds: Until the last rank was done, without the switch.
    """

    strategy: str
    num_layers: int
    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float


@dataclass(frozen=True)
class Link:
    """Messages between neighbours, all ranks sending and receiving at the same time.

    Args:
        latency_s: Seconds of the shortest message.
        bandwidth: Bytes per second and direction.
    """

    latency_s: float
    bandwidth: float


class Reader:
    """Checked values of a file; every method raises `HotspaConfigError`, or `KeyError` for what is missing.

    Args:
        where: The file, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def number(self, data: Mapping[str, Any], name: str) -> float:
        return number(data[name], name, self.where, REMEDY)

    def positive(self, data: Mapping[str, Any], name: str) -> float:
        return number(data[name], name, self.where, REMEDY, positive=True)

    def count(self, data: Mapping[str, Any], name: str) -> int:
        value = self.positive(data, name)
        if value != int(value):
            raise HotspaConfigError(f"{name} is {value} instead of an integer", where=self.where, fix=REMEDY)
        return int(value)

    def key(self, data: Mapping[str, Any]) -> CalibrationKey:
        return CalibrationKey(
            device=str(data["device"]),
            kind=str(data["kind"]),
            **{name: self.count(data, name) for name in _KEY_COUNTS},
            backend=str(data["backend"]),
            dtype=str(data["dtype"]),
            model=str(data["model"]),
            versions={str(name): str(version) for name, version in dict(data["versions"]).items()},
        )

    def model(self, data: Mapping[str, Any]) -> ModelFacts:
        counts = (self.count(data, f.name) for f in fields(ModelFacts) if f.name != "family")
        return ModelFacts(str(data["family"]), *counts)

    def link(self, data: Mapping[str, Any]) -> Link:
        return Link(self.number(data, "latency_s"), self.positive(data, "bandwidth"))

    def hop(self, data: Mapping[str, Any]) -> Hop:
        return Hop(self.number(data, "latency_s"), self.number(data, "token_s"))

    def sample(self, data: Mapping[str, Any]) -> Sample:
        lengths = tuple(self.count({"lengths": length}, "lengths") for length in data["lengths"])
        return Sample(
            self.count(data, "tp"),
            self.count(data, "num_layers"),
            lengths,
            self.positive(data, "seconds"),
            bool(data["with_ends"]),
        )

    def strategy(self, data: Mapping[str, Any], name: str) -> str:
        try:
            return str(Strategy.parse(str(data["strategy"])))
        except StrategyError as error:
            raise HotspaConfigError(f"{name}: {error.what}", where=self.where, fix=REMEDY) from None

    def phase(self, data: Mapping[str, Any]) -> PhaseSample:
        replicas = tuple(
            tuple(tuple(self.count({"replicas": length}, "replicas") for length in pack) for pack in packs)
            for packs in data["replicas"]
        )
        seconds = self.positive(data, "seconds")
        return PhaseSample(self.strategy(data, "phases"), self.count(data, "num_layers"), replicas, seconds)

    def switch(self, data: Mapping[str, Any]) -> SwitchSample:
        return SwitchSample(
            self.strategy(data, "switches"),
            self.count(data, "num_parameters"),
            self.number(data, "load_s"),
            self.positive(data, "return_s"),
        )

    def memory(self, data: Mapping[str, Any]) -> MemorySample:
        tp, num_layers, tokens = (self.count(data, name) for name in ("tp", "num_layers", "tokens"))
        return MemorySample(tp, num_layers, tokens, self.positive(data, "num_bytes"))
