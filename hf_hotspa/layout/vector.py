"""The parameter vector: every parameter laid end to end in one canonical order.

Each parameter is stored with its sharded dim outermost (a row-parallel weight transposed), so that a tensor-parallel
shard of it is one contiguous interval of the vector, or one interval for each part of a fused weight.
The vector is divided in *segments*: the parameters of one unit (embedding, each layer, head) that share a dtype and
are trained or frozen together. A segment is the granularity of every buffer: layouts bind, switches move and
the master store cuts by segment. Plain data, no torch; all sizes are counted in elements.

In which dtypes gradients exist: while micro-batches add them up, and while they travel to the master store.

Owns the two options and what each means for a parameter. Whatever they are, the sums in the master store and in relay
buffers are of the master's precision, as are the master's weights. Plain data, no torch: the engine and the cost models
ask the same functions.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_hotspa.errors import HotspaConfigError, ModelError, check_choice
from hf_hotspa.layout.stages import StageCosts

FP32, BF16, AUTO = "fp32", "bf16", "auto"
ACCUMULATION_DTYPES = (FP32, BF16)
WIRE_DTYPES = (AUTO, FP32, BF16)
_BF16 = "bfloat16"


def master_dtype(dtype: str) -> str:
    """The dtype of the masters of trained weights of a dtype: fp32, and fp64 stays fp64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes of the gradients of trained weights.

    Args:
        accumulation: Dtype of the buffer of a phase's sums: `fp32` (that of the masters: fp64 for fp64) or `bf16`.
        wire: The dtype in which they travel to the master store: `fp32` (as above), `bf16`, or `auto`: the one that
            they were accumulated in.

    Raises:
        HotspaConfigError: one of them is none of these.
    """

    accumulation: str = FP32
    wire: str = AUTO

    def __post_init__(self) -> None:
        check_choice("the dtype in which gradients accumulate", self.accumulation, ACCUMULATION_DTYPES)
        check_choice("the dtype in which gradients travel", self.wire, WIRE_DTYPES)

    def accumulated(self, dtype: str) -> str:
        """The dtype of the buffers of a strategy's gradients, of weights of a dtype."""
        return _BF16 if self.accumulation == BF16 else master_dtype(dtype)

    def moved(self, dtype: str) -> str:
        """The dtype on the wire, of weights of a dtype."""
        if self.wire == AUTO:
            return self.accumulated(dtype)
        return _BF16 if self.wire == BF16 else master_dtype(dtype)


IN_FP32 = GradientDtypes()
"""The default: nothing is rounded below the precision of the masters."""


EMBEDDING, HEAD = -1, -2
"""Unit numbers of what comes before and after the decoder layers; layer i is unit i."""


