"""The memory model: bytes on the fullest rank under a strategy, their breakdown, and the largest possible pack.

A rank holds its share of the master store (fp32 weights and gradients) and of the optimizer state; weights and
gradients of the active strategy, in an arena sized for the pool's largest strategy; activations of the micro-batches in
flight on its stage; on the last stage the logits of one pack; switch buffers. `PLANNED_SHARE` leaves room for the rest
(device context, communicators, fragmentation, kernel workspaces).

With 1F1B, stage i of p keeps `min(p - i, m)` of m micro-batches in flight (Narayanan et al., SC'21, section 2.2); with
GPipe, all of a group. Neither keeps more tokens than `Bucket.most_tokens`. A rank with v stages (`+v2`) holds up to p +
(p - 1) / v full packs, each on some of its stages (`packing.pipeline_order`).

Activations are linear in the tokens of a pack (attention keeps no score matrix), so the largest pack has a closed form
and never shrinks when the limit rises.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from hf_hotspa.costs.divided import carried_bytes, gathered_bytes, repeated_bytes, returned_bytes, tokens_at_a_time
from hf_hotspa.costs.optimizer_state import ADAM, OptimizerState
from hf_hotspa.costs.scoring import Scoring
from hf_hotspa.costs.sizes import MasterSizes, ModelSizes, StageSizes, dtype_bytes, loss_chunk_tokens
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import num_chunks
from hf_hotspa.packing.pipeline_order import most_packs
from hf_hotspa.strategy import Bucket, Strategy

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one rank of the fullest stage.

    Args:
        master_weights: Its share of the master store, as are `master_gradients` and `optimizer`.
        weights: Of the strategy, like `gradients`.
        arena: What the pool's largest strategy needs beyond these weights and gradients.
        activations: Of all micro-batches in flight.
        logits: Of one pack on the last stage, plus what the losses of other packs in flight keep.
        switch: Switch buffers.
        in_flight: Most micro-batches in flight.
        held_tokens: Most tokens in flight.
        pack_tokens: Tokens of the largest pack.
    """

    master_weights: float
    master_gradients: float
    optimizer: float
    weights: float
    gradients: float
    arena: float
    activations: float
    logits: float
    switch: float
    stage: int
    in_flight: int
    held_tokens: int
    pack_tokens: int

    def parts(self) -> dict[str, float]:
        """Bytes by name."""
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def total(self) -> float:
        """Sum of all parts in bytes."""
        return sum([getattr(self, name) for name in _PARTS])

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(part)}" for name, part in self.parts().items() if part)
        return f"{size(self.total)} on stage {self.stage} ({parts})"


_PARTS = tuple(f.name for f in fields(MemoryBreakdown)[:-4])


def size(num_bytes: float) -> str:
    """Formats bytes in GiB, or MiB if less than one."""
    return f"{num_bytes / _GIB:,.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"


