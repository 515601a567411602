"""Predicted seconds of phases where the strategies were given, to be shown beside the measured ones.

Owns where the constants come from: what `hotspa_calibration` asks for, else what an earlier run with `auto` or
`hf-hotspa calibrate` left in the cache, if anything. Promises: predictions decide nothing here, they are never corrected
on the way, they are the same on all ranks, and a cache that cannot be read costs a warning, not the run.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hf_hotspa.cost.calibration import Calibration
from hf_hotspa.cost.chooser import predict_phases
from hf_hotspa.cost.time import TimeModel
from hf_hotspa.data.mini_batch import MiniBatchPlan
from hf_hotspa.errors import HotspaError
from hf_hotspa.report import StepReport
from hf_hotspa.runtime.calibration import cached_calibration, calibration_key
from hf_hotspa.runtime.engine import HotSPaEngine
from hf_hotspa.runtime.specs import describe_model
from hf_hotspa.strategy import Strategy
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.auto import (
    agreed_calibration,
    agreement_of,
    calibrated_time,
    collected,
    model_sizes,
    trained_config,
)

logger = logging.getLogger(__name__)


class Predictions:
    """The time model of a run with given strategies.

    Args:
        time: The time model.
        switch: Load and return seconds of each strategy.
    """

    def __init__(self, time: TimeModel, switch: Mapping[Strategy, float]) -> None:
        self._time, self._switch = time, dict(switch)

    def trained(self, step: int, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """The report of a mini-batch with predictions."""
        foretold = {str(p.strategy): p.seconds for p in predict_phases(self._time, self._switch, plan)}
        phases = (replace(phase, predicted_s=foretold[phase.strategy]) for phase in report.phases)
        return replace(report, phases=tuple(phases))


def find_calibration(model: PreTrainedModel, args: HotSPaTrainingArguments) -> Calibration | None:
    """What `hotspa_calibration` asks for, else what rank 0's cache holds for this run; None where there is nothing.

    Collective, and to be called before there is an engine, which would share the machine with a measurement.

    Raises:
        HotspaError: on every rank: the file cannot be read or says nothing about this run, or measuring failed.
    """
    strategies = [bucket.strategy for bucket in args.hotspa_buckets]
    with agreement_of(args) as agreement:
        if args.hotspa_calibration is None:
            mine = _cached(model, args, strategies) if args.process_index == 0 else None
            text = agreement.texts(json.dumps(mine.to_dict()) if mine is not None else "")[0]
            return Calibration.from_dict(json.loads(text)) if text else None
        description = None
        with collected() as found:
            description = describe_model(
                model, torch.bfloat16 if args.bf16 else None, args.hotspa_attention_dropout is None
            )
        agreement.check({}, found.error, "predictions")
        assert description is not None
        return agreed_calibration(model.config, description, args, strategies, agreement)


def _cached(model: PreTrainedModel, args: HotSPaTrainingArguments, strategies: list[Strategy]) -> Calibration | None:
    """What the cache of this rank holds for the strategies of a run."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size)
    dtype = torch.bfloat16 if args.bf16 else model.dtype
    try:
        config = trained_config(model.config, args)
        found = cached_calibration(calibration_key(config, dtype, args.device, args.world_size, on_node))
    except HotspaError as error:
        logger.warning("no predictions: %s", error)
        return None
    return found if found is not None and found.covers(strategies) else None


def make_predictions(
    engine: HotSPaEngine, calibration: Calibration | None, args: HotSPaTrainingArguments
) -> Predictions | None:
    """The predictions of a run; None without a calibration."""
    if calibration is None:
        return None
    sizes = model_sizes(engine.description, args)
    return Predictions(
        calibrated_time(calibration, sizes, args),
        calibration.switch_seconds([bucket.strategy for bucket in engine.buckets], sizes),
    )
