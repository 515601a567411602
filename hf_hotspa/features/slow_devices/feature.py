"""Slow devices: they are found, work is divided by speed, and slow ranks hand work over.

Its hooks; see `hf_hotspa.seam`.
"""

from typing import Any

from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.seam import Flags, Measure, State, settings

options = HandOver

flags = Flags(arguments="hf_hotspa.features.slow_devices.arguments:StragglerArguments")

measures = (
    Measure("products_s"),  # part of `compute_s` in matrix products that can migrate
    Measure("left_out"),  # share of the rank's columns that no rank computed; 0 in an exact run
)


def attach(replica: Any, description: Any, options: Any) -> tuple[Any, ...]:
    """What the ranks of a tensor-parallel group hand over; nothing without the option."""
    if replica.mesh.tensor is None or settings(options.features, HandOver) is None:
        return ()
    from hf_hotspa.features.slow_devices.flexible_linear import make_flexible

    return (make_flexible(replica),)


def _watch(engine: Any, args: Any, plan: Any) -> Any:
    """The watch over the devices of a run; None if off, or with a single device."""
    from hf_hotspa.features.slow_devices.device_watch import watch_devices

    return watch_devices(engine, args, plan)


state = State(run=_watch)
