"""What this machine lets ranks share: which GPUs, which NCCL, and how N ranks run on them.

`Machine.found()` looks; `setup_of(machine, ranks)` decides, a pure function, so that every kind of machine is tested
without one. NCCL wanted a GPU for every rank until 2.30; since then several may share one
(`NCCL_MULTI_RANK_GPU_ENABLE=1`, experimental). A newer library than torch's is preloaded where `HOTSPA_NCCL_LIBRARY`
names it: the library is asked for its version then, as `torch.cuda.nccl.version()` is the one that torch was built with.
"""

import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

LIBRARY = "HOTSPA_NCCL_LIBRARY"
ON = "HOTSPA_GPU_ON"
"""`gpu`, `host` (GPUs as if there were no NCCL) or `cpu`: what `python -m tests.gpu --on` was given, for its ranks."""
SHARES_SINCE = (2, 30)
SHARED_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",  # ranks that share a GPU share its processors: all kernels must fit at once, else they hang
}
OWN, SHARED, HOST, CPU = "nccl", "nccl-shared", "host", "cpu"
"""Kinds of set-up: NCCL and a GPU a rank; NCCL, and ranks share GPUs; ranks share a GPU and messages go through the host
(gloo); no GPU at all, gloo."""
TITLES = {
    OWN: "NCCL, a GPU for every rank",
    SHARED: "NCCL, several ranks on a GPU",
    HOST: "GPUs, messages through the host (gloo)",
    CPU: "CPU processes (gloo)",
}
NO_GPU = "this machine has no NVIDIA GPU that torch sees"


@dataclass(frozen=True)
class Machine:
    """What was found.

    Args:
        gpus: The names of the GPUs that torch sees.
        driver: The version of the driver; empty when unknown, as the others.
        cuda: Of the CUDA that torch was built with.
        nccl: Of the NCCL library that is loaded: `(major, minor, patch)`; None where torch has none.
        torch: Of torch.
        preloaded: Whether `HOTSPA_NCCL_LIBRARY` names the library that is loaded.
    """

    gpus: tuple[str, ...]
    driver: str
    cuda: str
    nccl: tuple[int, ...] | None
    torch: str
    preloaded: bool = False

    @classmethod
    def found(cls, *, driver: bool = False) -> "Machine":
        """This machine, as this process sees it.

        Args:
            driver: Whether the version of the driver is asked for, which takes a process.
        """
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(
            gpus=tuple(torch.cuda.get_device_name(i) for i in range(count)),
            driver=_driver() if count and driver else "",
            cuda=torch.version.cuda or "",
            nccl=loaded_nccl() if count and os.environ.get(ON) != "host" else None,
            torch=torch.__version__,
            preloaded=bool(os.environ.get(LIBRARY)) and os.environ[LIBRARY] in os.environ.get("LD_PRELOAD", ""),
        )

    @property
    def shares(self) -> bool:
        """Whether its NCCL lets ranks share a GPU."""
        return self.nccl is not None and self.nccl[:2] >= SHARES_SINCE

    @property
    def versions(self) -> dict[str, str]:
        """Of driver, CUDA, NCCL and torch, and the GPUs; `none` where there is none."""
        nccl = ".".join(map(str, self.nccl)) if self.nccl else ""
        kinds = {name: self.gpus.count(name) for name in self.gpus}
        return {
            "GPUs": ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none",
            "driver": self.driver or "none",
            "CUDA": self.cuda or "none",
            "NCCL": (nccl or "none") + (" (preloaded)" if self.preloaded else ""),
            "torch": self.torch,
        }


@dataclass(frozen=True)
class Setup:
    """How a world of ranks runs on a machine.

    Args:
        kind: See `TITLES`.
        ranks: Their number.
        devices: Rank -> GPU; empty on CPU.
        environment: What a rank's environment needs beside it.
    """

    kind: str
    ranks: int
    devices: tuple[int, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def over_nccl(self) -> bool:
        return self.kind in (OWN, SHARED)


def setup_of(machine: Machine, ranks: int) -> Setup:
    """How so many ranks run there: over NCCL where it can be, on GPUs where there are any."""
    count = len(machine.gpus)
    if not count:
        return Setup(CPU, ranks)
    if machine.nccl is not None and count >= ranks:
        return Setup(OWN, ranks, tuple(range(ranks)))
    if machine.shares:
        return Setup(SHARED, ranks, tuple(rank % count for rank in range(ranks)), tuple(SHARED_ENVIRONMENT.items()))
    return Setup(HOST, ranks, (0,) * ranks)


def best_setup(machine: Machine) -> Setup:
    """Of four ranks, or of two where that is what NCCL can do."""
    four, two = setup_of(machine, 4), setup_of(machine, 2)
    return two if two.over_nccl and not four.over_nccl else four


def announcement(machine: Machine, setup: Setup) -> str:
    """The first and the last line of `make test-gpu`."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if name != "GPUs")
    gpus = f" on {machine.versions['GPUs']}" if machine.gpus else ""
    return f"{TITLES[setup.kind]}: {setup.ranks} ranks{gpus}; {versions}"


def preloading(machine: Machine, environment: Mapping[str, str]) -> dict[str, str] | None:
    """What must be set in the environment of a new process so that it runs with the library that is asked for; None where
    this one has it, or none is asked for."""
    library = environment.get(LIBRARY)
    if not library or machine.preloaded or not machine.gpus:
        return None
    before = environment.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library}


def nccl_version(code: int) -> tuple[int, int, int]:
    """`ncclGetVersion`'s number in parts: 2.8.4 is 2804, and 2.30.7 is 23007."""
    if code < 10_000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10_000, code % 10_000 // 100, code % 100


@functools.cache
def loaded_nccl() -> tuple[int, ...] | None:
    """The version of the NCCL library in this process: the preloaded one, else torch's."""
    import torch

    code = ctypes.c_int()
    for name in (None, "libnccl.so.2"):
        try:
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(code))
        except (OSError, AttributeError):
            continue
        return nccl_version(code.value)
    try:  # it is a part of torch's own library
        return tuple(torch.cuda.nccl.version()[:3])
    except (AttributeError, RuntimeError):
        return None


def _driver() -> str:
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"[0-9.]+", run.stdout)
    return found[0] if found else ""
