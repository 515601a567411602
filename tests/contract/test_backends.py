"""Nobody but the table of backends asks which backend it is: neither by name, nor by torch's questions."""

import ast

import pytest
import torch.distributed as dist

from hf_hotspa.parallel.backends import BACKENDS, abilities, backend_for
from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files
from tests.shared_gpu import BACKEND

OWNERS = {"hf_hotspa/parallel/backends.py", "hf_hotspa/engine/transport.py"}
QUESTIONS = {
    "get_backend", "getBackendName", "is_nccl_available", "is_gloo_available", "is_mpi_available", "is_backend_available",
    "ProcessGroupNCCL", "ProcessGroupGloo", "_get_backend", "supports_coalescing",
}  # fmt: skip


def questions_of(source: str) -> list[tuple[int, str]]:
    """Where a source names a backend or asks for it: line and what."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in BACKENDS:
            found.append((node.lineno, repr(node.value)))
        if isinstance(node, ast.Attribute) and node.attr in QUESTIONS:
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.Name) and node.id in QUESTIONS:
            found.append((node.lineno, node.id))
        if isinstance(node, ast.ImportFrom):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name in QUESTIONS]
    return found


def test_no_code_path_asks_which_backend_it_is() -> None:
    files = set(source_files(*PACKAGE_FOLDERS, "examples")) - OWNERS
    asking = {file: found for file in files if (found := questions_of((ROOT / file).read_text()))}
    assert not asking, f"ask hf_hotspa.parallel.backends what a backend can do, not which it is: {asking}"


def test_the_check_sees_each_way_to_ask() -> None:
    for line in (
        'if dist.get_backend() == "gloo": pass',
        'group = dist.new_group(backend="gloo")',
        'x = "nccl" if torch.cuda.is_available() else "gloo"',
        "from torch.distributed import is_nccl_available",
        "isinstance(group, dist.ProcessGroupGloo)",
    ):
        assert questions_of(line), line


def test_the_table_answers() -> None:
    assert (backend_for("cuda"), backend_for("cpu")) == ("nccl", "gloo")
    assert BACKENDS["gloo"].tags
    assert not BACKENDS["nccl"].tags
    assert BACKEND not in BACKENDS  # what the tests register is a stranger, of which nothing is taken for granted


def test_a_stranger_is_trusted_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "somebody's own")
    assert not abilities().host_tensors
    assert not abilities().tags
    assert abilities().wakes_ranks  # nothing is aborted
