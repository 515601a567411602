"""What is known of a run before its first mini-batch: predicted seconds where strategies were given, and `RunFacts`.

Predictions are shown beside the measured seconds. Beside them it says what the best single strategy would take, which switching is compared with. Owns where the
constants come from: what `hotspa_calibration` asks for, else what an earlier run with `auto` or `hf-hotspa calibrate`
left in the cache, if anything. Promises: predictions decide nothing here, they are never corrected
on the way, they are the same on all ranks, and a cache that cannot be read costs a warning, not the run. Of the facts (what a run is
called by, the floating-point operations that the model needs): nothing is communicated, there are no host names, and what a command line
says of tokens, keys and passwords is left out.

`hotspa_stragglers`: what a run knows of slow devices, and what it does about them.

Watching costs nothing of its own: every rank learns the seconds of all ranks from what the engine gathers at the end of a
mini-batch anyway, and all come to the same conclusion. What is found is in the step reports (`paces`, `slow`), and in the log of the
main process when a device becomes slow or recovers. `balance` also divides the packs of later mini-batches over replicas by
their speed and cuts the layers of pipelines and the MLPs of tensor-parallel groups by it, and `migrate` lets slow ranks give columns of their matrix products to the others of their tensor-parallel group.
Both change the order of sums alone. `resize` lets slow ranks leave columns out, and `semi` divides between the two by what a
pretest found; these are not exact, and say so. What any of them depends on is in checkpoints.
"""

import json
import logging
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_hotspa.calibrate.calibration import cached_calibration, calibration_key
from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.hardware import PRESETS
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.slow_devices import ColumnStatistics, StageCuts, pretest
from hf_hotspa.errors import HotspaConfigError, HotspaError, UnsupportedError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.specs import ModelDescription, describe_model, dtype_name
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.four_bit import is_four_bit
from hf_hotspa.parallel.mesh import known_nodes
from hf_hotspa.report import ModelFlops, RunFacts, StepReport
from hf_hotspa.reporting.run_log import length_histogram
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.automatic import make_auto_plan
from hf_hotspa.search.chooser import predict_phases
from hf_hotspa.search.plan import Plan
from hf_hotspa.search.single import Singles, SingleStrategy, with_single
from hf_hotspa.stragglers.columns import Resizing
from hf_hotspa.stragglers.giving import GIVING, LOSSY
from hf_hotspa.stragglers.speeds import SpeedHistory, Speeds
from hf_hotspa.strategy import Strategy
from hf_hotspa.trainer.arguments import MEASURE, HotSPaTrainingArguments
from hf_hotspa.trainer.auto import (
    AutoStrategies,
    agreed_calibration,
    cost_model,
    frozen_base,
    measured_costs,
    memory_limit,
    processes_of_a_node,
    searched_strategies,
    trained_config,
)
from hf_hotspa.trainer.given_arguments import flags_of
from hf_hotspa.versions import LIBRARIES, version_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """What is known of the machine.

    Args:
        calibration: Measured seconds and bytes.
        limit_bytes: What a device may hold, the least over all ranks.
        stage_costs: What stages are cut by: of a calibration that the user has named, which is the same in every run.
    """

    calibration: Calibration
    limit_bytes: int | None
    stage_costs: StageCosts | None = None