@dataclass(frozen=True)
class Part:
    """A stretch of the sharded dim that is cut on its own (q, k and v of a fused weight are three parts).

    Args:
        rows: Size along the sharded dim.
        groups: Groups of rows that stay whole while tp is at most their number (key/value heads, for query heads).
        items: Units that are never cut (heads); a multiple of `groups`.
        replicate: When tp exceeds `groups`, neighbouring shards hold the same whole group (key/value heads);
            otherwise they share the group's items between them.
        by_step_time: Ranks of slow devices may have fewer of these rows than others (columns of an MLP), see `layout.shares`.
    """

    rows: int
    groups: int
    items: int
    replicate: bool = False
    by_step_time: bool = False

    def cut(self, tp: int, shard: int) -> tuple[int, int]:
        """The rows `[start, stop)` of one shard. Cuts may be uneven, never through an item."""
        if self.groups >= tp or (self.groups == self.items and not self.replicate):  # the latter: some shards are empty
            size = self.rows // self.groups
            return self.groups * shard // tp * size, self.groups * (shard + 1) // tp * size
        sharers = tp // self.groups
        group, position = divmod(shard, sharers)
        items, size = self.items // self.groups, self.rows // self.items
        first, last = (0, items) if self.replicate else (items * position // sharers, items * (position + 1) // sharers)
        return (group * items + first) * size, (group * items + last) * size


@dataclass(frozen=True)
class Packed:
    """Of a matrix in 4 bits, one of its two tensors: its codes (uint8, two weights in each) or its scales (fp32, one a block).

    Blocks are consecutive weights of the matrix in row-major order. Where each row is of whole blocks, the tensors are
    [out, blocks, bytes] and [out, blocks]; else they have one dim, and are not cut.

    Args:
        shape: Of the matrix, [out, in].
        step: How many rows, or columns, of the matrix one index of the stored `shard_dim` holds: cuts at multiples of it are
            at borders of blocks. 0 where it is not cut.
        weights: The weights of the matrix, which count in costs; 0 for scales.
    """

    shape: tuple[int, int]
    step: int
    weights: int


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model as plain data.

    Args:
        name: Its Hugging Face name (the first one, when weights are tied).
        shape: Its shape in the Hugging Face model.
        dtype: Name of the dtype in which strategies hold it (``float32``, ``bfloat16``, ``float64``).
        unit: The layer index, `EMBEDDING` or `HEAD`.
        shard_dim: The tensor dim that tensor parallelism cuts; None when every tp coordinate holds all of it.
        parts: How `shard_dim` is cut; empty exactly when `shard_dim` is None.
        partial_gradient: Held by every tp coordinate, and each one's gradient is only a part of the sum (q/k norms).
        trainable: False for a frozen parameter: moved, but without gradient and optimizer state.
        tied_names: Further names of the same parameter.
        in_head: Also used by the head, so that the last pipeline stage holds it too (tied embeddings).
        offset: Where it starts in the parameter vector.
        experts: How many experts it has the weights of, along its first dim; 0 where it is not one of experts.
        frozen_dtype: Name of the dtype in which the master store keeps it while it is frozen: that of the model that was
            given, so that nothing of it is rounded. None for `dtype`.
        packed: Of which matrix in 4 bits it is a part; `shape` is how its bytes or scales are stored, while `parts` count rows
            (or columns) of the matrix. None for a parameter of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: int
    shard_dim: int | None = None
    parts: tuple[Part, ...] = ()
    partial_gradient: bool = False
    trainable: bool = True
    tied_names: tuple[str, ...] = ()
    in_head: bool = False
    offset: int = 0
    frozen_dtype: str | None = None
    experts: int = 0
    packed: Packed | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def master_dtype(self) -> str:
        """The dtype of the master store: fp32 for trained weights, fp64 stays fp64, frozen weights stay as loaded."""
        return master_dtype(self.dtype) if self.trainable else self.frozen_dtype or self.dtype

    @property
    def storage_dim(self) -> int | None:
        """The dim of `shape` that is outermost in the storage; None for the natural order."""
        return None if self.packed is not None and not self.packed.step else self.shard_dim

    @property
    def row_size(self) -> int:
        """Elements of one row of the storage, which has `storage_dim` outermost."""
        return self.numel // self.shape[self.storage_dim] if self.storage_dim is not None else 1

    @property
    def cut_size(self) -> int:
        """What `parts` divide: rows or columns along `shard_dim`, of the matrix where it is packed."""
        assert self.shard_dim is not None
        return (self.shape if self.packed is None else self.packed.shape)[self.shard_dim]

    @property
    def weights(self) -> int:
        """The weights of a matrix, which decide what it costs to compute; 0 for vectors."""
        if self.packed is not None:
            return self.packed.weights
        return self.numel if len(self.shape) > 1 else 0

    def shard_rows(self, tp: int, shard: int) -> tuple[tuple[int, int], ...]:
        """The row ranges of one shard along `shard_dim`, in the order in which the shard stores them."""
        ranges, start = [], 0
        for part in self.parts:
            low, high = part.cut(tp, shard)
            ranges.append((start + low, start + high))
            start += part.rows
        return tuple(ranges)


@dataclass(frozen=True)
class Segment:
    """The parameters `[start, stop)` of the vector that share a unit, both dtypes and being trained or frozen."""

    index: int
    unit: int
    dtype: str
    master_dtype: str
    trainable: bool
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UnitCosts:
    """What a layer computes for a token, in parameters, with its part of the head.

    Args:
        cut: What tensor parallelism divides evenly.
        whole: What every tp coordinate computes.
        by_step_time: What it may divide by the relative step time of devices; 0 in layers with experts, whose work depends on the tokens.
        columns: Of the MLP whose projections these are.
    """

    cut: int
    whole: int
    by_step_time: int
    columns: int


@dataclass(frozen=True)
class ParameterVector:
    """All parameters of a model in canonical order; made by `build_vector`.

    Args:
        specs: The parameters by offset.
        segments: The segments by offset; they tile the vector.
        layer_costs: Relative compute cost of each decoder layer for one token.
        head_cost: The same for the head (final norm and vocabulary projection).
        measured: What decides the cut of stages in their place, where seconds of the model were measured. It moves layers
            between stages and changes nothing else: no offset, no segment, no checkpoint.
        step_times: How long each rank of the world takes for the same work, see `stages.USUAL_STEP_TIME`: by it the columns of MLPs are
            divided over tensor-parallel groups, and nothing else changes either. Empty where they are divided evenly.
    """

    specs: tuple[ParameterSpec, ...]
    segments: tuple[Segment, ...]
    layer_costs: tuple[int, ...]
    head_cost: int
    measured: StageCosts | None = None
    step_times: tuple[int, ...] = ()

    @property
    def stage_costs(self) -> StageCosts:
        """What decides the cut of stages."""
        return self.measured or StageCosts(self.layer_costs, self.head_cost)

    @cached_property
    def unit_costs(self) -> dict[int, UnitCosts]:
        """Of each layer what it computes."""
        by_unit: dict[int, list[ParameterSpec]] = {unit: [] for unit in range(self.num_layers)}
        for spec in self.specs:
            if spec.unit in by_unit and spec.weights:
                by_unit[spec.unit].append(spec)
        costs = {}
        for unit, specs in by_unit.items():
            has_experts = any(spec.experts for spec in specs)
            paced = [s for s in specs if s.parts and all(part.by_step_time for part in s.parts) and not has_experts]
            rest = [spec for spec in specs if spec not in paced]
            costs[unit] = UnitCosts(
                cut=sum(s.weights for s in rest if s.shard_dim is not None) + self.head_cost // self.num_layers,
                whole=sum(s.weights for s in rest if s.shard_dim is None),
                by_step_time=sum(s.weights for s in paced),
                columns=paced[0].parts[0].rows if paced else 0,
            )
        return costs

    def with_step_times(self, step_times: Iterable[int]) -> "ParameterVector":
        """The same parameters, whose MLPs are divided by these relative step times of the ranks; evenly where there are none.

        Raises:
            HotspaConfigError: a relative step time is not positive.
        """
        given = tuple(step_times)
        if min(given, default=1) < 1:
            raise HotspaConfigError(
                "a relative step time of a rank is not positive", fix="give relative step times relative to 100"
            )
        return replace(self, step_times=given)

    def with_measured(self, costs: StageCosts | None) -> "ParameterVector":
        """The same parameters, whose stages are cut by what was measured; by count when None.

        Raises:
            HotspaConfigError: the costs are of another number of layers.
        """
        if costs is not None and len(costs.layers) != self.num_layers:
            raise HotspaConfigError(
                f"costs of {len(costs.layers)} layers for a model of {self.num_layers}", fix="measure this model"
            )
        return replace(self, measured=costs)

    @property
    def numel(self) -> int:
        return self.segments[-1].stop

    @property
    def num_layers(self) -> int:
        return len(self.layer_costs)

    def segment_of(self, spec: ParameterSpec) -> Segment:
        return self.segments[bisect_right(self._segment_starts, spec.offset) - 1]

    def specs_of(self, segment: Segment) -> tuple[ParameterSpec, ...]:
        return self._specs_by_segment[segment.index]

    @cached_property
    def _segment_starts(self) -> list[int]:
        return [segment.start for segment in self.segments]

    @cached_property
    def _specs_by_segment(self) -> list[tuple[ParameterSpec, ...]]:
        by_segment: list[list[ParameterSpec]] = [[] for _ in self.segments]
        for spec in self.specs:
            by_segment[self.segment_of(spec).index].append(spec)
        return [tuple(specs) for specs in by_segment]

    def digest(self) -> str:
        """SHA-256 of everything that decides layouts and plans: equal on ranks with the same model."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def trained_part(vector: ParameterVector) -> ParameterVector:
    """The trained parameters of a vector, laid end to end in the same order."""
    trained = [spec for spec in vector.specs if spec.trainable]
    return build_vector(trained, vector.layer_costs, vector.head_cost).with_measured(vector.measured)


def _unit_order(unit: int, num_layers: int) -> int:
    return {EMBEDDING: -1, HEAD: num_layers}.get(unit, unit)


def build_vector(specs: Iterable[ParameterSpec], layer_costs: Sequence[int], head_cost: int) -> ParameterVector:
    """Orders the parameters by unit (embedding, layers, head), then by segment, and gives each its offset.

    Args:
        specs: The parameters in the model's order; their offsets are ignored.

    Raises:
        ModelError: a parameter is empty or scalar where it is sharded, its parts do not add up, or two share a name.
    """
    ordered: dict[tuple[int, str, bool, str], list[ParameterSpec]] = {}
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise ModelError(f"two parameters are called {spec.name!r}")
        names.add(spec.name)
        if (spec.shard_dim is None) != (not spec.parts) or (
            spec.shard_dim is not None and sum(p.rows for p in spec.parts) != spec.cut_size
        ):
            raise ModelError(f"the parts of parameter {spec.name!r} {spec.shape} do not add up to its sharded dim")
        if any(p.groups < 1 or p.items % p.groups or p.rows % p.items for p in spec.parts):
            raise ModelError(
                f"a part of parameter {spec.name!r} {spec.shape} does not divide into its groups and items"
            )
        key = (_unit_order(spec.unit, len(layer_costs)), spec.dtype, not spec.trainable, spec.master_dtype)
        ordered.setdefault(key, []).append(spec)
    placed: list[ParameterSpec] = []
    segments: list[Segment] = []
    offset = 0
    for key in sorted(ordered):
        start = offset
        for spec in ordered[key]:
            placed.append(replace(spec, offset=offset))
            offset += spec.numel
        if offset > start:
            one, index = placed[-1], len(segments)
            segments.append(Segment(index, one.unit, one.dtype, one.master_dtype, one.trainable, start, offset))
    if not segments:
        raise ModelError("the model has no parameters")
    return ParameterVector(tuple(placed), tuple(segments), tuple(layer_costs), head_cost)
