"""The files of a checkpoint that only the stock `transformers.Trainer` reads, so that a run can go on with it.

Promises that what it finds is what it would have written itself at this step: the optimizer's state of whole parameters,
numbered as by its own groups; the scheduler; the generators of each process; the arguments. Nothing here reads any of it.
"""

import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_hotspa.checkpoint.tensors import bare_optimizer, names_in_groups
from hf_hotspa.engine.master import MasterStore

PICKLED_ARGUMENTS = "training_args.bin"


def pickled(value: Any) -> bytes:
    """What `torch.save` writes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def random_file(rank: int, world_size: int) -> str:
    """The file with the generators of a process."""
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def random_states(world_size: int) -> dict[str, Any]:
    """The generators of this process, in the stock Trainer's form."""
    states: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state() if world_size == 1 else torch.cuda.get_rng_state_all()
    return states


def state_names(master: MasterStore, optimizer: Optimizer) -> list[str]:
    """The elementwise states of an optimizer, such as `exp_avg`.

    The same on all ranks: the stores of all of them hold all parameters, even if no element of them.
    """
    state = bare_optimizer(optimizer).state
    return sorted({
        key
        for parameter in master.parameters.values()
        for key, value in state.get(parameter, {}).items()
        if _is_elementwise(value, parameter)
    })  # fmt: skip


def state_buffers(master: MasterStore, optimizer: Optimizer, key: str) -> list[Tensor | None]:
    """One of the states, laid out as this rank's share of the weights; zeros where a parameter has none."""
    state, buffers = bare_optimizer(optimizer).state, master.empty_buffers()
    for name, parameter in master.parameters.items():
        share, value = master.shares[name], state.get(parameter, {}).get(key)
        buffer = buffers[share.segment]
        if buffer is not None and _is_elementwise(value, parameter):
            buffer[share.low : share.low + len(value)] = value
    return buffers


def _is_elementwise(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def optimizer_state(optimizer: Optimizer, master: MasterStore, states: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """The optimizer's `state_dict` with whole parameters in place of this rank's shares, in host memory.

    Args:
        optimizer: On the master store; its groups are made as with the stock Trainer.
        states: State -> parameter -> the whole of it.
    """
    bare, state = bare_optimizer(optimizer), dict[int, dict[str, Any]]()
    described = bare.state_dict()
    for names, group in zip(names_in_groups(bare, master), described["param_groups"], strict=True):
        for name, index in zip(names, group["params"], strict=True):
            if own := described["state"].get(index):
                state[index] = {
                    key: states[key][name] if _is_elementwise(value, master.parameters[name]) else _kept(value)
                    for key, value in own.items()
                }
    return {"state": state, "param_groups": described["param_groups"]}


def _kept(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
