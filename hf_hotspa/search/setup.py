"""A plan before any device is rented: from a model's config, a kind of machine and lengths to buckets and numbers.

Defines the input (`Setup`) and the answers of `hf-hotspa plan` (`PlannedSetup`) and `hf-hotspa estimate` (`Estimate`),
as plain data. Times come from a calibration of such a machine, or from data sheets, which compare strategies better
than they predict seconds. Recomputation runs every layer forward once more: its layers take 4/3 of their time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.cost_model import CostModel, check_calibration
from hf_hotspa.costs.hardware import Hardware, load_hardware, parse_bytes, parse_nodes
from hf_hotspa.costs.memory import (
    UNLIMITED_TOKENS,
    MemoryBreakdown,
    MemoryModel,
    MemoryOptions,
    card_bytes,
    planned_limit,
)
from hf_hotspa.costs.model_config import ModelConfig, load_model
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.costs.terms import (
    TASKS,
    WITHOUT_LOGITS,
    Scoring,
    added_weights,
    form_names,
    optimizer_states,
    packed_weights,
    reduced_states,
)
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError
from hf_hotspa.layout.vector import IN_FP32, GradientDtypes
from hf_hotspa.seam import SYNCHRONOUS, Options
from hf_hotspa.search.baselines import DataParallel, Pricing, dynamic_layout, people_run
from hf_hotspa.search.bucket_plan import Plan, memory_dict
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.histogram import Counts, read_lengths
from hf_hotspa.search.offers import choose, divided, longest_by_strategy, with_chunks
from hf_hotspa.search.search import SearchOptions
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, strategies_with_options

PLAN_KIND, ESTIMATE_KIND = "hf_hotspa plan", "hf_hotspa memory estimate"
SCHEMA_VERSION = 1
DTYPE = "bfloat16"  # the default dtype of weights and activations
_MOST_DEVICES = 1 << 15
NEAR = 0.02  # up to how much slower than the chosen plan those that training may race are reported, as a share
_SHOWN = (
    "nodes", "devices_per_node", "limit_bytes", "limit_source", "dtype", "optim", "task", "recompute", "sequence_parallel"
)  # fmt: skip


def _of_task(model: ModelConfig, task: object) -> ModelConfig:
    if task not in WITHOUT_LOGITS:
        return model
    return replace(model, shape=replace(model.shape, outputs=1), tied=False)


@dataclass(frozen=True)
class Setup:
    """A model on a number of machines."""

    model: ModelConfig
    nodes: int
    devices_per_node: int
    hardware: Hardware | None = None  # the machines, with the given devices a node; None if only memory is needed
    limit_bytes: int | None = None  # of a device; None for no limit
    limit_source: str = "as given"  # its origin, in words
    dtype: str = "bfloat16"
    recompute: bool = False  # whether layers keep their input only
    sequence_parallel: bool = False  # whether norms and residuals are divided over tp
    calibration: Calibration | None = None  # measurements of the model on such a machine; replaces all data sheets
    gradients: GradientDtypes = IN_FP32  # the dtypes in which gradients accumulate and travel
    schedule: str = "auto"  # one of `pipeline_order.SCHEDULES`
    adapter: Any | None = None  # None to train the model
    features: tuple[Options, ...] = ()  # settings of features (`hf_hotspa.seam`)
    optim: str = "adamw_torch"  # the optimizer, by the name of `--optim`
    task: str = "sft"  # one of `terms.TASKS`
    teacher: ModelConfig | None = None  # of the task `distill`
    packed: Any | None = None  # the layers of a frozen model that are in another form

    @classmethod
    def read(
        cls,
        model: str,
        nodes: str,
        hardware: str | None = None,
        memory_limit: str | None = None,
        calibration: str | None = None,
        dtype: str | None = None,
        lora: str | None = None,
        quantization: str | None = None,
        **options: Any,
    ) -> "Setup":
        """Reads a setup from the words of a command line; raises `HotspaConfigError` if one is unknown or impossible.

        Args:
            model: See `load_model`; likewise `teacher`, for the task `distill`, `nodes`: `parse_nodes`, `memory_limit`: `parse_bytes`, `lora`: `added_weights`.
            hardware: See `load_hardware`; not with a calibration.
            calibration: A file of `hf-hotspa calibrate`.
            dtype: The dtype of computation; None for the calibration's, else bfloat16.
            quantization: One of `costs.terms.form_names`, with an adapter; None if the frozen model is in that dtype.
        """
        shape = _of_task(load_model(model), options.get("task"))
        count, devices = _devices(nodes)
        adapter = added_weights(lora, shape.linears) if lora is not None else None
        if quantization is not None and adapter is None:
            raise HotspaConfigError(
                f"--quantization {quantization} needs an adapter",
                why="packed weights are frozen, and nothing would be trained",
                fix="add --lora 16",
            )
        packed = packed_weights(quantization, shape) if quantization is not None else None
        machine = load_hardware(hardware) if hardware is not None else None
        measured = Calibration.load(calibration) if calibration is not None else None
        if measured is not None:
            dtype = dtype or measured.key.dtype
            check_calibration(
                measured, str(calibration), shape.shape, dtype=dtype, nodes=count, devices_per_node=devices,
                base=packed and packed.kind,
            )  # fmt: skip
            machine = measured.hardware()
        memory = machine.device.memory_bytes if machine is not None else None
        given = None if memory_limit is None else parse_bytes(memory_limit, "the memory limit")
        if given is not None and memory is not None and machine is not None and given > memory:
            raise HotspaConfigError(
                f"a memory limit of {given / 2**30:,.2f} GiB is more than the {memory / 2**30:,.2f} GiB of a device "
                f"of {machine.name}",
                fix=f"use at most {memory >> 20}MiB, or hardware with more memory",
            )
        limit, source = planned_limit(given, memory, f"of {(memory or 0) / 2**30:,.2f} GiB", "--memory-limit")
        if options.get("sequence_parallel") and (why := shape.shape.sp_unsupported_reason):
            raise HotspaConfigError(f"{shape.name} cannot run +sp", why=why, fix="leave --sequence-parallel out")
        if machine is not None:
            machine = replace(machine, devices_per_node=devices)
        teacher = _teacher(options.get("teacher"), shape, options.get("task"))
        options |= {"calibration": measured, "adapter": adapter, "packed": packed, "teacher": teacher}
        setup = cls(shape, count, devices, machine, limit, source, dtype or DTYPE, **options)
        dtype_bytes(setup.dtype)
        return setup

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @cached_property
    def sizes(self) -> ModelSizes:
        sizes = ModelSizes(
            self.model.shape, self.dtype, self.model.tied, gradients=self.gradients, added=self.adapter,
            packed=self.packed,
        )  # fmt: skip
        if self.calibration is None:
            return sizes
        return replace(sizes, measured=self.calibration.stage_costs(sizes.stage_costs.layers))

    @cached_property
    def memory(self) -> MemoryModel:
        return (
            self.cost.memory if self.hardware is not None else MemoryModel(self.sizes, self.world_size, self._options)
        )

    @cached_property
    def cost(self) -> CostModel:
        """The cost model, calibrated or from data sheets. Raises `HotspaConfigError`: the hardware has no speed for the
        dtype."""
        assert self.hardware is not None
        if self.calibration is not None:
            return CostModel.of_calibration(self.calibration, self.sizes, self._options, self.world_size)
        return CostModel.of_hardware(self.hardware, self.sizes, self._options, self.world_size)

    @property
    def scoring(self) -> Scoring:
        """What a step runs beside its training pass."""
        scoring, teacher = TASKS[self.task], self.teacher
        if teacher is None:
            return scoring
        return scoring.taught(self.sizes, ModelSizes(teacher.shape, self.dtype, teacher.tied))

    @property
    def _options(self) -> MemoryOptions:
        scoring = self.scoring
        if self.adapter is not None:  # the model without its adapter is the reference
            scoring = replace(scoring, reference=False)
        optimizer = optimizer_states()[self.optim]
        return MemoryOptions(optimizer, self.dtype, schedule=self.schedule, features=self.features, scoring=scoring)

    def strategies(self) -> list[Strategy]:
        """Returns every legal strategy with every choice of options, except options that are fixed for all."""
        options = strategies_with_options(self.world_size, self.model.shape)
        plain = list(dict.fromkeys(map(self.with_options, options)))
        offered = [*plain, *divided(plain, self.model.shape, RunOptions(self.schedule))]
        if self.teacher is None:
            return offered
        return [strategy for strategy in offered if strategy.unsupported_reason(self.teacher.shape) is None]

    def with_options(self, strategy: Strategy) -> Strategy:
        """Returns a strategy with its own options and the options fixed for all strategies."""
        sp = strategy.sp or (self.sequence_parallel and strategy.tp > 1)
        return replace(strategy, sp=sp, rc=strategy.rc or int(self.recompute))

    def to_dict(self) -> dict[str, object]:
        shape = self.model.shape
        return {
            "model": {
                "name": self.model.name,
                "family": shape.family,
                "parameters": self.sizes.num_parameters,
                "layers": shape.num_layers,
                "hidden_size": shape.hidden_size,
                "max_position_embeddings": shape.max_position_embeddings,
            },
            "hardware": self.hardware.name if self.hardware is not None else None,
            "calibrated": self.calibration.measured_at if self.calibration is not None else None,
            **{name: getattr(self, name) for name in _SHOWN},
            "units_of_a_step": self.scoring.units,
            "teacher": self.teacher.name if self.teacher is not None else None,
            "gradients": asdict(self.gradients),
            "pipeline_schedule": self.schedule,
            "pipeline_mode": SYNCHRONOUS,
            "lora": {"r": self.adapter.rank, "targets": list(self.adapter.linears)} if self.adapter else None,
            "quantization": self.packed.kind if self.packed else None,
            "trained_parameters": self.sizes.num_trained,
            **{name: text for each in self.features for name, text in each.shown().items()},
        }


def _devices(nodes: str) -> tuple[int, int]:
    count, devices = parse_nodes(nodes)
    if count * devices > _MOST_DEVICES:
        fix = f"plan for at most {_MOST_DEVICES} devices"
        raise HotspaConfigError(f"{nodes} are {count * devices} devices", fix=fix)
    return count, devices


def _teacher(name: str | None, student: ModelConfig, task: str | None) -> ModelConfig | None:
    if (name is None) != (task != "distill"):
        raise HotspaConfigError(
            "--task distill without --teacher" if name is None else f"--teacher {name} without --task distill",
            fix="give both",
        )
    if name is None:
        return None
    teacher = load_model(name)
    own, other = (config.shape.vocab_size for config in (student, teacher))
    if own != other:
        raise HotspaConfigError(
            f"{student.name} has a vocabulary of {own:,} and the teacher {teacher.name} of {other:,}",
            why="their distributions are compared over one vocabulary",
            fix="use a teacher with the student's tokenizer and vocabulary size",
        )
    return teacher


@dataclass(frozen=True)
class PlannedSetup:
    """The answer of `hf-hotspa plan`, for these lengths from that source."""

    setup: Setup
    lengths: tuple[int, ...]
    source: str
    plan: Plan

    def notes(self) -> list[str]:
        """Returns what the reader must know before using the plan."""
        positions = self.setup.model.shape.max_position_embeddings
        of_features = [note for each in self.setup.features for note in each.plan_notes(self.setup)]
        if positions is None or self.plan.longest <= positions:
            return of_features
        until = "until max_position_embeddings is raised"
        return [*of_features, f"The model has {positions} positions: the trainer rejects longer buckets {until}."]

    def to_dict(self) -> dict[str, object]:
        return {
            "kind": PLAN_KIND,
            "schema_version": SCHEMA_VERSION,
            **self.setup.to_dict(),
            "lengths": {"source": self.source, "count": len(self.lengths), "longest": self.plan.longest},
            **self.plan.to_dict(),
            "notes": self.notes(),
        }


def make_plan(
    setup: Setup,
    lengths: str | Counts,
    longest: int | None = None,
    mini_batch_size: int = 512,
    max_phases: int = 3,
    overlong: str = "error",
    written: Sequence[str] = (),
) -> PlannedSetup:
    """Chooses buckets for a setup with hardware. `lengths`: see `read_lengths`, also for `longest` and `overlong`.
    `written`: strategies in the syntax of `hotspa_strategies`, to be priced beside the plan. Raises `HotspaError`: no
    lengths, or nothing holds the longest one; the message names the smallest change that works."""
    assert setup.hardware is not None
    shape = setup.model.shape
    drawn, top = read_lengths(lengths, mini_batch_size, longest, shape.max_position_embeddings, overlong)
    more = sum(each.row_tokens() for each in setup.features)
    drawn, top = [length + more for length in drawn], top + more
    cost, time = setup.cost, setup.cost.time
    # a calibration may know fewer degrees than more devices allow
    strategies = [strategy for strategy in setup.strategies() if time.knows(strategy)]
    pricing = Pricing(cost, Capacities(cost.memory, setup.limit_bytes), drawn, mini_batch_size, top)
    prices = tuple(pricing.written(text, setup.world_size, setup.schedule) for text in written)
    try:
        choice = choose(pricing, strategies, SearchOptions(max_phases, may_go_round=True, raced=True))
    except DeviceMemoryError as error:
        raise DeviceMemoryError(error.what, where=error.where, why=error.why, fix=_what_would_fit(setup, top)) from None
    near = tuple(near for near in choice.near if choice.seconds <= near.seconds <= choice.seconds * (1 + NEAR))
    choice, others = replace(choice, near=near), DataParallel(cost.memory, time, setup.hardware, setup.task)
    settings = others.settings(pricing) if time.knows(Strategy(setup.world_size)) else ()
    links = tuple(cost.seconds_of_links(row.bucket.strategy) for row in choice.rows) if setup.nodes > 1 else ()
    plan = Plan(
        choice, choice.buckets, cost.rank_bytes(choice.buckets), mini_batch_size, setup.limit_bytes, setup.limit_source,
        settings, written=prices, links=links, rivals=people_run(pricing, strategies, setup.devices_per_node),
        layouts=dynamic_layout(pricing, strategies),
    )  # fmt: skip
    plan = plan.with_seconds(sum(each.seconds_beside(setup) for each in setup.features))
    return PlannedSetup(setup, tuple(drawn), str(lengths), plan)


def _longest_held(setup: Setup, wanted: int, offload: bool = False) -> int:
    """The longest sequence, at most `wanted`, that any strategy holds; `offload`: with `hotspa_offload="master"`."""
    memory = setup.cost.memory
    memory = replace(memory, options=replace(memory.options, offload_master=offload))
    tokens = Capacities(memory, setup.limit_bytes).tokens
    strategies = with_chunks(setup.strategies(), wanted, tokens, setup.model.shape, schedule=setup.schedule)
    return min(wanted, max(map(tokens, strategies), default=0))


def _what_would_fit(setup: Setup, longest: int) -> str:
    """Changes with which the longest sequence fits, each tried on the memory model."""
    ways = []
    if setup.calibration is None:
        lora, add = setup, ""
        if setup.adapter is None:
            lora, add = replace(setup, adapter=added_weights("16", setup.model.linears)), "--lora 16 "
            ways.append((add.strip(), lora))
        for form in form_names()[:1] if setup.packed is None else ():
            packed = packed_weights(form, setup.model)
            ways.append((f"{add}--quantization {form}", replace(lora, packed=packed)))
        for optim in list(reduced_states())[:1] if setup.adapter is None and setup.optim == "adamw_torch" else ():
            ways.append((f"--optim {optim}", replace(setup, optim=optim)))
    fitting = [text for text, changed in ways if _longest_held(changed, longest) >= longest]
    if _longest_held(setup, longest, offload=True) >= longest:
        fitting.append('hotspa_offload="master" in training (optimizer state in host memory)')
    for factor in (2, 4, 8):
        larger = replace(setup, nodes=setup.nodes * factor)
        if larger.world_size <= _MOST_DEVICES and _longest_held(larger, longest) >= longest:
            fitting.append(f"{larger.world_size} devices")
            break
    if shorter := _longest_held(setup, longest):
        fitting.append(f"--longest {shorter} --overlong truncate (or split, drop)")
    return "; or ".join(fitting) if fitting else "a smaller model, or devices with more memory"


@dataclass(frozen=True)
class Estimate:
    """The answer of `hf-hotspa estimate`."""

    setup: Setup
    strategy: Strategy
    pack_tokens: int  # of the requested pack
    memory: MemoryBreakdown  # of its fullest rank
    largest_pack: int | None  # the most tokens of a pack; None without a limit
    # tokens of the longest sequence that fits, for this strategy and others; empty without a limit
    longest: tuple[tuple[Strategy, int], ...] = ()

    @property
    def card_bytes(self) -> float:
        """What the driver shows for the device."""
        return card_bytes(self.memory.total, self.setup.world_size)

    @property
    def fits(self) -> bool:
        """Whether it stays below the limit."""
        return self.setup.limit_bytes is None or self.memory.total <= self.setup.limit_bytes

    def to_dict(self) -> dict[str, object]:
        return {
            "kind": ESTIMATE_KIND,
            "schema_version": SCHEMA_VERSION,
            **self.setup.to_dict(),
            "strategy": str(self.strategy),
            "pack_tokens": self.pack_tokens,
            "largest_pack_tokens": self.largest_pack,
            "longest_sequences": [{"strategy": str(strategy), "tokens": tokens} for strategy, tokens in self.longest],
            "fits": self.fits,
            "memory": memory_dict(self.memory),
            "card_bytes": self.card_bytes,
        }


def make_estimate(setup: Setup, strategy: str, pack_tokens: int) -> Estimate:
    """Estimates the memory of one strategy, alone in its pool. Raises `HotspaConfigError`: no such strategy for this
    model and these machines, or an impossible pack. Raises `UnsupportedError`: a strategy that cannot run, see
    `RunOptions.check`."""
    if not 1 <= pack_tokens < UNLIMITED_TOKENS:
        raise HotspaConfigError(f"a pack of {pack_tokens} tokens is impossible", fix="use at least 1 token")
    asked = setup.with_options(Strategy.parse(strategy))
    shape = replace(setup.model.shape, max_position_embeddings=None)  # a pack may be longer than any sequence
    bucket = Bucket(asked, pack_tokens, pack_tokens)
    check_buckets((bucket,), setup.world_size, shape)
    RunOptions(setup.schedule).check((bucket,), shape)
    for settings in setup.features:
        settings.check_plan([bucket], ["of embedding and head"] if setup.model.tied else [], setup.schedule)
    memory = setup.memory.breakdown(asked, pack_tokens)
    if setup.limit_bytes is None:
        return Estimate(setup, asked, pack_tokens, memory, None)
    capacities = Capacities(setup.memory, setup.limit_bytes)
    tokens = cache(partial(capacities.tokens, arena=0))
    longest = longest_by_strategy(asked, shape, tokens, schedule=setup.schedule)
    largest = setup.memory.largest_pack(asked, setup.limit_bytes)
    return Estimate(setup, asked, pack_tokens, memory, largest, tuple(longest))
