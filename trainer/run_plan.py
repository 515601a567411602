"""`RunPlan`: the strategies of a run's mini-batches, and their predicted seconds.

Given strategies are predicted if the machine is known, from `hotspa_calibration`, or from the cache of an earlier run
with `auto` or `hf-hotspa calibrate`. These predictions decide nothing, are never corrected, and are the same on all
ranks. A cache that cannot be read only causes a warning.

With `auto`, on all ranks: the lengths are scanned, the machine is calibrated (a file, the cache, or seconds of
measuring), the search makes a plan under the memory limit, and the main process prints it; `search.choices` chooses for
each mini-batch. An error of one rank is raised by all.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.calibrate.model_calibration import MEASURING, Procedure, cached_calibration, calibrate, calibration_key
from hf_hotspa.costs.calibration import Calibration, FrozenBase
from hf_hotspa.costs.cost_model import CostModel, check_calibration
from hf_hotspa.costs.hardware import Device, Hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions, planned_limit
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import ADAM, ModelSizes
from hf_hotspa.costs.terms import optimizer_states
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.engine.switching import device_limit
from hf_hotspa.errors import HotspaError, printable
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.model_check import model_facts
from hf_hotspa.model.model_kind import without_attention_dropout
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.packed_layer import packed_layers
from hf_hotspa.model.specs import ModelDescription, describe_model, dtype_name
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.loss import TokenLoss
from hf_hotspa.parallel.mesh import known_nodes
from hf_hotspa.report import StepReport
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.automatic import RunQuestion, longest_wanted, make_auto_plan, stock_settings
from hf_hotspa.search.bucket_plan import Plan, limit_text
from hf_hotspa.search.choices import Choices
from hf_hotspa.search.chooser import predict_phases
from hf_hotspa.search.histogram import LengthsSeen
from hf_hotspa.search.offers import divided
from hf_hotspa.search.single import Singles, SingleStrategy, with_single
from hf_hotspa.strategy import Bucket, Strategy, strategies_with_options
from hf_hotspa.switched.passes import SideInputs
from hf_hotspa.trainer.arguments import MEASURE, HotSPaTrainingArguments, argument_options
from hf_hotspa.trainer.known_shortages import FILE, fewest_tokens, largest_packs, warn_of_known

logger = logging.getLogger(__name__)

_ROUNDS = Strategy(pp=2, v=2)  # the smallest pipeline with several stages on each rank


def searched_strategies(shape: ModelShape, args: HotSPaTrainingArguments) -> list[Strategy]:
    """Every strategy that a run may have, with every choice of options."""
    every = min(args.hotspa_recompute_every, shape.num_layers)
    options = strategies_with_options(args.world_size, shape)
    plain = list(dict.fromkeys(s.recomputing(every) for s in options))
    run, teacher = run_options(args), args.scoring.teacher
    wanted = [*plain, *divided(plain, shape, run)]
    if teacher is not None:
        wanted = [s for s in wanted if s.unsupported_reason(teacher.shape) is None]
    # with a capacity of experts every strategy computes complete packs; if no strategy can, the engine raises the error
    return [s for s in wanted if run.runs(s, shape)] or wanted


def run_options(args: HotSPaTrainingArguments) -> RunOptions:
    return engine_options(args).run_options(args.device.type)


def engine_options(
    args: HotSPaTrainingArguments,
    loss: TokenLoss | None = None,  # a custom token loss; None if the Trainer computes the loss
    stage_costs: StageCosts | None = None,  # measured costs that stages are cut by
    time: TimeModel | None = None,
) -> EngineOptions:
    """The options of the engine of a run. `time`: the time model that strategies were chosen and chunks are cut by.
    None for given strategies, where measurements change nothing."""
    return EngineOptions(
        compute_dtype=torch.bfloat16 if args.bf16 else None, timeout_s=float(args.ddp_timeout), loss=loss,
        seed=args.seed, gradients=args.hotspa_gradients,
        features=args.hotspa_features, stage_costs=stage_costs,
        pair_costs={tp: time.pair_cost(tp) for tp in time.layers} if time is not None else {}, **argument_options(args),
    )  # fmt: skip


@dataclass(frozen=True)
class Known:
    """The known properties of the machine. `stage_costs`: costs that stages are cut by, from a calibration file of the
    user, which is the same in every run."""

    calibration: Calibration  # measured seconds and bytes
    limit_bytes: int | None  # the usable memory of a device, the least over all ranks
    stage_costs: StageCosts | None = None


class RunPlan:
    """The strategies of a run's mini-batches, given or chosen, and their predicted seconds if the machine is known.

    Attributes:
        buckets: All buckets that the engine needs.
        choices: What chooses among them; None for given strategies.
        stage_costs: The costs that stages are cut by; None to cut by count.
        time: The time model that chunks of tokens are cut by; None for given strategies.
        predicted_bytes: The predicted bytes of strategies on their fullest ranks with full packs.
        fits: Raises if a device cannot hold the strategies, for a description with another stage partition.
        single: The best single strategy that fits, if any; None before `compare_with_single`.
        singles: Returns all that fit; none before `compare_with_single`.
        predicts: Whether the seconds of this machine are known.
    """

    time: TimeModel | None = None
    predicted_bytes: Mapping[Strategy, float] = {}
    choices: Choices | None = None
    single: SingleStrategy | None = None

    def __init__(
        self, buckets: tuple[Bucket, ...] = (), args: HotSPaTrainingArguments | None = None, known: Known | None = None
    ) -> None:
        self.buckets, self.stage_costs = buckets, known.stage_costs if known is not None else None
        self._args: Any = args
        self._known = known
        self._cost: CostModel | None = None
        self.predicts = known is not None
        self.fits: Callable[[ModelDescription], None] = self._check_given
        self.singles: Callable[[], Singles] = Singles

    @classmethod
    def chosen(
        cls,
        choices: Choices,
        args: HotSPaTrainingArguments,
        stage_costs: StageCosts | None,
        fits: Callable[[ModelDescription], None],
        singles: Callable[[], Singles],
    ) -> "RunPlan":
        """The plan of a search; for the last three see the attributes."""
        plan, cost, made = choices.plan, choices.cost, cls(choices.plan.buckets, args)
        made.choices, made.stage_costs, made.fits, made.singles = choices, stage_costs, fits, singles
        made.predicts, made.time = choices.predicts, cost.time
        made.predicted_bytes = {b.strategy: m.total for b, m in zip(plan.buckets, plan.memory, strict=True)}
        made.single = SingleStrategy(plan.choice.static, cost.time, choices.switch, cost.sizes.shape.quadratic_cost)
        return made

    @property
    def is_idle(self) -> bool:
        """Whether mini-batches need not be asked for, or reported."""
        return self.choices is None and not self.predicts

    @property
    def pool(self) -> tuple[Bucket, ...]:
        return self.buckets if self.choices is None else self.choices.pool

    def _check_given(self, cut: ModelDescription) -> None:
        measured = self._known.calibration if self._known is not None else None
        check_given(self.buckets, cut, measured, self._args)

    def begin(self, description: ModelDescription) -> None:
        """Called once the model has been read. Raises `DeviceMemoryError`: see `check_given`."""
        if self.choices is not None:  # the search has read it, and checked what fits
            return
        self.fits(description)
        self.take_cut(description)
        if (cost := self._cost) is not None:
            self._shape = description.shape
            legal = searched_strategies(self._shape, self._args)
            self._legal = [s for s in legal if cost.time.knows(s)]
            self._switch = cost.switch_seconds([*(bucket.strategy for bucket in self.buckets), *self._legal])
        if self._args.process_index == 0:
            warn_of_known(self._args.output_dir, self.buckets)

    def take_cut(self, description: ModelDescription) -> None:
        """Predicts for the stage partition of the description, with the relative step times of devices in it."""
        if self._known is None:
            return
        cost = cost_model(self._known.calibration, description, self._args)
        # as the engine does, which does not know of the calibration
        self._cost = replace(cost, time=replace(cost.time, cut_by=description.shape.quadratic_cost))

    def compare_with_single(self, table: SequenceTable, mini_batch_size: int) -> None:
        """Finds the best single strategy for a data set."""
        known, cost = self._known, self._cost
        if known is None or cost is None:
            return
        asked = RunQuestion(
            table, mini_batch_size, known.limit_bytes, longest=self.buckets[-1].longest,
            policy=self._args.hotspa_overlong, max_phases=1, may_chunk=False,
        )  # fmt: skip
        shape = self._shape
        self.singles = lambda: Singles.of(
            self._legal, lambda s: make_auto_plan(asked, [s], cost), shape, known.limit_bytes
        )
        with suppress(HotspaError):  # nothing fits by the memory model
            best = make_auto_plan(asked, self._legal, cost).choice.static
            self.single = SingleStrategy(best, cost.time, self._switch, shape.quadratic_cost)

    def start(self, num_steps: int) -> None:
        """Begins a run of `num_steps` mini-batches; keeps what an earlier one learnt."""
        if self.choices is not None:
            self.choices.start(num_steps)

    def choose(self, step: int, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets of a mini-batch. Also called in a thread."""
        return self.buckets if self.choices is None else self.choices.choose(step, lengths)

    def trained(self, step: int, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """Takes the report of a training pass of mini-batch `step`; returns it with predictions."""
        if self.choices is not None:
            predicted = self.choices.trained(step, plan, report)
        else:
            assert self._cost is not None
            predicted = {phase.strategy: phase for phase in predict_phases(self._cost.time, self._switch, plan)}
        if predicted is None:
            return report
        phases = (replace(p, predicted_s=predicted[Strategy.parse(p.strategy)].seconds) for p in report.phases)
        report = replace(report, phases=tuple(phases))
        return with_single(report, self.single, plan) if self.single is not None else report

    def ended(self, step: int, report: StepReport) -> StepReport:
        """Takes the report of all of mini-batch `step`; returns it with the result of a race, if one has ended."""
        return report if self.choices is None else self.choices.ended(step, report)

    def summary(self) -> dict[str, Any] | None:
        """The plan for the record of a run; None for given strategies, or without predictions."""
        return self.choices.plan.summary() if self.choices is not None and self.predicts else None


START_S = 20.0  # about the seconds of measuring before a run whose first mini-batches race the nearest plans
_MIB = 1 << 20


def choice_text(plan: Plan, mini_batch_size: int, limit: str | None, everything: bool) -> str:
    """What `auto` chose, for a terminal: a sentence, with `everything` also the tables behind it. One line without a
    `limit`, on one process."""
    if limit is None:
        return printable(f"hotspa_strategies=auto: one process ({plan.choice}): rows are packed, nothing to switch")
    chosen = f'hotspa_strategies=auto chose "{plan.choice}" for mini-batches of {mini_batch_size} rows'
    answers = "\n".join(plan.answers)
    if not everything:
        return printable(f"{chosen}\n{answers}")
    return printable(f"{chosen}\n{limit}\n{answers}\n\n") + str(plan)  # a table, perhaps in colours


def says_everything(args: HotSPaTrainingArguments) -> bool:
    """Whether the start of a run prints its calibration and the tables of its plan, and not only the answer: with
    `log_level="info"` (`hf-hotspa train --verbose`). The report has them in any case."""
    return bool(args.get_process_log_level() <= logging.INFO)


def prepare_auto(
    model: PreTrainedModel,
    args: HotSPaTrainingArguments,
    agreement: Agreement,
    read_tables: Callable[[], list[SequenceTable]],
    mini_batch_size: int,
    *,
    sampled: bool = False,
    fields: Collection[str] = (),  # what rows and batches have, by name; the same on all ranks
) -> RunPlan:
    """Plans a run. Collective; all ranks make the same plan, or raise the same error. `read_tables`: returns the scans
    of the data set and of the sets that are only evaluated; called on every rank. `sampled`: whether longer rows may
    come than the scanned ones: all that model and memory allow must fit. Raises `HotspaError` on every rank if an
    untrainable model, an unusable calibration, or a limit under which nothing fits."""
    description, tables = _agreed_inputs(model, args, agreement, read_tables)
    strategies, may_chunk = _strategies_for(description, args, fields)
    # on one process there is no choice to make by seconds
    alone, longest = args.world_size == 1, max(int(table.longest_of_rows.max(initial=1)) for table in tables)
    # the effect of the strategies' options follows from the others
    measured = list(dict.fromkeys(Strategy(s.dp * s.cp, s.tp, s.pp) for s in strategies))
    known = model.config, description, args, measured, agreement, longest
    calibration = None if alone and args.hotspa_calibration is None else agreed_calibration(*known)
    vector = description.vector.with_measured(measured_costs(calibration, description, args))
    description, races = replace(description, vector=vector), calibration is not None and not args.full_determinism
    limit, source = memory_limit(args, agreement)
    most_tokens = _tokens_before_out_of_memory(args, agreement, description.shape.num_layers)
    cost = cost_model(calibration, description, args)
    asked = RunQuestion(
        tables[0], mini_batch_size, limit, source, args.hotspa_longest, args.hotspa_overlong, most_tokens, tables[1:],
        sampled, max_phases=args.hotspa_max_buckets, raced=races, may_chunk=may_chunk,
        has_host_memory=args.device.type != "cpu",
    )  # fmt: skip
    may_go_round = run_options(args).runs(_ROUNDS, description.shape)

    def renewed(lengths: list[int]) -> Plan:
        there, table = [bucket.strategy for bucket in plan.buckets], SequenceTable.from_lengths(lengths)
        again = replace(asked, table=table, longest=plan.longest, evaluated=(), sampled=False, beside=there)
        return make_auto_plan(again, there, cost)

    def single(strategy: Strategy) -> Plan:
        return make_auto_plan(replace(asked, raced=False), [strategy], cost)

    def fits(cut: ModelDescription) -> None:
        pools = chain(plan.pool, *plan.raced, *plan.ready)
        cost_model(calibration, cut, args).memory.check_pool([*pools], limit, limit_text(limit, source))

    plan = agreement.run(
        "auto strategies", lambda: make_auto_plan(replace(asked, may_go_round=may_go_round), strategies, cost),
        lambda plan: {"choice of strategies": repr(plan.buckets)},
    )  # fmt: skip
    if args.process_index == 0:
        if calibration is not None and not (alone or sampled or args.scoring.forwards):  # a trainer that could pack
            plan = replace(plan, baselines=stock_settings(asked, plan, cost, calibration.hardware()))
        text = limit_text(limit, source) if calibration is not None else None
        tqdm.write(choice_text(plan, mini_batch_size, text, says_everything(args)))
    singles = partial(Singles.of, strategies, single, description.shape, limit)
    watched = (LengthsSeen(tables[0].sequence_lengths), renewed) if sampled and not alone else None
    of_run = args.hotspa_max_buckets, args.full_determinism, args.process_index == 0
    choices = Choices(plan, cost, calibration is not None, *of_run, watched)
    return RunPlan.chosen(choices, args, vector.measured, fits, singles)


def _strategies_for(
    description: ModelDescription, args: HotSPaTrainingArguments, fields: Collection[str]
) -> tuple[list[Strategy], bool]:
    """The strategies for rows with such fields, and whether sequences may be in chunks, too. If tokens may come that see
    later ones beside them, nothing parts these."""
    side, shape = cast(SideInputs | None, description.side_inputs), description.shape
    strategies = searched_strategies(shape, args)
    if side is None or not (shape.both_ways_in_blocks and side.comes_with(fields)):
        return strategies, True
    return [s for s in strategies if run_options(args).keeps_sequences(s, shape)], False


def find_calibration(model: PreTrainedModel, args: HotSPaTrainingArguments, agreement: Agreement) -> Known | None:
    """The calibration of `hotspa_calibration`, else the one in rank 0's cache for this run, if any. Call it before
    there is an engine, which would share the machine with a measurement. Collective. Raises `HotspaError` on every rank
    if the file cannot be read or does not cover this run, or measuring failed."""
    strategies = [bucket.strategy for bucket in args.hotspa_buckets]
    if args.hotspa_calibration is None:
        mine = _cached(model, args, strategies) if args.process_index == 0 else None
        text = agreement.texts(json.dumps(mine.to_dict()) if mine is not None else "")[0]
        if not text:
            return None
        return Known(Calibration.from_dict(json.loads(text)), memory_limit(args, agreement)[0])
    description = agreement.run("predictions", lambda: _described(model, args))
    calibration = agreed_calibration(model.config, description, args, strategies, agreement)
    named = None if args.hotspa_calibration == MEASURE else measured_costs(calibration, description, args)
    return Known(calibration, memory_limit(args, agreement)[0], named)


def _cached(model: PreTrainedModel, args: HotSPaTrainingArguments, strategies: list[Strategy]) -> Calibration | None:
    """The calibration in this rank's cache that covers the strategies of a run."""
    dtype = torch.bfloat16 if args.bf16 else model.dtype
    try:
        config, base = trained_config(model.config, args), None
        if packed_layers(model):
            base = frozen_base(describe_model(model, dtype, args.hotspa_attention_dropout is None))
        key = calibration_key(config, dtype, args.device, args.world_size, processes_of_a_node(), base)
        calibration = cached_calibration(key)
    except HotspaError as error:
        logger.warning("no predictions: %s", error)
        return None
    return calibration if calibration is not None and calibration.covers(strategies) else None


def _described(model: PreTrainedModel, args: HotSPaTrainingArguments) -> ModelDescription:
    return describe_model(model, torch.bfloat16 if args.bf16 else None, args.hotspa_attention_dropout is None)


def _agreed_inputs(
    model: PreTrainedModel,
    args: HotSPaTrainingArguments,
    agreement: Agreement,
    read_tables: Callable[[], list[SequenceTable]],
) -> tuple[ModelDescription, list[SequenceTable]]:
    """The model and the scans, the same on all ranks. Collective."""

    def read_inputs() -> tuple[ModelDescription, list[SequenceTable]]:
        """Raises the errors that can be found before measuring, which takes a minute."""
        description, tables = _described(model, args), read_tables()
        longest_wanted(tables, description.shape, args.hotspa_longest, args.hotspa_overlong)
        return description, tables

    def facts(prepared: tuple[ModelDescription, list[SequenceTable]]) -> dict[str, str]:
        rows, tokens = ([count(table) for table in prepared[1]] for count in (len, lambda table: table.num_tokens))
        return model_facts(model) | {"rows of the data set": str(rows), "tokens of the data set": str(tokens)}

    return agreement.run("auto strategies", read_inputs, lambda prepared: {"model": prepared[0].digest()}, facts=facts)


def _tokens_before_out_of_memory(
    args: HotSPaTrainingArguments, agreement: Agreement, layers: int
) -> dict[Strategy, int]:
    """The most tokens per pack of strategies that ran out of memory before, by the disks of all nodes. Collective."""
    own = agreement.run("auto strategies", lambda: json.dumps(largest_packs(args.output_dir)))
    known = fewest_tokens([json.loads(text) for text in agreement.texts(own)])
    every = min(args.hotspa_recompute_every, layers)
    most_tokens = {strategy.recomputing(every): tokens for strategy, tokens in known.items()}
    if most_tokens and args.process_index == 0:
        packs = ", ".join(map(str, most_tokens))
        logger.warning("%s: packs of %s are kept below what ran out of memory", FILE, packs)
    return most_tokens


def measured_costs(
    calibration: Calibration | None, description: ModelDescription, args: HotSPaTrainingArguments
) -> StageCosts | None:
    """The costs that stages are cut by. None, to cut by count, if runs must have the same bits: seconds differ."""
    if calibration is None or (args.full_determinism and args.hotspa_calibration in (None, MEASURE)):
        return None
    return calibration.stage_costs(description.vector.layer_costs)


def agreed_calibration(
    config: PreTrainedConfig,
    description: ModelDescription,
    args: HotSPaTrainingArguments,
    strategies: list[Strategy],
    agreement: Agreement,
    longest: int | None = None,  # tokens of the longest row
) -> Calibration:
    """The calibration that `hotspa_calibration` names, else a measurement (kept in the cache), of `START_S` if a race
    follows. Collective. Raises `HotspaError` on every rank if it cannot be read, does not cover this run, or cannot be
    measured."""
    if args.hotspa_calibration in (None, MEASURE):
        return calibrate(
            trained_config(config, args), strategies=strategies, compute_dtype=description.compute_dtype,
            device=args.device, base=frozen_base(description), procedure=Procedure(
                longest=longest, seconds=None if args.hotspa_calibration == MEASURE else START_S,
                progress=lambda text: _say_of_calibration(text, args),
            ),
        )  # fmt: skip

    def read() -> Calibration:
        calibration = Calibration.load(str(args.hotspa_calibration))
        local = processes_of_a_node()
        check_calibration(
            calibration, str(args.hotspa_calibration), description.shape, dtype=dtype_name(description.compute_dtype),
            nodes=-(-args.world_size // local), devices_per_node=local, strategies=strategies,
            base=frozen_base(description),
        )  # fmt: skip
        return calibration

    return agreement.run("hotspa_calibration", read, lambda calibration: {"calibration": repr(calibration)})


def _say_of_calibration(text: str, args: HotSPaTrainingArguments) -> None:
    if text.startswith(MEASURING) or says_everything(args):
        tqdm.write(printable(f"calibration: {text}"))


def frozen_base(description: ModelDescription) -> FrozenBase | None:
    """The frozen base for the calibration of a run with a packed base; None for any other run."""
    kinds = {layer.kind for layer in description.packed.values()}
    added = description.added
    return FrozenBase(max(kinds), added.rank) if kinds and added is not None else None


def trained_config(config: PreTrainedConfig, args: HotSPaTrainingArguments) -> PreTrainedConfig:
    """The config that replicas are built from, as far as it affects their cost."""
    return config if args.hotspa_attention_dropout is None else without_attention_dropout(config)


def memory_options(args: HotSPaTrainingArguments) -> MemoryOptions:
    """The memory of a run beside weights and activations."""
    engine, on_gpu = engine_options(args), args.device.type == "cuda"
    # a second source keeps two strategies' weights; with auto, the worse case counts
    second = on_gpu if engine.second_source is None else engine.second_source
    return MemoryOptions(
        optimizer=optimizer_states().get(str(getattr(args.optim, "value", args.optim)), ADAM),
        switch_bytes=2 * engine.staging_bytes,
        weight_copies=2 if second else 1,
        schedule=engine.pipeline_schedule,
        context_parallel=engine.context_parallel,
        features=engine.features,
        offload_master=engine.offload_master and on_gpu,
        scoring=args.scoring,
    )


def cost_model(
    calibration: Calibration | None, description: ModelDescription, args: HotSPaTrainingArguments
) -> CostModel:
    """The cost model of a run. Without a calibration, for an unknown device: its seconds only compare work."""
    if calibration is None:
        sizes = _sizes(description, args)
        device = Device(1 << 40, {sizes.compute_dtype: 1e13}, 1e11)
        machine = Hardware("a device", device, args.world_size, 1e10, 1e10)
        return CostModel.of_hardware(machine, sizes, memory_options(args), args.world_size)
    return CostModel.of_calibration(calibration, _sizes(description, args), memory_options(args), args.world_size)


def _sizes(description: ModelDescription, args: HotSPaTrainingArguments) -> ModelSizes:
    dtype = dtype_name(description.compute_dtype)
    return ModelSizes(description.shape, dtype, vector=description.vector, gradients=args.hotspa_gradients)


def check_given(
    buckets: Sequence[Bucket],
    description: ModelDescription,
    calibration: Calibration | None,
    args: HotSPaTrainingArguments,
) -> None:
    """Rejects given strategies that need more than `hotspa_memory_limit_mb`, by the forecast that `auto` plans with.

    Activations are measured ones with a calibration, else from a formula. Without a given limit the engine rejects only
    weights, gradients, master store and switch buffers that certainly do not fit. Raises `DeviceMemoryError` on every
    rank, naming the part that does not fit."""
    limit = args.hotspa_memory_limit_mb
    if limit is None:
        return
    sizes = _sizes(description, args)
    largest = max(stage.weight_bytes for bucket in buckets for stage in sizes.stages(bucket.strategy))
    options = replace(
        memory_options(args),
        compute_dtype=sizes.compute_dtype,
        weight_copies=2 if engine_options(args).uses_second_source(args.device, len(buckets), largest) else 1,
    )
    memory = MemoryModel(sizes, args.world_size, options)
    if calibration is not None:
        memory = calibration.memory_model(sizes, options, args.world_size)
    memory.check_pool(buckets, limit * _MIB, f"hotspa_memory_limit_mb={limit}")


def processes_of_a_node() -> int:
    """Processes of this run on each node, once its ranks have agreed on anything."""
    nodes = known_nodes()
    return nodes.devices_per_node if nodes is not None else 1


def memory_limit(args: HotSPaTrainingArguments, agreement: Agreement) -> tuple[int | None, str]:
    """Bytes of a device that the plan may use, the least over all ranks, and the source of the number."""
    given = args.hotspa_memory_limit_mb
    if given is not None:
        return planned_limit(given * _MIB, None, "", "")
    local = nodes.local(args.process_index) if (nodes := known_nodes()) is not None else 1
    free, source = _free_memory(args.device, local)
    return planned_limit(None, float(agreement.gather([free]).min()), source, "hotspa_memory_limit_mb")


_CGROUP = Path("/sys/fs/cgroup")


def _free_memory(device: torch.device, local: int) -> tuple[float, str]:
    """Bytes that this process may fill, one of `local` on its machine, and the source of the number."""
    if (on_device := device_limit(device)) is not None:
        return float(on_device), "of what is free on the device"
    return _free_host_memory() / local, f"of the free memory of the machine, for each of {local} processes"


def _free_host_memory() -> float:
    free = float(psutil.virtual_memory().available)
    try:
        allowed = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, float(allowed) - used) if allowed.isdecimal() else free
