"""Time coefficients from data sheets, for machines that cannot be measured.

* Matrix products of a layer: `6 P s / t` floating-point operations for s tokens and P active parameters (2 forward, 4
  backward; 2 of these for weight gradients, which frozen weights do not need). A product of sizes m, n and k reaches
  the device's `matmul_share` of the peak, divided by `1 + HALF_SIZE (1/m + 1/n + 1/k)`: narrow shards of tensor
  parallelism and short packs fill fewer tiles. For m, the tokens, that is a constant number of seconds per pack.
* Operations between the products read and write memory: `between_products` counts the bytes.
* Causal attention: `7 l (l + SHORT_LENGTH) a / t` per sequence (2 forward; 5 backward with recomputed scores, as in
  flash attention), at the device's `attention_share`, less for narrow heads.
* Blocks that the family's plan does not cut cost every device the same.
* Tensor parallelism: four all-reduces per layer (Narayanan et al., SC'21, section 2.3), each `2 s h e (1 - 1/t)` bytes
  over the slowest link of the group; across nodes every NIC of a node carries its share.

Shares are of a device (`hardware.Device`). docs/data/constants.csv has the source of each constant, and docs/predicted.md the errors on
published runs (`benchmarks/published.py`).
"""

from dataclasses import dataclass

from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.packed_linears import unpacking_seconds
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.model_shape import ModelShape

HALF_SIZE = 256  # a matrix product with one such size, and two large ones, runs at half its best speed
SHORT_LENGTH = 512  # a sequence of so many tokens has twice the seconds of attention that its pairs alone would need
NARROW_HEAD, NARROW_SHARE = 64, 0.8  # attention with heads of at most this width reaches a smaller share
BANDWIDTH_SHARE = 0.8  # of the memory bandwidth, by operations that only read and write
LINK_EFFICIENCY = 0.75
KERNELS_PER_LAYER = 120  # kernel launches of a layer, forward and backward
KERNEL_S = 5e-6  # least seconds of a kernel
LOSS_PASSES = 8  # how often fp32 logits are read or written between head and loss, forward and backward


@dataclass(frozen=True)
class Kernels:
    """What a layer runs besides matrix products: by default the separate operations of transformers' models."""

    fused: bool = False  # whether operations between products are fused, by a compiler or by hand
    attention_share: float | None = None  # of the peak, by attention; None for the device's


SEPARATE = Kernels()


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


def _narrowness(shape: ModelShape, tp: int) -> float:
    """Returns how much longer a layer's matrix products take than large ones of as many operations, as a factor."""
    matrices, hidden = 3 if shape.gated else 2, shape.hidden_size
    inner = shape.expert_parameters / shape.num_experts if shape.num_experts else shape.mlp_parameters
    blocks = (
        (shape.attention_parameters, shape.attention_size, shape.whole_attention),
        (shape.active_mlp_parameters, inner / (matrices * hidden), shape.whole_mlp),
    )
    total = extra = 0.0
    for parameters, width, whole in blocks:
        total += parameters
        for share, degree in ((whole, 1), (1 - whole, tp)):
            if share and parameters:
                extra += share * parameters * HALF_SIZE * (1 / hidden + degree / width)
    return 1 + extra / max(total, 1)


def between_products(shape: ModelShape, tp: int, kernels: Kernels) -> float:
    """Returns the bytes per token that a layer's operations between matrix products read and write, forward and
    backward, in 16 bits, on a rank. Norms and residual sums count as divided by tp (`+sp`).

    In separate operations a norm computes in fp32: 92 bytes an element; each residual sum 12; gate and activation 28
    per inner element (10 without a gate); rotations of queries and keys 40. Fused: 10, 12, 16 (10) and 8.
    """
    heads, inner = shape.attention_parameters / (2 * shape.hidden_size), shape.active_mlp_parameters / shape.hidden_size
    norm, gate, rotation = (10, 16, 8) if kernels.fused else (92, 28, 40)
    of_mlp = (gate / 3 if shape.gated else 10 / 2) * inner
    of_heads = (rotation + norm * shape.head_norms) * heads
    cut = of_heads * (1 - shape.whole_attention) + of_mlp * (1 - shape.whole_mlp) + 2 * (norm + 12) * shape.hidden_size
    return cut / tp + of_heads * shape.whole_attention + of_mlp * shape.whole_mlp


