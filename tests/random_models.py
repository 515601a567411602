"""Random models, strategies and layouts for property tests: tiny, and as irregular as real families are together."""

import random
from dataclasses import dataclass, replace
from unittest.mock import patch

from hf_hotspa.layout import placement
from hf_hotspa.layout.placement import Layout, master_layout
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy, legal_strategies

TRAINED_DTYPES = ("float32", "bfloat16", "float16", "float64")
FROZEN_DTYPES = ("float32", "bfloat16", "uint8")


@dataclass(frozen=True)
class RandomModel:
    """A parameter vector, and the shape that decides which strategies are legal for it."""

    vector: ParameterVector
    shape: ModelShape

    def strategies(self, world_size: int) -> list[Strategy]:
        """Its legal strategies, pipelines with one stage and with two on each rank; there is one for every world (pure data
        parallelism)."""
        found = legal_strategies(world_size, self.shape)
        return found + [replace(s, v=2) for s in found if s.pp > 1 and 2 * s.pp <= self.shape.num_layers]


def plain(rows: int) -> tuple[Part, ...]:
    """A sharded dim that may be cut anywhere."""
    return (Part(rows, rows, rows),)


class _Builder:
    """Collects parameters, freezing some of them and giving some another dtype."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice(TRAINED_DTYPES)
        self.mixed = rng.random() < 0.3
        self.freezes = rng.random() < 0.3
        self.specs: list[ParameterSpec] = []

    def add(
        self,
        name: str,
        unit: int,
        shape: tuple[int, ...],
        dim: int | None = None,
        parts: tuple[Part, ...] = (),
        *,
        partial: bool = False,
        in_head: bool = False,
    ) -> None:
        frozen = self.freezes and self.rng.random() < 0.3
        dtype = self.dtype
        if frozen and self.rng.random() < 0.7:
            dtype = self.rng.choice(FROZEN_DTYPES)
        elif self.mixed and self.rng.random() < 0.3:
            dtype = "float32"
        self.specs.append(
            ParameterSpec(
                name, shape, dtype, unit, dim, parts, partial_gradient=partial, trainable=not frozen, in_head=in_head
            )
        )

    def linear(
        self, name: str, unit: int, rows: int, columns: int, parts: tuple[Part, ...], *, rowwise: bool = False
    ) -> None:
        """A weight cut along its rows (columns when row-parallel), at times with a bias."""
        self.add(f"{name}.weight", unit, (rows, columns), 1 if rowwise else 0, parts)
        if self.rng.random() < 0.2:
            self.add(f"{name}.bias", unit, (rows,), *((None, ()) if rowwise else (0, parts)))


def random_model(rng: random.Random) -> RandomModel:
    """A decoder of a few hundred parameters.

    It may have fewer key/value heads than tp, an odd vocabulary, tied embeddings, fused qkv and gate_up weights, q/k
    norms with partial gradients, biases, several dtypes and frozen parameters.
    """
    build = _Builder(rng)
    layers, hidden, width = rng.randint(1, 5), rng.randint(2, 6), rng.randint(3, 9)
    kv_heads, head_dim, vocab = rng.choice((1, 2, 2, 3, 4)), rng.randint(1, 3), rng.randint(5, 17)
    heads = kv_heads * rng.choice((1, 2, 2, 4))
    tied, fused_qkv, fused_mlp, norms = (rng.random() < 0.4 for _ in range(4))
    query = Part(heads * head_dim, kv_heads, heads)
    key_value = Part(kv_heads * head_dim, kv_heads, kv_heads, replicate=True)
    build.add("embed.weight", EMBEDDING, (vocab, hidden), 0, plain(vocab), in_head=tied)
    for layer in range(layers):
        at = f"layers.{layer}"
        if fused_qkv:
            rows = query.rows + 2 * key_value.rows
            build.linear(f"{at}.qkv", layer, rows, hidden, (query, key_value, key_value))
        else:
            for name, part in (("q", query), ("k", key_value), ("v", key_value)):
                build.linear(f"{at}.{name}", layer, part.rows, hidden, (part,))
        if norms:
            build.add(f"{at}.q_norm.weight", layer, (head_dim,), partial=True)
            build.add(f"{at}.k_norm.weight", layer, (head_dim,), partial=True)
        build.linear(f"{at}.o", layer, hidden, query.rows, (query,), rowwise=True)
        if fused_mlp:
            build.linear(f"{at}.gate_up", layer, 2 * width, hidden, plain(width) * 2)
        else:
            build.linear(f"{at}.gate", layer, width, hidden, plain(width))
            build.linear(f"{at}.up", layer, width, hidden, plain(width))
        build.linear(f"{at}.down", layer, hidden, width, plain(width), rowwise=True)
        build.add(f"{at}.norm.weight", layer, (hidden,))
    build.add("norm.weight", HEAD, (hidden,))
    if not tied:
        build.add("head.weight", HEAD, (vocab, hidden), 0, plain(vocab))
    costs = [rng.randint(1, 4) for _ in range(layers)]
    shape = ModelShape(
        "random", layers, heads, kv_heads, hidden, heads * head_dim, vocab, layer_parameters=hidden * width
    )
    return RandomModel(build_vector(build.specs, costs, rng.randint(0, 4)), shape)


def random_master_layout(rng: random.Random, vector: ParameterVector, world_size: int) -> Layout:
    """The master layout, often with a finer alignment than the product's, so that tiny models are cut at all."""
    with patch.object(placement, "MASTER_ALIGNMENT", rng.choice((1, 3, 16, placement.MASTER_ALIGNMENT))):
        return master_layout(vector, world_size)
