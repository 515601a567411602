"""Sizes of model states: weights, gradients and master store of a rank.

Exact with a parameter vector (from layouts); otherwise computed from the model's shape. The latter cuts attention by
heads and MLPs evenly, except for what every tp coordinate holds: two norms, blocks that the family's plan does not cut,
and key/value heads fewer than tp.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.costs.model_config import EXPERTS
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.placement import Layout, master_layout, strategy_layout
from hf_hotspa.layout.shares import is_uneven, largest_share
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import BESIDE, EMBEDDING, IN_FP32, GradientDtypes, ParameterVector, Segment
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.plan.units import Room, Units, sizes_of_neighbours
from hf_hotspa.strategy import Strategy

LOSS_CHUNK_BYTES = 256 << 20
"""Largest size of the fp32 logits on a rank; the loss of a longer pack is computed in chunks."""

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
MASTER_BYTES = 4  # of an element of the master store, and of its gradient


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element. Raises `HotspaConfigError`: no size is known for the dtype."""
    if dtype not in _DTYPE_BYTES:
        raise HotspaConfigError(f"no size is known for dtype {dtype!r}", fix=f"use one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


def loss_chunk_tokens(vocabulary_rows: int) -> int:
    """Returns the tokens whose logits exist at a time, from the most vocabulary rows of a rank."""
    return max(1, LOSS_CHUNK_BYTES // (4 * max(1, vocabulary_rows)))


@dataclass(frozen=True)
class StageSizes:
    """The fullest rank of a pipeline stage."""

    num_layers: int
    weight_bytes: int  # weights that exist at a time
    gradient_bytes: int  # their gradients, in the accumulation dtype
    trained_bytes: int = 0  # all trained weights

    @property
    def arena_bytes(self) -> int:
        """Weights plus gradients."""
        return self.weight_bytes + self.gradient_bytes


@dataclass(frozen=True)
class MasterSizes:
    """Master weights, gradients of trained weights and optimizer state on the fullest rank."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class OptimizerState:
    """State size of an optimizer."""

    full: float  # bytes per element of a parameter
    # bytes per element of a parameter whose state is kept in fewer bytes; None if there are none
    reduced: float | None = None
    least: int = 0  # the fewest elements of such a parameter
    multiple: int = 1  # what its elements are a multiple of
    embeddings: bool = True  # whether embeddings are treated like other parameters; otherwise they have full states

    def element_bytes(self, numel: int, is_embedding: bool) -> float:
        """Returns the bytes per element of a parameter with `numel` elements."""
        full = numel < self.least or numel % self.multiple or (is_embedding and not self.embeddings)
        return self.full if self.reduced is None or full else self.reduced


ADAM = OptimizerState(8)

Shares = Mapping[str | None, float]
"""Shares of the fullest tp coordinate in the cut dims of linear layers, by `Linear.of_heads`; `EXPERTS_HERE`: of the experts."""
EXPERTS_HERE = "experts here"


class Added(Protocol):
    """Weights of every decoder layer that are trained in the place of the model's, which is frozen."""

    @property
    def parameters(self) -> int:
        """Of one layer."""

    def held_numel(self, shares: Shares) -> float:
        """Of one layer, on the fullest tp coordinate."""


class Packed(Protocol):
    """Frozen weights of every decoder layer that are held in another form. Numbers are of one layer."""

    @property
    def weights(self) -> int: ...

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight."""

    def cut(self, shares: Shares) -> float:
        """Weights that the fullest tp coordinate computes with."""

    def held_numel(self, shares: Shares) -> float:
        """Weights that it holds."""

    def most_at_a_time(self, shares: Shares) -> float:
        """The most of them that are unpacked at a time."""


def _present_bytes(num_bytes: NDArray[np.int64], rooms: Sequence[Room | None]) -> NDArray[np.int64]:
    """Bytes on each rank, from [segments, ranks], when only two neighbouring units are present at a time."""
    units: dict[Room, NDArray[np.int64]] = {}
    total = np.zeros(num_bytes.shape[1], np.int64)
    for own, room in zip(num_bytes, rooms, strict=True):
        if room is None:
            total += own
        else:
            units[room] = units.get(room, 0) + own
    return total + (np.maximum.reduce(sizes_of_neighbours(units)) if units else 0)


def _of_neighbours(units: Sequence[int]) -> list[int]:
    return sizes_of_neighbours(dict(enumerate(units)))


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one model under any strategy."""

    shape: ModelShape
    compute_dtype: str = "bfloat16"  # the dtype of a strategy's weights
    tied: bool = False  # whether head and embedding are one weight
    # the parameters, for exact sizes. Replaces all fields except `shape` and `gradients`.
    vector: ParameterVector | None = None
    gradients: GradientDtypes = IN_FP32
    added: Added | None = None  # weights that are trained on the frozen model, if any
    measured: StageCosts | None = None  # measured costs of the stage partition, see `ParameterVector`
    packed: Packed | None = None  # weights of the frozen model in another form, if any
    _stages: dict[tuple[int, ...], tuple[StageSizes, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def stage_costs(self) -> StageCosts:
        """The costs of the stage partition: measured if present, otherwise by parameters."""
        if self.vector is not None:
            return self.vector.stage_costs
        shape = self.shape
        by_count = (shape.layer_parameters,) * shape.num_layers, shape.head_rows(1) * shape.hidden_size
        return self.measured or StageCosts(*by_count)

    @property
    def num_parameters(self) -> int:
        """All parameters; tied ones count once."""
        if self.vector is not None:
            return sum(spec.packed.weights if spec.packed else spec.numel for spec in self.vector.specs)
        shape = self.shape
        rows = shape.vocab_size + (0 if self.tied else shape.head_rows(1))
        base = shape.num_layers * shape.layer_parameters + (rows + 1) * shape.hidden_size
        return base + (self.num_trained if self.added is not None else 0)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all weights as strategies hold them; tied ones count once."""
        if self.vector is not None:
            laid_out = (segment for segment in self.vector.segments if segment.unit != BESIDE)
            return sum(segment.numel * dtype_bytes(segment.dtype) for segment in laid_out)
        whole, packed = self.num_parameters * dtype_bytes(self.compute_dtype), self.packed
        if packed is None:
            return whole
        return whole - self.shape.num_layers * packed.weights * (dtype_bytes(self.compute_dtype) - packed.weight_bytes)

    @cached_property
    def in_place_bytes(self) -> float:
        """Bytes of the frozen weights that strategies hold in the form of the master store."""
        if self.vector is not None:
            return sum(s.numel * dtype_bytes(s.dtype) for s in self.vector.segments if s.has_one_form)
        frozen, width, packed = self.num_parameters - self.num_trained, dtype_bytes(self.compute_dtype), self.packed
        if packed is None:
            return frozen * width
        in_form = min(frozen, self.shape.num_layers * packed.weights)
        return in_form * packed.weight_bytes + (frozen - in_form) * width * (width == MASTER_BYTES)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of one decoder layer, computed from the shape."""
        return self._layer_bytes(1) + self.added_parameters(1) * dtype_bytes(self.compute_dtype)

    @property
    def num_trained(self) -> int:
        if self.vector is not None:
            return sum(segment.numel for segment in self.vector.segments if segment.trainable)
        if self.added is not None:
            return self.shape.num_layers * self.added.parameters
        return self.num_parameters

    @cached_property
    def trains_norms(self) -> bool:
        if self.vector is None:
            return self.added is None
        return any(s.trainable and len(s.shape) == 1 and not s.name.endswith("bias") for s in self.vector.specs)

    def layers_of_stages(self, pp: int, v: int = 1) -> tuple[range, ...]:
        """Returns the layers of each stage, as in layouts. Stage s is on pipeline rank s mod pp. Raises
        `StrategyError`: more stages than layers."""
        return self.stage_costs.stages(pp * v)

    def stages(self, strategy: Strategy) -> tuple[StageSizes, ...]:
        """Returns the sizes of each pipeline rank's stages. Raises `StrategyError`: more stages than layers."""
        key: tuple[int, ...] = strategy.z, strategy.tp, strategy.pp, strategy.ep, strategy.v
        if self.has_uneven_shares(strategy):
            key += strategy.dp, strategy.cp
        if key not in self._stages:
            self._stages[key] = self._from_layout(strategy) if self.vector is not None else self._from_shape(strategy)
        return self._stages[key]

    def has_uneven_shares(self, strategy: Strategy) -> bool:
        """Whether some tensor-parallel groups divide MLPs by the relative step times of their devices."""
        return self.vector is not None and is_uneven(self.vector, strategy)

    def mlp_share(self, strategy: Strategy) -> float:
        """The fraction of an MLP on the fullest rank of a tensor-parallel group."""
        return largest_share(self.vector, strategy) if self.vector is not None else 1 / strategy.tp

    def _from_layout(self, strategy: Strategy) -> tuple[StageSizes, ...]:
        assert self.vector is not None
        # replicas are equal, so a small layout is enough: one replica, or as many as share experts
        apart = math.lcm(strategy.tp, strategy.ep)
        one = Strategy(apart // strategy.tp, strategy.tp, strategy.pp, ep=strategy.ep, v=strategy.v)
        if self.has_uneven_shares(strategy):
            one, apart = strategy, strategy.stage_size
        sizes = np.stack([placement.sizes for placement in strategy_layout(self.vector, one).placements])
        segments, accumulated = self.vector.segments, self.gradients.accumulated
        rooms = Units(self.vector).rooms(strategy)
        of_weights = [dtype_bytes(s.dtype) for s in segments]
        weights = _present_bytes(np.array(of_weights)[:, None] * sizes, rooms.weights)
        of_gradients = [dtype_bytes(accumulated(s.dtype)) if s.trainable else 0 for s in segments]
        gradients = _present_bytes(np.array(of_gradients)[:, None] * sizes, rooms.gradients)
        trained = np.array([b if s.trainable else 0 for b, s in zip(of_weights, segments, strict=True)]) @ sizes
        fullest = (weights + gradients).reshape(strategy.pp, apart).argmax(axis=1)
        stages = []
        for stage, layers in enumerate(self.stage_costs.ranks(strategy.pp, strategy.v)):
            rank = stage * apart + int(fullest[stage])
            stages.append(StageSizes(len(layers), int(weights[rank]), int(gradients[rank]), int(trained[rank])))
        return tuple(stages)

    def _from_shape(self, strategy: Strategy) -> tuple[StageSizes, ...]:
        width, tp, tied = dtype_bytes(self.compute_dtype), strategy.tp, self.tied
        gradient_bytes = dtype_bytes(self.gradients.accumulated(self.compute_dtype))
        added, norm = self.added_parameters(tp), self.shape.hidden_size
        layer, layer_bytes = self._layer(tp, strategy.ep) + added, self._layer_bytes(tp, strategy.ep) + added * width
        vocabulary = -(-self.shape.vocab_size // tp) * self.shape.hidden_size
        head = self.shape.head_rows(tp) * self.shape.hidden_size
        stages = []
        for stage, layers in enumerate(self.stage_costs.ranks(strategy.pp, strategy.v)):
            first, last, num_layers = stage == 0, stage == strategy.pp - 1, len(layers)
            kept = vocabulary if tied and (first or last) else 0  # a tied weight is resident
            before, after = [vocabulary - kept] * first, [head - kept + norm] * last
            units = [*before, *[layer] * num_layers, *after]
            in_bytes = [unit * width for unit in before] + [layer_bytes] * num_layers + [unit * width for unit in after]
            weights = kept * width + (max(_of_neighbours(in_bytes)) if strategy.z == 3 else sum(in_bytes))
            if self.added is None:
                trained = kept + sum(units)
                gradients = kept + max(_of_neighbours(units)) if strategy.z else trained
            else:
                gradients, trained = added * (min(2, num_layers) if strategy.z else num_layers), num_layers * added
            stages.append(StageSizes(num_layers, weights, gradients * gradient_bytes, trained * width))
        return tuple(stages)

    def _head_shares(self, tp: int) -> tuple[float, float]:
        heads, kv_heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        if tp <= kv_heads:
            return -(-kv_heads // tp) / kv_heads, -(-kv_heads // tp) / kv_heads
        return -(-heads // tp) / heads, 1 / kv_heads  # a key/value head is held by several coordinates

    def added_parameters(self, tp: int) -> int:
        """Parameters of `added` in one layer, on the fullest tp coordinate."""
        return math.ceil(self.added.held_numel(self.shares(tp)) - 1e-3) if self.added is not None else 0

    def shares(self, tp: int, ep: int = 1) -> Shares:
        """The shares of the fullest tp coordinate in the cut dims of linear layers; ep divides whole experts instead."""
        shape, (queries, keys) = self.shape, self._head_shares(tp)
        mlp = 1 / tp + (1 - 1 / tp) * shape.whole_mlp
        return {
            "query": queries + (1 - queries) * shape.whole_attention,
            "key": keys + (1 - keys) * shape.whole_attention,
            None: mlp,
            EXPERTS: mlp if ep == 1 else 1.0,
            EXPERTS_HERE: 1 / ep,
        }

    def _layer_bytes(self, tp: int, ep: int = 1) -> int:
        width, packed = dtype_bytes(self.compute_dtype), self.packed
        num_bytes = self._layer(tp, ep) * width
        if packed is None:
            return num_bytes
        shares = self.shares(tp, ep)
        other = num_bytes - packed.cut(shares) * width
        return math.ceil(other + packed.held_numel(shares) * packed.weight_bytes - 1e-3)

    def _layer(self, tp: int, ep: int = 1) -> int:
        """Parameters of one layer on the fullest tp coordinate, computed from the shape; ep divides experts evenly."""
        shape, heads, kv_heads = self.shape, self.shape.num_attention_heads, self.shape.num_key_value_heads
        norms = min(2 * shape.hidden_size, shape.layer_parameters)
        attention = min(shape.attention_parameters, shape.layer_parameters - norms)
        mlp = shape.layer_parameters - norms - attention
        experts = min(shape.expert_parameters, mlp) if ep > 1 else 0
        mlp -= experts
        queries, keys = self._head_shares(tp)
        share = (heads * queries + kv_heads * keys) / (heads + kv_heads)
        cut = attention * share * (1 - shape.whole_attention) + mlp / tp * (1 - shape.whole_mlp)
        whole = norms + attention * shape.whole_attention + mlp * shape.whole_mlp + experts / ep
        return math.ceil(cut + whole - 1e-3)  # rounding errors must not add a parameter

    def master(self, world_size: int, optimizer: OptimizerState = ADAM) -> MasterSizes:
        """The largest rank's share of the master store, with its optimizer state."""
        if self.vector is None:
            frozen = self.num_parameters - self.num_trained
            return self._shared_out(self.num_trained, frozen, world_size, optimizer, self.shape.num_layers)
        return self._fullest(master_layout(self.vector, world_size), range(world_size), optimizer)

    def master_of_stage(self, strategy: Strategy, stage: int, optimizer: OptimizerState = ADAM) -> MasterSizes:
        """The largest rank's share in a stage if each stage has a separate master store for its weights."""
        size = strategy.stage_size
        if self.vector is None:
            plain = self if self.packed is None else replace(self, packed=None)
            alone = plain.stages(Strategy(pp=strategy.pp))[stage]
            trained, whole = (b // dtype_bytes(self.compute_dtype) for b in (alone.trained_bytes, alone.weight_bytes))
            return self._shared_out(trained, whole - trained, size, optimizer, alone.num_layers, stage == 0)
        layout = master_layout(self.vector, strategy.world_size, strategy)
        return self._fullest(layout, range(stage * size, (stage + 1) * size), optimizer)

    def _shared_out(
        self,
        trained: int,
        frozen: int,
        num_ranks: int,
        optimizer: OptimizerState,
        num_layers: int,
        has_embedding: bool = True,
    ) -> MasterSizes:
        share, rest = -(-trained // num_ranks), -(-frozen // num_ranks) * dtype_bytes(self.compute_dtype)
        if self.packed is not None:  # preparing such a model copies its other weights to fp32
            packed = min(frozen, num_layers * self.packed.weights)
            rest = math.ceil(((frozen - packed) * MASTER_BYTES + packed * self.packed.weight_bytes) / num_ranks)
        vocabulary = self.shape.vocab_size * self.shape.hidden_size
        embedded = vocabulary if has_embedding and self.added is None else 0
        # small parameters with full states are negligible
        state = embedded * optimizer.element_bytes(embedded, True)
        state += (trained - embedded) * optimizer.element_bytes(vocabulary, False)
        return MasterSizes(share * MASTER_BYTES + rest, share * MASTER_BYTES, math.ceil(state / num_ranks))

    def _fullest(self, layout: Layout, ranks: range, optimizer: OptimizerState) -> MasterSizes:
        assert self.vector is not None
        sizes = np.stack([placement.sizes[ranks.start : ranks.stop] for placement in layout.placements])
        width = np.array([dtype_bytes(s.master_dtype) for s in self.vector.segments])
        trained = np.array([s.trainable for s in self.vector.segments])
        weights, gradients = width @ sizes, (width * trained) @ sizes
        state = np.array([self._state_bytes(s, optimizer) for s in self.vector.segments]) @ sizes
        rank = int((weights + gradients).argmax())
        return MasterSizes(int(weights[rank]), int(gradients[rank]), math.ceil(state[rank]))

    def _state_bytes(self, segment: Segment, optimizer: OptimizerState) -> float:
        assert self.vector is not None
        if not segment.trainable:
            return 0.0
        specs = self.vector.specs_of(segment)
        of_specs = (s.numel * optimizer.element_bytes(s.numel, s.unit == EMBEDDING and len(s.shape) > 1) for s in specs)
        return sum(of_specs) / segment.numel
