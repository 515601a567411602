"""Predicted seconds of phases where the strategies were given, to be shown beside the measured ones.

Beside them it says what the best single strategy would take, which switching is compared with. Owns where the
constants come from: what `hotspa_calibration` asks for, else what an earlier run with `auto` or `hf-hotspa calibrate`
left in the cache, if anything. Promises: predictions decide nothing here, they are never corrected
on the way, they are the same on all ranks, and a cache that cannot be read costs a warning, not the run.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from hf_hotspa.calibrate.calibration import cached_calibration, calibration_key
from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.specs import ModelDescription, describe_model
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.four_bit import is_four_bit
from hf_hotspa.report import StepReport
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.automatic import make_auto_plan
from hf_hotspa.search.chooser import predict_phases
from hf_hotspa.search.plan import Plan
from hf_hotspa.search.single import Singles, SingleStrategy, with_single
from hf_hotspa.strategy import Strategy
from hf_hotspa.trainer.arguments import MEASURE, HotSPaTrainingArguments
from hf_hotspa.trainer.auto import (
    agreed_calibration,
    cost_model,
    frozen_base,
    measured_costs,
    memory_limit,
    processes_of_a_node,
    searched_strategies,
    trained_config,
)

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
