"""The memory model: bytes on the fullest rank under a strategy, their breakdown, and the largest possible pack.

The bytes are a sum of named terms (`terms.MemoryTerm`): `TERMS`, and what features add. A rank holds its share of the
master store (fp32 weights and gradients) and of the optimizer state; weights and gradients of the active strategy, in
an arena sized for the pool's largest strategy; activations of the micro-batches in flight on its stage; on the last
stage the logits of one pack; switch buffers. `PLANNED_SHARE` leaves room for the rest (device context, communicators,
fragmentation, kernel workspaces).

With 1F1B, stage i of p keeps `min(p - i, m)` of m micro-batches in flight (Narayanan et al., SC'21, section 2.2); with
GPipe, all of a group. Neither keeps more tokens than `Bucket.most_tokens`. A rank with v stages (`+v2`) holds up to p +
(p - 1) / v full packs, each on some of its stages (`packing.pipeline_order`).

Activations are linear in the tokens of a pack (attention keeps no score matrix), so the largest pack has a closed form
and never shrinks when the limit rises.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hf_hotspa.costs.divided import gathered_bytes, repeated_bytes, tokens_at_a_time
from hf_hotspa.costs.packed_linears import unpacked
from hf_hotspa.costs.sizes import (
    ADAM,
    MasterSizes,
    ModelSizes,
    OptimizerState,
    StageSizes,
    dtype_bytes,
    loss_chunk_tokens,
)
from hf_hotspa.costs.terms import LOSS, RECOMPUTATION, Bytes, MemoryTerm, Packs, Rate, Scoring
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import num_chunks
from hf_hotspa.seam import hooks
from hf_hotspa.strategy import Bucket, Strategy

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one rank of the fullest stage."""

    master_weights: float  # its share of the master store, as are `master_gradients` and `optimizer`
    master_gradients: float
    optimizer: float
    weights: float  # of the strategy, like `gradients`
    gradients: float
    arena: float  # what the pool's largest strategy needs beyond these weights and gradients
    activations: float  # of all micro-batches in flight
    logits: float  # of one pack on the last stage, plus what the losses of other packs in flight keep
    switch: float  # switch buffers
    stage: int
    in_flight: int  # most micro-batches in flight
    held_tokens: int  # most tokens in flight
    pack_tokens: int  # tokens of the largest pack

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def total(self) -> float:
        return sum([getattr(self, name) for name in _PARTS])

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(part)}" for name, part in self.parts().items() if part)
        return f"{size(self.total)} on stage {self.stage} ({parts})"


_PARTS = tuple(f.name for f in fields(MemoryBreakdown)[:-4])
_OF_TERMS = tuple(name for name in _PARTS if name not in ("arena", "switch"))  # activations and logits are last


def size(num_bytes: float) -> str:
    """Formats bytes in GiB, or MiB if less than one."""
    return f"{num_bytes / _GIB:,.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"