def _attention(shape: ModelShape, tp: int, hardware: Hardware, dtype: str, kernels: Kernels) -> float:
    """Seconds per pair of tokens."""
    heads = shape.attention_size * ((1 - shape.whole_attention) / tp + shape.whole_attention)
    share = kernels.attention_share or hardware.device.attention_share
    if shape.attention_size <= NARROW_HEAD * shape.num_attention_heads:
        share *= NARROW_SHARE
    return 7 * shape.pair_layers * heads / (hardware.device.flops(dtype) * share)


def layer_cost(
    shape: ModelShape, tp: int, hardware: Hardware, dtype: str, added: int | None = None, kernels: Kernels = SEPARATE
) -> Cost:
    """Cost of one decoder layer, forward and backward, on each device of a tp group. `added`: parameters that are
    trained in the place of the layer; None if the layer is trained."""
    device, width = hardware.device, dtype_bytes(dtype)
    whole = shape.whole_parameters
    parameters = (shape.active_parameters - whole) / tp + whole
    matmul = _products(parameters, added) / (device.flops(dtype) * device.matmul_share)
    attention = _attention(shape, tp, hardware, dtype, kernels)
    moved = between_products(shape, tp, kernels) * width / 2 / (device.memory_bandwidth * BANDWIDTH_SHARE)
    # fixed costs of a pack: half-empty tiles, reading the weights three times, or launching the kernels
    idle = shape.idle_parameters * ((1 - shape.whole_mlp) / tp + shape.whole_mlp)
    read = parameters + idle  # a pack uses all experts
    reads = 3 * read * width / device.memory_bandwidth
    fixed = max(matmul * HALF_SIZE, reads, KERNELS_PER_LAYER * KERNEL_S)
    reduced = 4 * all_reduce_seconds(tp, shape.hidden_size * width, hardware)
    return Cost(
        attention,
        matmul * _narrowness(shape, tp) + attention * SHORT_LENGTH + moved + reduced,
        fixed + 4 * all_reduce_latency(tp, hardware),
    )


def head_cost(shape: ModelShape, tp: int, hardware: Hardware, dtype: str, frozen: bool = False) -> Cost:
    """Cost of vocabulary projection and loss, forward and backward."""
    device, rows = hardware.device, shape.outputs or shape.vocab_size / tp
    matmul = _products(rows * shape.hidden_size, 0 if frozen else None) / (device.flops(dtype) * device.matmul_share)
    loss = LOSS_PASSES * rows * 4 / (device.memory_bandwidth * BANDWIDTH_SHARE)
    narrow = 1 + HALF_SIZE * (1 / shape.hidden_size + 1 / rows)
    reduced = all_reduce_seconds(tp, shape.hidden_size * dtype_bytes(dtype), hardware)
    return Cost(0.0, matmul * narrow + loss + reduced, matmul * HALF_SIZE + 3 * all_reduce_latency(tp, hardware))


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
    sizes: ModelSizes, hardware: Hardware, dtype: str, kernels: Kernels = SEPARATE
) -> tuple[dict[int, Cost], dict[int, Cost], dict[int, Cost]]:
    """Returns layer, head and embedding costs by tp."""
    shape, frozen = sizes.shape, sizes.added is not None
    degrees = range(1, shape.num_attention_heads + 1)

    def layer(tp: int) -> Cost:
        own = layer_cost(shape, tp, hardware, dtype, sizes.added_parameters(tp) if frozen else None, kernels)
        return own + unpacking_seconds(sizes, tp, hardware, dtype)

    return (
        {tp: layer(tp) for tp in degrees},
        {tp: head_cost(shape, tp, hardware, dtype, frozen) for tp in degrees},
        {tp: embedding_cost(shape, tp, hardware, dtype) for tp in degrees},
    )
