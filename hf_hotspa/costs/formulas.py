"""Textbook formulas of 3D parallelism, with sources. They explain; `time` and `memory` predict.

Sources: N21 = Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC'21); K22 = Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). A *message*
is the hidden state of a micro-batch: `2 b s h` bytes in 16 bits. `hf-hotspa formulas` prints them for a model and a
cluster.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.errors import HotspaConfigError

ALL_REDUCES_PER_LAYER = 4
"""Tensor parallelism: two all-reduces in the forward pass of a layer (after attention and MLP), two in the backward
pass (N21 section 2.3)."""

STATE_BYTES_PER_PARAMETER = 20
"""Adam in mixed precision with fp32 gradient accumulation: weights 2 + gradients 2 + fp32 gradients 4 + master
weights 4 + momentum 4 + variance 4."""


ALL_REDUCES_RECOMPUTED = 6
"""The same with full recomputation: two forward, two in the repeated forward pass, two backward."""

ELEMENT_BYTES = 2  # bytes of a 16-bit element


@dataclass(frozen=True)
class Matmul:
    """The product of two n x n matrices in 16 bits, on one device under tensor parallelism of degree t. Each device has
    the complete first matrix, and a shard of the second and of the result.
    """

    flops: float  # `2 n^3 / t`
    bytes: float  # `2 n^2 + 4 n^2 / t`: `(1 + 2 / t) / 3` of the bytes of a single device

    @classmethod
    def of(cls, n: int, tp: int = 1) -> "Matmul":
        return cls(2 * n**3 / tp, 2 * n**2 + 4 * n**2 / tp)

    @property
    def intensity(self) -> float:
        """Operations per byte: `n / (2 + t)`, which is `3 / (2 + t)` of a single device's."""
        return self.flops / self.bytes


def bubble_fraction(pp: int, num_micro_batches: int) -> float:
    """Idle time of a pipeline over its ideal time, `(p - 1) / m`, for both GPipe and 1F1B (N21 section 2.2). Raises
    `HotspaConfigError`: a number is below 1."""
    if pp < 1 or num_micro_batches < 1:
        raise HotspaConfigError(f"{pp} stages and {num_micro_batches} micro-batches do not form a pipeline")
    return (pp - 1) / num_micro_batches


def inter_elements(num_tokens: int, hidden_size: int) -> int:
    """`C_inter = 2 b s h`: elements of a micro-batch between two stages, forward and backward (N21 3.2)."""
    return 2 * num_tokens * hidden_size


def intra_elements(num_tokens: int, hidden_size: int, tp: int, layers_of_stage: int) -> float:
    """`C_intra = l_stage * 8 b s h (1 - 1/t)`: elements that a device sends for the all-reduces of its stage (N21 3.2).

    A ring all-reduce of n elements sends `2 n (1 - 1/t)` from each device, and a layer has four of `b s h`. So
    `C_intra = l_stage * 4 * (1 - 1/t) * C_inter`: tensor parallelism belongs inside the node.
    """
    return layers_of_stage * ALL_REDUCES_PER_LAYER * 2 * num_tokens * hidden_size * (1 - 1 / tp)


def pipeline_seconds(pp: int, num_micro_batches: int, micro_batch_s: float) -> float:
    """`(m + p - 1) (t_f + t_b)`: seconds of a batch (N21 2.2); `micro_batch_s` is t_f + t_b on one stage."""
    bubble_fraction(pp, num_micro_batches)
    return (num_micro_batches + pp - 1) * micro_batch_s


def tensor_seconds(message: float, bandwidth: float, tp: int, layers_of_stage: float, num_micro_batches: int) -> float:
    """`T_tp`: seconds of the all-reduces of a batch with full recomputation: six per layer and micro-batch, each of a
    `message` in bytes, at the `bandwidth` between tp ranks in bytes per second."""
    each = message / bandwidth * 2 * (tp - 1) / tp
    return each * ALL_REDUCES_RECOMPUTED * layers_of_stage * num_micro_batches


def data_seconds(gradient_bytes: float, bandwidth: float, dp: int) -> float:
    """`T_dp`: seconds of a ring all-reduce of a device's gradients."""
    return gradient_bytes / bandwidth * 2 * (dp - 1) / dp


