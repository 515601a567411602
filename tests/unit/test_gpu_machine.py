"""Which set-up `make test-gpu` chooses on every kind of machine, with versions that are made up."""

import pytest

from tests.gpu_machine import (
    CPU,
    HOST,
    LIBRARY,
    OWN,
    SHARED,
    SHARED_ENVIRONMENT,
    Machine,
    announcement,
    best_setup,
    nccl_version,
    preloading,
    setup_of,
)

H100 = "NVIDIA H100 80GB HBM3"


def machine(gpus: int, nccl: tuple[int, ...] | None, preloaded: bool = False) -> Machine:
    driver, cuda = ("580.65.06", "13.0") if gpus else ("", "")
    return Machine((H100,) * gpus, driver, cuda, nccl, "2.13.0", preloaded)


@pytest.mark.parametrize(
    ("gpus", "nccl", "ranks", "kind", "devices"),
    [
        (8, (2, 28, 9), 4, OWN, (0, 1, 2, 3)),
        (4, (2, 30, 1), 4, OWN, (0, 1, 2, 3)),
        (2, (2, 30, 1), 4, SHARED, (0, 1, 0, 1)),
        (3, (2, 32, 0), 4, SHARED, (0, 1, 2, 0)),
        (1, (2, 30, 0), 4, SHARED, (0, 0, 0, 0)),
        (1, (3, 0, 0), 2, SHARED, (0, 0)),
        (1, (2, 29, 7), 4, HOST, (0, 0, 0, 0)),
        (1, (2, 29, 7), 1, OWN, (0,)),
        (2, (2, 28, 9), 2, OWN, (0, 1)),
        (4, None, 4, HOST, (0, 0, 0, 0)),
        (0, None, 4, CPU, ()),
    ],
)
def test_how_ranks_run(
    gpus: int, nccl: tuple[int, ...] | None, ranks: int, kind: str, devices: tuple[int, ...]
) -> None:
    found = setup_of(machine(gpus, nccl), ranks)
    assert (found.kind, found.devices, found.ranks) == (kind, devices, ranks)
    assert dict(found.environment) == (SHARED_ENVIRONMENT if kind == SHARED else {})
    assert found.over_nccl == (kind in (OWN, SHARED))


@pytest.mark.parametrize(
    ("gpus", "nccl", "ranks"),
    [(2, (2, 28, 9), 2), (3, (2, 28, 9), 2), (2, (2, 30, 1), 4), (1, (2, 28, 9), 4), (0, None, 4)],
)
def test_the_best_set_up(gpus: int, nccl: tuple[int, ...] | None, ranks: int) -> None:
    """Two ranks over NCCL say more than four over the host."""
    one = machine(gpus, nccl)
    assert best_setup(one) == setup_of(one, ranks)


def test_the_line_has_every_version() -> None:
    one = machine(1, (2, 30, 7), preloaded=True)
    line = announcement(one, best_setup(one))
    assert line == (
        f"NCCL, several ranks on a GPU: 4 ranks on 1 x {H100}; "
        "driver 580.65.06, CUDA 13.0, NCCL 2.30.7 (preloaded), torch 2.13.0"
    )
    none = machine(0, None)
    assert announcement(none, best_setup(none)) == (
        "CPU processes (gloo): 4 ranks; driver none, CUDA none, NCCL none, torch 2.13.0"
    )


def test_a_library_is_preloaded_once_and_beside_others() -> None:
    old = machine(1, (2, 28, 9))
    assert preloading(old, {}) is None
    assert preloading(old, {LIBRARY: "/lib/new.so"}) == {"LD_PRELOAD": "/lib/new.so"}
    assert preloading(old, {LIBRARY: "/lib/new.so", "LD_PRELOAD": "a.so"}) == {"LD_PRELOAD": "/lib/new.so:a.so"}
    assert preloading(machine(1, (2, 32, 0), preloaded=True), {LIBRARY: "/lib/new.so"}) is None
    assert preloading(machine(0, None), {LIBRARY: "/lib/new.so"}) is None


@pytest.mark.parametrize(
    ("code", "version"), [(2804, (2, 8, 4)), (21805, (2, 18, 5)), (23007, (2, 30, 7)), (30000, (3, 0, 0))]
)
def test_versions_of_nccl(code: int, version: tuple[int, ...]) -> None:
    assert nccl_version(code) == version


def test_this_machine_can_be_looked_at() -> None:
    found = Machine.found()
    assert found.torch
    assert set(found.versions) == {"GPUs", "driver", "CUDA", "NCCL", "torch"}
    assert best_setup(found).ranks in (2, 4)