def round_up(num_bytes: float) -> str:
    """Formats a limit that a user can type, rounded up to a mebibyte."""
    mebibytes = -(-int(num_bytes + 1) // (1 << 20))
    return f"{mebibytes}MiB ({mebibytes / 1024:,.2f} GiB)"


UNLIMITED_TOKENS = 1 << 40
"""Result of `largest_pack` without a limit."""

PLANNED_SHARE = 0.9
"""Share of a device's memory that plans may fill without a given limit."""

_NORM_INPUT_BYTES = 4
"""Norms compute in fp32."""
_STRAIGHT = 1e-9
"""Relative rounding error of a total on a straight line; the bytes of one token are a larger share."""
_WIDE = 1 << 18


def activation_bytes(
    shape: ModelShape,
    tp: int,
    *,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
    ep: int = 1,
    frozen: bool = False,
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

    Fused kernels keep less: a LLaMA in 16 bits then has the usual `(18h + 6f) / t` bytes (derivation as in Korthikanti
    et al., 2022). With recomputation only the layer's input (1h) stays.

    Args:
        frozen: Whether the norms are frozen.
    """
    heads = shape.attention_parameters / shape.hidden_size  # queries, keys, values and the output: 2a + 2kv
    mlp = _kept_by_mlp(shape)
    of_experts = 2 * shape.experts_per_token * shape.hidden_size / (tp if ep > 1 else 1)
    of_norm = _NORM_INPUT_BYTES + element_bytes * (not frozen)
    norms = 2 * of_norm if shape.gated else 3 * element_bytes
    normed = of_norm * heads / 2 * shape.head_norms  # queries and keys: a + kv
    cut = (heads * (1 - shape.whole_attention) + mlp * (1 - shape.whole_mlp)) / tp
    in_compute_dtype = 2 * shape.hidden_size + of_experts + cut + heads * shape.whole_attention + mlp * shape.whole_mlp
    return norms * shape.hidden_size / (tp if sequence_parallel else 1) + normed / tp + element_bytes * in_compute_dtype


def _kept_by_mlp(shape: ModelShape) -> float:
    """Elements per token: four tensors for three matrices with a gate, otherwise two for two."""
    return shape.active_mlp_parameters / shape.hidden_size * (4 / 3 if shape.gated else 1)


@dataclass(frozen=True)
class MemoryOptions:
    """Options of a run that affect memory.

    Args:
        compute_dtype: The dtype of activations.
        activation_bytes: Measured bytes per token and layer by tp; a formula is used for a missing tp.
        end_bytes: Measured bytes per token beyond what the layers keep, by tp: on a last stage for the logits; on other
            stages for the backward pass of one layer, which needs no more than a layer keeps. For a missing tp
            `logit_copies` is used, on last stages.
        logit_copies: fp32 copies of the logits that exist at once on the last stage: the probabilities, and the logits
            with their gradient in the compute dtype.
        switch_bytes: Largest size of the staging and relay buffers of switches.
        weight_copies: How many strategies' weights are kept at a time: 2 with a second source.
        schedule: One of `pipeline_order.SCHEDULES`.
        offload_master: Whether the master store and the optimizer state are in host memory.
        context_parallel: The cp method, one of `costs.divided.WAYS`.
        features: Settings of features (`hf_hotspa.seam`).
        scoring: Forward passes of a step besides training.
    """

    optimizer: OptimizerState = ADAM
    compute_dtype: str = "bfloat16"
    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    end_bytes: Mapping[int, float] = field(default_factory=dict)
    logit_copies: float = 2.0
    switch_bytes: int = 2 * (16 << 20)
    weight_copies: int = 1
    schedule: str = "auto"
    offload_master: bool = False
    context_parallel: str = "auto"
    features: tuple[Any, ...] = ()
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def by_stage(self) -> Any:
        """Settings under which stages have separate master stores and several versions of their weights, if any."""
        return next((each for each in self.features if hasattr(each, "most_versions")), None)


@dataclass(frozen=True)
class _Stage:
    """Memory of a stage's packs, in bytes per token of a rank unless noted.

    Args:
        num_layers: Layers that hold packs.
        carrying: Layers that keep keys and values for the next chunk.
        of_layer: One layer without recomputation.
        at_end: A layer in its backward pass, without logits.
        recomputing: See `MemoryModel._recomputing`; None without recomputation.
        returned: Rows that experts returned.
        gathered: Keys and values of the other ranks.
        dequantized: Total bytes of dequantized weights.
        sent: Messages to the next stage.
        last: Whether the stage has the logits.
        hidden: The hidden state.
        logits: The end of the last stage, for up to `logit_tokens` tokens.
        kept_by_loss: What a loss keeps until the backward pass of its pack.
    """

    num_layers: int
    carrying: int
    of_layer: float
    at_end: float
    recomputing: tuple[float, float] | None
    returned: float
    gathered: float
    dequantized: float
    sent: float
    last: bool
    hidden: int
    logits: float
    logit_tokens: int
    kept_by_loss: float

    def layers_bytes(self, held_tokens: int, pack_tokens: int, logit_bytes: float) -> float:
        """Returns the peak bytes of the layers for all packs in flight, beyond the logits.

        At the peak either the logits and all activations exist; or the logits are freed, or on another stage, and a
        layer runs its backward pass, which without recomputation needs no more than a layer keeps (`end_bytes`).
        """
        if self.recomputing is None:
            backward = 0.0 if logit_bytes else self.at_end
            return self.of_layer * self.num_layers * held_tokens + backward * pack_tokens
        kept, again = self.recomputing
        others = (held_tokens - pack_tokens) * kept
        return others + max(kept * pack_tokens, again * pack_tokens - logit_bytes)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of one model on `world_size` devices, which share the master store."""

    sizes: ModelSizes
    world_size: int
    options: MemoryOptions = MemoryOptions()
    _known_stages: dict[tuple[Strategy, int], "_Stage"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _of_layers: dict[Strategy, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_fullest: dict[Strategy, list["_Fullest"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _master(self) -> MasterSizes:
        if self.options.offload_master:
            return MasterSizes(0, 0, 0)
        return self.sizes.master(self.world_size, self.options.optimizer)

    def arena_bytes(self, strategy: Strategy) -> int:
        """Bytes of weights (all kept copies) and gradients of the strategy on its fullest rank."""
        return max(map(self._stage_arena, self.sizes.stages(strategy)))

    def _stage_arena(self, stage: StageSizes) -> int:
        return self.options.weight_copies * stage.weight_bytes + stage.gradient_bytes

    def breakdown(
        self,
        strategy: Strategy,
        pack_tokens: int,
        *,
        longest: int = 0,
        num_packs: int | None = None,
        arena_bytes: int = 0,
    ) -> MemoryBreakdown:
        """Returns the fullest of `stages`. In a pipeline a sequence longer than `pack_tokens` is a separate pack."""
        stages = self.stages(Bucket(strategy, longest, pack_tokens), num_packs, arena_bytes)
        return max(stages, key=lambda stage: stage.total)

    def stages(self, bucket: Bucket, num_packs: int | None = None, arena_bytes: int = 0) -> list[MemoryBreakdown]:
        """Returns the bytes on the fullest rank of each pipeline position.

        Args:
            num_packs: Packs of a replica; enough to fill the pipeline if None.
            arena_bytes: The pool's arena.
        """
        return [self._breakdown(bucket, stage, num_packs, arena_bytes) for stage in range(bucket.strategy.pp)]

    def _breakdown(self, bucket: Bucket, stage: int, num_packs: int | None, arena_bytes: int) -> MemoryBreakdown:
        own, sizes = self._stage_of(bucket.strategy, stage), self.sizes.stages(bucket.strategy)[stage]
        options, master, weights = self.options, self._master, self.options.weight_copies * sizes.weight_bytes
        num_packs, chain = self._packs_or_chunks(bucket, num_packs)
        if options.by_stage is not None:
            master = self.sizes.master_of_stage(bucket.strategy, stage, options.optimizer)
            versions = options.by_stage.most_versions(bucket.strategy.pp, stage, num_packs)
            weights += (versions - 1) * sizes.trained_bytes
        in_flight, held_tokens = self._in_flight(bucket, stage, num_packs, chain)
        activations, logits = self._of_packs(own, bucket, in_flight, held_tokens)
        return MemoryBreakdown(
            master_weights=master.weight_bytes * (2 if options.scoring.reference else 1),
            master_gradients=master.gradient_bytes,
            optimizer=master.optimizer_bytes,
            weights=weights,
            gradients=sizes.gradient_bytes,
            arena=max(0, arena_bytes - weights - sizes.gradient_bytes),
            activations=activations,
            logits=logits,
            switch=min(options.switch_bytes, self._most_moved(sizes, arena_bytes)),
            stage=stage,
            in_flight=in_flight,
            held_tokens=held_tokens,
            pack_tokens=tokens_at_a_time(bucket.strategy, bucket.capacity),
        )

    def _stage_of(self, strategy: Strategy, stage: int) -> "_Stage":
        if (strategy, stage) not in self._known_stages:
            self._known_stages[strategy, stage] = self._make_stage(strategy, stage)
        return self._known_stages[strategy, stage]

    def _make_stage(self, strategy: Strategy, stage: int) -> "_Stage":
        options, shape, width = self.options, self.sizes.shape, dtype_bytes(self.options.compute_dtype)
        hidden = shape.hidden_size * width
        rows = -(-shape.vocab_size // strategy.tp)
        last = stage == strategy.pp - 1
        # with several stages per rank, count each as the longest, which may hold most of the packs
        parts = self.sizes.layers_of_stages(strategy.pp, strategy.v)[stage :: strategy.pp]
        num_layers, of_layer = strategy.v * max(map(len, parts)), self._layer_bytes(strategy)
        # a stage's output stays until its backward pass; torch's schedules also have buffers for its gradients
        copies = 1 if options.schedule in ("auto", "own") else 2
        sent = copies * hidden / (strategy.tp if strategy.sp else 1) * strategy.v
        return _Stage(
            num_layers=num_layers,
            carrying=self.sizes.stages(strategy)[stage].num_layers,
            of_layer=of_layer,
            at_end=min(of_layer, options.end_bytes.get(strategy.tp, 0.0)),
            recomputing=self._recomputing(strategy, num_layers, of_layer, hidden) if strategy.rc else None,
            returned=returned_bytes(strategy, shape, width) * (1 if strategy.rc else num_layers),
            gathered=gathered_bytes(strategy, shape, 1, options.context_parallel, width),
            dequantized=self.sizes.dequantized(strategy.tp) * width,
            sent=0.0 if last and strategy.v == 1 else sent,
            last=last,
            hidden=hidden,
            logits=options.end_bytes.get(strategy.tp, rows * 4 * options.logit_copies),
            logit_tokens=loss_chunk_tokens(rows),
            # probabilities, or gradients of the hidden state and of the head (`parallel.head_loss`)
            kept_by_loss=rows * 4 * max(1.0, shape.hidden_size / loss_chunk_tokens(rows)) + hidden,
        )

    def _packs_or_chunks(self, bucket: Bucket, num_packs: int | None) -> tuple[int | None, int]:
        """Returns how many packs of a replica (or chunks, with `+ck`) pass the pipeline one by one; and the chunks of
        one sequence, 1 without `+ck`."""
        strategy = bucket.strategy
        if not strategy.ck or strategy.pp == 1:
            return num_packs, 1
        chain = num_chunks(bucket.longest or bucket.capacity, strategy.ck, self.sizes.shape.quadratic_cost)
        if num_packs is not None:
            num_packs = num_packs * num_chunks(bucket.capacity, strategy.ck) + chain
        return num_packs, chain

    def _in_flight(self, bucket: Bucket, stage: int, num_packs: int | None, chain: int) -> tuple[int, int]:
        """Returns the most packs (or chunks) whose activations a stage keeps, and their tokens on a rank."""
        strategy, pack_tokens = bucket.strategy, tokens_at_a_time(bucket.strategy, bucket.capacity)
        held_tokens, longest = -(-bucket.most_tokens // strategy.cp), bucket.longest or bucket.capacity
        in_flight = most_packs(self.options.schedule, strategy.pp, stage, num_packs, chain, strategy.v)
        if strategy.ck and strategy.pp == 1:
            in_flight = min(1 + strategy.kg, num_chunks(longest, strategy.ck))
            held_tokens = min(in_flight * pack_tokens, max(-(-longest // strategy.cp), pack_tokens))
        elif in_flight is None:
            in_flight = held_tokens // max(1, min(pack_tokens, tokens_at_a_time(strategy, bucket.pack_tokens)))
        elif chain == 1:  # the sizes of several chunks depend on measurements
            held_tokens = min(in_flight * pack_tokens, held_tokens)
        return in_flight, held_tokens

    def _of_packs(self, own: "_Stage", bucket: Bucket, in_flight: int, held_tokens: int) -> tuple[float, float]:
        """Returns the peak activation bytes of a stage for all packs in flight; and the bytes of a pack's logits plus
        what the losses of other packs keep."""
        strategy, logits = bucket.strategy, 0.0
        pack_tokens = tokens_at_a_time(strategy, bucket.capacity)
        if own.last and in_flight:
            at_a_time = min(pack_tokens, own.logit_tokens)
            # the other tokens have hidden states and their gradients only
            logits = at_a_time * own.logits + 2 * own.hidden * (pack_tokens - at_a_time)
        activations = own.layers_bytes(held_tokens, pack_tokens, logits) if held_tokens else 0.0
        activations += own.returned * held_tokens
        if strategy.ck:
            width = dtype_bytes(self.options.compute_dtype)
            activations += carried_bytes(
                strategy, self.sizes.shape, own.carrying, bucket.longest or bucket.capacity, width
            )
        # attention of a layer and the logits never exist at the same time
        activations += max(0.0, own.gathered * pack_tokens - logits)
        # neither do dequantized weights of a layer and the logits
        activations += max(0.0, own.dequantized - logits)
        if in_flight:
            activations += own.sent * held_tokens
        if own.last and in_flight > 1:
            logits += own.kept_by_loss * held_tokens
        return activations, logits

    def _most_moved(self, stage: StageSizes, arena_bytes: int) -> float:
        """Returns the most bytes that a rank sends and receives in a switch: each at most the weights, or the
        gradients, of the pool's largest strategy. Small models need less than full buffers."""
        own = self._stage_arena(stage)
        return 2 * max(arena_bytes, own) * max(stage.weight_bytes, stage.gradient_bytes) / own

    def _recomputing(self, strategy: Strategy, num_layers: int, of_layer: float, hidden: int) -> tuple[float, float]:
        """Returns the bytes per token that a stage's layers keep with `+rc`, and while the last recomputing layer runs.

        Layers 0, n, 2n, ... keep only their input. Recomputing adds the layer's activations, a gradient at either end
        and one inside the MLP, which sequence parallelism gathers.
        """
        sharers, every, shape = strategy.tp if strategy.sp else 1, strategy.rc, self.sizes.shape
        element_bytes = dtype_bytes(self.options.compute_dtype)
        inner = shape.active_mlp_parameters / ((3 if shape.gated else 2) * shape.hidden_size) * element_bytes
        inner *= shape.whole_mlp + (1 - shape.whole_mlp) * self.sizes.mlp_share(strategy)
        if self.sizes.dequantized(strategy.tp):  # gradients of both the adapter's product and the frozen one
            inner *= 2
        gradients = 2 * hidden / sharers + inner + (hidden if sharers > 1 else 0.0)
        recomputed = -(-num_layers // every)
        kept = recomputed * hidden / sharers + (num_layers - recomputed) * of_layer
        # the layers after the last recomputing one have already run backward
        return kept, kept - (num_layers - 1) % every * of_layer - hidden / sharers + of_layer + gradients

    def _layer_bytes(self, strategy: Strategy) -> float:
        """Bytes per token of a layer without recomputation on the rank with most columns; measured ones have no cp."""
        if strategy not in self._of_layers:
            self._of_layers[strategy] = self._sum_of_layer(strategy)
        return self._of_layers[strategy]

    def _sum_of_layer(self, strategy: Strategy) -> float:
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
        # another arena shifts all totals by a constant, so all arenas share one cache
        shifts = self.options.by_stage is None
        most = UNLIMITED_TOKENS
        for stage, sizes, risings in self._fullest(strategy):
            key = longest, num_packs, 0 if shifts else arena_bytes
            rising = risings.get(key)
            if rising is None:
                rising = risings[key] = Rising(self._totals(strategy, stage, *key), UNLIMITED_TOKENS)
            more = self._more_for_arena(sizes, arena_bytes) if shifts else 0.0
            most = min(most, rising.most_within(limit_bytes - more))
        return most

    def _totals(
        self, strategy: Strategy, stage: int, longest: int | None, num_packs: int | None, arena: int
    ) -> Callable[[int], float]:
        """Returns `_breakdown(...).total` as a function of tokens. Parts independent of tokens are computed once."""
        own = self._stage_of(strategy, stage)

        def bucket_of(tokens: int) -> Bucket:
            return Bucket(strategy, tokens, 1) if longest is None else Bucket(strategy, longest, tokens)

        if self.options.by_stage is not None:  # weights depend on the packs
            return lambda tokens: self._breakdown(bucket_of(tokens), stage, num_packs, arena).total
        of = self._breakdown(bucket_of(1), stage, num_packs, arena)
        states = of.master_weights + of.master_gradients + of.optimizer + of.weights + of.gradients + of.arena

        def total(tokens: int) -> float:
            bucket = bucket_of(tokens)
            in_flight = self._in_flight(bucket, stage, *self._packs_or_chunks(bucket, num_packs))
            activations, logits = self._of_packs(own, bucket, *in_flight)
            return states + activations + logits + of.switch

        return total

    def _more_for_arena(self, stage: StageSizes, arena: int) -> float:
        own, most = self._stage_arena(stage), self.options.switch_bytes
        if arena <= own:
            return 0.0
        moved = min(most, self._most_moved(stage, arena)) - min(most, self._most_moved(stage, 0))
        return arena - own + moved

    def _fullest(self, strategy: Strategy) -> list["_Fullest"]:
        """Returns the stages that can be the fullest: a stage after one that is at least as large in every respect
        cannot, as earlier stages hold at least as many packs; except the last, which has the logits."""
        if strategy not in self._known_fullest:
            sizes, last = self.sizes.stages(strategy), strategy.pp - 1
            stages: list[_Fullest] = []
            for stage, own in enumerate(sizes):
                smaller = any(
                    before.num_layers >= own.num_layers
                    and before.weight_bytes >= own.weight_bytes
                    and before.gradient_bytes >= own.gradient_bytes
                    for _, before, _ in stages
                )
                if strategy.v > 1 or stage == last or not smaller:
                    stages.append((stage, own, {}))
            self._known_fullest[strategy] = stages
        return self._known_fullest[strategy]

    def check_pool(self, buckets: Sequence[Bucket], limit_bytes: float | None, where: str | None = None) -> None:
        """Checks that a pool fits.

        Args:
            where: Source of the limit, for the message.

        Raises:
            DeviceMemoryError: naming the strategy, its memory, what does not fit, and the largest pack that does.
        """
        if limit_bytes is None:
            return
        arena = max((self.arena_bytes(bucket.strategy) for bucket in buckets), default=0)
        for bucket in buckets:
            strategy, tokens, longest = bucket.strategy, bucket.pack_tokens, bucket.longest
            need = self.breakdown(strategy, tokens, longest=longest, arena_bytes=arena)
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


def most_within(total: Callable[[int], float], limit: float, high: int) -> int:
    """Returns the largest number up to `high` whose total is within the limit; 0 if none is. See `Rising`."""
    return Rising(total, high).most_within(limit)


_Fullest = tuple[int, StageSizes, dict[tuple[int | None, int | None, int], "Rising"]]
"""A stage, its sizes, and its bytes by tokens for each (longest sequence, number of packs, arena)."""


class Rising:
    """Inverts a non-decreasing function, and caches its values.

    Args:
        total: Piecewise linear with few pieces, as bytes over tokens are. The search evaluates it where the line
            through the two points around the limit meets the limit; it bisects if that makes little progress.
        high: Upper end of the search.
    """

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
