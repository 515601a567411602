"""The parameter vector (all parameters end to end in one canonical order), and the dtypes of gradients.

Each parameter is stored with its sharded dim outermost (a row-parallel weight transposed). So a tensor-parallel shard
is one contiguous interval of the vector, or one interval for each part of a fused weight. The vector is divided into
*segments*: the parameters of one unit (embedding, each layer, head) that share a dtype and are trained or frozen
together. Segments are the granularity of all buffers: layouts bind, switches move and the master store cuts by segment.

`GradientDtypes` holds the dtypes in which gradients accumulate and travel to the master store. Master weights and sums
in the master store and relay buffers always have the master's precision. Sizes are in elements.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_hotspa.errors import HotspaConfigError, ModelError, check_choice
from hf_hotspa.layout.stages import StageCosts

FP32, BF16, AUTO = "fp32", "bf16", "auto"
ACCUMULATION_DTYPES = (FP32, BF16)
WIRE_DTYPES = (AUTO, FP32, BF16)
_BF16 = "bfloat16"


def master_dtype(dtype: str) -> str:
    """The dtype of master weights for trained weights of a dtype: fp32; fp64 stays fp64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes of the gradients of trained weights. Raises `HotspaConfigError`: another value."""

    # dtype of the buffer of a phase's sums: `fp32` (the master dtype: fp64 for fp64) or `bf16`
    accumulation: str = FP32
    # dtype on the way to the master store: `fp32` (as above), `bf16`, or `auto` for the accumulation dtype
    wire: str = AUTO

    def __post_init__(self) -> None:
        check_choice("the dtype in which gradients accumulate", self.accumulation, ACCUMULATION_DTYPES)
        check_choice("the dtype in which gradients travel", self.wire, WIRE_DTYPES)

    def accumulated(self, dtype: str) -> str:
        """The dtype of a strategy's gradient buffers for weights of a dtype."""
        return _BF16 if self.accumulation == BF16 else master_dtype(dtype)

    def moved(self, dtype: str) -> str:
        """The dtype on the wire for gradients of weights of a dtype."""
        if self.wire == AUTO:
            return self.accumulated(dtype)
        return _BF16 if self.wire == BF16 else master_dtype(dtype)


IN_FP32 = GradientDtypes()  # the default: gradients keep the precision of the masters


EMBEDDING, HEAD = -1, -2  # unit numbers of embedding and head; layer i is unit i
BESIDE = -3
"""The unit of what is trained beside the layers: modules that a caller runs by himself (the encoders of images). No strategy
lays it out; the master store divides it over all ranks, like any other unit."""


