"""The textbook formulas of 3D-parallel tuning, each with its source. They explain; `time` and `memory` predict.

Sources: N21 = Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(SC'21); K22 = Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from hf_hotspa.errors import HotspaConfigError

ALL_REDUCES_PER_LAYER = 4
"""Tensor parallelism: two all-reduces in the forward pass of a layer (behind attention and MLP), two in the backward
pass (N21 section 2.3)."""

STATE_BYTES_PER_PARAMETER = 20
"""Adam in mixed precision with fp32 gradient accumulation: weights 2 + gradients 2 + fp32 gradients 4 + master
weights 4 + momentum 4 + variance 4."""


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


def gpt_parameters(num_layers: int, hidden_size: int, vocab_size: int = 0, positions: int = 0) -> int:
    """Parameters of a GPT: `12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)` (N21 equation 2)."""
    return 12 * num_layers * hidden_size**2 + 13 * num_layers * hidden_size + (vocab_size + positions) * hidden_size


def parameters_per_device(num_parameters: float, tp: int, pp: int) -> float:
    """About `N / (p t)`: what a device holds of a model, the embedding being shared evenly with the rest."""
    return num_parameters / (tp * pp)


def state_bytes_per_device(
    num_parameters: float, tp: int, pp: int, bytes_per_parameter: float = STATE_BYTES_PER_PARAMETER
) -> float:
    """Bytes of model states on a device when data parallelism divides nothing."""
    return parameters_per_device(num_parameters, tp, pp) * bytes_per_parameter


def gpt_activation_bytes(num_tokens: int, hidden_size: int, tp: int = 1, *, sequence_parallel: bool = False) -> float:
    """16-bit activations of one GPT layer without attention scores (flash attention): `s b h (10 + 24 / t)`.

    With sequence parallelism `34 s b h / t` (K22 equations 2 and 4 without their last term).
    """
    replicated = 10 / tp if sequence_parallel else 10
    return num_tokens * hidden_size * (replicated + 24 / tp)
