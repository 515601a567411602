"""`hotspa_stragglers`: what a run knows of slow devices, and what it does about them.

Watching costs nothing of its own: every rank learns the seconds of all ranks from what the engine gathers at the end of a
mini-batch anyway, and all come to the same conclusion. What is found is in the step reports (`paces`, `slow`), and in the log of the
main process when a device becomes slow or recovers. `balance` also divides the packs of later mini-batches over replicas by
their speed and cuts the layers of pipelines and the MLPs of tensor-parallel groups by it, and `migrate` lets slow ranks give columns of their matrix products to the others of their tensor-parallel group.
Both change the order of sums alone. `resize` lets slow ranks leave columns out, and `semi` divides between the two by what a
pretest found; these are not exact, and say so. What any of them depends on is in checkpoints.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_hotspa.engine.column_statistics import ColumnStatistics
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.pretest import pretest
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError, UnsupportedError
from hf_hotspa.layout.shares import is_uneven, paces_of_groups, shard_widths
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.stragglers.columns import Resizing
from hf_hotspa.stragglers.modes import GIVING, LOSSY
from hf_hotspa.stragglers.speeds import SpeedHistory, Speeds
from hf_hotspa.stragglers.stage_cuts import Paces, cut_by_speed, paces_of_ranks, stage_loads
from hf_hotspa.stragglers.tensor_shares import can_share, shares_by_speed, works_by_degree
from hf_hotspa.strategy import Strategy
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.predictions import Predictions
from hf_hotspa.typed import reading_state

logger = logging.getLogger(__name__)

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

    def __init__(
        self,
        engine: HotSPaEngine,
        mode: str,
        delay: int,
        resizing: Resizing,
        stages: StageCuts,
    ) -> None:
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
    """For each rank the largest of its shares."""
    return [max(shares) for shares in zip(*by_strategy.values(), strict=True)]


def _needs(engine: HotSPaEngine, axes: Sequence[str], mode: str, lacking: str, why: str) -> None:
    if all(getattr(strategy, axis) == 1 for strategy in engine.phases for axis in axes):
        names = ", ".join(map(str, engine.phases))
        raise HotspaConfigError(
            f"hotspa_stragglers={mode}, and {lacking} ({names})",
            why=why,
            fix=f"use a strategy with {' or '.join(f'{axis}2' for axis in axes)} or more, or hotspa_stragglers=watch",
        )
