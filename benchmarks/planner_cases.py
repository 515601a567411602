"""Models, layouts and strategies for planner benchmarks: Llama-shaped parameter vectors, real and DP-sharded layouts.

Everything is made without torch, from shapes alone, and cached: a benchmark asks for the same layouts many times.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout, Placement, gradient_layout, master_layout, place, strategy_layout
from hf_hotspa.layout.stages import StageCosts, nested_orders
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.strategy import Strategy, strategies_of


class Shape(NamedTuple):
    """The sizes of a Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "7B": Shape(32, 4096, 11008, 32, 32, 32000),
    "32B": Shape(60, 6656, 17920, 64, 64, 32000),
    "70B": Shape(80, 8192, 28672, 64, 8, 32000),
    "405B": Shape(126, 16384, 53248, 128, 8, 128256),
}
"""The 32B one is used by the modelled switch table."""


@lru_cache
def llama_vector(model: str) -> ParameterVector:
    """The parameter vector of a model of `SHAPES`, in bf16."""
    shape = SHAPES[model]
    hidden, head = shape.hidden, shape.hidden // shape.heads
    vocabulary, ffn = (_even(shape.vocabulary),), (_even(shape.ffn),)
    query = (Part(hidden, shape.kv_heads, shape.heads),)
    key = (Part(shape.kv_heads * head, shape.kv_heads, shape.kv_heads, replicate=True),)
    specs = [ParameterSpec("embed_tokens", (shape.vocabulary, hidden), "bfloat16", EMBEDDING, 0, vocabulary)]
    for layer in range(shape.layers):
        name = f"layers.{layer}."
        specs += [
            ParameterSpec(name + "q_proj", (hidden, hidden), "bfloat16", layer, 0, query),
            ParameterSpec(name + "k_proj", (shape.kv_heads * head, hidden), "bfloat16", layer, 0, key),
            ParameterSpec(name + "v_proj", (shape.kv_heads * head, hidden), "bfloat16", layer, 0, key),
            ParameterSpec(name + "o_proj", (hidden, hidden), "bfloat16", layer, 1, query),
            ParameterSpec(name + "gate_proj", (shape.ffn, hidden), "bfloat16", layer, 0, ffn),
            ParameterSpec(name + "up_proj", (shape.ffn, hidden), "bfloat16", layer, 0, ffn),
            ParameterSpec(name + "down_proj", (hidden, shape.ffn), "bfloat16", layer, 1, ffn),
            ParameterSpec(name + "input_norm", (hidden,), "bfloat16", layer),
            ParameterSpec(name + "post_norm", (hidden,), "bfloat16", layer),
        ]
    specs.append(ParameterSpec("norm", (hidden,), "bfloat16", HEAD))
    specs.append(ParameterSpec("lm_head", (shape.vocabulary, hidden), "bfloat16", HEAD, 0, vocabulary))
    return build_vector(specs, *stage_costs(model))


def _even(rows: int) -> Part:
    return Part(rows, rows, rows)


