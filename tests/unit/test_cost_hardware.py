"""Descriptions of machines: presets, YAML, units, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.hardware import PRESETS, load_hardware, parse_bytes, parse_nodes, template
from hf_hotspa.errors import HotspaConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str, tmp_path: Path) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    # what `hf-hotspa hardware` prints is the machine itself
    path = tmp_path / "own.yaml"
    path.write_text(template(hardware))
    assert replace(load_hardware(path), name=name) == hardware
    assert hardware.device.flops("float32") > 0
    cluster = hardware.cluster(4 * hardware.devices_per_node)
    assert isinstance(cluster, Cluster)
    assert cluster.num_nodes == 4
    assert cluster.latency_s == hardware.inter_latency_s
    assert hardware.cluster(2).latency_s == hardware.intra_latency_s


@pytest.mark.parametrize(
    ("asked", "name"),
    [("4090", "4090-24g"), ("RTX 4090", "4090-24g"), ("NVIDIA L40S", "l40s-48g"), ("A10G", "a10g-24g"), ("a10", "a10-24g"),
     ("H100_80G", "h100-80g"), ("rtx3090", "3090-24g"), ("b200", "b200-180g"), ("H20", "h20-96g"), ("MI300X", "mi300x-192g")],
)  # fmt: skip
def test_the_first_part_of_a_name_is_enough(asked: str, name: str) -> None:
    assert load_hardware(asked).name == name


def test_a_file_changes_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "base: a100-80g\nnics_per_node: 2\ninter_bandwidth: 12.5e9\nmemory_bytes: 40 GiB\n"
        "peak_flops: {bfloat16: 200e12}\n"
    )
    found = load_hardware(path)
    assert found.name == "a100-80g*"
    assert found.device.memory_bytes == 40 << 30
    assert found.inter_bandwidth == 12.5e9
    assert found.device.flops("bfloat16") == 200e12
    assert found.device.memory_bandwidth == PRESETS["a100-80g"].device.memory_bandwidth
    assert found.cluster(32).shares_nics
    with pytest.raises(HotspaConfigError, match="no peak speed for 'float32'.*bfloat16"):
        found.device.flops("float32")


def test_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(
        "devices_per_node: 4\nintra_bandwidth: 1e9\ninter_bandwidth: 1e8\nmemory_bytes: 1GiB\n"
        "peak_flops: {float32: 1e11}\nmemory_bandwidth: 2e10\n"
    )
    assert load_hardware(path).name == "box"
    assert load_hardware(path).cluster(8) == Cluster(8, 4, 1e9, 1e8, None, 150e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base: a100\n", "several machines 'a100'.*use one of a100-80g, a100-40g, a100-80g-pcie"),
        ("base: a101-80g\n", "no machine with the name 'a101-80g'.*did you mean a10.*hf-hotspa hardware"),
        ("base: a100-80g\nnics: 2\n", "no field 'nics'.*fields are base, name, devices_per_node"),
        ("devices_per_node: 8\n", "intra_bandwidth, inter_bandwidth, memory_bytes.*missing"),
        ("base: a100-80g\nintra_bandwidth: fast\n", "intra_bandwidth is 'fast'"),
        ("base: a100-80g\nintra_bandwidth: -1\n", "intra_bandwidth is -1"),
        ("base: a100-80g\ndevices_per_node: 1.5\n", "instead of an integer"),
        ("base: a100-80g\nmemory_bytes: lots\n", "memory_bytes is 'lots'"),
        ("base: a100-80g\nmemory_bytes: -3\n", "memory_bytes is -3"),
        ("base: a100-80g\npeak_flops: 3\n", "instead of speeds by dtype"),
        ("- a\n- b\n", "holds list instead of fields"),
        ("a: [1\n", "not YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(HotspaConfigError, match=f"(?s){says}"):
        load_hardware(path)


def test_unknown_preset() -> None:
    with pytest.raises(HotspaConfigError, match="'tpu', and no such file.*`hf-hotspa hardware` lists"):
        load_hardware("tpu")


def test_bytes_and_nodes() -> None:
    assert parse_bytes("70GiB") == 70 << 30
    assert parse_bytes(" 1.5 GB ") == 1_500_000_000
    assert parse_bytes("512mib") == 512 << 20
    assert parse_bytes(2e9) == 2_000_000_000
    for wrong in ("", "x", "-1GB", "0", True, "5 parsecs", "inf", "1.2.3"):
        with pytest.raises(HotspaConfigError):
            parse_bytes(wrong)
    assert parse_nodes("4x8") == (4, 8)
    for wrong in ("4", "x8", "0x8", "4x8x2", "4*8"):
        with pytest.raises(HotspaConfigError, match="4x8"):
            parse_nodes(wrong)
