"""Cuts of pipelines by the speed of devices in a run: decides, asks the memory model, has the engine do it, and says so.

Done between two mini-batches, by all ranks at once, since all know the same of the devices. The cut in force and the speeds
that were decided on are in checkpoints, so that a resumed run has the stages, hence the order of sums, of the one before.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.stragglers.stage_cuts import Paces, cut_by_speed, stage_loads
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import reading_state

logger = logging.getLogger(__name__)


class StageCuts:
    """Who cuts the pipelines of an engine.

    Args:
        engine: The engine of the run.
        fits: Raises where a device cannot hold the pool in a cut.
        takes: Told of every new cut.
    """

    def __init__(
        self,
        engine: HotSPaEngine,
        fits: Callable[[ModelDescription], None],
        takes: Callable[[ModelDescription], None] | None = None,
    ) -> None:
        self._engine, self._fits, self._takes = engine, fits, takes
        self._decided: tuple[float, ...] | None = None
        self._resumed: Paces | None = None
        self._is_refused = False

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """What each stage has to do, see `Speeds.loads`; empty where all cuts are those without slow devices."""
        return stage_loads(self._engine.description.vector.stage_costs)

    def begin(self) -> str:
        """Before a mini-batch: takes the cut of the run that this one goes on from. Collective where it is another one.

        Returns:
            What is different from now on; empty where nothing is.
        """
        paces, self._resumed = self._resumed, None
        return self._recut(paces) if paces is not None else ""

    def decide(self, speeds: Sequence[float] | None) -> str:
        """After a mini-batch: cuts by what is known of the devices. Collective where a cut changes.

        Args:
            speeds: `SlowDevices.speeds`.

        Returns:
            What is different from the next mini-batch on; empty where nothing is.
        """
        known = tuple(speeds) if speeds is not None else None
        if known == self._decided:
            return ""
        self._decided = known
        costs = self._engine.description.vector.stage_costs
        return self._recut(cut_by_speed(costs, self._engine.phases, known))

    def _recut(self, paces: Paces) -> str:
        before = self._cuts()
        if paces == self._engine.description.vector.stage_costs.paces:
            return ""
        try:
            changed = self._engine.recut(paces, self._fits)
        except DeviceMemoryError as error:
            if self._is_refused:
                return ""
            self._is_refused = True
            return f"the layers of pipelines stay where they are, as memory does not hold another cut: {error}"
        if self._takes is not None:
            self._takes(self._engine.description)
        if not changed:
            return ""
        self._is_refused = False
        now = self._cuts()
        layers = [f"{s} {'+'.join(map(str, now[s]))}" for s in now if now[s] != before[s]]
        return f"stages have so many layers now: {', '.join(layers)}"

    def _cuts(self) -> dict[Strategy, list[int]]:
        costs = self._engine.description.vector.stage_costs
        return {s: [len(stage) for stage in costs.stages(s.num_stages)] for s in self._engine.phases}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        return {"paces": self._engine.description.vector.stage_costs.paces, "decided": self._decided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, with the next mini-batch.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("the stages of pipelines", "stages are cut evenly until slow devices are found anew"):
            paces = tuple(tuple(int(pace) for pace in of_depth) for of_depth in state["paces"])
            decided = state["decided"]
            self._decided = None if decided is None else tuple(map(float, decided))
            if any(pace < 1 for of_depth in paces for pace in of_depth):
                raise ValueError("a pace is not positive")
        self._resumed = paces
