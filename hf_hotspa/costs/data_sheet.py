"""Time coefficients from data sheets, for machines that cannot be measured.

* Matrix products of a layer: `6 P s / t` floating-point operations for s tokens and P active parameters (2 forward, 4
  backward; 2 of these for weight gradients, which frozen weights do not need).
* Causal attention: `7 l^2 a / t` per sequence (2 forward; 5 backward with recomputed scores, as in flash attention).
* Blocks that the family's plan does not cut cost every device the same.
* Tensor parallelism: four all-reduces per layer (Narayanan et al., SC'21, section 2.3), each `2 s h e (1 - 1/t)` bytes
  over the slowest link of the group; across nodes every NIC of a node carries its share.

Matrix products reach `MATMUL_EFFICIENCY * s / (s + HALF_TOKENS)` of the peak: a constant number of seconds per pack
plus a linear term. Predictions are within about a third; measure if the machine is available.
"""

from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.packed_linears import unpacking_seconds
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.model_shape import ModelShape

MATMUL_EFFICIENCY = 0.62
"""Share of the peak that a layer's large matrix products reach, with the operations between them (training runs of
Narayanan et al., SC'21, reach 0.52 overall)."""
HALF_TOKENS = 256  # pack size in tokens at which matrix products run at half their best speed
ATTENTION_EFFICIENCY = 0.5
LINK_EFFICIENCY = 0.75
KERNELS_PER_LAYER = 120  # kernel launches of a layer, forward and backward
KERNEL_S = 5e-6  # least seconds of a kernel
LOSS_PASSES = 8  # how often fp32 logits are read or written between head and loss, forward and backward


def all_reduce_seconds(tp: int, num_bytes: float, hardware: Hardware) -> float:
    """Seconds of a ring all-reduce of `num_bytes`, without latency."""
    if tp == 1:
        return 0.0
    return 2 * num_bytes * (1 - 1 / tp) / (hardware.ring_bandwidth(tp) * LINK_EFFICIENCY)


def _products(parameters: float, added: float | None) -> float:
    return 6 * parameters if added is None else 4 * parameters + 6 * added


def all_reduce_latency(tp: int, hardware: Hardware) -> float:
    """Latency of one collective in seconds."""
    if tp == 1:
        return 0.0
    return hardware.intra_latency_s if tp <= hardware.devices_per_node else hardware.inter_latency_s


def layer_cost(shape: ModelShape, tp: int, hardware: Hardware, dtype: str, added: int | None = None) -> Cost:
    """Cost of one decoder layer, forward and backward, on each device of a tp group. `added`: parameters that are
    trained in the place of the layer; None if the layer is trained."""
    peak, width = hardware.device.flops(dtype), dtype_bytes(dtype)
    whole = shape.whole_parameters
    parameters = (shape.active_parameters - whole) / tp + whole
    matmul = _products(parameters, added) / (peak * MATMUL_EFFICIENCY)
    heads = shape.attention_size * ((1 - shape.whole_attention) / tp + shape.whole_attention)
    attention = 7 * heads / (peak * ATTENTION_EFFICIENCY)
    # fixed costs of a pack: half-empty tiles, reading the weights three times, or launching the kernels
    read = parameters + shape.idle_parameters * (
        (1 - shape.whole_mlp) / tp + shape.whole_mlp
    )  # a pack uses all experts
    reads = 3 * read * width / hardware.device.memory_bandwidth
    fixed = max(matmul * HALF_TOKENS, reads, KERNELS_PER_LAYER * KERNEL_S)
    return Cost(
        attention,
        matmul + 4 * all_reduce_seconds(tp, shape.hidden_size * width, hardware),
        fixed + 4 * all_reduce_latency(tp, hardware),
    )


def head_cost(shape: ModelShape, tp: int, hardware: Hardware, dtype: str, frozen: bool = False) -> Cost:
    """Cost of vocabulary projection and loss, forward and backward."""
    peak, rows = hardware.device.flops(dtype), shape.vocab_size / tp
    matmul = _products(rows * shape.hidden_size, 0 if frozen else None) / (peak * MATMUL_EFFICIENCY)
    loss = LOSS_PASSES * rows * 4 / hardware.device.memory_bandwidth
    reduced = all_reduce_seconds(tp, shape.hidden_size * dtype_bytes(dtype), hardware)
    return Cost(0.0, matmul + loss + reduced, matmul * HALF_TOKENS + 3 * all_reduce_latency(tp, hardware))


def embedding_cost(shape: ModelShape, tp: int, hardware: Hardware, dtype: str) -> Cost:
    """Cost of the look-up and the scattered gradient: memory traffic and one all-reduce."""
    width = dtype_bytes(dtype)
    moved = 4 * shape.hidden_size * width / hardware.device.memory_bandwidth
    return Cost(
        0.0,
        moved + all_reduce_seconds(tp, shape.hidden_size * width, hardware),
        4 * KERNEL_S + all_reduce_latency(tp, hardware),
    )


def hops(shape: ModelShape, hardware: Hardware, dtype: str) -> tuple[Hop, Hop]:
    """Cost of sending a hidden state inside a node, and between nodes."""
    width = shape.hidden_size * dtype_bytes(dtype)
    nic = hardware.inter_bandwidth * (hardware.nics_per_node or hardware.devices_per_node) / hardware.devices_per_node
    return (
        Hop(hardware.intra_latency_s, width / (hardware.intra_bandwidth * LINK_EFFICIENCY)),
        Hop(hardware.inter_latency_s, width / (nic * LINK_EFFICIENCY)),
    )


def costs(
    sizes: ModelSizes, hardware: Hardware, dtype: str
) -> tuple[dict[int, Cost], dict[int, Cost], dict[int, Cost]]:
    """Returns layer, head and embedding costs by tp."""
    shape, frozen = sizes.shape, sizes.added is not None
    degrees = range(1, shape.num_attention_heads + 1)

    def layer(tp: int) -> Cost:
        own = layer_cost(shape, tp, hardware, dtype, sizes.added_parameters(tp) if frozen else None)
        return own + unpacking_seconds(sizes, tp, hardware, dtype)

    return (
        {tp: layer(tp) for tp in degrees},
        {tp: head_cost(shape, tp, hardware, dtype, frozen) for tp in degrees},
        {tp: embedding_cost(shape, tp, hardware, dtype) for tp in degrees},
    )
