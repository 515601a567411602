"""`hotspa_stragglers`: what a run knows of slow devices, and what it does about them.

Watching costs nothing of its own: every rank learns the seconds of all ranks from what the engine gathers at the end of a
mini-batch anyway, and all come to the same conclusion. What is found is in the step reports (`paces`, `slow`), and in the log of the
main process when a device becomes slow or recovers.
"""

import logging
from collections.abc import Mapping
from typing import Any

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.report import StepReport

logger = logging.getLogger(__name__)

_MOST_SAID = 10


class DeviceWatch:
    """The slow devices of a run.

    Args:
        engine: The engine of the run.
        mode: `hotspa_stragglers`, not `off`.

    Attributes:
        decides: Whether the run depends on what is found; a checkpoint then holds it.
    """

    def __init__(self, engine: HotSPaEngine, mode: str) -> None:
        self.mode, self.decides = mode, mode != "watch"
        self._pace = engine.device_pace()
        self._speaks, self._said = engine.rank == 0, 0

    def trained(self, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """Takes the report of a mini-batch; returns it with what it says of the devices."""
        report, event = self._pace.trained(plan, report)
        if event is not None and self._speaks and self._said < _MOST_SAID:
            self._said += 1
            last = "; further changes are in the report alone" if self._said == _MOST_SAID else ""
            logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)%s", event.step, event, self.mode, last)
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        return self._pace.devices.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one of another number of ranks is left, as those are other devices.

        Raises:
            HotspaConfigError: it is damaged.
        """
        self._pace.devices.load_state_dict(state)
