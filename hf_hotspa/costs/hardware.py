"""Hardware of the cost model, by name or file: the values of `--hardware`.

Defines `Device` (memory and speed of one device) and `Hardware` (devices, nodes and links, which yields the
`hf_hotspa.cluster.Cluster` of planners), and parses sizes and clusters.

Peak speeds are from data sheets for dense matrix products (no sparsity). Bandwidths are per direction, half of the data
sheet values for NVLink and PCIe. A YAML or JSON file may start from a named machine and change single fields::

    base: a100-80g
    nics_per_node: 2
    inter_bandwidth: 12.5e9      # bytes per second and direction of one NIC
    memory_bytes: 70 GiB         # of one device
    peak_flops: {bfloat16: 312e12}
    matmul_share: 0.6            # of the peak, by large matrix products

`hf-hotspa hardware NAME` prints all fields of a machine as a starting point.
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
from hf_hotspa.nearest import meant

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}} | {
    f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)
}


@dataclass(frozen=True)
class Device:
    """One device: operations per second of matrix products by dtype name, and memory bytes per second."""

    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    # shares of the peak: of large matrix products in training, and of flash attention on long sequences with heads of
    # width 128. Fitted per generation, see docs/predicted.md; without a run of a generation as on A100
    matmul_share: float = 0.68
    attention_share: float = 0.6

    def flops(self, dtype: str) -> float:
        """Returns the peak speed in a dtype. Raises `HotspaConfigError`: the description has no speed for it."""
        if dtype not in self.peak_flops:
            raise HotspaConfigError(
                f"the device has no peak speed for {dtype!r}",
                fix=f"use one of {', '.join(sorted(self.peak_flops))} (--dtype), or add it to peak_flops",
            )
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Hardware:
    """A kind of machine."""

    name: str
    device: Device
    devices_per_node: int
    intra_bandwidth: float  # bytes per second and direction of a device's port inside its node
    inter_bandwidth: float  # bytes per second and direction of one NIC
    nics_per_node: int | None = None  # None for one per device
    intra_latency_s: float = 25e-6  # of one collective inside a node
    inter_latency_s: float = 150e-6  # of one collective across nodes

    def ring_bandwidth(self, num_ranks: int) -> float:
        """Bytes per second of the slowest link in a ring of neighbours; across nodes every NIC carries its share."""
        if num_ranks <= self.devices_per_node:
            return self.intra_bandwidth
        return min(self.intra_bandwidth, self.inter_bandwidth * (self.nics_per_node or self.devices_per_node))

    def cluster(self, world_size: int) -> Cluster:
        one_node = world_size <= self.devices_per_node
        return Cluster(
            world_size,
            self.devices_per_node,
            self.intra_bandwidth,
            self.inter_bandwidth,
            self.nics_per_node,
            self.intra_latency_s if one_node else self.inter_latency_s,
        )


def parse_bytes(value: str | float, name: str = "memory", where: str | None = None) -> int:
    """Parses bytes from a number or text such as ``70GiB``, ``80 GB``, ``512MiB``. Raises `HotspaConfigError`: another
    format, or not positive."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        num_bytes = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (KeyError, ValueError):
        num_bytes = math.nan
    if isinstance(value, bool) or not 0 < num_bytes < math.inf:
        raise HotspaConfigError(
            f"{name} is {value!r}", where=where, fix="give a number of bytes, or text such as 70GiB or 512MiB"
        )
    return int(num_bytes)


