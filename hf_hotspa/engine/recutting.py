"""Cuts the pipelines of an engine, and the MLPs of its tensor-parallel groups, by the pace of its devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.layout.shares import is_uneven, paces_of_groups, shard_widths
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.stragglers.speeds import (
    Paces,
    can_share,
    cut_by_speed,
    paces_of_ranks,
    shares_by_speed,
    stage_loads,
    works_by_degree,
)
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import reading_state

_Cut = tuple[Paces, tuple[int, ...]]
"""By which paces stages are cut, and by which paces of ranks MLPs are."""


class StageCuts:
    """Who cuts the pipelines of an engine, and the MLPs of its tensor-parallel groups.

    Args:
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
        self._resumed: _Cut | None = None
        self._is_refused = self._said_even = False

    @property
    def can_share(self) -> bool:
        """Whether there are MLPs that tensor-parallel groups can divide unevenly."""
        return can_share(self._vector)

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """What each stage has to do, see `Speeds.loads`; empty where all cuts are those without slow devices."""
        return stage_loads(self._vector.stage_costs)

    @property
    def works(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """What each rank of tensor-parallel groups has to do, see `Speeds.works`."""
        return works_by_degree(self._vector, self._engine.phases)

    @property
    def _vector(self) -> ParameterVector:
        return self._engine.description.vector

    def begin(self) -> str:
        """Before a mini-batch: takes the cut of the run that this one goes on from. Collective where it is another one.

        Returns:
            What is different from now on; empty where nothing is.
        """
        cut, self._resumed = self._resumed, None
        return self._recut([cut]) if cut is not None else ""

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
        vector = self._vector
        shares = shares_by_speed(vector, self._engine.phases, known)
        wanted = [(self._stages(vector.with_paces(shares), known), shares)]
        if shares != vector.paces:  # where memory does not hold these shares, perhaps another cut of stages
            wanted.append((self._stages(vector, known), vector.paces))
        return "; ".join(said for said in (self._recut(wanted), self._why_even(known)) if said)

    def _stages(self, vector: ParameterVector, speeds: tuple[float, ...] | None) -> Paces:
        """The paces of stages, of groups that divide MLPs as the vector says."""
        if speeds is None:
            return ()
        ranks = paces_of_ranks(speeds)
        pool = self._engine.phases
        return cut_by_speed(vector.stage_costs, pool, speeds, lambda s: paces_of_groups(vector, s, ranks))

    def _why_even(self, speeds: tuple[float, ...] | None) -> str:
        groups = [str(strategy) for strategy in self._engine.phases if strategy.tp > 1]
        if speeds is None or self._said_even or not groups or self.can_share:
            return ""
        self._said_even = True
        return f"the shards of {', '.join(groups)} stay even, as no layer has a dense MLP that its plan divides"

    def _recut(self, wanted: Sequence[_Cut]) -> str:
        """Takes the first of some cuts that memory holds."""
        before, said = (self._cuts(), self._shares()), ""
        for paces, of_ranks in wanted:
            if (paces, of_ranks) == (self._vector.stage_costs.paces, self._vector.paces):
                break
            try:
                changed = self._engine.recut(paces, self._fits, of_ranks)
            except DeviceMemoryError as error:
                if not self._is_refused:
                    said = f"layers and columns stay where they are, as memory does not hold another cut: {error}"
                continue
            if self._takes is not None:
                self._takes(self._engine.description)
            if not changed:
                return ""
            self._is_refused = False
            return self._difference(*before)
        self._is_refused |= bool(said)
        return said

    def _difference(self, cuts: dict[Strategy, list[int]], shares: list[str]) -> str:
        """What is different from before."""
        said, now, of_ranks = list[str](), self._cuts(), self._shares()
        if layers := [f"{s} {'+'.join(map(str, now[s]))}" for s in now if now[s] != cuts[s]]:
            said.append(f"stages have so many layers now: {', '.join(layers)}")
        if of_ranks != shares:
            slow = f"slow ranks compute so much of MLPs now: {', '.join(of_ranks)}"
            said.append(slow if of_ranks else "MLPs are divided evenly again")
        return "; ".join(said)

    def _cuts(self) -> dict[Strategy, list[int]]:
        costs = self._vector.stage_costs
        return {s: [len(stage) for stage in costs.stages(s.num_stages)] for s in self._engine.phases}

    def _shares(self) -> list[str]:
        """Which ranks have fewer columns than an even share, of the first layer with an MLP that is divided."""
        vector = self._vector
        paced = (s for s in vector.specs if s.parts and all(part.by_pace for part in s.parts))
        spec = next((s for s in paced if vector.unit_costs[s.unit].by_pace), None)
        if not vector.paces or spec is None:
            return []
        shown = []
        for strategy in (s for s in self._engine.phases if is_uneven(vector, s)):
            for rank in range(strategy.world_size):
                widths = shard_widths(vector, strategy, spec, rank)
                own = widths[strategy.shard_index(strategy.coord(rank).tp)]
                if own < min(sum(widths) // strategy.tp, max(widths)):
                    shown.append(f"{strategy} rank {rank} {own / sum(widths):.0%}")
        return shown

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        return {"paces": self._vector.stage_costs.paces, "ranks": self._vector.paces, "decided": self._decided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, with the next mini-batch.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("the stages of pipelines", "stages are cut evenly until slow devices are found anew"):
            paces = tuple(tuple(int(pace) for pace in of_depth) for of_depth in state["paces"])
            ranks = tuple(int(pace) for pace in state.get("ranks", ()))
            decided = state["decided"]
            self._decided = None if decided is None else tuple(map(float, decided))
            if any(pace < 1 for of_depth in (*paces, ranks) for pace in of_depth):
                raise ValueError("a pace is not positive")
        self._resumed = paces, ranks