@dataclass(frozen=True)
class Part:
    """A stretch of the sharded dim that is cut separately (q, k and v of a fused weight are three parts)."""

    rows: int  # size along the sharded dim
    groups: int  # groups of rows that are not cut while tp is at most their number (key/value heads, for query heads)
    items: int  # units that are never cut (heads); a multiple of `groups`
    # if tp exceeds `groups`, neighbouring shards hold the same complete group (key/value heads); otherwise they
    # divide the group's items
    replicate: bool = False
    # ranks that take longer may have fewer of these rows (columns of an MLP), see `layout.shares`
    by_step_time: bool = False

    def cut(self, tp: int, shard: int) -> tuple[int, int]:
        """Returns the rows `[start, stop)` of one shard. Cuts may be uneven, but never split an item."""
        # with more shards than items some are empty
        if self.groups >= tp or (self.groups == self.items and not self.replicate):
            size = self.rows // self.groups
            return self.groups * shard // tp * size, self.groups * (shard + 1) // tp * size
        sharers = tp // self.groups
        group, position = divmod(shard, sharers)
        items, size = self.items // self.groups, self.rows // self.items
        first, last = (0, items) if self.replicate else (items * position // sharers, items * (position + 1) // sharers)
        return (group * items + first) * size, (group * items + last) * size


@dataclass(frozen=True)
class Packed:
    """One of the tensors that hold a packed matrix: codes (uint8, of one weight or several), or scales (one per block).

    Blocks are consecutive weights in row-major order. If rows consist of complete blocks, the tensors are
    [out, blocks, bytes] and [out, blocks]; otherwise they have one dim and are not cut. The matrices of experts are one
    after the other, and the tensors have one more dim.
    """

    shape: tuple[int, ...]  # shape of the matrix, [out, in], or [experts, rows, columns]
    # rows (or columns) of the matrix in one index of the stored `shard_dim`: cuts at its multiples are at block
    # borders. 0 if not cut
    step: int
    weights: int  # number of weights of all matrices, for costs; 0 for scales


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model as plain data."""

    name: str  # its Hugging Face name (the first one if weights are tied)
    shape: tuple[int, ...]  # its Hugging Face shape
    dtype: str  # dtype in which strategies hold it (``float32``, ``bfloat16``, ``float64``)
    unit: int  # the layer index, `EMBEDDING`, `HEAD` or `BESIDE`
    # the dim that tensor parallelism cuts; None if every tp coordinate holds the complete parameter
    shard_dim: int | None = None
    parts: tuple[Part, ...] = ()  # how `shard_dim` is cut; empty exactly if `shard_dim` is None
    # every tp coordinate holds it, and each gradient is only a part of the sum (q/k norms)
    partial_gradient: bool = False
    trainable: bool = True  # False for a frozen parameter: moved, but without gradient and optimizer state
    tied_names: tuple[str, ...] = ()  # further names of the same parameter
    in_head: bool = False  # also used by the head, so the last pipeline stage holds it too (tied embeddings)
    offset: int = 0
    # dtype in the master store while frozen: the given model's, without rounding. None for `dtype`
    frozen_dtype: str | None = None
    experts: int = 0  # number of experts along its first dim; 0 for other parameters
    # the packed matrix that it is a part of, if any. `shape` is then of the stored bytes or scales, while `parts`
    # count rows (or columns) of the matrix
    packed: Packed | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def master_dtype(self) -> str:
        """Its dtype in the master store: fp32 for trained weights, fp64 stays fp64, frozen weights stay as loaded."""
        return master_dtype(self.dtype) if self.trainable else self.frozen_dtype or self.dtype

    @property
    def storage_dim(self) -> int | None:
        """The dim of `shape` that is outermost in storage; None for the natural order."""
        return None if self.packed is not None and not self.packed.step else self.shard_dim

    @property
    def row_size(self) -> int:
        """Elements of one index of `storage_dim` in storage."""
        return self.numel // self.shape[self.storage_dim] if self.storage_dim is not None else 1

    @property
    def cut_size(self) -> int:
        """The number of rows or columns that `parts` divide, along `shard_dim`; of the matrix if packed."""
        assert self.shard_dim is not None
        return (self.shape if self.packed is None else self.packed.shape)[self.shard_dim]

    @property
    def weights(self) -> int:
        """The number of weights of a matrix, which decides its compute cost; 0 for vectors."""
        if self.packed is not None:
            return self.packed.weights
        return self.numel if len(self.shape) > 1 else 0

    def shard_rows(
        self, tp: int, shard: int, cuts: Callable[[Part], tuple[int, ...]] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Returns the row ranges of one shard along `shard_dim`, in storage order. `cuts`: the ends of a part's uneven
        shares, starting with 0; empty for even ones."""
        ranges, start = [], 0
        for part in self.parts:
            ends = cuts(part) if cuts is not None else ()
            low, high = ends[shard : shard + 2] if ends else part.cut(tp, shard)
            ranges.append((start + low, start + high))
            start += part.rows
        return tuple(ranges)


@dataclass(frozen=True)
class Segment:
    """The parameters `[start, stop)` of the vector with one unit, both dtypes and `trainable` in common."""

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

    @property
    def has_one_form(self) -> bool:
        """Whether it is frozen, and strategies compute in the dtype of the master store."""
        return not self.trainable and self.dtype == self.master_dtype


@dataclass(frozen=True)
class UnitCosts:
    """Work of a layer for one token, in parameters, with its part of the head."""

    cut: int  # work that tensor parallelism divides evenly
    whole: int  # work that every tp coordinate does
    # work that may be divided by the relative step time of devices; 0 in layers with experts, whose work depends on
    # the tokens
    by_step_time: int
    columns: int  # columns of the MLP with the `by_step_time` projections


@dataclass(frozen=True)
class ParameterVector:
    """All parameters of a model in canonical order; made by `build_vector`."""

    specs: tuple[ParameterSpec, ...]  # sorted by offset
    segments: tuple[Segment, ...]  # sorted by offset; they tile the vector
    layer_costs: tuple[int, ...]  # relative compute cost of each decoder layer for one token
    head_cost: int  # the same for the head (final norm and vocabulary projection)
    # measured costs that replace both for the stage partition. They move layers between stages and change no offset,
    # segment or checkpoint
    measured: StageCosts | None = None
    # relative step time of each rank of the world, see `stages.USUAL_STEP_TIME`. Divides the MLP columns of
    # tensor-parallel groups and changes nothing else. Empty for even division
    step_times: tuple[int, ...] = ()

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of the stage partition."""
        return self.measured or StageCosts(self.layer_costs, self.head_cost)

    @cached_property
    def unit_costs(self) -> dict[int, UnitCosts]:
        """The work of each layer."""
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
        """Returns a copy whose MLPs are divided by these relative step times of the ranks; evenly if empty. Raises
        `HotspaConfigError`: a relative step time is not positive."""
        given = tuple(step_times)
        if min(given, default=1) < 1:
            fix = "give relative step times, with 100 as usual"
            raise HotspaConfigError("a relative step time of a rank is not positive", fix=fix)
        return replace(self, step_times=given)

    def with_measured(self, costs: StageCosts | None) -> "ParameterVector":
        """Returns a copy whose stages are cut by measured costs; by parameter count if None. Raises
        `HotspaConfigError`: the costs are of another number of layers."""
        if costs is not None and len(costs.layers) != self.num_layers:
            fix = "measure this model"
            raise HotspaConfigError(f"costs of {len(costs.layers)} layers for a model of {self.num_layers}", fix=fix)
        return replace(self, measured=costs)

    @property
    def numel(self) -> int:
        return self.segments[-1].stop

    @property
    def num_layers(self) -> int:
        return len(self.layer_costs)

    def segment_of(self, spec: ParameterSpec) -> Segment:
        return self.segments[bisect_right(self.segments, spec.offset, key=lambda segment: segment.start) - 1]

    def specs_of(self, segment: Segment) -> tuple[ParameterSpec, ...]:
        return self._specs_by_segment[segment.index]

    @cached_property
    def _specs_by_segment(self) -> list[tuple[ParameterSpec, ...]]:
        by_segment: list[list[ParameterSpec]] = [[] for _ in self.segments]
        for spec in self.specs:
            by_segment[self.segment_of(spec).index].append(spec)
        return [tuple(specs) for specs in by_segment]

    def digest(self) -> str:
        """SHA-256 of everything that decides layouts and plans; equal on ranks with the same model."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def build_vector(specs: Iterable[ParameterSpec], layer_costs: Sequence[int], head_cost: int) -> ParameterVector:
    """Orders the parameters by unit (embedding, layers, head, beside), then by segment, and assigns offsets. `specs`: the
    parameters in the model's order; their offsets are ignored. Raises `ModelError`: a sharded parameter is empty or
    scalar, its parts do not add up, or two share a name."""
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
        order = {EMBEDDING: -1, HEAD: len(layer_costs), BESIDE: len(layer_costs) + 1}.get(spec.unit, spec.unit)
        key = (order, spec.dtype, not spec.trainable, spec.master_dtype)
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