def stage_seconds(
    message: float, inter_bandwidth: float, intra_bandwidth: float, tp: int, pp: int, num_micro_batches: int
) -> float:
    """`T_pp`: seconds of a batch's messages between stages. Each tp rank sends its share of a message to the next
    stage, which gathers the shares inside the node. `message`: bytes. `inter_bandwidth`: between stages, in bytes per
    second. `intra_bandwidth`: between tp ranks, in bytes per second."""
    if pp == 1:
        return 0.0
    sends = 2 * num_micro_batches + 2 * (pp - 1)
    gathers = num_micro_batches + pp - 1
    return sends * message / tp / inter_bandwidth + gathers * message / intra_bandwidth * (tp - 1) / tp


def parameters_per_device(num_parameters: float, tp: int, pp: int) -> float:
    """About `N / (p t)`: parameters of a device if the embedding is divided evenly with the rest."""
    return num_parameters / (tp * pp)


def state_bytes_per_device(num_parameters: float, tp: int, pp: int) -> float:
    """Bytes of model states on a device without ZeRO."""
    return parameters_per_device(num_parameters, tp, pp) * STATE_BYTES_PER_PARAMETER


def logit_bytes(num_tokens: int, vocab_size: int, tp: int) -> float:
    """`M_emb = 2 b s v / t`: logits of a micro-batch in 16 bits, with the vocabulary cut over tp."""
    return ELEMENT_BYTES * num_tokens * vocab_size / tp


def recomputed_bytes(num_tokens: int, hidden_size: int, num_layers: float, pp: int) -> float:
    """`M_transformer = 2 b s h l / p`: layer inputs of a stage in 16 bits, with full recomputation and without sequence
    parallelism, for one micro-batch."""
    return ELEMENT_BYTES * num_tokens * hidden_size * num_layers / pp


# -- ZeRO stages: bytes of model states on each device, and traffic of a step ------------------------------------------
#
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC'20), section 3.1 and
# Table 1: mixed precision with Adam keeps, per parameter, 2 bytes of weights, 2 of gradients and K = 12 of optimizer
# state (fp32 weights, momentum, variance). Stage 1 divides the optimizer state over the data-parallel degree, stage 2
# the gradients too, stage 3 everything. Traffic: section 7. For plans of other systems; `memory` counts hf_hotspa.

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
    """Bytes of model states on one device, from bytes per parameter; `optimizer_bytes` includes fp32 master weights.
    Raises `HotspaConfigError`: there is no such stage, or dp is below 1. `num_parameters`: of the model, or of its part
    at a device's tp and pp coordinates. `stage`: ZeRO stage, 0 (nothing is divided) to 3 (everything is)."""
    _check_stage(stage)
    if dp < 1:
        raise HotspaConfigError(f"a data-parallel degree of {dp} is impossible", fix="use at least 1")
    return num_parameters * (
        weight_bytes / (dp if stage >= 3 else 1)
        + gradient_bytes / (dp if stage >= 2 else 1)
        + optimizer_bytes / (dp if stage >= 1 else 1)
    )


class Traffic(NamedTuple):
    """Elements that each device sends (and receives) in a step: all-gathered weights, reduce-scattered gradients."""

    gathers: float
    reduces: float


def traffic(trained: float, frozen: float, dp: int, stage: int, packs: int) -> Traffic:
    """Returns the traffic of a step of `packs` packs (micro-batches) per device.

    An all-gather and a reduce-scatter of n elements send n (dp - 1) / dp each. Stages 0 and 1: gradients and trained
    weights once. Stage 2: gradients once per pack, as no device keeps all of them; weights once. Stage 3: all weights
    for each forward and backward pass, gradients once per pack: for one pack, 3 / 2 of plain data parallelism. Raises
    `HotspaConfigError`: there is no such stage.
    """
    _check_stage(stage)
    share = (dp - 1) / dp
    reduces = trained * (packs if stage >= 2 else 1)
    gathers = 2 * packs * (trained + frozen) if stage == 3 else trained
    return Traffic(gathers * share, reduces * share)


def _check_stage(stage: int) -> None:
    if stage not in STAGES:
        raise HotspaConfigError(f"there is no ZeRO stage {stage!r}", fix=f"use one of {', '.join(map(str, STAGES))}")
