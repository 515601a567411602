"""HotSPaTrainer: one strategy, fixed buckets as in the paper, or auto."""

import math
from typing import Any

from contest import make_model, one_each
from transformers import TrainerCallback

from hf_hotspa.packing import bucketing
from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments
from peers.sides.common import Turns, arguments
from peers.sides.phase_clock import PhaseClock
from peers.work import Work

_NO_LIMIT_MIB = 1 << 16
"""What free memory there is would differ from run to run, and with it the packs."""


class _Watch(TrainerCallback):
    """Installs the clock as soon as there is an engine."""

    def __init__(self, trainer: HotSPaTrainer, turns: Turns) -> None:
        self._trainer, self._turns = trainer, turns

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clock = PhaseClock()
        clock.install(self._trainer.engine)
        self._turns.inside = clock.take


def run(work: Work, turns: Turns) -> Any:
    """Trains; the weights are gathered into the model."""
    auto = work.strategies == "auto"
    if not work.packed:  # these processes run nothing else
        bucketing.pack_sequences = one_each  # type: ignore[assignment]
    limit = math.ceil(work.limit_bytes / 2**20) if work.limit_bytes else _NO_LIMIT_MIB
    args = arguments(
        work,
        HotSPaTrainingArguments,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        hotspa_mini_batch_size=work.mini_batch_rows,
        hotspa_strategies=work.strategies,
        hotspa_planner=work.planner,
        hotspa_memory_limit_mb=limit if auto else None,
    )
    trainer = HotSPaTrainer(
        model=make_model(work.model), args=args, train_dataset=work.rows(), callbacks=[turns.callback()]
    )
    trainer.add_callback(_Watch(trainer, turns))
    trainer.train()
    turns.facts["pool"] = [str(bucket) for bucket in trainer.engine.buckets]
    weights = trainer.model.state_dict()
    trainer.close_engine()
    return weights
