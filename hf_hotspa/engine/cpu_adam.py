"""DeepSpeed's CPU Adam for a master store in host memory: vectorized C++, compiled once by the system's compiler.

Owns loading the kernel, and the optimizer class around it. It promises that a step depends on nothing but weights,
gradients, the state and the groups, so that a resumed run goes on bit for bit, and that its state is that of
`torch.optim.AdamW`: each goes on from a checkpoint of the other.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

# private, and the only one who knows where torch compiles
from torch.utils.cpp_extension import _get_build_directory

from hf_hotspa.engine.sole_compiler import sole_compiler

CPU_ADAM = "CpuAdamW"
"""The name of the class, as checkpoints have it."""


def load_cpu_adam() -> str | None:
    """Loads the kernel, compiled before if this is the first time on this machine (a minute; kept in torch's cache of
    extensions, `TORCH_EXTENSIONS_DIR`).

    Returns:
        None, or in a few words why it cannot be had. Never raises, and never waits for a process that was killed
        (`sole_compiler`): the caller has another optimizer.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it looks for others, and prints that there are none
    try:
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    except ImportError as error:
        return f"DeepSpeed cannot be imported: {error}"
    try:
        builder = CPUAdamBuilder()
        with sole_compiler(Path(_get_build_directory(builder.name, False))):
            builder.load(verbose=False)
    except Exception as error:  # of a compiler, of ninja, of the loader
        lines = str(error).strip().splitlines()
        return f"its kernel cannot be compiled: {lines[0] if lines else type(error).__name__}"
    return None


@cache
def cpu_adam_class() -> type[Optimizer]:
    """`CpuAdamW(groups, lr, betas, eps, weight_decay)`: AdamW on fp32 parameters in host memory.

    Made on demand, after `load_cpu_adam`: DeepSpeed is an optional dependency.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    class CpuAdamW(DeepSpeedCPUAdam):  # type: ignore[misc]
        """DeepSpeed's class, without what it remembers beside its state."""

        def step(self, closure: Any = None) -> Any:
            # DeepSpeed's C++ object multiplies the powers of the betas up from step to step, in fp32; a new one takes
            # them from the number of the step, as a process that was resumed would
            first = self.param_groups[0]
            constants = first["lr"], *first["betas"], first["eps"], first["weight_decay"]
            self.ds_opt_adam.create_adam(self.opt_id, *constants, self.adam_w_mode, False)
            return super().step(closure)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["step"] = int(state["step"])  # a tensor in torch's AdamW; the kernel takes a number

    CpuAdamW.__qualname__ = CPU_ADAM
    return CpuAdamW
