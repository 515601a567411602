"""The stages of ZeRO: bytes of weights, gradients and optimizer state on each device, and what a step sends.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC'20), section 3.1 and
Table 1: mixed precision with Adam keeps 2 bytes of weights, 2 of gradients and K = 12 of optimizer state (fp32 weights,
momentum, variance) a parameter. Stage 1 divides the optimizer state over the data-parallel degree, stage 2 the
gradients too, stage 3 everything. Section 7 has what is sent. These are the formulas that other systems are planned with; what hf_hotspa itself
keeps is counted in `memory`.
"""

from typing import NamedTuple

from hf_hotspa.errors import HotspaConfigError

STAGES = (0, 1, 2, 3)
WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12


def model_state_bytes(
    num_parameters: float,
    dp: int,
    stage: int,
    *,
    weight_bytes: float = WEIGHT_BYTES,
    gradient_bytes: float = GRADIENT_BYTES,
    optimizer_bytes: float = OPTIMIZER_BYTES,
) -> float:
    """Bytes of model states on one device.

    Args:
        num_parameters: Parameters of the model, or of the part of it that a device's tp and pp coordinates hold.
        dp: Data-parallel degree, over which the stage divides.
        stage: 0 (nothing is divided) to 3 (everything is).
        weight_bytes: Bytes of the weights, a parameter.
        gradient_bytes: Bytes of the gradients, a parameter.
        optimizer_bytes: Bytes of the optimizer state, a parameter; fp32 master weights count here.

    Raises:
        HotspaConfigError: there is no such stage, or dp is below 1.
    """
    _check_stage(stage)
    if dp < 1:
        raise HotspaConfigError(f"a data-parallel degree of {dp} is impossible", fix="use at least 1")
    return num_parameters * (
        weight_bytes / (dp if stage >= 3 else 1)
        + gradient_bytes / (dp if stage >= 2 else 1)
        + optimizer_bytes / (dp if stage >= 1 else 1)
    )


class Traffic(NamedTuple):
    """What a ring sends in one optimizer step, in elements that each device sends (and receives).

    Attributes:
        gathers: Weights, by all-gathers.
        reduces: Gradients, by reduce-scatters.
    """

    gathers: float
    reduces: float


def traffic(trained: float, frozen: float, dp: int, stage: int, packs: int) -> Traffic:
    """What a step of so many packs (micro-batches) a device sends.

    An all-gather and a reduce-scatter of n elements send n (dp - 1) / dp each. Stages 0 and 1: gradients once, and the
    weights that were trained once. Stage 2: gradients once a pack, as nobody keeps them whole; weights once. Stage 3:
    all weights for each forward and each backward pass, gradients once a pack; plain data parallelism for one pack sends
    two thirds of it.

    Raises:
        HotspaConfigError: there is no such stage.
    """
    _check_stage(stage)
    share = (dp - 1) / dp
    reduces = trained * (packs if stage >= 2 else 1)
    gathers = 2 * packs * (trained + frozen) if stage == 3 else trained
    return Traffic(gathers * share, reduces * share)


def _check_stage(stage: int) -> None:
    if stage not in STAGES:
        raise HotspaConfigError(f"there is no ZeRO stage {stage!r}", fix=f"use one of {', '.join(map(str, STAGES))}")
