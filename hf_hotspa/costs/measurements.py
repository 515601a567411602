"""What a calibration is made of: its key and single measurements.

Plain data without torch, with the bounds that a file is read by; `calibration.py` puts it together,
`calibrate/calibration.py` measures it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Count, NotNegative, Positive, PositiveCount

REMEDY = "delete the file and calibrate again (hf-hotspa calibrate)"


@dataclass(frozen=True)
class CalibrationKey:
    """What a calibration holds for. Another value of any field is another calibration.

    Args:
        device: Name of the processor or accelerator.
        kind: `cpu` or `cuda`.
        cores: Processor cores that a node's processes may use.
        memory_bytes: Memory of a device; on CPU that of a node.
        threads: Compute threads of a rank.
        model: Digest of the model's config.
        versions: Versions of the libraries, by name.
        base: What is frozen, and trained instead (`FrozenBase`); empty where the model is trained.
    """

    device: str
    kind: str
    cores: PositiveCount
    memory_bytes: PositiveCount
    world_size: PositiveCount
    devices_per_node: PositiveCount
    threads: PositiveCount
    backend: str
    dtype: str
    model: str
    versions: Mapping[str, str] = field(default_factory=dict)
    base: str = ""

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
    left_out = {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "architectures",
        "use_cache",
        "quantization_config",
    }
    kept = {key: value for key, value in config.items() if key not in left_out and not key.endswith("_token_id")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelFacts:
    """What a reader, or `hf-hotspa plan`, must know of the model that was measured.

    Args:
        family: The transformers `model_type`.
        hidden_size: Width of the residual stream.
    """

    family: str
    hidden_size: PositiveCount
    layer_parameters: PositiveCount
    vocab_size: PositiveCount
    num_attention_heads: PositiveCount


@dataclass(frozen=True)
class MemorySample:
    """Memory that the busiest rank took beyond weights and gradients during forward and backward of one pack."""

    tp: PositiveCount
    num_layers: PositiveCount
    tokens: PositiveCount
    num_bytes: Positive


@dataclass(frozen=True)
class SwitchSample:
    """One load and one return of gradients, of the busiest rank.

    Args:
        strategy: The strategy, `dp4`; `StrategyError` when it is none.
    """

    strategy: str
    num_parameters: PositiveCount
    load_s: NotNegative
    return_s: Positive

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)


@dataclass(frozen=True)
class PhaseSample:
    """One whole phase, as training has them: packs of mixed lengths, all replicas at the same time.

    Args:
        strategy: The strategy, `dp2pp2`; `StrategyError` when it is none.
        num_layers: Decoder layers of the model that ran.
        replicas: The packs of each replica, each the lengths of its sequences.
        seconds: Until the last rank was done, without the switch.
    """

    strategy: str
    num_layers: PositiveCount
    replicas: tuple[tuple[tuple[PositiveCount, ...], ...], ...]
    seconds: Positive

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)


@dataclass(frozen=True)
class LayerSample:
    """Forward and backward of one decoder layer alone, without tensor parallelism, all ranks at the same time.

    Args:
        layers: The indices of all layers of its kind.
        seconds: Of one of them; on a core where ranks share cores.
    """

    layers: tuple[Count, ...]
    lengths: tuple[PositiveCount, ...]
    seconds: Positive


@dataclass(frozen=True)
class ExchangeSample:
    """One exchange of the ranks of cp, all groups of a strategy at the same time.

    Args:
        name: `all_to_all` or `gather`.
        tp: How far apart its ranks are: the tensor-parallel degree beside it.
        num_bytes: What each rank sends to the others.
        seconds: Until the last rank is done; on a core where ranks share cores.
    """

    name: Literal["all_to_all", "gather"]
    cp: PositiveCount
    tp: PositiveCount
    num_bytes: PositiveCount
    seconds: Positive


@dataclass(frozen=True)
class Link:
    """Messages between neighbours, all ranks sending and receiving at the same time.

    Args:
        latency_s: Seconds of the shortest message.
        bandwidth: Bytes per second and direction.
    """

    latency_s: NotNegative
    bandwidth: Positive
