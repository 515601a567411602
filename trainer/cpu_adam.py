"""DeepSpeed's CPU Adam for a master store in host memory: vectorized C++, compiled once by the system's compiler.

A step depends only on weights, gradients, state and groups, so a resumed run continues bit for bit. The state matches
`torch.optim.AdamW`: each loads the other's checkpoints.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

# private, but nothing else knows where torch compiles
from torch.utils.cpp_extension import _get_build_directory

from hf_hotspa.checkpoint.tensors import CPU_ADAM
from hf_hotspa.process_lock import LOCK_NAME, ProcessLock

logger = logging.getLogger(__name__)


def load_cpu_adam() -> str | None:
    """Loads the kernel. Compiles it on first use on this machine (about a minute; kept in torch's extension cache,
    `TORCH_EXTENSIONS_DIR`). Returns None on success, otherwise a short reason. Never raises, and never waits for a
    killed process (`sole_compiler`): the caller can use another optimizer."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it looks for others, and prints that there are none
    try:
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    except ImportError as error:
        return f"DeepSpeed cannot be imported: {error}"
    try:
        builder = CPUAdamBuilder()
        with sole_compiler(Path(_get_build_directory(builder.name, False))):
            builder.load(verbose=False)
    except Exception as error:  # from the compiler, ninja or the loader
        lines = str(error).strip().splitlines()
        return f"its kernel cannot be compiled: {lines[0] if lines else type(error).__name__}"
    return None


@cache
def cpu_adam_class() -> type[Optimizer]:
    """`CpuAdamW(groups, lr, betas, eps, weight_decay)`: AdamW on fp32 parameters in host memory. Call it after
    `load_cpu_adam`; it imports DeepSpeed, which is optional."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    class CpuAdamW(DeepSpeedCPUAdam):  # type: ignore[misc]
        """DeepSpeed's class, without its memory outside the state."""

        def step(self, closure: object = None) -> Any:
            # DeepSpeed's C++ object multiplies up powers of the betas step by step, in fp32; a new one computes them
            # from the step number, as a resumed process would
            first = self.param_groups[0]
            constants = first["lr"], *first["betas"], first["eps"], first["weight_decay"]
            self.ds_opt_adam.create_adam(self.opt_id, *constants, self.adam_w_mode, False)
            return super().step(closure)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["step"] = int(state["step"])  # a tensor in torch's AdamW; the kernel requires a number

    CpuAdamW.__qualname__ = CPU_ADAM
    return CpuAdamW


# -- compiling it once -------------------------------------------------------------------------------------------------

# One process at a time compiles a torch extension, and none waits for a killed compilation.
#
# torch's own lock is a file `lock` in the extension's folder. It outlives a killed process, and later processes wait
# for it forever, without a message. Our processes wait for each other by a lock that ends with its process. An orphaned
# torch lock is removed: at once if one of our processes died on this machine, otherwise once it is older than any
# compilation.


_BATON = "lock"  # the name that torch gives it
_PATIENCE_S = 1200.0  # how long to wait for a living process; less than ranks wait for each other
_STALE_S = 600.0
"""The age at which a file is orphaned if no process on this machine holds it; it may be another machine's. Compiling
takes a minute or two."""


@contextlib.contextmanager
def sole_compiler(folder: Path) -> Iterator[None]:
    """While active, none of our other processes compiles in this folder, and torch waits for no dead process. Raises
    `TimeoutError` if another process compiles for longer than any compilation takes; `OSError` if the folder cannot be
    written to."""
    lock, host = ProcessLock(folder / LOCK_NAME), socket.gethostname()
    if not lock.take(owner=host):
        logger.warning("waiting for another process, which compiles in %s", folder)
        if not lock.take(_PATIENCE_S, owner=host):
            raise TimeoutError(f"another process has been compiling in {folder} for {_PATIENCE_S:.0f} s")
    try:
        _take_away(folder / _BATON, died_here=lock.left_behind == host)
        yield
    finally:
        lock.release()


def _take_away(baton: Path, died_here: bool) -> None:
    """Waits until torch's lock file is gone, or removes it if orphaned."""
    deadline, waits = time.monotonic() + _PATIENCE_S, False
    while (age_s := _age_s(baton)) is not None:
        holder = _holder(baton)
        if holder is None and (died_here or age_s > _STALE_S):
            logger.warning("%s was left by a compilation that was killed, and is removed", baton)
            baton.unlink(missing_ok=True)
            return
        who = f"process {holder} holds {baton}" if holder is not None else f"{baton} may be another machine's"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{who}; remove it if nothing compiles there")
        if not waits:
            waits = True
            logger.warning("waiting: %s; remove it if nothing compiles there", who)
        time.sleep(0.1)


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def _holder(path: Path) -> int | None:
    wanted = str(path.resolve())
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's process, or one that ended meanwhile
            if any(os.readlink(entry.path) == wanted for entry in os.scandir(folder)):
                return int(folder.parent.name)
    return None
