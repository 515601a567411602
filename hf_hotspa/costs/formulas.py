"""The textbook formulas of 3D-parallel tuning, each with its source. They explain; `time` and `memory` predict.

Sources: N21 = Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC'21); K22 = Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). A *message* is
the hidden state of a micro-batch: `2 b s h` bytes in 16 bits. `hf-hotspa formulas` prints them for a model and a cluster.
"""

from dataclasses import dataclass

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
        """Of matrices of n x n."""
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
    """`(m + p - 1) (t_f + t_b)`: seconds of a batch (N21 2.2).

    Args:
        micro_batch_s: Forward and backward of a micro-batch on one stage.
    """
    bubble_fraction(pp, num_micro_batches)
    return (num_micro_batches + pp - 1) * micro_batch_s


def tensor_seconds(message: float, bandwidth: float, tp: int, layers_of_stage: float, num_micro_batches: int) -> float:
    """`T_tp`: the all-reduces of a batch, layers recomputing everything: six a layer and micro-batch, each of a message.

    Args:
        message: Bytes.
        bandwidth: Bytes a second of the links between the ranks of tp.
    """
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