def parse_nodes(text: str) -> tuple[int, int]:
    """Parses `(nodes, devices per node)` from text such as ``4x8``. Raises `HotspaConfigError`: another format."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*x\s*([1-9][0-9]{0,6})\s*", text.lower())
    if not match:
        raise HotspaConfigError(f"{text!r} is not a cluster", fix="write nodes x devices, such as 4x8 or 1x8")
    return int(match[1]), int(match[2])


_MIB = 1 << 20
_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # bytes per second and direction of a 16-lane slot
# bytes per second of a NIC (400, 200 and 100 Gb/s), and NICs of a node; None: one for each GPU, if a board joins all GPUs
_NDR, _HDR, _100G, _SHARED = (50e9, None), (25e9, None), (12.5e9, None), (12.5e9, 1)

# `Device.matmul_share` and `Device.attention_share` by first part of the name; others count as A100
_HOPPER, _BLACKWELL = (0.66, 0.32), (0.44, 0.45)
_SHARES = {**dict.fromkeys(("h100", "h800", "h200", "mi300x"), _HOPPER), "b200": _BLACKWELL}


def _gpu(
    name: str,
    memory_mib: int,
    half: float,
    single: float,
    memory: float,
    link: float,
    network: tuple[float, int | None] = _SHARED,
    bfloat16: bool = True,
) -> Hardware:
    """A GPU in a node of eight; by default with one NIC."""
    speeds = {**({"bfloat16": half} if bfloat16 else {}), "float16": half, "float32": single}
    device = Device(memory_mib * _MIB, speeds, memory, *_SHARES.get(name.split("-")[0], ()))
    return Hardware(name, device, 8, link, *network)


# Memory is the driver's number if known. PCIe cards have the slot's link, even if a bridge can join pairs: collectives
# over a node pass the slots. GeForce cards since Ampere cannot access each other's memory directly, so a byte crosses
# the slot twice, at half the speed. Nodes of such cards count with one NIC of 100 Gb/s; a file can change this.
PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        # NVIDIA, "A100 Tensor Core GPU" data sheet: 312 TFLOPS, 2,039 GB/s (40 GB: 1,555; PCIe: 1,935), NVLink 600 GB/s.
        _gpu("a100-80g", 81_252, 312e12, 19.5e12, 2.039e12, 300e9, _HDR),
        _gpu("a100-40g", 40_536, 312e12, 19.5e12, 1.555e12, 300e9, _HDR),
        _gpu("a100-80g-pcie", 81_252, 312e12, 19.5e12, 1.935e12, _PCIE4),
        # A100 with NVLink of 400 GB/s.
        _gpu("a800-80g", 81_252, 312e12, 19.5e12, 2.039e12, 200e9, _HDR),
        # NVIDIA, "H100 Tensor Core GPU" data sheets: SXM 1,979 TFLOPS with sparsity, 3.35 TB/s, NVLink 900 GB/s; PCIe
        # 1,513 TFLOPS with sparsity, 2 TB/s; NVL 1,671 TFLOPS with sparsity, 94 GB, 3.9 TB/s.
        _gpu("h100-80g", 81_559, 989e12, 67e12, 3.35e12, 450e9, _NDR),
        _gpu("h100-80g-pcie", 81_559, 756e12, 51e12, 2.0e12, _PCIE5),
        _gpu("h100-94g-nvl", 95_830, 835e12, 60e12, 3.9e12, _PCIE5),
        # H100 SXM with NVLink of 400 GB/s.
        _gpu("h800-80g", 81_559, 989e12, 67e12, 3.35e12, 200e9, _NDR),
        # NVIDIA, H20 specification: 148 TFLOPS, 96 GB, 4.0 TB/s, NVLink 900 GB/s.
        _gpu("h20-96g", 97_871, 148e12, 44e12, 4.0e12, 450e9, _NDR),
        # NVIDIA, "H200 Tensor Core GPU" data sheet: 1,979 TFLOPS with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s.
        _gpu("h200-141g", 143_771, 989e12, 67e12, 4.8e12, 450e9, _NDR),
        # NVIDIA, "HGX B200" data sheet, an eighth of the board: 4.5 PFLOPS with sparsity, 180 GB, 8 TB/s, NVLink 1.8 TB/s.
        _gpu("b200-180g", 183_359, 2250e12, 75e12, 8.0e12, 900e9, _NDR),
        # NVIDIA, "V100" data sheet (SXM2): 125 TFLOPS in float16 and no bfloat16, 900 GB/s, NVLink 300 GB/s.
        _gpu("v100-16g", 16_160, 125e12, 15.7e12, 0.9e12, 150e9, _100G, bfloat16=False),
        _gpu("v100-32g", 32_510, 125e12, 15.7e12, 0.9e12, 150e9, _100G, bfloat16=False),
        # NVIDIA, "T4" data sheet: 65 TFLOPS in float16 and no bfloat16, 300 GB/s.
        _gpu("t4-16g", 15_360, 65e12, 8.1e12, 0.3e12, _PCIE3, bfloat16=False),
        # NVIDIA, data sheets "A10" (125 TFLOPS, 600 GB/s) and "A40" (149.7 TFLOPS, 696 GB/s); A10G as in AWS's G5 (70 TFLOPS).
        _gpu("a10-24g", 23_028, 125e12, 31.2e12, 0.6e12, _PCIE4),
        _gpu("a10g-24g", 23_028, 70e12, 35e12, 0.6e12, _PCIE4),
        _gpu("a40-48g", 46_068, 149.7e12, 37.4e12, 0.696e12, _PCIE4),
        # NVIDIA, "RTX A6000" (309.7 TFLOPS with sparsity, 768 GB/s), "RTX 6000 Ada" (1,457 in FP8 with sparsity, 960 GB/s).
        _gpu("a6000-48g", 49_140, 154.8e12, 38.7e12, 0.768e12, _PCIE4),
        _gpu("6000ada-48g", 49_140, 364.2e12, 91.1e12, 0.96e12, _PCIE4),
        # NVIDIA, data sheets "L4" (242 TFLOPS with sparsity, 300 GB/s), "L40" (181.05, 864 GB/s), "L40S" (362.05, 864 GB/s).
        _gpu("l4-24g", 23_034, 121e12, 30.3e12, 0.3e12, _PCIE4),
        _gpu("l40-48g", 46_068, 181e12, 90.5e12, 0.864e12, _PCIE4),
        _gpu("l40s-48g", 46_068, 362e12, 91.6e12, 0.864e12, _PCIE4),
        # NVIDIA, architecture papers of GA102, AD102 and Blackwell: tensor cores with sums in fp32; 936, 1,008, 1,792 GB/s.
        _gpu("3090-24g", 24_576, 71e12, 35.6e12, 0.936e12, _PCIE4 / 2),
        _gpu("4090-24g", 24_564, 165.2e12, 82.6e12, 1.008e12, _PCIE4 / 2),
        _gpu("5090-32g", 32_607, 209.5e12, 104.8e12, 1.792e12, _PCIE5 / 2),
        # AMD, "Instinct MI300X" data sheet: 1,307.4 TFLOPS, 192 GB, 5.3 TB/s, seven links of 64 GB/s and direction.
        _gpu("mi300x-192g", 196_592, 1307.4e12, 163.4e12, 5.3e12, 448e9, _NDR),
        # For processes that share a few cores and use gloo. Calibrate if numbers matter.
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

_LIST = "`hf-hotspa hardware` lists the named machines, and prints the fields of one for your own file"


def find_preset(text: str) -> Hardware | None:
    """Returns the machine with this name or first part (`h100`: the first in the list, `h100-80g`), or None.

    Ignores case, spaces and the words NVIDIA, RTX, GeForce and AMD.
    """
    name = _plain_name(text)
    return PRESETS.get(name) or next(iter(_of_kind(name)), None)


def other_forms(text: str) -> list[str]:
    """Returns the names of the machines that `find_preset` did not choose for a first part that several share."""
    name = _plain_name(text)
    return [] if name in PRESETS else [preset.name for preset in _of_kind(name)[1:]]


def _plain_name(text: str) -> str:
    words = str(text).lower().replace("_", "-").replace(" ", "-").split("-")
    return "-".join(word.removeprefix("rtx") for word in words if word not in ("nvidia", "rtx", "geforce", "amd", ""))


def _of_kind(name: str) -> list[Hardware]:
    return [preset for key, preset in PRESETS.items() if key.split("-")[0] == name]


def _unknown(text: object, where: str = "") -> HotspaConfigError:
    near = meant(_plain_name(str(text)), [*PRESETS, *(key.split("-")[0] for key in PRESETS)])
    return HotspaConfigError(
        f"there is no machine with the name {str(text)!r}" + ("" if where else ", and no such file"),
        where=where,
        fix=near + _LIST,
    )


def template(hardware: Hardware) -> str:
    """Returns a YAML file with all fields of a machine; `load_hardware` reads it back."""
    device = hardware.device
    rows = [
        ("name", f"{hardware.name}-own", "for tables"),
        ("memory_bytes", f"{device.memory_bytes / _MIB:.15g}MiB", "of one device"),
        ("peak_flops", "", "dense matrix products, operations per second"),
        *((f"  {dtype}", _plain(speed), "") for dtype, speed in device.peak_flops.items()),
        ("memory_bandwidth", _plain(device.memory_bandwidth), "bytes per second"),
        ("matmul_share", f"{device.matmul_share:g}", "of the peak, by large matrix products"),
        ("attention_share", f"{device.attention_share:g}", "of the peak, by flash attention on long sequences"),
        ("devices_per_node", hardware.devices_per_node, "where --nodes does not say it"),
        ("intra_bandwidth", _plain(hardware.intra_bandwidth), "of a device inside its node: bytes per second, one way"),
        ("inter_bandwidth", _plain(hardware.inter_bandwidth), "of one NIC: bytes per second, one way"),
        ("nics_per_node", "null" if hardware.nics_per_node is None else hardware.nics_per_node, "null: one a device"),
        ("intra_latency_s", f"{hardware.intra_latency_s:g}", "of one collective inside a node"),
        ("inter_latency_s", f"{hardware.inter_latency_s:g}", "of one across nodes"),
    ]
    return "".join(
        f"{f'{key}: {value}'.ljust(30)}{f'  # {comment}' if comment else ''}".rstrip() + "\n"
        for key, value, comment in rows
    )


def _plain(value: float) -> str:
    return f"{value / 1e9:.15g}e9"


def load_hardware(text: str | os.PathLike[str]) -> Hardware:
    """Returns the hardware of a name (see `find_preset`) or a YAML or JSON file. Raises `HotspaConfigError`: no such
    preset or file, no YAML, an unknown or missing field, or an impossible value."""
    path = Path(text)
    if not path.is_file():
        preset = find_preset(str(text))
        if preset is None:
            raise _unknown(text)
        return preset
    import yaml  # type: ignore[import-untyped]  # only needed for files

    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        reason = " ".join(str(error).split())
        raise HotspaConfigError(f"the hardware description is not YAML: {reason}", where=str(path), fix=_LIST) from None
    if not isinstance(data, dict):
        raise HotspaConfigError(
            f"the hardware description holds {type(data).__name__} instead of fields",
            where=str(path),
            fix="write `field: value` lines, such as `base: a100-80g`",
        )
    return hardware_from(data, str(path))


def hardware_from(data: Mapping[str, Any], where: str = "hardware description") -> Hardware:
    """Returns the hardware of a mapping of fields; see the module docstring. Raises `HotspaConfigError`: an unknown or
    missing field, or an impossible value."""
    of_hardware = [f.name for f in fields(Hardware) if f.name != "device"]
    of_device = [f.name for f in fields(Device)]
    known = ["base", *of_hardware, *of_device]
    for key in data:
        if key not in known:
            raise HotspaConfigError(f"there is no field {key!r}", where=where, fix=f"fields are {', '.join(known)}")
    base: Hardware | None = None
    if "base" in data:
        base = find_preset(str(data["base"]))
        if base is None:
            raise _unknown(data["base"], where)
        if others := other_forms(str(data["base"])):
            fix = f"use one of {', '.join([base.name, *others])}"
            raise HotspaConfigError(f"there are several machines {data['base']!r}", where=where, fix=fix)
    else:
        needed = ["devices_per_node", "intra_bandwidth", "inter_bandwidth", *of_device]
        if missing := [name for name in needed if name not in data and not name.endswith("_share")]:
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
    if key == "memory_bytes":
        return parse_bytes(value, key, where)
    parsed = _number(key, value, where, zero=key.endswith("latency_s"))
    if key.endswith("_share") and parsed > 1:
        raise HotspaConfigError(f"{key} is {value!r}", where=where, fix="give a share of the peak, between 0 and 1")
    if key in ("devices_per_node", "nics_per_node"):
        if parsed != int(parsed):
            raise HotspaConfigError(f"{key} is {value!r} instead of an integer", where=where)
        return int(parsed)
    return parsed


def _number(key: str, value: Any, where: str, zero: bool = False) -> float:
    try:
        # YAML 1.1 reads 25e9 as text: its floats need a point and a signed exponent
        parsed = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not (0 < parsed < math.inf or (zero and parsed == 0)):
        raise HotspaConfigError(
            f"{key} is {value!r}", where=where, fix="give a number above 0" if not zero else "give 0 or a number above"
        )
    return parsed
