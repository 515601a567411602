"""Slow devices: they are found, work is divided by speed, and slow ranks hand work over.

Its hooks; see `hf_hotspa.seam`.
"""

from typing import TYPE_CHECKING, Any

from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.seam import Flags, Measure, State, settings

if TYPE_CHECKING:
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.features.slow_devices.device_watch import DeviceWatch
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.run_plan import RunPlan

options = HandOver

flags = Flags(arguments="hf_hotspa.features.slow_devices.arguments:StragglerArguments")

measures = (
    Measure("products_s"),  # part of `compute_s` in matrix products that can migrate
    Measure("left_out"),  # share of the rank's columns that no rank computed; 0 in an exact run
)


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> tuple[Any, ...]:
    """What the ranks of a tensor-parallel group hand over; nothing without the option."""
    if replica.mesh.tensor is None or settings(options.features, HandOver) is None:
        return ()
    from hf_hotspa.features.slow_devices.flexible_linear import make_flexible

    return (make_flexible(replica),)


def _watch(engine: "HotSPaEngine", args: "HotSPaTrainingArguments", plan: "RunPlan") -> "DeviceWatch | None":
    from hf_hotspa.features.slow_devices.device_watch import watch_devices

    return watch_devices(engine, args, plan)


state = State(run=_watch)