def round_up(num_bytes: float) -> str:
    """Formats a limit that a user can type, rounded up to a mebibyte."""
    mebibytes = -(-int(num_bytes + 1) // (1 << 20))
    return f"{mebibytes}MiB ({mebibytes / 1024:,.2f} GiB)"


UNLIMITED_TOKENS = 1 << 40  # result of `largest_pack` without a limit

PLANNED_SHARE = 0.9  # share of a device's memory that plans may fill without a given limit

# what a device holds besides what torch allocates: see `card_bytes`
ALLOCATOR_SLACK = 0.08  # of the allocated bytes, in blocks that are reserved and not in use
CONTEXT_BYTES = 1 << 29  # of CUDA, its kernels and its libraries
COMMUNICATOR_BYTES = 1_150_000_000  # of NCCL with fully connected sends, as Megatron measured

_NORM_INPUT_BYTES = 4  # norms compute in fp32
_STRAIGHT = 1e-9  # relative rounding error of a total on a straight line; the bytes of one token are a larger share
_WIDE = 1 << 18


def card_bytes(allocated: float, world_size: int) -> float:
    """Returns the bytes that the driver shows for a device on which torch allocates so many: with blocks that the
    allocator reserves, the context of CUDA and, beside other ranks, the buffers of communicators."""
    return allocated * (1 + ALLOCATOR_SLACK) + CONTEXT_BYTES + (COMMUNICATOR_BYTES if world_size > 1 else 0)


def activation_bytes(
    shape: ModelShape,
    tp: int,
    *,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
    ep: int = 1,
    frozen: bool = False,
    fused: bool = False,
) -> float:
    """Returns the bytes that one decoder layer keeps for one token until its backward pass.

    In elements, for layers of Transformers with hidden size h, attention width a and MLP width f:

    * Inputs of the projections of both blocks: 2h, complete on every tp coordinate, also with sequence parallelism,
      which gathers them.
    * Queries, keys, values and attention output: 4a; gate, up, activated gate and product of the MLP: 4f (2f without a
      gate). Divided by tp, except for the shares of blocks that every coordinate holds complete.
    * Two norms: their input in fp32 (4 bytes an element) and, if trained, their result before the weight (1h each);
      sequence parallelism divides this. Norms of queries and keys likewise. Layer norms (of layers without a gate)
      count with their inputs and the residual sum: 3h.
    * Experts: f follows from the parameters that compute a token, the k chosen experts. Their inputs and outputs (2kh)
      are on every tp coordinate if tp cuts experts, and divided if ep does; loads count as equal.

    `fused` kernels keep less, as in Megatron: norms their input in the compute dtype, a gated MLP 3f; and sequence
    parallelism divides everything. A LLaMA in 16 bits then has `8h + 4 (a + kv) + 6f` bytes, as in Korthikanti et al.,
    2022. With recomputation only the layer's input (1h) stays. `frozen`: whether the norms are frozen.
    """
    heads = shape.attention_parameters / shape.hidden_size  # queries, keys, values and the output: 2a + 2kv
    mlp = _kept_by_mlp(shape) * (3 / 4 if fused and shape.gated else 1)
    of_experts = 2 * shape.experts_per_token * shape.hidden_size / (tp if ep > 1 else 1)
    of_norm = _NORM_INPUT_BYTES + element_bytes * (not frozen)
    norms = 2 * of_norm if shape.gated else 3 * element_bytes
    if fused:
        norms, of_norm = 2 * element_bytes, element_bytes
    normed = of_norm * heads / 2 * shape.head_norms  # queries and keys: a + kv
    cut = (heads * (1 - shape.whole_attention) + mlp * (1 - shape.whole_mlp)) / tp
    inputs = 2 * shape.hidden_size / (tp if fused and sequence_parallel else 1)
    in_compute_dtype = inputs + of_experts + cut + heads * shape.whole_attention + mlp * shape.whole_mlp
    return norms * shape.hidden_size / (tp if sequence_parallel else 1) + normed / tp + element_bytes * in_compute_dtype


def _kept_by_mlp(shape: ModelShape) -> float:
    """Elements per token: four tensors for three matrices with a gate, otherwise two for two."""
    return shape.active_mlp_parameters / shape.hidden_size * (4 / 3 if shape.gated else 1)


@dataclass(frozen=True)
class MemoryOptions:
    """Options of a run that affect memory."""

    optimizer: OptimizerState = ADAM
    compute_dtype: str = "bfloat16"  # the dtype of activations
    # measured bytes per token and layer by tp; a formula is used for a missing tp
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    # measured bytes per token beyond what the layers keep, by tp: on a last stage for the logits; on other stages for
    # the backward pass of one layer, which needs no more than a layer keeps. For a missing tp `logit_copies` is used,
    # on last stages.
    end_bytes: Mapping[int, float] = field(default_factory=dict)
    # fp32 copies of the logits that exist at once on the last stage: the probabilities, and the logits with their
    # gradient in the compute dtype
    logit_copies: float = 2.0
    switch_bytes: int = 2 * (16 << 20)  # largest size of the staging and relay buffers of switches
    weight_copies: int = 1  # how many strategies' weights are kept at a time: 2 with a second source
    schedule: str = "auto"  # one of `pipeline_order.SCHEDULES`
    offload_master: bool = False  # whether the master store and the optimizer state are in host memory
    context_parallel: str = "auto"  # the cp method, one of `costs.divided.WAYS`
    features: tuple[Any, ...] = ()  # settings of features (`hf_hotspa.seam`)
    scoring: Scoring = field(default_factory=Scoring)  # forward passes of a step besides training


class MemoryStage:
    """The fullest rank of a pipeline position, as terms see it."""

    def __init__(self, model: "MemoryModel", strategy: Strategy, index: int, layer: float) -> None:
        self.model, self.strategy, self.index = model, strategy, index
        self.options, self.shape = model.options, model.sizes.shape
        self.own: StageSizes = model.sizes.stages(strategy)[index]
        self.layer = layer  # bytes of a layer for one token, without recomputation
        self.is_last = index == strategy.pp - 1
        self.recomputes = strategy.rc > 0
        self.width = dtype_bytes(model.options.compute_dtype)  # bytes of an element of the activations
        self.hidden = self.shape.hidden_size * self.width  # bytes of the hidden state of a token
        self.sharers = strategy.tp if strategy.sp else 1  # of the hidden states between blocks
        self.head_rows = self.shape.head_rows(strategy.tp)
        # layers that hold packs; of several stages each counts as the longest, which may hold most of them
        stages = model.sizes.layers_of_stages(strategy.pp, strategy.v)[index :: strategy.pp]
        self.num_layers = strategy.v * max(map(len, stages))

    @cached_property
    def master(self) -> MasterSizes:
        """Its share of the master store."""
        of_features = (terms.master(self) for terms in hooks("terms") if terms.master is not None)
        return next((master for master in of_features if master is not None), self.model.master)

    @property
    def inner_gradient(self) -> float:
        """Bytes of a token's gradient inside an MLP."""
        shape = self.shape
        inner = shape.active_mlp_parameters / ((3 if shape.gated else 2) * shape.hidden_size) * self.width
        return inner * (shape.whole_mlp + (1 - shape.whole_mlp) * self.model.sizes.mlp_share(self.strategy))


def _kept_activations(stage: MemoryStage) -> Rate:
    """Of the layers; with `+rc`, layers 0, n, 2n, ... keep only their input."""
    every = stage.strategy.rc
    recomputed = -(-stage.num_layers // every) if every else 0
    return Rate(recomputed * stage.hidden / stage.sharers + (stage.num_layers - recomputed) * stage.layer)


def _recomputed_layer(stage: MemoryStage) -> Rate | None:
    """While the last recomputing layer runs again: its activations, a gradient at either end, and one inside the MLP,
    which sequence parallelism gathers. The layers after it have already run backward."""
    if not stage.recomputes:
        return None
    input_bytes, after = stage.hidden / stage.sharers, (stage.num_layers - 1) % stage.strategy.rc
    gradients = 2 * input_bytes + stage.inner_gradient + (stage.hidden if stage.sharers > 1 else 0.0)
    return Rate(pack_token=stage.layer + gradients - input_bytes - after * stage.layer)


def _layer_backward(stage: MemoryStage) -> Rate | None:
    """Needs no more than a layer keeps (`end_bytes`)."""
    if stage.is_last or stage.recomputes:
        return None
    return Rate(pack_token=min(stage.layer, stage.options.end_bytes.get(stage.strategy.tp, 0.0)))


def _gathered(stage: MemoryStage) -> Rate | None:
    of_token = gathered_bytes(stage.strategy, stage.shape, stage.options.context_parallel, stage.width)
    return Rate(pack_token=of_token) if of_token else None


def _sent(stage: MemoryStage) -> Rate | None:
    """A stage's output stays until its backward pass; torch's schedules also have buffers for its gradients."""
    if stage.is_last and stage.strategy.v == 1:
        return None
    copies = 1 if stage.options.schedule in ("auto", "own") else 2
    return Rate(copies * stage.hidden / stage.sharers * stage.strategy.v)


def _logits(stage: MemoryStage) -> Bytes | None:
    """Of one pack; beyond the tokens of a chunk of the loss there are hidden states and their gradients only."""
    if not stage.is_last:
        return None
    rows, options, beyond = stage.head_rows, stage.options, 2 * stage.hidden
    of_token = options.end_bytes.get(stage.strategy.tp, rows * 4 * options.logit_copies)
    most = loss_chunk_tokens(rows)

    def logits(packs: Packs) -> float:
        if not packs.in_flight:
            return 0.0
        at_a_time = min(packs.pack_tokens, most)
        return at_a_time * of_token + beyond * (packs.pack_tokens - at_a_time)

    return logits


def _other_losses(stage: MemoryStage) -> Bytes | None:
    """What losses of several packs keep: probabilities, or gradients of hidden state and head (`parallel.head_loss`)."""
    if not stage.is_last:
        return None
    rows = stage.head_rows
    of_token = rows * 4 * max(1.0, stage.shape.hidden_size / loss_chunk_tokens(rows)) + stage.hidden
    return lambda packs: of_token * packs.held_tokens if packs.in_flight > 1 else 0.0


def _unpacked_bytes(stage: MemoryStage) -> Rate | None:
    weights = unpacked(stage.model.sizes, stage.strategy.tp)
    return Rate(fixed=weights * stage.width) if weights else None


def _second_gradient(stage: MemoryStage) -> Rate | None:
    """While a layer runs again: gradients of both the product of what is trained and the frozen one."""
    if not stage.recomputes or not unpacked(stage.model.sizes, stage.strategy.tp):
        return None
    return Rate(pack_token=stage.inner_gradient)


def _teacher(stage: MemoryStage) -> Rate | None:
    """Its share of a teacher's weights; those that its layers run with; and the head's, beside the student's pass."""
    teacher, options = stage.options.scoring.teacher, stage.options
    if teacher is None:
        return None
    share = 0.0 if options.offload_master else teacher.weight_bytes / stage.model.world_size
    head = stage.head_rows * teacher.shape.hidden_size * stage.width if stage.is_last else 0
    return Rate(fixed=share + teacher.stages(stage.strategy)[stage.index].weight_bytes + head)


def _teachers_logits(stage: MemoryStage) -> Bytes | None:
    if stage.options.scoring.teacher is None or not stage.is_last:
        return None
    rows = stage.head_rows
    most = loss_chunk_tokens(rows)
    return lambda packs: min(packs.pack_tokens, most) * rows * 4 if packs.in_flight else 0.0


TERMS = (
    MemoryTerm("master weights", "master_weights", lambda stage: Rate(fixed=stage.master.weight_bytes)),
    MemoryTerm(
        "weights of a reference model", "master_weights",
        lambda stage: Rate(fixed=stage.master.weight_bytes) if stage.options.scoring.reference else None,
    ),
    MemoryTerm("weights of a teacher", "master_weights", _teacher),
    MemoryTerm("master gradients", "master_gradients", lambda stage: Rate(fixed=stage.master.gradient_bytes)),
    MemoryTerm("optimizer state", "optimizer", lambda stage: Rate(fixed=stage.master.optimizer_bytes)),
    MemoryTerm("weights", "weights", lambda stage: Rate(fixed=stage.options.weight_copies * stage.own.weight_bytes)),
    MemoryTerm("gradients", "gradients", lambda stage: Rate(fixed=stage.own.gradient_bytes)),
    MemoryTerm("kept activations", "activations", _kept_activations),
    MemoryTerm("outputs of the stage", "activations", _sent),
    MemoryTerm("recomputed layer", "activations", _recomputed_layer, RECOMPUTATION),
    MemoryTerm("backward pass of a layer", "activations", _layer_backward, "backward"),
    MemoryTerm("gathered keys and values", "activations", _gathered, "attention"),
    MemoryTerm("logits", "logits", _logits, LOSS),
    MemoryTerm("losses of other packs", "logits", _other_losses),
    MemoryTerm("unpacked weights", "activations", _unpacked_bytes, "products"),
    MemoryTerm("second gradient inside an MLP", "activations", _second_gradient, RECOMPUTATION),
    MemoryTerm("logits of a teacher", "logits", _teachers_logits),
)  # fmt: skip
"""The terms of the core. The arena and the buffers of switches follow from the weights and gradients of all terms."""


_NOTHING = Rate()


class _Sums:
    """The terms of a stage, added up as far as they are `Rate`s."""

    def __init__(self, stage: MemoryStage, terms: Iterable[MemoryTerm]) -> None:
        self.stage = stage
        self._loss: Bytes | None = None
        self._rates = dict.fromkeys(_OF_TERMS, _NOTHING)
        self._others: dict[str, list[Bytes]] = {part: [] for part in _OF_TERMS}
        moments: dict[str, Rate] = {}
        for term in terms:
            num_bytes = term.of(stage)
            if num_bytes is None:
                continue
            if term.moment == LOSS:
                self._loss = num_bytes
            elif isinstance(num_bytes, Rate):
                rates, key = (moments, term.moment) if term.moment else (self._rates, term.part)
                rates[key] = rates.get(key, _NOTHING).plus(num_bytes)
            else:
                self._others[term.part].append(num_bytes)
        self._moments = tuple(moments.values())
        self._shifts: dict[tuple[int | None, int], float] = {}

    def part(self, name: str, packs: Packs) -> float:
        """Bytes of a part that exist all the time."""
        num_bytes = self._rates[name](packs)
        for other in self._others[name]:
            num_bytes += other(packs)
        return num_bytes

    def of_packs(self, packs: Packs) -> tuple[float, float]:
        """Returns the peak bytes of activations, and of logits."""
        activations, logits = self.part("activations", packs), self.part("logits", packs)
        loss = self._loss(packs) if self._loss is not None else 0.0
        for rate in self._moments:
            of_moment = rate.pack_token * packs.pack_tokens + rate.fixed
            if of_moment > loss:
                activations += of_moment - loss
        return activations, loss + logits

    def states(self, packs: Packs) -> dict[str, float]:
        """Returns the parts that do not grow with tokens."""
        return {name: self.part(name, packs) for name in _OF_TERMS[:-2]}

    def arena_and_switch(self, packs: Packs, arena_bytes: int) -> tuple[float, float]:
        """Returns what the pool's arena needs beyond the weights and gradients; and the buffers of switches: a rank
        sends and receives at most the weights, or the gradients, of the pool's largest strategy, each."""
        own, options = self.stage.own, self.stage.options
        more = arena_bytes - self.part("weights", packs) - self.part("gradients", packs)
        arena = options.weight_copies * own.weight_bytes + own.gradient_bytes
        moved = 2 * max(arena_bytes, arena) * max(own.weight_bytes, own.gradient_bytes) / arena
        return max(0, more), min(options.switch_bytes, moved)

    def shift(self, num_packs: int | None, arena_bytes: int) -> float:
        """Returns the bytes that the pool's arena adds."""
        key = num_packs, arena_bytes
        if key not in self._shifts:
            packs = Packs(num_packs, 0, 0, 0, 0)
            of_pool, alone = (sum(self.arena_and_switch(packs, num_bytes)) for num_bytes in (arena_bytes, 0))
            self._shifts[key] = of_pool - alone
        return self._shifts[key]


@dataclass(frozen=True)
class MemoryModel:
    """Memory of one model on `world_size` devices, which share the master store."""

    sizes: ModelSizes
    world_size: int
    options: MemoryOptions = MemoryOptions()
    _known_sums: dict[tuple[Strategy, int], _Sums] = field(default_factory=dict, init=False, repr=False, compare=False)
    _of_layers: dict[Strategy, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_fullest: dict[Strategy, list["_Fullest"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def master(self) -> MasterSizes:
        """The fullest rank's share of the master store on the devices."""
        if self.options.offload_master:
            return MasterSizes(0, 0, 0)
        return self.sizes.master(self.world_size, self.options.optimizer)

    def arena_bytes(self, strategy: Strategy) -> int:
        """Bytes of weights (all kept copies) and gradients of the strategy on its fullest rank."""
        copies = self.options.weight_copies
        return max(copies * stage.weight_bytes + stage.gradient_bytes for stage in self.sizes.stages(strategy))

    def breakdown(
        self,
        strategy: Strategy,
        pack_tokens: int,
        *,
        longest: int = 0,
        num_packs: int | None = None,
        arena_bytes: int = 0,
        pool: Iterable[Strategy] = (),
    ) -> MemoryBreakdown:
        """Returns the fullest of `stages`. In a pipeline a sequence longer than `pack_tokens` is a separate pack. `pool`:
        the other strategies of the run."""
        stages = self.stages(Bucket(strategy, longest, pack_tokens), num_packs, arena_bytes, pool)
        return max(stages, key=lambda stage: stage.total)

    def stages(
        self, bucket: Bucket, num_packs: int | None = None, arena_bytes: int = 0, pool: Iterable[Strategy] = ()
    ) -> list[MemoryBreakdown]:
        """Returns the bytes on the fullest rank of each pipeline position. `num_packs`: packs of a replica; enough to
        fill the pipeline if None. `arena_bytes`: the pool's arena. `pool`: the other strategies of the run."""
        less, stages = self._once_bytes([bucket.strategy, *pool]), []
        for stage in range(bucket.strategy.pp):
            sums, packs = self._sums(bucket.strategy, stage), self._packs(bucket, stage, num_packs)
            activations, logits = sums.of_packs(packs)
            arena, switch = sums.arena_and_switch(packs, arena_bytes)
            states = sums.states(packs)
            states["master_weights"] -= less
            stages.append(
                MemoryBreakdown(
                    **states, arena=arena, switch=switch, activations=activations, logits=logits, stage=stage,
                    in_flight=packs.in_flight, held_tokens=packs.held_tokens, pack_tokens=packs.pack_tokens,
                )
            )  # fmt: skip
        return stages

    def _once_bytes(self, pool: Iterable[Strategy]) -> float:
        """Bytes that a rank's master store, and the store of a reference, need less because strategies compute with frozen
        weights of the store: if each strategy of a pool has all of them on every rank (`held_in_place`)."""
        options, frozen = self.options, self.sizes.in_place_bytes
        if options.offload_master or any(s.tp * s.pp * s.ep > 1 or s.z == 3 for s in pool):
            return 0.0
        share = frozen / self.world_size
        return share - (frozen - share if options.scoring.reference else 0.0)

    def _sums(self, strategy: Strategy, stage: int) -> _Sums:
        if (strategy, stage) not in self._known_sums:
            if strategy not in self._of_layers:
                self._of_layers[strategy] = self._layer_bytes(strategy)
            context = MemoryStage(self, strategy, stage, self._of_layers[strategy])
            self._known_sums[strategy, stage] = _Sums(context, self._terms)
        return self._known_sums[strategy, stage]

    @cached_property
    def _terms(self) -> tuple[MemoryTerm, ...]:
        return *TERMS, *(term for terms in hooks("terms") for term in terms.memory)

    def _packs(self, bucket: Bucket, stage: int, num_packs: int | None) -> Packs:
        """Returns the packs, or chunks with `+ck`, that pass a stage."""
        strategy, schedule, capacity = bucket.strategy, self.options.schedule, bucket.capacity
        pack_tokens, longest, chain = tokens_at_a_time(strategy, capacity), bucket.longest or capacity, 1
        if strategy.ck and strategy.pp == 1:
            in_flight = min(1 + strategy.kg, num_chunks(longest, strategy.ck))
            held_tokens = min(in_flight * pack_tokens, max(-(-longest // strategy.cp), pack_tokens))
            return Packs(num_packs, in_flight, held_tokens, pack_tokens, longest)
        if strategy.ck:
            chain = num_chunks(longest, strategy.ck, self.sizes.shape.quadratic_cost)
            if num_packs is not None:
                num_packs = num_packs * num_chunks(capacity, strategy.ck) + chain
        held_tokens = -(-bucket.most_tokens // strategy.cp)
        most = most_packs(schedule, strategy.pp, stage, num_packs, chain, strategy.v)
        if most is None:
            most = held_tokens // max(1, min(pack_tokens, tokens_at_a_time(strategy, bucket.pack_tokens)))
        elif chain == 1:  # the sizes of several chunks depend on measurements
            held_tokens = min(most * pack_tokens, held_tokens)
        return Packs(num_packs, most, held_tokens, pack_tokens, longest)

    def _layer_bytes(self, strategy: Strategy) -> float:
        """Bytes per token of a layer without recomputation on the rank with most columns; measured ones have no cp."""
        options, shape, tp = self.options, self.sizes.shape, strategy.tp
        element_bytes, measured = dtype_bytes(options.compute_dtype), options.activation_bytes
        repeated = repeated_bytes(strategy, shape, options.context_parallel, element_bytes)
        more = (self.sizes.mlp_share(strategy) - 1 / tp) * (1 - shape.whole_mlp)  # than with even shares
        repeated += element_bytes * more * _kept_by_mlp(shape)
        if not strategy.sp and tp in measured:
            return measured[tp] + repeated
        if strategy.sp and 1 in measured:
            # everything is divided, except the gathered inputs of the two blocks
            gathered = 2 * shape.hidden_size * element_bytes
            return (measured[1] - gathered) / tp + gathered + repeated
        own = activation_bytes(
            shape, tp, sequence_parallel=strategy.sp, element_bytes=element_bytes, ep=strategy.ep,
            frozen=not self.sizes.trains_norms,
        )  # fmt: skip
        return own + repeated

    def largest_pack(
        self,
        strategy: Strategy,
        limit_bytes: float | None,
        *,
        longest: int | None = 0,
        num_packs: int | None = None,
        arena_bytes: int = 0,
    ) -> int:
        """Returns the most tokens of a pack; if `longest` is None, of the longest sequence, with packs of one token. 0
        if nothing fits, `UNLIMITED_TOKENS` without a limit."""
        if limit_bytes is None:
            return UNLIMITED_TOKENS
        most = UNLIMITED_TOKENS
        for sums, risings in self._fullest(strategy):
            rising = risings.get((longest, num_packs))
            if rising is None:
                total = self._totals(sums, longest, num_packs)
                rising = risings[longest, num_packs] = Rising(total, UNLIMITED_TOKENS)
            # another arena shifts all totals by a constant, so all arenas share one cache
            most = min(most, rising.most_within(limit_bytes - sums.shift(num_packs, arena_bytes)))
        return most

    def _totals(self, sums: _Sums, longest: int | None, num_packs: int | None) -> Callable[[int], float]:
        """Returns the total bytes of a stage without an arena as a function of tokens."""
        strategy, stage = sums.stage.strategy, sums.stage.index

        def packs_of(tokens: int) -> Packs:
            bucket = Bucket(strategy, tokens, 1) if longest is None else Bucket(strategy, longest, tokens)
            return self._packs(bucket, stage, num_packs)

        one = packs_of(1)
        states = sum(sums.states(one).values()) + sum(sums.arena_and_switch(one, 0))
        if self.world_size == 1:  # with more ranks it depends on the pool
            states -= self._once_bytes([strategy])

        def total(tokens: int) -> float:
            activations, logits = sums.of_packs(packs_of(tokens))
            return states + activations + logits

        return total

    def _fullest(self, strategy: Strategy) -> list["_Fullest"]:
        """Returns the stages that can be the fullest: a stage after one that is at least as large in every respect
        cannot, as earlier stages hold at least as many packs; except the last, which has the logits."""
        if strategy not in self._known_fullest:
            sizes, last = self.sizes.stages(strategy), strategy.pp - 1
            stages: list[int] = []
            for stage, own in enumerate(sizes):
                smaller = any(
                    before.num_layers >= own.num_layers
                    and before.weight_bytes >= own.weight_bytes
                    and before.gradient_bytes >= own.gradient_bytes
                    for before in (sizes[index] for index in stages)
                )
                if strategy.v > 1 or stage == last or not smaller:
                    stages.append(stage)
            self._known_fullest[strategy] = [(self._sums(strategy, stage), {}) for stage in stages]
        return self._known_fullest[strategy]

    def check_pool(self, buckets: Sequence[Bucket], limit_bytes: float | None, where: str | None = None) -> None:
        """Checks that a pool fits. Raises `DeviceMemoryError`: naming the strategy, its memory, what does not fit, and
        the largest pack that does. `where`: source of the limit, for the message."""
        if limit_bytes is None:
            return
        arena = max((self.arena_bytes(bucket.strategy) for bucket in buckets), default=0)
        for bucket in buckets:
            strategy, tokens, longest = bucket.strategy, bucket.pack_tokens, bucket.longest
            pool = [other.strategy for other in buckets]
            need = self.breakdown(strategy, tokens, longest=longest, arena_bytes=arena, pool=pool)
            if need.total <= limit_bytes:
                continue
            states = need.total - need.activations - need.logits
            fits = self.largest_pack(strategy, limit_bytes, arena_bytes=arena)
            smaller = f"packs of at most {fits} tokens, or " if fits else ""
            raise DeviceMemoryError(
                f"{strategy} with packs of {tokens} tokens needs {need}, and the limit is {size(limit_bytes)}",
                where=where,
                why="weights, gradients, optimizer state and the buffers of switches alone do not fit"
                if states > limit_bytes
                else f"its activations do not fit: {size(limit_bytes - states)} are left for them",
                fix=f"use {smaller}a limit of {round_up(need.total)}, or strategies with more tp or pp",
            )


def planned_limit(given: float | None, available: float | None, whose: str, flag: str) -> tuple[int | None, str]:
    """Returns the bytes of a device that any plan may fill, and the source of the number: the `given` limit (of
    `flag`), otherwise a share of the `available` memory (`whose` names its source)."""
    if given is not None:
        return int(given), "as given"
    if available is None:
        return None, f"no limit ({flag} sets one)"
    return int(PLANNED_SHARE * available) // _MIB * _MIB, f"{PLANNED_SHARE:.0%} {whose} ({flag})"


_Fullest = tuple[_Sums, dict[tuple[int | None, int | None], "Rising"]]
"""The terms of a stage, and its bytes by tokens for each (longest sequence, number of packs)."""


class Rising:
    """Inverts a non-decreasing function, and caches its values. `total`: piecewise linear with few pieces, as bytes
    over tokens are. The search evaluates it where the line through the two points around the limit meets the limit; it
    bisects if that makes little progress. `high`: upper end of the search."""

    def __init__(self, total: Callable[[int], float], high: int) -> None:
        self._total = total
        self._at, self._of = [0, high], [total(0), total(high)]

    def most_within(self, limit: float) -> int:
        """Returns the largest number whose total is within the limit; 0 if none is."""
        at, of = self._at, self._of
        index = bisect_right(of, limit)  # the first point above the limit
        if index in (0, len(at)):
            return at[-1] if index else 0
        halve = False
        while (width := at[index] - at[index - 1]) > 1:
            low, of_low = at[index - 1], of[index - 1]
            slope = (of[index] - of_low) / width
            half = width // 2 if width <= _WIDE else math.isqrt(width)  # a flat piece is short
            middle = low + (half if halve else int((limit - of_low) / slope))
            middle = min(max(middle, low + 1), at[index] - 1)
            line, at_middle = of_low + (middle - low) * slope, self._evaluate(index, middle)
            index += at_middle <= limit
            if at_middle <= limit < at_middle + slope and abs(at_middle - line) < _STRAIGHT * at_middle:
                return middle  # all three points are on a line, so the next number is above the limit
            if at[index - 1] == middle and at[index] - middle > 1 and not halve:
                index += self._evaluate(index, middle + 1) <= limit
            halve = not halve and at[index] - at[index - 1] > width // 2
        return at[index - 1]

    def _evaluate(self, index: int, number: int) -> float:
        total = self._total(number)
        self._at.insert(index, number)
        self._of.insert(index, total)
        return total


def most_packs(
    schedule: str, num_stages: int, stage: int, num_packs: int | None, chain: int = 1, rounds: int = 1
) -> int | None:
    """Returns the most units that a stage, counted from 0, holds at a time without a token limit; None for any number.

    `num_packs`: units of a replica; None for any number. `chain`: units of the longest chain. `rounds`: stages on each
    rank; if above 1, `stage` is the rank, of `num_stages`. Such a rank holds a pack on some of its stages only: it counts
    by their share, rounded up.
    """
    if rounds > 1:  # see `packing.pipeline_order.interleaved_order`: no group is larger than 2 p - 1
        passes = 2 * (num_stages - 1 - stage) + (rounds - 1) * (2 * num_stages - 1) + chain
        most = -(passes // -rounds)
    elif schedule == "gpipe" and num_stages > 1:
        return num_packs
    else:
        most = num_stages - stage + chain - 1
    return most if num_packs is None else min(most, num_packs)
