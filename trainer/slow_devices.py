"""`hotspa_stragglers`: what a run knows of slow devices, and what it does about them.

Watching costs nothing of its own: every rank learns the seconds of all ranks from what the engine gathers at the end of a
mini-batch anyway, and all come to the same conclusion. What is found is in the step reports (`paces`, `slow`), and in the log of the
main process when a device becomes slow or recovers. `balance` also divides the packs of later mini-batches over replicas by
their speed, which changes the order of sums alone; what it depends on is in checkpoints.
"""

import logging
from collections.abc import Mapping
from typing import Any

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.stragglers.speeds import SpeedHistory
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.dataloader import planned_ahead

logger = logging.getLogger(__name__)

_MOST_SAID = 10


class DeviceWatch:
    """The slow devices of a run.

    Args:
        engine: The engine of the run.
        mode: `hotspa_stragglers`, not `off`.
        delay: How many mini-batches are planned ahead of training.

    Attributes:
        decides: Whether the run depends on what is found; a checkpoint then holds it.
        speeds: By which packs are divided; None where the mode divides evenly.

    Raises:
        HotspaConfigError: no strategy has replicas to divide packs over.
    """

    def __init__(self, engine: HotSPaEngine, mode: str, delay: int) -> None:
        self.mode, self.decides = mode, mode != "watch"
        self._pace = engine.device_pace()
        self.speeds: SpeedHistory | None = None
        if mode == "balance":
            if all(strategy.dp == 1 for strategy in engine.phases):
                names = ", ".join(map(str, engine.phases))
                raise HotspaConfigError(
                    f"hotspa_stragglers=balance, and no strategy has replicas ({names})",
                    why="packs are divided over the replicas of dp",
                    fix="use a strategy with dp2 or more, or hotspa_stragglers=watch",
                )
            self.speeds = SpeedHistory(delay)
        self._speaks, self._said = engine.rank == 0, 0

    def start(self, stream: bool) -> SpeedHistory | None:
        """The speeds for a walk through a data set from its beginning; what is known last stays.

        Args:
            stream: Whether the data set is one.

        Raises:
            UnsupportedError: it is, and packs are to be divided by speed.
        """
        if self.speeds is not None:
            if stream:
                raise UnsupportedError(
                    f"hotspa_stragglers={self.mode} cannot divide the packs of a stream",
                    why="mini-batches of a stream are planned when their rows have been read, by an even division",
                    fix="use hotspa_stragglers=watch, or a data set with random access",
                )
            self.speeds.restart()
        return self.speeds

    def trained(self, plan: MiniBatchPlan, report: StepReport) -> StepReport:
        """Takes the report of a mini-batch; returns it with what it says of the devices."""
        report, event = self._pace.trained(plan, report)
        first = None
        if self.speeds is not None:
            first = self.speeds.trained(report.step - 1, self._pace.devices.speeds())
        if (event is not None or first is not None) and self._speaks and self._said < _MOST_SAID:
            self._said += 1
            said = str(event) if event is not None else "the pace of a slow device changed"
            if first is not None:
                evenly = self._pace.devices.speeds() is None
                said += f"; from mini-batch {first + 1} on packs are divided {'evenly' if evenly else 'by speed'}"
            last = "; further changes are in the report alone" if self._said == _MOST_SAID else ""
            logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)%s", report.step, said, self.mode, last)
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        state: dict[str, Any] = {"devices": self._pace.devices.state_dict()}
        if self.speeds is not None:
            state["speeds"] = self.speeds.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one of another number of ranks is left, as those are other devices.

        Raises:
            HotspaConfigError: it is damaged.
        """
        same = self._pace.devices.load_state_dict(state.get("devices", {}))
        if same and self.speeds is not None and "speeds" in state:
            self.speeds.load_state_dict(state["speeds"])


def watch_devices(engine: HotSPaEngine, args: HotSPaTrainingArguments) -> DeviceWatch | None:
    """Whoever watches the devices of a run; None where nobody does, and for a device alone.

    Raises:
        HotspaConfigError: see `DeviceWatch`.
    """
    if args.hotspa_stragglers == "off" or engine.world_size == 1:
        return None
    ahead = planned_ahead(args.dataloader_num_workers, args.dataloader_prefetch_factor)
    return DeviceWatch(engine, args.hotspa_stragglers, ahead)