def stage_costs(model: str) -> tuple[list[int], int]:
    """The cost of each layer and of the head, by which stages are cut: elements that are multiplied."""
    shape = SHAPES[model]
    kv = 2 * shape.kv_heads * (shape.hidden // shape.heads)
    layer = shape.hidden * (2 * shape.hidden + kv + 3 * shape.ffn)
    return [layer] * shape.layers, shape.vocabulary * shape.hidden


def weights(model: str, strategy: Strategy) -> Layout:
    """The weights of a model under a strategy."""
    return _layout(strategy_layout, model, strategy, strategy.shard_order)


def gradients(model: str, strategy: Strategy) -> Layout:
    """What the ranks of a strategy add to the gradient."""
    return _layout(gradient_layout, model, strategy, strategy.shard_order)


@lru_cache(maxsize=1024)
def _layout(
    make: Callable[[ParameterVector, Strategy], Layout], model: str, strategy: Strategy, _: tuple[int, ...]
) -> Layout:
    # strategies of equal degrees are equal, so that the order is a separate key
    return make(llama_vector(model), strategy)


@lru_cache
def master(model: str, world_size: int) -> Layout:
    """The master store."""
    return master_layout(llama_vector(model), world_size)


def sharded_gradients(model: str, strategy: Strategy, rows: int, columns: int) -> Layout:
    """Gradients after a reduce-scatter over dp, on an axis orthogonal to the tp cut: every element has one owner.

    Args:
        model: One of `SHAPES`; parameters that are not sharded (norms) are left out.
        strategy: The strategy.
        rows: Each segment is a grid of this many rows, which tp cuts; a multiple of tp. Equal on both sides of a switch.
        columns: And this many columns, which dp cuts; a multiple of dp.
    """
    layers, head = stage_costs(model)
    cut = StageCosts(tuple(layers), head).stages(strategy.pp)
    stage_of = [0, *(stage for stage, layers in enumerate(cut) for _ in layers), strategy.pp - 1]
    sizes = [head, *layers, head]
    known: dict[tuple[int, int], Placement] = {}
    bases = [0]
    for size, stage in zip(sizes, stage_of, strict=True):
        bases.append(bases[-1] + size)
        if (size, stage) not in known:
            known[size, stage] = _grid(strategy, stage, size, rows, columns)
    placements = tuple(known[key] for key in zip(sizes, stage_of, strict=True))
    return Layout(f"sharded gradients of {strategy}", strategy.world_size, tuple(bases[:-1]), placements)


def _grid(strategy: Strategy, stage: int, size: int, rows: int, columns: int) -> Placement:
    cuts = np.arange(rows * columns + 1, dtype=np.int64) * size // (rows * columns)
    found = []
    sizes = np.zeros(strategy.world_size, np.int64)
    high, wide = rows // strategy.tp, columns // strategy.dp
    for dp in range(strategy.dp):
        for tp in range(strategy.tp):
            rank = (stage * strategy.dp + dp) * strategy.tp + tp
            offset = 0
            for row in range(strategy.shard_index(tp) * high, (strategy.shard_index(tp) + 1) * high):
                first = row * columns + dp * wide
                start, stop = int(cuts[first]), int(cuts[first + wide])
                found.append((rank, start, stop, offset))
                offset += stop - start
            sizes[rank] = offset
    return place(np.array(found, np.int64), sizes)


def sharded_pair(model: str, a: Strategy, b: Strategy) -> tuple[Layout, Layout]:
    """The DP-sharded gradients of two strategies, cut so finely that both fit."""
    rows, columns = int(np.lcm(a.tp, b.tp)), int(np.lcm(a.dp, b.dp))
    return sharded_gradients(model, a, rows, columns), sharded_gradients(model, b, rows, columns)


def pool(world_size: int, model: str, *, nested: bool) -> list[Strategy]:
    """Every legal strategy of a world, in plain order or with the nested orders of the pool."""
    shape = SHAPES[model]
    legal = [s for s in strategies_of(world_size) if s.pp <= shape.layers and s.tp <= shape.heads]
    return in_order(legal, model) if nested else legal


def in_order(strategies: Sequence[Strategy], model: str) -> list[Strategy]:
    """Strategies with the nested shard orders that are best for them as a pool."""
    layers, head = stage_costs(model)
    orders = nested_orders(strategies, layers, StageCosts(tuple(layers), head))
    return [strategy.ordered(orders[strategy]) for strategy in strategies]


def bit_reversed(strategy: Strategy) -> Strategy:
    """A strategy whose shard index is the bit-reversed tp coordinate, as in the modelled tables."""
    bits = strategy.tp.bit_length() - 1
    if bits < 2:
        return strategy
    return strategy.ordered(tuple(int(f"{tp:0{bits}b}"[::-1], 2) for tp in range(strategy.tp)))


def cluster_of(world_size: int, per_node: int, nic: str) -> Cluster:
    """A cluster with a NIC for each device ("device") or one for each node ("node"); 200 and 25 GB/s."""
    return Cluster(world_size, per_node, nics_per_node=None if nic == "device" else 1)
