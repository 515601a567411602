"""Machines as the cost model sees them: named presets, and descriptions in YAML.

Owns `Device` (memory and speed of one device) and `Hardware` (devices, nodes and links), which yields the
`hf_hotspa.cluster.Cluster` that planners use. A YAML file may start from a preset and change single fields::

    base: a100-80g
    nics_per_node: 2
    inter_bandwidth: 12.5e9      # bytes per second and direction of one NIC
    memory_bytes: 70 GiB         # of one device
    peak_flops: {bfloat16: 312e12}

Peak numbers of presets are those of data sheets (dense, no sparsity); bandwidths are per direction.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import HotspaConfigError

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}} | {
    f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)
}
_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        memory_bytes: Its memory.
        peak_flops: Floating-point operations per second of matrix products, by dtype name.
        memory_bandwidth: Bytes per second of its memory.
    """

    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float

    def flops(self, dtype: str) -> float:
        """Peak speed in a dtype.

        Raises:
            HotspaConfigError: the description has no speed for it.
        """
        if dtype not in self.peak_flops:
            raise HotspaConfigError(
                f"the device has no peak speed for {dtype!r}",
                fix=f"use one of {', '.join(sorted(self.peak_flops))}, or add it to peak_flops",
            )
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Args:
        name: For tables and messages.
        device: One device.
        devices_per_node: Devices of a node.
        intra_bandwidth: Bytes per second, per direction, of a device's port inside its node.
        inter_bandwidth: Bytes per second, per direction, of one NIC.
        nics_per_node: NICs of a node; None for one a device.
        intra_latency_s: Seconds that one collective inside a node takes beside its bytes.
        inter_latency_s: The same across nodes.
        reserved_bytes: Memory of a device that no model can have: driver context, communicators, fragmentation.
    """

    name: str
    device: Device
    devices_per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    nics_per_node: int | None = None
    intra_latency_s: float = 25e-6
    inter_latency_s: float = 150e-6
    reserved_bytes: int = 0

    def cluster(self, world_size: int) -> Cluster:
        """The links of `world_size` devices."""
        one_node = world_size <= self.devices_per_node
        return Cluster(
            world_size,
            self.devices_per_node,
            self.intra_bandwidth,
            self.inter_bandwidth,
            self.nics_per_node,
            self.intra_latency_s if one_node else self.inter_latency_s,
        )


def _gpu(name: str, memory_mib: int, half: float, single: float, memory: float, link: float, nic: float) -> Hardware:
    # 5000 MiB for context and communicators: the "gap" that PKU-DAIR/Hetu's published memory model subtracts.
    speeds = {"bfloat16": half, "float16": half, "float32": single}
    return Hardware(name, Device(memory_mib * _MIB, speeds, memory), 8, link, nic, reserved_bytes=5000 * _MIB)


PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        _gpu("a100-80g", 81_252, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _gpu("a800-80g", 81_252, 312e12, 19.5e12, 2.039e12, 200e9, 25e9),
        _gpu("h100-80g", 81_559, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        _gpu("h200-141g", 143_771, 989e12, 67e12, 4.8e12, 450e9, 50e9),
        # A stand-in for processes that share a few cores and talk over gloo; calibrate where numbers matter.
        Hardware(
            "cpu-gloo",
            Device(4 << 30, {"float32": 30e9, "float64": 15e9, "bfloat16": 10e9}, 10e9),
            8,
            1e9,
            1e9,
            intra_latency_s=200e-6,
            inter_latency_s=200e-6,
        ),
    )
}
"""The named machines."""


def load_hardware(text: str | os.PathLike[str]) -> Hardware:
    """The hardware that a preset's name or a YAML file describes.

    Raises:
        HotspaConfigError: no such preset or file, no YAML, an unknown or missing field, or an impossible value.
    """
    if str(text) in PRESETS:
        return PRESETS[str(text)]
    path = Path(text)
    choices = f"use one of {', '.join(PRESETS)}, or the path of a YAML file"
    if not path.is_file():
        raise HotspaConfigError(f"there is no hardware preset and no file {str(text)!r}", fix=choices)
    import yaml  # type: ignore[import-untyped]  # here, because only description files need it

    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise HotspaConfigError(f"the hardware description is no YAML: {error}", where=str(path), fix=choices) from None
    if not isinstance(data, dict):
        raise HotspaConfigError(
            f"the hardware description holds {type(data).__name__} instead of fields",
            where=str(path),
            fix="write `field: value` lines, such as `base: a100-80g`",
        )
    return hardware_from(data, str(path))


def hardware_from(data: Mapping[str, Any], where: str = "hardware description") -> Hardware:
    """The hardware that a mapping of fields describes; see the head of the file.

    Raises:
        HotspaConfigError: an unknown or missing field, or an impossible value.
    """
    of_hardware = [f.name for f in fields(Hardware) if f.name != "device"]
    of_device = [f.name for f in fields(Device)]
    known = ["base", *of_hardware, *of_device]
    for key in data:
        if key not in known:
            raise HotspaConfigError(f"there is no field {key!r}", where=where, fix=f"fields are {', '.join(known)}")
    base: Hardware | None = None
    if "base" in data:
        if data["base"] not in PRESETS:
            raise HotspaConfigError(
                f"there is no hardware preset {data['base']!r}", where=where, fix=f"use one of {', '.join(PRESETS)}"
            )
        base = PRESETS[data["base"]]
    else:
        needed = ["devices_per_node", "intra_bandwidth", "inter_bandwidth", *of_device]
        if missing := [name for name in needed if name not in data]:
            raise HotspaConfigError(
                f"the fields {', '.join(missing)} are missing",
                where=where,
                fix=f"give them, or start from a preset with `base: {next(iter(PRESETS))}`",
            )
    values = {key: _value(key, value, where) for key, value in data.items() if key != "base"}
    if base is not None and "name" not in values:
        values["name"] = f"{base.name}*"
    for_device = {key: values.pop(key) for key in of_device if key in values}
    if base is not None:
        return replace(base, device=replace(base.device, **for_device), **values)
    return Hardware(**{"name": Path(where).stem, **values}, device=Device(**for_device))


def _value(key: str, value: Any, where: str) -> Any:
    if key == "name":
        return str(value)
    if key == "peak_flops":
        if not isinstance(value, Mapping) or not value:
            raise HotspaConfigError(
                f"peak_flops is {value!r} instead of speeds by dtype", where=where, fix="peak_flops: {bfloat16: 312e12}"
            )
        return {str(dtype): _number(f"peak_flops of {dtype}", speed, where) for dtype, speed in value.items()}
    if key == "nics_per_node" and value is None:
        return None
    if key in ("memory_bytes", "reserved_bytes"):
        return parse_bytes(value, key, where, zero=key == "reserved_bytes")
    found = _number(key, value, where, zero=key.endswith("latency_s"))
    if key in ("devices_per_node", "nics_per_node"):
        if found != int(found):
            raise HotspaConfigError(f"{key} is {value!r} instead of an integer", where=where)
        return int(found)
    return found


def _number(key: str, value: Any, where: str, zero: bool = False) -> float:
    try:
        # YAML 1.1 reads 25e9 as text: its floats need a point and a signed exponent
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not (0 < found < math.inf or (zero and found == 0)):
        raise HotspaConfigError(
            f"{key} is {value!r}", where=where, fix="give a number above 0" if not zero else "give 0 or a number above"
        )
    return found


def parse_bytes(value: str | float, name: str = "memory", where: str | None = None, zero: bool = False) -> int:
    """Bytes from a number, or from text such as ``70GiB``, ``80 GB``, ``512MiB``.

    Raises:
        HotspaConfigError: it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        found = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (KeyError, ValueError):
        found = math.nan
    if isinstance(value, bool) or not (0 < found < math.inf or (zero and found == 0)):
        raise HotspaConfigError(
            f"{name} is {value!r}", where=where, fix="give a number of bytes, or text such as 70GiB or 512MiB"
        )
    return int(found)


def parse_nodes(text: str) -> tuple[int, int]:
    """`(nodes, devices a node)` of ``4x8``.

    Raises:
        HotspaConfigError: it is something else.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*x\s*([1-9][0-9]{0,6})\s*", text.lower())
    if not match:
        raise HotspaConfigError(f"{text!r} is no cluster", fix="write nodes x devices, such as 4x8 or 1x8")
    return int(match[1]), int(match[2])
