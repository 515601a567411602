"""`hf-hotspa calibrate`: runs on the processes of a launcher, or starts processes without one.

Owns the start of these processes, and passes their result or error to the printing process.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import AutoConfig

from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
from hf_hotspa.commands.rank_world import WorldError, run_world
from hf_hotspa.costs.calibration import Calibration, FrozenBase
from hf_hotspa.costs.model_config import read_config
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.errors import HotspaConfigError, PeerError, printable
from hf_hotspa.parallel import backends

_TIMEOUT = timedelta(minutes=10)
_Request = tuple[dict[str, object], str | None, bool, bool, FrozenBase | None]  # what `_measure` gets beside the rank


def _measure(
    rank: int,
    world_size: int,
    config: dict[str, object],
    dtype: str | None,
    force: bool,
    quiet: bool,
    base: FrozenBase | None,
) -> Calibration:
    """Collective; for the arguments see `run`."""
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    progress = None if quiet else lambda text: print(printable(text), file=sys.stderr, flush=True)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    return calibrate(
        AutoConfig.for_model(str(config["model_type"]), **fields),
        compute_dtype=getattr(torch, dtype) if dtype is not None else None,
        device=device,
        force=force,
        base=base,
        procedure=Procedure(progress=progress),
    )


def run(
    model: str,  # a preset, a config file or its folder
    processes: int | None,  # how many to start; None for the number of GPUs, else of cores. Not with a launcher
    dtype: str | None,  # the dtype of computation; the config's when None
    force: bool,  # whether to measure even if the cache has a result
    *,
    quiet: bool = False,  # whether to print no progress
    base: FrozenBase | None = None,
) -> Calibration | None:
    """Calibrates a model. Returns None on ranks above 0 of a launcher. Raises `HotspaError`: the input is wrong, or a
    rank failed."""
    request = read_config(model), dtype, force, quiet, base
    if dtype is not None:
        dtype_bytes(dtype)
    launched, gpus = int(os.environ.get("WORLD_SIZE", "0")), torch.cuda.device_count()
    if launched:
        if processes not in (None, launched):
            fix = "leave --processes out"
            raise HotspaConfigError(f"--processes {processes}, and the launcher started {launched}", fix=fix)
        return _run_launched(request)
    count = processes if processes is not None else gpus or os.cpu_count() or 1
    if count < 1:
        raise HotspaConfigError(f"{count} processes cannot measure anything", fix="use at least 1")
    if count > gpus > 0:
        raise HotspaConfigError(f"{count} processes on {gpus} GPUs", fix="use at most one process a GPU")
    try:
        return run_world(count, _measure, *request, timeout_s=_TIMEOUT.total_seconds(), device=_device())
    except WorldError as failure:
        raise PeerError(f"a process failed: {failure}", where="calibration") from failure


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _run_launched(request: _Request) -> Calibration | None:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group(backends.backend_for(_device()), timeout=_TIMEOUT)
    rank = dist.get_rank()
    try:
        calibration = _measure(rank, dist.get_world_size(), *request)
    finally:
        if ours:
            dist.destroy_process_group()
    return calibration if rank == 0 else None