class Predictions:
    """The time model of a run with given strategies.

    Attributes:
        single: The best single strategy that fits; None before `compare_with_single`, and where none does.
        singles: Gives all that there are; none before `compare_with_single`.
    """

    def __init__(
        self, engine: HotSPaEngine, known: Known, args: HotSPaTrainingArguments, may_divide: bool = True
    ) -> None:
        self._args, self._known, self._engine = args, known, engine
        self.take_cut(engine.description)
        legal = searched_strategies(engine.description.shape, args, may_divide=may_divide)
        self._legal = [s for s in legal if self._cost.time.knows(s)]
        self._switch = self._cost.switch_seconds([*(bucket.strategy for bucket in engine.buckets), *self._legal])
        self.single: SingleStrategy | None = None
        self.singles: Callable[[], Singles] = Singles

    def take_cut(self, description: ModelDescription) -> None:
        """Predicts for stages that are cut as the description says, by devices of the paces that cut them."""
        cost = cost_model(self._known.calibration, description, self._args)
        # as the engine does, which does not know of it
        self._cost = replace(cost, time=replace(cost.time, cut_by=description.shape.quadratic_cost))

    def compare_with_single(self, table: SequenceTable, mini_batch_size: int) -> None:
        """Looks for the best single strategy for a data set, whatever strategies were given."""
        shape, longest = self._engine.description.shape, self._engine.buckets[-1].longest

        def planned(among: list[Strategy]) -> Plan:
            return make_auto_plan(
                table,
                among,
                self._cost,
                mini_batch_size=mini_batch_size,
                limit_bytes=self._known.limit_bytes,
                longest=longest,
                policy=self._args.hotspa_overlong,
                max_phases=1,
                may_chunk=False,
            )

        self.singles = lambda: Singles.of(self._legal, lambda s: planned([s]), shape, self._known.limit_bytes)
        with suppress(HotspaError):  # nothing fits, by the memory model: there is nothing to compare with
            best = planned(self._legal).choice.static
            self.single = SingleStrategy(best, self._cost.time, self._switch, shape.quadratic_cost)

    def trained(self, step: int, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """The report of a mini-batch with predictions."""
        predicted = {str(p.strategy): p.seconds for p in predict_phases(self._cost.time, self._switch, plan)}
        phases = (replace(phase, predicted_s=predicted[phase.strategy]) for phase in report.phases)
        report = replace(report, phases=tuple(phases))
        return with_single(report, self.single, plan) if self.single is not None else report


def find_calibration(model: PreTrainedModel, args: HotSPaTrainingArguments, agreement: Agreement) -> Known | None:
    """What `hotspa_calibration` asks for, else what rank 0's cache holds for this run; None where there is nothing.

    Collective, and to be called before there is an engine, which would share the machine with a measurement.

    Raises:
        HotspaError: on every rank: the file cannot be read or says nothing about this run, or measuring failed.
    """
    strategies = [bucket.strategy for bucket in args.hotspa_buckets]
    if args.hotspa_calibration is None:
        mine = _cached(model, args, strategies) if args.process_index == 0 else None
        text = agreement.texts(json.dumps(mine.to_dict()) if mine is not None else "")[0]
        if not text:
            return None
        return Known(Calibration.from_dict(json.loads(text)), memory_limit(args, agreement)[0])
    dtype = torch.bfloat16 if args.bf16 else None
    description = agreement.run(
        "predictions", lambda: describe_model(model, dtype, args.hotspa_attention_dropout is None)
    )
    calibration = agreed_calibration(model.config, description, args, strategies, agreement)
    named = None if args.hotspa_calibration == MEASURE else measured_costs(calibration, description, args)
    return Known(calibration, memory_limit(args, agreement)[0], named)


def _cached(model: PreTrainedModel, args: HotSPaTrainingArguments, strategies: list[Strategy]) -> Calibration | None:
    """What the cache of this rank holds for the strategies of a run."""
    dtype = torch.bfloat16 if args.bf16 else model.dtype
    try:
        config, base = trained_config(model.config, args), None
        if any(map(is_four_bit, model.modules())):
            base = frozen_base(describe_model(model, dtype, args.hotspa_attention_dropout is None))
        calibration = cached_calibration(
            calibration_key(config, dtype, args.device, args.world_size, processes_of_a_node(), base)
        )
    except HotspaError as error:
        logger.warning("no predictions: %s", error)
        return None
    return calibration if calibration is not None and calibration.covers(strategies) else None


# -- facts ------------------------------------------------------------------------------------------------------------


def run_facts(
    engine: HotSPaEngine, trainer: Any, table: SequenceTable | None, predictions: AutoStrategies | Predictions | None
) -> RunFacts:
    """The facts of a run. No communication, no host names.

    Args:
        trainer: Gives `args`, `model` and `train_dataset`.
        table: The scan of the data set; None for a stream.
        predictions: What `hotspa_strategies=auto` chose, or the predictions for strategies that were given; None without.
    """
    args, model = trainer.args, trainer.model
    shape = engine.description.shape
    auto = predictions if isinstance(predictions, AutoStrategies) else None
    known = None if predictions is None or (auto is not None and not auto.predicts) else predictions
    single = known.single if known is not None else None
    return RunFacts(
        world_size=engine.world_size,
        versions={name.replace("-", "_"): version_of(name) or "not installed" for name in LIBRARIES}
        | {"python": platform.python_version()},
        machine=_machine(engine.device, args),
        model={
            "name": type(model).__name__,
            "family": shape.family,
            "parameters": engine.description.vector.numel,
            "layers": shape.num_layers,
            "compute_dtype": dtype_name(engine.description.compute_dtype),
        },
        settings={
            **{
                name.removeprefix("hotspa_"): getattr(args, name)
                for name, flag in flags_of(type(args)).items()
                if flag.recorded
            },
            "mini_batch_size": args.hotspa_rows_a_step,
            "pipeline_mode": pipeline_mode(args),
            "overlap_load": engine.overlap.load,
            "overlap_return": engine.overlap.return_gradients,
            "max_steps": args.max_steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "seed": args.seed,
        },
        buckets=[
            {"strategy": str(b.strategy), "low": b.low, "longest": b.longest, "pack_tokens": b.pack_tokens}
            for b in (auto.pool if auto is not None else engine.buckets)
        ],
        plan=auto.plan.summary() if auto is not None and auto.predicts else None,
        lengths=length_histogram(table.sequence_lengths) if table is not None else None,
        single=str(single.bucket.strategy) if single is not None else None,
        run=_names(args, model, trainer.train_dataset),
        flops=_flops(engine, model),
    )


def _machine(device: torch.device, args: HotSPaTrainingArguments) -> dict[str, Any]:
    """What one rank runs on, and the memory that it may use: on an accelerator that of the device, or `hotspa_memory_limit_mb`."""
    machine: dict[str, Any] = {
        "device": device.type,
        "device_name": platform.machine(),
        "nodes": nodes.count if (nodes := known_nodes()) is not None else 1,
        "cpu_cores": os.cpu_count(),
        "threads_a_rank": torch.get_num_threads(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory
        limit = args.hotspa_memory_limit_mb << 20 if args.hotspa_memory_limit_mb else most
        machine |= {"device_name": torch.cuda.get_device_name(device), "memory_bytes": min(most, limit)}
    return machine


def _names(args: HotSPaTrainingArguments, model: Any, dataset: Any) -> dict[str, str]:
    """What a person knows the run by."""
    source = args.hotspa_model_path or getattr(model.config, "_name_or_path", "")
    return {
        "name": args.run_name or Path(args.output_dir or ".").resolve().name,
        "model": str(source or f"{type(model).__name__}, new weights"),
        "data set": data_name(dataset),
        "command": command_line(sys.orig_argv),
        "output folder": str(Path(args.output_dir or ".").resolve()),
    }


def data_name(dataset: Any) -> str:
    """The file, or the name on the hub, of a data set, or else its class; and its rows, where they can be counted."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None) or type(dataset).__name__
    try:
        return f"{name}, {len(dataset):,} rows"
    except TypeError:
        return str(name)


_SECRET = re.compile(r"-.*(token|key|secret|password)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\bhf_\w{16,}")
_LONGEST_COMMAND = 1000


def command_line(words: Sequence[str]) -> str:
    """A command (`sys.orig_argv`) as typed: without folders of the interpreter, `***` for tokens, keys and
    passwords."""
    if "ipykernel" in sys.modules:
        return "a notebook"
    first, *rest = words
    shown = [Path(first).name]
    if rest and Path(rest[0]).parent == Path(first).parent != Path("."):  # a command that is installed beside it
        shown = [Path(rest.pop(0)).name]
    hidden = False
    for word in rest:
        flag, equals, _ = word.partition("=")
        is_secret = _SECRET.match(flag) is not None
        shown.append(
            "***" if hidden else f"{flag}=***" if is_secret and equals else _SECRET_VALUE.sub("***", shlex.quote(word))
        )
        hidden = is_secret and not equals
    text = " ".join(shown)
    return text if len(text) <= _LONGEST_COMMAND else text[:_LONGEST_COMMAND] + " ..."


_OTHER_CARDS = {"mig", "laptop", "max", "ti", "super", "d"}
_VARIANTS = {"pcie", "nvl"}


def peak_of_card(name: str, dtype: str) -> float | None:
    """Operations per second of a GPU's data sheet; None for a card that is not known, or has several speeds.

    Args:
        name: As the driver says it: `NVIDIA A100-SXM4-80GB`.
        dtype: Only half precision has a peak that nothing else decides: in fp32 tensor cores may, or may not, be used.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHER_CARDS or dtype not in ("bfloat16", "float16"):
        return None
    if {"6000", "ada"} <= words:
        words.add("6000ada")
    cards = [(preset.name.split("-"), preset.device.peak_flops.get(dtype)) for preset in PRESETS.values()]
    peaks = {peak for (card, *more), peak in cards if card in words and words & _VARIANTS == _VARIANTS & set(more)}
    return peaks.pop() if len(peaks) == 1 else None


def _flops(engine: HotSPaEngine, model: Any) -> ModelFlops | None:
    """What the model asks for; None where the speed of the device is not known."""
    description = engine.description
    if engine.device.type != "cuda":
        return None
    peak = peak_of_card(torch.cuda.get_device_name(engine.device), dtype_name(description.compute_dtype))
    return model_flops(description.shape, model, peak * engine.world_size) if peak else None


def model_flops(shape: ModelShape, model: Any, peak: float) -> ModelFlops:
    """The operations of a model: 2 a parameter and token forward, 2 for the gradient of the input, 2 for that of the
    weight if it is trained; in causal attention 6 by the square of a sequence. Recomputation does not count. Only layers of full attention
    have that part, so that of sliding windows and of linear attention is left out.

    Args:
        peak: Of all devices.
    """
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained) / max(sum(size for size, _ in sizes), 1)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * shape.num_layers
    parameters = shape.num_layers * shape.active_parameters + shape.vocab_size * shape.hidden_size
    return ModelFlops(
        token=(4.0 + 2.0 * trained) * parameters,
        square=6.0 * kinds.count("full_attention") * shape.attention_size,
        peak=peak,
    )


def pipeline_mode(args: HotSPaTrainingArguments) -> str:
    """How the stages of a run update: with `pipedream`, by how many packs their weights are behind."""
    mode = args.hotspa_pipedream
    return args.hotspa_pipeline_mode if mode is None else mode.text(args.hotspa_buckets[0].strategy.pp)


# -- slow devices -----------------------------------------------------------------------------------------------------


_MOST_SAID = 10
_WORTH_SAYING = 0.05
"""Shares that changed by less since they were said last are in the report alone."""
_IMPUTED = {"zero": "0", "same": "those of the mini-batch before", "average": "the mean of the others"}


class DeviceWatch:
    """The slow devices of a run.

    Args:
        mode: `hotspa_stragglers`, not `off`.
        delay: How many mini-batches are planned ahead of training.
        resizing: How products are resized, in `resize` and `semi`.
        stages: Cuts pipelines and MLPs in `balance`.

    Attributes:
        decides: Whether the run depends on what is found; a checkpoint then holds it.
        speeds: By which packs are divided; None where the mode divides evenly.

    Raises:
        HotspaConfigError: no strategy has replicas to divide packs over, stages to divide layers over or groups to divide MLPs
            over, or shards whose columns could go elsewhere.
        UnsupportedError: `migrate`, `resize` or `semi` with a strategy of `+z` or cp.
    """

    def __init__(self, engine: HotSPaEngine, mode: str, delay: int, resizing: Resizing, stages: StageCuts) -> None:
        self.mode, self.decides, self._engine = mode, mode != "watch", engine
        if mode == "balance":
            why = "packs are divided over the replicas of dp, layers over the stages of pp, and dense MLPs over the shards of tp"
            shares = stages.can_share
            lacking = "no strategy has replicas, stages or shards" if shares else "no strategy has replicas or stages"
            if not shares and any(strategy.tp > 1 for strategy in engine.phases):
                lacking += ", and no layer has a dense MLP that its plan divides"
            _needs(engine, ("dp", "pp", "tp") if shares else ("dp", "pp"), mode, lacking, why)
        if mode in GIVING:
            why = "columns are those of products that a tensor-parallel group shares"
            _needs(engine, ("tp",), mode, "no strategy is tensor parallel", why)
            if untried := [str(s) for s in engine.phases if s.z or s.cp > 1]:
                raise UnsupportedError(
                    f"hotspa_stragglers={mode} with {', '.join(untried)}",
                    why="columns stay with their rank yet where weights come layer by layer or tokens are shared (+z, cp)",
                    fix="leave these strategies out, or use hotspa_stragglers=watch",
                )
        self._pace = engine.device_pace(mode if mode in GIVING else None)
        self.speeds = SpeedHistory(delay) if mode == "balance" else None
        self._stages = stages if mode == "balance" else None
        self._has_replicas = any(strategy.dp > 1 for strategy in engine.phases)
        self._speaks, self._said = engine.rank == 0, 0
        self._last: list[float] = []
        self._statistics = ColumnStatistics(engine, resizing) if mode in LOSSY else None
        if mode == "semi":
            assert self._pace.giving is not None
            pretest(engine, self._pace.giving)
        if mode in LOSSY and self._speaks:
            logger.warning(
                "hotspa_stragglers=%s: this run is not exact. While a device is slow, columns of its products are left out, "
                "and their gradients are %s (migrate and balance are exact)",
                mode,
                _IMPUTED[resizing.imputation],
            )

    def start(self) -> SpeedHistory | None:
        """The speeds for a walk through a data set or a stream from its beginning; what is known last stays."""
        if self.speeds is not None:
            self.speeds.restart()
        return self.speeds

    def begin(self, step: int, pass_steps: int) -> None:
        """Before a mini-batch. Collective where columns are chosen by variation, and where a resumed run has another cut
        of stages or MLPs.

        Args:
            step: Mini-batches trained so far.
            pass_steps: Those of a pass over the data.
        """
        if self._statistics is not None:
            self._statistics.begin(step, pass_steps)
        if self._stages is not None and (said := self._stages.begin()):
            self._take_cut()
            if self._speaks:
                logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)", step + 1, said, self.mode)

    def trained(self, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """Takes the report of a mini-batch; returns it with what it says of the devices. Collective where pipelines or
        MLPs are cut anew."""
        report, event = self._pace.trained(plan, report)
        answer = self._answer(report.step)
        if (event is not None or answer) and self._speaks and self._said < _MOST_SAID:
            self._said += 1
            said = str(event) if event is not None else "the pace of a slow device changed"
            last = "; further changes are in the report alone" if self._said == _MOST_SAID else ""
            text = f"{said}; {answer}" if answer else said
            logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)%s", report.step, text, self.mode, last)
        return report

    def _answer(self, step: int) -> str:
        """What is done from some later mini-batch on; empty where nothing changes."""
        devices = self._pace.devices
        if self.speeds is not None and self._stages is not None:
            return self._balanced(step, self.speeds, self._stages)
        giving = self._pace.giving
        if giving is None or not giving.decide(devices.known, devices.slow):
            return ""
        self._engine.give(giving.shares, giving.resized)
        most = [_most(by_strategy) for by_strategy in (giving.shares, giving.resized)]
        now = [share for shares in most for share in shares]
        if (
            len(now) == len(self._last)
            and max(abs(a - b) for a, b in zip(now, self._last, strict=True)) < _WORTH_SAYING
        ):
            return ""
        self._last = now
        said = []
        for rank, (given, left) in enumerate(zip(*most, strict=True)):
            does = [f"gives {given:.0%} of its columns away"] if given > 0.0 else []
            does += [f"leaves {left:.0%} of its columns out"] if left > 0.0 else []
            said += [f"rank {rank} {' and '.join(does)}"] if does else []
        return ", ".join(said) or "all columns are computed where they lie"

    def _balanced(self, step: int, history: SpeedHistory, stages: StageCuts) -> str:
        ranks, said = self._pace.devices.speeds(), list[str]()
        if of_stages := stages.decide(ranks):
            self._take_cut()
            said.append(of_stages)
        first = history.trained(step - 1, Speeds(ranks, stages.loads, stages.works) if ranks is not None else None)
        if first is not None and self._has_replicas:
            said.append(f"from mini-batch {first + 1} on packs are divided {'evenly' if ranks is None else 'by speed'}")
        return "; ".join(said)

    def _take_cut(self) -> None:
        self._pace.take_cut(self._engine.description.vector, self._engine.layouts)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        of_mode = {name: part.state_dict() for name, part in self._parts().items()}
        return {"devices": self._pace.devices.state_dict(), **of_mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one of another number of ranks is left, as those are other devices.

        Raises:
            HotspaConfigError: it is damaged.
        """
        if not self._pace.devices.load_state_dict(state.get("devices", {})):
            return
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])
        if self._pace.giving is not None and "giving" in state:
            self._engine.give(self._pace.giving.shares, self._pace.giving.resized)

    def _parts(self) -> dict[str, Any]:
        """What the mode goes by, by its name in the state; each has a state of its own."""
        parts = {"speeds": self.speeds, "stages": self._stages, "giving": self._pace.giving}
        return {name: part for name, part in parts.items() if part is not None}

    def rank_tensors(self) -> dict[str, Tensor]:
        """What this rank alone needs to go on bit for bit, in host memory."""
        return self._statistics.tensors() if self._statistics is not None else {}

    def load_rank_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from `rank_tensors`."""
        if self._statistics is not None:
            self._statistics.load(tensors)


def watch_devices(
    engine: HotSPaEngine,
    args: HotSPaTrainingArguments,
    fits: Callable[[ModelDescription], None],
    predictions: Predictions | None = None,
) -> DeviceWatch | None:
    """Whoever watches the devices of a run; None where nobody does, and for a device alone. Collective for `semi`.

    Args:
        fits: Raises where a device cannot hold the pool in a cut of stages and MLPs.

    Raises:
        HotspaConfigError: see `DeviceWatch`.
    """
    if args.hotspa_stragglers == "off" or engine.world_size == 1:
        return None
    stages = StageCuts(engine, fits, predictions.take_cut if predictions is not None else None)
    resizing = Resizing(args.hotspa_resize_columns, args.hotspa_resize_imputation, args.hotspa_resize_period)
    return DeviceWatch(engine, args.hotspa_stragglers, 0, resizing, stages)


def _most(by_strategy: Mapping[str, Sequence[float]]) -> list[float]:
    return [max(shares) for shares in zip(*by_strategy.values(), strict=True)]


def _needs(engine: HotSPaEngine, axes: Sequence[str], mode: str, lacking: str, why: str) -> None:
    if all(getattr(strategy, axis) == 1 for strategy in engine.phases for axis in axes):
        names = ", ".join(map(str, engine.phases))
        raise HotspaConfigError(
            f"hotspa_stragglers={mode}, and {lacking} ({names})",
            why=why,
            fix=f"use a strategy with {' or '.join(f'{axis}2' for axis in axes)} or more, or hotspa_stragglers=watch",
        )
