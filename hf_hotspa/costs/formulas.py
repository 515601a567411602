"""The textbook formulas of 3D-parallel tuning, each with its source. They explain; `time` and `memory` predict.

Sources: N21 = Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC'21); K22 = Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). A *message* is
the hidden state of a micro-batch: `2 b s h` bytes in 16 bits. `hf-hotspa formulas` prints them for a model and a cluster.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.errors import HotspaConfigError

ALL_REDUCES_PER_LAYER = 4
"""Tensor parallelism: two all-reduces in the forward pass of a layer (behind attention and MLP), two in the backward
pass (N21 section 2.3)."""

STATE_BYTES_PER_PARAMETER = 20
"""Adam in mixed precision with fp32 gradient accumulation: weights 2 + gradients 2 + fp32 gradients 4 + master
weights 4 + momentum 4 + variance 4."""


ALL_REDUCES_RECOMPUTED = 6
"""The same when layers recompute everything: two in the forward pass, two in the one that is repeated, two backward."""

ELEMENT_BYTES = 2
"""16 bits."""


@dataclass(frozen=True)
class Matmul:
    """The product of two matrices of n x n in 16 bits, and what tensor parallelism of degree t leaves of it on a device.

    The first matrix is whole on each device, the second is cut, and so is the result.

    Args:
        flops: `2 n^3 / t`.
        bytes: `2 n^2 + 4 n^2 / t`: `(1 + 2 / t) / 3` of what one device would move.
    """

    flops: float
    bytes: float

    @classmethod
    def of(cls, n: int, tp: int = 1) -> "Matmul":
        return cls(2 * n**3 / tp, 2 * n**2 + 4 * n**2 / tp)

    @property
    def intensity(self) -> float:
        """Operations a byte: `n / (2 + t)`. It falls as t grows: `3 / (2 + t)` of what one device has."""
        return self.flops / self.bytes


def bubble_fraction(pp: int, num_micro_batches: int) -> float:
    """Idle time of a pipeline over its ideal time, `(p - 1) / m`, for GPipe and 1F1B alike (N21 section 2.2).

    Raises:
        HotspaConfigError: a number is below 1.
    """
    if pp < 1 or num_micro_batches < 1:
        raise HotspaConfigError(f"{pp} stages and {num_micro_batches} micro-batches are no pipeline")
    return (pp - 1) / num_micro_batches


def inter_elements(num_tokens: int, hidden_size: int) -> int:
    """`C_inter = 2 b s h`: elements that a micro-batch moves between two stages, forward and backward (N21 3.2)."""
    return 2 * num_tokens * hidden_size


def intra_elements(num_tokens: int, hidden_size: int, tp: int, layers_of_stage: int) -> float:
    """`C_intra = l_stage * 8 b s h (1 - 1/t)`: elements that a device sends for the all-reduces of its stage (N21 3.2).

    A ring all-reduce of n elements sends `2 n (1 - 1/t)` from each device, and a layer has four of `b s h`. Hence
    `C_intra = l_stage * 4 * (1 - 1/t) * C_inter`: tensor parallelism belongs inside the node.
    """
    return layers_of_stage * ALL_REDUCES_PER_LAYER * 2 * num_tokens * hidden_size * (1 - 1 / tp)


def pipeline_seconds(pp: int, num_micro_batches: int, micro_batch_s: float) -> float:
    """`(m + p - 1) (t_f + t_b)`: seconds of a batch (N21 2.2); `micro_batch_s` is t_f + t_b on one stage."""
    bubble_fraction(pp, num_micro_batches)
    return (num_micro_batches + pp - 1) * micro_batch_s


def tensor_seconds(message: float, bandwidth: float, tp: int, layers_of_stage: float, num_micro_batches: int) -> float:
    """`T_tp`: the all-reduces of a batch, layers recomputing everything: six a layer and micro-batch, each of a message
    in bytes, over links between the ranks of tp of that bandwidth in bytes a second."""
    each = message / bandwidth * 2 * (tp - 1) / tp
    return each * ALL_REDUCES_RECOMPUTED * layers_of_stage * num_micro_batches


def data_seconds(gradient_bytes: float, bandwidth: float, dp: int) -> float:
    """`T_dp`: the all-reduce of the gradients that a device holds, by a ring."""
    return gradient_bytes / bandwidth * 2 * (dp - 1) / dp


def stage_seconds(
    message: float, inter_bandwidth: float, intra_bandwidth: float, tp: int, pp: int, num_micro_batches: int
) -> float:
    """`T_pp`: what a batch passes between stages: each rank of tp sends its share of a message to the next stage, where
    they are gathered inside the node.

    Args:
        message: Bytes.
        inter_bandwidth: Bytes a second of the links between stages.
        intra_bandwidth: The same between the ranks of tp.
    """
    if pp == 1:
        return 0.0
    sends = 2 * num_micro_batches + 2 * (pp - 1)
    gathers = num_micro_batches + pp - 1
    return sends * message / tp / inter_bandwidth + gathers * message / intra_bandwidth * (tp - 1) / tp


def parameters_per_device(num_parameters: float, tp: int, pp: int) -> float:
    """About `N / (p t)`: what a device holds of a model, the embedding being shared evenly with the rest."""
    return num_parameters / (tp * pp)


def state_bytes_per_device(num_parameters: float, tp: int, pp: int) -> float:
    """Bytes of model states on a device when data parallelism divides nothing."""
    return parameters_per_device(num_parameters, tp, pp) * STATE_BYTES_PER_PARAMETER


def logit_bytes(num_tokens: int, vocab_size: int, tp: int) -> float:
    """`M_emb = 2 b s v / t`: the logits of a micro-batch in 16 bits, the vocabulary cut over tp."""
    return ELEMENT_BYTES * num_tokens * vocab_size / tp


def recomputed_bytes(num_tokens: int, hidden_size: int, num_layers: float, pp: int) -> float:
    """`M_transformer = 2 b s h l / p`: the inputs of a stage's layers in 16 bits, all else being recomputed; without sequence
    parallelism, and of one micro-batch."""
    return ELEMENT_BYTES * num_tokens * hidden_size * num_layers / pp


# -- the stages of ZeRO: bytes of model states on each device, and what a step sends ------------------------------------
#
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC'20), section 3.1 and Table 1: mixed
# precision with Adam keeps 2 bytes of weights, 2 of gradients and K = 12 of optimizer state (fp32 weights, momentum, variance) a
# parameter. Stage 1 divides the optimizer state over the data-parallel degree, stage 2 the gradients too, stage 3 everything. Section 7
# has what is sent. Other systems are planned with these; what hf_hotspa itself keeps is counted in `memory`.

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
    """Elements that each device sends (and receives) in a step: weights by all-gathers, gradients reduce-scattered."""

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
