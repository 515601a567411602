"""Parallel strategies and buckets: parsing, formatting, rank arithmetic, and which strategies are legal.

Owns the two grammars that users type:

* a *strategy*, ``dp4tp2``; axes of degree 1 are optional (``dp4tp2pp1``). ``ep4`` divides the experts of each layer
  over four neighbouring ranks of a stage. Options follow plus signs: ``tp4+sp`` (sequence parallel), ``dp4+rc`` (every
  layer recomputes its activations), ``dp4+rc2`` (every second layer), ``dp4+ck8192`` (packs are computed in chunks of
  at most 8192 tokens), ``dp4+ck8192+kg2`` (two more chunks keep their graphs), ``dp4+ck8192+kh`` (the chunks' keys and
  values wait in host memory), ``dp4+z2`` (gradients leave layer by layer), ``dp4+z3`` (weights come layer by layer,
  too), ``pp4+v2`` (two stages on each rank of a pipeline);
* a list of *buckets*, ``dp4:1024@4096,dp2tp2:4096,tp2pp2:8192``, with entries
  ``strategy:longest sequence[@tokens per pack]``. A sequence goes to the first bucket that is long enough. Packs of a
  pipeline may be smaller than its longest sequence (``pp4:32768@8192``): see `Bucket`.

Rank order is tp fastest, then cp, dp, pp: ``rank = ((pp_coord * dp + dp_coord) * cp + cp_coord) * tp + tp_coord``. ep
is not an axis: it divides the ranks of a stage. No torch.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from hf_hotspa.errors import LaunchError, StrategyError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.seam import StrategyOption, hooks

AXES = ("dp", "cp", "tp", "pp")
DEGREES = (*AXES, "ep")
MAX_DEGREE = 1 << 20
_CHUNK_FIX = "write the most tokens of a chunk, such as +ck4096, or leave +ck out"
_STRATEGY = re.compile(rf"(?:(?:{'|'.join(DEGREES)})[0-9]+)+")
_DEGREE = re.compile(rf"({'|'.join(DEGREES)})([0-9]+)")
_SWITCHES = ("sp", "kh")
_NUMBER = "([1-9][0-9]{0,5})"
_OPTIONS = {"sp": "", "rc": f"{_NUMBER}?", "ck": "([0-9]{1,9})", "kg": _NUMBER, "kh": "", "z": "([23])", "v": _NUMBER}
"""The pattern of the number behind an option, in the order in which they are written; `_added` has more options."""


@dataclass(frozen=True, order=True)
class Coord:
    """The position of a rank on the four axes."""

    dp: int
    tp: int
    pp: int
    cp: int = 0


@dataclass(frozen=True, order=True)
class Strategy:
    """The degrees of parallelism, and the options that save memory.

    Args:
        dp: Replicas.
        tp: Ranks that share each layer of a replica.
        pp: Pipeline stages of a replica.
        sp: Sequence parallel: between the parts of a layer that tp divides, each tp rank holds only its share of the
            tokens (Korthikanti et al., 2022, section 4.2.2). Needs tp > 1.
        rc: Recompute: every rc-th layer keeps only its input and runs again in the backward pass; 0 for none.
        ck: The most tokens of a chunk: packs, and sequences inside them, are computed a chunk at a time,
            also through a pipeline; 0 for whole packs.
        kg: How many chunks before the last one of a sequence keep their graphs, so that they run forward once.
        kh: Whether keys and values of earlier chunks, and their summed gradients, are in host memory.
        cp: Ranks that share the tokens of each pack, also inside a sequence (`parallel.context`).
        z: What is complete for one layer at a time only, and otherwise sharded over all ranks: 2 for gradients, 3 for
            gradients and weights (Rajbhandari et al., SC'20, section 5); 0 for neither.
        ep: Neighbouring ranks of a stage that divide the experts of a layer, each with whole experts.
            With 1, experts are held, or cut by tp, like other weights. Divides dp * cp * tp.
        v: Stages on each rank of a pipeline: stage s of pp * v is on the rank with the pp coordinate s mod pp
            (interleaved 1F1B; Narayanan et al., SC'21, section 2.2).
        added: The options that features add (`seam.StrategyOption`), by name, with their number or 1; see `option`.
        shard_order: The tp shard of each tp coordinate; empty for the identity. A pool of strategies chooses it to keep
            data in place between strategies. Ignored in comparisons.

    Raises:
        StrategyError: a degree is not a positive integer, ep does not divide the ranks of a stage, ep or v has an
            unsupported combination, the order is not a permutation of the shards, or an option lacks what it needs: sp
            tp, kg and kh chunks on one stage, v a pipeline.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    rc: int = 0
    ck: int = 0
    cp: int = 1
    z: int = 0
    kg: int = 0
    kh: bool = False
    ep: int = 1
    v: int = 1
    added: tuple[tuple[str, int], ...] = ()
    shard_order: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_strategy(self)

    def __str__(self) -> str:
        degrees = zip(DEGREES, self.degrees, strict=True)
        return ("".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "dp1") + self.options

    @property
    def spelled_out(self) -> str:
        """The earlier format, with dp, tp and pp degrees of 1: `dp4tp1pp1`."""
        context = f"cp{self.cp}" if self.cp > 1 else ""
        experts = f"ep{self.ep}" if self.ep > 1 else ""
        return f"dp{self.dp}{context}tp{self.tp}pp{self.pp}{experts}{self.options}"

    @property
    def options(self) -> str:
        """The options as text, such as `+rc2` or `+ck8192+kh`; empty without options."""
        own = [(name, int(getattr(self, name))) for name in _OPTIONS]
        bare = {*_SWITCHES, *(name for name, option in _added().items() if not option.numbered)}
        return "".join(
            f"+{name}{'' if name in bare or (name == 'rc' and number == 1) else number}"
            for name, number in (*own, *self.added)
            if number > (name == "v")
        )

    def option(self, name: str) -> int:
        """The number of an option that a feature adds, 1 for one without a number; 0 if it is not set."""
        return dict(self.added).get(name, 0)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in the order of `DEGREES`."""
        return tuple(getattr(self, name) for name in DEGREES)

    @property
    def is_common(self) -> bool:
        """Without layer-wise sharding, chunks or expert parallelism."""
        return not self.z and not self.ck and self.ep == 1

    @property
    def cuts_packs(self) -> bool:
        """Whether packs are computed in parts, one after the other."""
        return self.ck > 0

    @property
    def exchanges_tokens(self) -> bool:
        """Whether ranks send each other tokens in every layer."""
        return self.cp > 1 or self.ep > 1

    @property
    def can_go_round(self) -> bool:
        """Whether a rank may have several stages (`+v`)."""
        return self.pp > 1 and not self.z and self.ep == 1

    @property
    def world_size(self) -> int:
        return self.dp * self.ranks_of_a_replica

    @property
    def ranks_of_a_replica(self) -> int:
        return self.cp * self.tp * self.pp

    @property
    def ranks_of_a_layer(self) -> int:
        """Ranks that exchange data inside a layer; all that have a part of it, if `+z3` moves its weights."""
        return self.stage_size if self.z == 3 else max(self.cp * self.tp, self.ep)

    @property
    def stage_size(self) -> int:
        """Ranks of a stage, over all replicas."""
        return self.dp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Stages of a replica, v on each rank of its pipeline."""
        return self.pp * self.v

    @property
    def keeps_step(self) -> bool:
        """Whether replicas exchange tokens, and so must run equally many packs."""
        return self.cp * self.tp % self.ep > 0

    def expert_shard(self, rank: int) -> int:
        """The shard of each layer's experts that a rank holds."""
        return rank % self.stage_size % self.ep

    def expert_groups(self) -> list[tuple[int, ...]]:
        """The groups of ranks that together hold a layer's experts, in shard order."""
        return [tuple(range(first, first + self.ep)) for first in range(0, self.world_size, self.ep)]

    def coord(self, rank: int) -> Coord:
        """The coordinates of a global rank."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coord(dp=dp, tp=tp, pp=pp, cp=cp)

    def rank(self, coord: Coord) -> int:
        """The global rank of coordinates: the inverse of `coord`."""
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def shard_index(self, tp_coord: int) -> int:
        """Which tp shard a tp coordinate holds."""
        return self.shard_order[tp_coord] if self.shard_order else tp_coord

    def ordered(self, shard_order: tuple[int, ...]) -> "Strategy":
        """Returns the strategy with another shard order."""
        return replace(self, shard_order=shard_order)

    def recomputing(self, every: int) -> "Strategy":
        """Returns the strategy with every n-th layer recomputing, unless `rc` is set; 0 for none."""
        return replace(self, rc=self.rc or every)

    def sharded(self, stage: int) -> "Strategy":
        """Returns the strategy with `+z2` or `+z3`, unless `z` is set; 0 for neither."""
        return replace(self, z=self.z or stage)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ on one axis only, in axis order; groups by first rank."""
        first = (rank for rank in range(self.world_size) if getattr(self.coord(rank), axis) == 0)
        return [self.group_of(rank, axis) for rank in first]

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one on one axis only, in axis order."""
        here = self.coord(rank)
        return tuple(self.rank(replace(here, **{axis: place})) for place in range(getattr(self, axis)))

    @property
    def layout(self) -> "Strategy":
        """What decides where weights and gradients lie, and what each rank adds to a gradient.

        Ranks of cp hold the same weights, and each adds its tokens' gradient, like ranks of dp. Strategies with equal
        layouts can run on the same buffers, one after the other.
        """
        replicas = self.dp * self.cp
        order = self.shard_order
        return Strategy(replicas, self.tp, self.pp, self.sp, z=self.z, ep=self.ep, v=self.v, shard_order=order)

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Parses ``dp4tp2``, then options; each axis at most once, in any order, 1 by default.

        Raises:
            StrategyError: the text is not a strategy.
        """
        text = text.strip()
        how = "write the degrees as dp2tp2, tp4 or dp4ep4; one that is 1 may be left out"
        base, *options = text.split("+")
        numbers: dict[str, int] = {}
        for option in options:
            name = option.rstrip("0123456789")
            pattern = _OPTIONS.get(name, _NUMBER if name in _added() and _added()[name].numbered else "")
            match = re.fullmatch(name + pattern, option) if name in _OPTIONS or name in _added() else None
            if match is None or name in numbers:
                raise StrategyError(
                    f"strategy {text!r} has the option {option!r}{' twice' if match else ', which does not exist'}",
                    fix="options are +sp (sequence parallel), +rc (recompute every layer), +rc2 (every second layer),"
                    " +ck4096 (compute packs in chunks of 4096 tokens; +kg2 keeps the graphs of two more, +kh keeps keys and values"
                    " in host memory), +z2 (gradients a layer at a time), +z3 (weights, too) and +v2 (two stages on each rank of"
                    " a pipeline)" + "".join(f"; +{name}{'4' * o.numbered} ({o.help})" for name, o in _added().items()),
                )
            numbers[name] = int(next(filter(None, match.groups()), 1))
            if numbers.get("v") == 1:
                raise StrategyError(
                    f"strategy {text!r} asks for one stage on each rank", fix="leave +v1 out, or write +v2"
                )
            if name == "ck" and numbers["ck"] < 1:
                raise StrategyError(f"strategy {text!r} asks for chunks of {numbers['ck']} tokens", fix=_CHUNK_FIX)
        if not _STRATEGY.fullmatch(base):
            raise StrategyError(f"{text!r} is not a strategy", fix=how)
        degrees: dict[str, int] = {}
        for axis, digits in _DEGREE.findall(base):
            if axis in degrees:
                raise StrategyError(f"strategy {text!r} names the axis {axis} twice", fix=how)
            if len(digits) > 7:
                raise StrategyError(f"strategy {text!r}: the degree {axis}{digits[:12]}... is too large", fix=how)
            degrees[axis] = int(digits)
        added = tuple(sorted((name, number) for name, number in numbers.items() if name in _added()))
        of_core = {name: name in _SWITCHES or number for name, number in numbers.items() if name in _OPTIONS}
        named: dict[str, Any] = degrees | of_core
        return cls(**named, added=added)

    def unsupported_reason(self, model: ModelShape) -> str | None:
        """Returns why this strategy cannot run the model, or None."""
        tp, pp, ep, layers = self.tp, self.pp, self.ep, model.num_layers
        heads, kv_heads, experts = model.num_attention_heads, model.num_key_value_heads, model.num_experts
        no_plan = f"the family {model.family!r} has no {{}} plan in transformers, so {{}} must be 1"
        reasons = (
            (tp > 1 and not model.has_tp_plan, no_plan.format("tensor-parallel", "tp")),
            (tp > 1, model.tp_unsupported_reason),
            (self.sp, model.sp_unsupported_reason),
            (self.ck, model.ck_unsupported_reason),
            (self.cp > 1, model.cp_unsupported_reason),
            (
                self.cp > 1 and model.both_ways and heads % (tp * self.cp),
                f"tokens also see later ones, so cp divides heads, and {tp * self.cp} does not divide the {heads} heads",
            ),
            (self.rc, model.rc_unsupported_reason),
            (self.z, model.z_unsupported_reason),
            (ep > 1, model.ep_unsupported_reason),
            (ep > 1 and not experts, f"{model.family} has no experts, so ep must be 1"),
            (experts % ep, f"ep{ep} does not divide the {experts} experts of a layer"),
            (tp > heads, f"tp{tp} is more than the {heads} attention heads"),
            (
                tp > kv_heads and tp % kv_heads,
                f"tp{tp} is neither at most the {kv_heads} key/value heads nor a multiple of them",
            ),
            (pp > 1 and not model.has_pp_plan, no_plan.format("pipeline", "pp")),
            (pp > 1, model.pp_unsupported_reason),
            (pp > layers, f"pp{pp} is more than the {layers} layers"),
            (self.rc > layers, f"+rc{self.rc} is more than the {layers} layers"),
            (self.num_stages > layers, f"pp{pp}+v{self.v} has {self.num_stages} stages, more than the {layers} layers"),
        )
        more = ((True, _added()[name].unsupported_reason(self, model)) for name, _ in self.added)
        return next((reason for applies, reason in (*reasons, *more) if applies and reason), None)


@cache
def _added() -> dict[str, StrategyOption]:
    return {option.name: option for settings in hooks("options") for option in settings.grammar}


@cache
def as_written(text: str) -> str:
    """Converts a recorded strategy or bucket to the current format, such as `dp1tp4pp1` to `tp4`; leaves other text
    unchanged."""
    name, colon, lengths = text.partition(":")
    with suppress(StrategyError):
        name = str(Strategy.parse(name))
    return name + colon + lengths


def strategies_of(world_size: int) -> Iterator[Strategy]:
    """Every (dp, tp, pp) whose product is the world size, in a fixed order: pp outermost, then tp."""
    for pp in range(1, world_size + 1):
        if world_size % pp == 0:
            for tp in range(1, world_size // pp + 1):
                if world_size // pp % tp == 0:
                    yield Strategy(dp=world_size // pp // tp, tp=tp, pp=pp)


def legal_strategies(world_size: int, model: ModelShape) -> list[Strategy]:
    """Returns the strategies of a world size that can run the model."""
    return [s for s in strategies_of(world_size) if s.unsupported_reason(model) is None]


def expert_strategies(strategies: Iterable[Strategy], model: ModelShape) -> list[Strategy]:
    """Returns the given strategies with every ep above 1 that divides the ranks of a stage and can run the model; none
    with chunks or layer units, which do not support ep."""
    candidates = (
        replace(strategy, ep=ep)
        for strategy in strategies
        for ep in range(2, min(strategy.stage_size, model.num_experts) + 1)
        if strategy.is_common and strategy.stage_size % ep == 0
    )
    return [strategy for strategy in candidates if strategy.unsupported_reason(model) is None]


def strategies_with_options(world_size: int, model: ModelShape) -> list[Strategy]:
    """Returns the legal strategies, without and with the options that the model supports: `+sp` (with tp), `+rc`, and
    on several processes `+z2` and `+z3`."""
    return [
        replace(strategy, sp=sp, rc=rc, z=z)
        for strategy in legal_strategies(world_size, model)
        for sp in ((False, True) if strategy.tp > 1 and model.sp_unsupported_reason is None else (False,))
        for rc in ((0, 1) if model.rc_unsupported_reason is None else (0,))
        for z in ((0, 2, 3) if world_size > 1 and model.z_unsupported_reason is None else (0,))
    ]


@dataclass(frozen=True, order=True)
class Bucket:
    """A length range and how it is trained: sequences of ``(low, longest]`` tokens run under `strategy`.

    Args:
        longest: The longest sequence, in tokens.
        pack_tokens: The most tokens in a pack (one row of concatenated sequences). At least `longest`, except for a
            pipeline: there a longer sequence has a separate pack, and the pipeline never holds more tokens than when
            full of packs of this size, or than that sequence (`packing.pipeline_order`).
        low: The `longest` of the previous bucket, or 0.
    """

    strategy: Strategy
    longest: int
    pack_tokens: int
    low: int = 0

    @property
    def capacity(self) -> int:
        """The most tokens that a pack holds."""
        return max(self.longest, self.pack_tokens)

    @property
    def most_tokens(self) -> int:
        """The most tokens in flight on a rank of a replica: a full pipeline, or one longer sequence.

        With several stages on a rank, tokens count by the share of the rank's stages that hold them: the first rank of
        a full pipeline holds pp + (pp - 1) / v packs (`packing.pipeline_order`). With chunks in a pipeline: all chunks
        of the longest sequence and one for each other stage; short sequences may fill the last chunk of a sequence.
        """
        pp, v, ck = self.strategy.pp, self.strategy.v, self.strategy.ck

        def full(tokens: int) -> int:
            """On the first rank of a full pipeline of packs or chunks of `tokens`."""
            return pp * tokens - ((pp - 1) * tokens // -v if v > 1 else 0)

        if not ck or pp == 1:
            return max(full(self.pack_tokens), self.longest)
        longest = self.longest or self.pack_tokens
        return full(ck) + longest if longest > ck else full(min(ck, self.pack_tokens))

    def __str__(self) -> str:
        packs = f"@{self.pack_tokens}" if self.pack_tokens != self.longest else ""
        return f"{self.strategy}:{self.longest}{packs}"


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """Parses ``dp4:1024@4096,dp2tp2:4096,tp2pp2:8192`` (shortest bucket first).

    Raises:
        StrategyError: an entry does not parse, the longest sequences do not increase, a strategy is used twice, a pack
            is smaller than the longest sequence, or the strategies need different numbers of processes.
    """
    example = "write strategy:longest[@pack tokens], shortest first, such as dp4:1024@4096,dp2tp2:4096,tp2pp2:8192"
    if text.strip() == "auto":
        raise StrategyError("'auto' is not a list of buckets; only the Trainer accepts it", fix=example)
    buckets: list[Bucket] = []
    for entry in text.split(","):
        name, colon, lengths = entry.strip().partition(":")
        strategy = Strategy.parse(name)
        match = re.fullmatch(r"([0-9]{1,9})(?:@([0-9]{1,9}))?", lengths.strip())
        if not colon or not match:
            raise StrategyError(f"bucket {entry.strip()!r} has no longest sequence in tokens", fix=example)
        longest = int(match[1])
        pack_tokens = int(match[2]) if match[2] else longest
        low = buckets[-1].longest if buckets else 0
        if longest <= low:
            raise StrategyError(
                f"bucket {entry.strip()!r}: its longest sequence {longest} is not above {low}, where the previous "
                "bucket ends",
                fix=example,
            )
        if pack_tokens < (1 if strategy.pp > 1 else longest):
            raise StrategyError(
                f"bucket {entry.strip()!r}: a pack of {pack_tokens} tokens cannot hold a sequence of {longest}",
                fix=f"write {strategy}:{longest}@{longest} or more",
            )
        if any(b.strategy == strategy for b in buckets):
            raise StrategyError(
                f"strategy {strategy} is used by two buckets", fix="join the two length ranges into one"
            )
        buckets.append(Bucket(strategy, longest, pack_tokens, low))
    worlds = {b.strategy.world_size for b in buckets}
    if len(worlds) > 1:
        sizes = ", ".join(f"{b.strategy} = {b.strategy.world_size}" for b in buckets)
        raise StrategyError(
            f"the strategies need different numbers of processes: {sizes}",
            fix="give every strategy the same product dp*cp*tp*pp, the number of processes you launch",
        )
    return tuple(buckets)


def check_launch(buckets: tuple[Bucket, ...], world_size: int) -> None:
    """Checks the number of processes. Raises `LaunchError`: the strategies need another number; the message gives the
    launch command."""
    needed = buckets[0].strategy.world_size
    if world_size != needed:
        raise LaunchError(
            f"the strategies need {needed} processes and {world_size} are running",
            why="`accelerate launch --cpu --num_processes N` starts one process" if world_size == 1 else None,
            fix=f"accelerate launch --multi_gpu --num_processes {needed} SCRIPT (on CPU give SCRIPT the flag --use_cpu)",
        )


def check_buckets(buckets: tuple[Bucket, ...], world_size: int, model: ModelShape) -> None:
    """Checks that every bucket's strategy fits the world and the model, and its lengths the model's positions. Raises
    `StrategyError`: naming the strategy, the reason and the legal choices."""
    limit = model.max_position_embeddings
    if limit is not None and buckets[-1].longest > limit:
        raise StrategyError(
            f"bucket {buckets[-1]} takes sequences of {buckets[-1].longest} tokens, and the model has {limit} positions",
            why="the model was not made for the encodings of later positions",
            fix=f"end the last bucket at {limit}, or raise max_position_embeddings in the model's config",
        )
    for bucket in buckets:
        strategy = bucket.strategy
        why = strategy.unsupported_reason(model)
        if strategy.world_size != world_size:
            why = f"it needs {strategy.world_size} processes and {world_size} are running"
        if why:
            whole = legal_strategies(world_size, model)
            legal = ", ".join(map(str, [*whole, *expert_strategies(whole, model)]))
            raise StrategyError(
                f"strategy {strategy} cannot run",
                why=why,
                fix=f"legal with {world_size} processes and this model: {legal}",
            )


# -- which degrees and options are compatible, for every model -----------------------------------------------------


def _check_strategy(strategy: Strategy) -> None:
    """Raises the `StrategyError` that `Strategy` documents."""
    _check_degrees(strategy)
    if strategy.shard_order and sorted(strategy.shard_order) != list(range(strategy.tp)):
        raise StrategyError(f"{strategy.shard_order} is not an order of the {strategy.tp} shards of {strategy}")
    if strategy.sp and strategy.tp == 1:
        raise StrategyError(
            f"strategy {strategy} is sequence parallel without tensor parallelism",
            why="sp divides the tokens over the ranks of tp",
            fix="use tp2 or more, or leave +sp out",
        )
    if strategy.z not in (0, 2, 3):
        raise StrategyError(
            f"there is no +z{strategy.z}", fix="use +z2 or +z3, or leave it out: that is ZeRO's stage 1"
        )
    if strategy.ck < 0:
        raise StrategyError(f"a chunk of {strategy.ck} tokens", fix=_CHUNK_FIX)
    if (strategy.kg or strategy.kh) and (not strategy.ck or strategy.pp > 1):
        raise StrategyError(
            f"strategy {strategy} has +kg or +kh {'in a pipeline' if strategy.ck else 'without token chunks'}",
            why="a pipeline keeps the graphs of all chunks, and their keys and values with them"
            if strategy.ck
            else "they say how chunks of packs are kept",
            fix="leave them out" if strategy.ck else "write +ck4096, too, or leave them out",
        )


def _check_degrees(strategy: Strategy) -> None:
    for axis in DEGREES:
        degree = getattr(strategy, axis)
        if type(degree) is not int or not 1 <= degree <= MAX_DEGREE:
            raise StrategyError(
                f"{axis} degree {degree!r} is not an integer between 1 and {MAX_DEGREE}",
                fix="write a strategy such as dp4tp2",
            )
    if strategy.stage_size % strategy.ep:
        raise StrategyError(
            f"strategy {strategy} divides experts over {strategy.ep} ranks, and each of its stages has {strategy.stage_size}",
            why="ep divides the experts of a layer over neighbouring ranks of its stage: dp * cp * tp of them",
            fix="let ep divide dp * cp * tp: dp4ep4, dp4ep2, dp2tp2ep4",
        )
    if strategy.ep > 1 and (strategy.z or strategy.ck):
        option = f"+z{strategy.z}" if strategy.z else f"+ck{strategy.ck}"
        raise StrategyError(
            f"strategy {strategy} has both experts over ranks (ep{strategy.ep}) and {option}",
            why="ranks that exchange tokens are synchronized by packs, and their chunks or layer units are not",
            fix=f"leave {option} out, or ep{strategy.ep}",
        )
    if type(strategy.v) is not int or not 1 <= strategy.v <= MAX_DEGREE:
        raise StrategyError(f"{strategy.v!r} stages on each rank", fix="write +v2, or leave it out")
    if strategy.v > 1 and strategy.pp == 1:
        raise StrategyError(
            f"strategy {strategy} has {strategy.v} stages on each rank and no pipeline",
            why="+v divides a pipeline into more stages, and packs visit each of its ranks several times",
            fix=f"use pp2 or more, or leave +v{strategy.v} out",
        )
    if strategy.v > 1 and (strategy.z or strategy.ep > 1):
        option = f"+z{strategy.z}" if strategy.z else f"ep{strategy.ep}"
        raise StrategyError(
            f"strategy {strategy} has both several stages on each rank (+v{strategy.v}) and {option}",
            why="there all replicas' stages are synchronized by packs, in the order of one stage on each rank",
            fix=f"leave {option} or +v{strategy.v} out",
        )
