"""`hotspa_stragglers`: what a run knows of slow devices, and what it does about them.

Watching costs nothing of its own: every rank learns the seconds of all ranks from what the engine gathers at the end of a
mini-batch anyway, and all come to the same conclusion. What is found is in the step reports (`paces`, `slow`), and in the log of the
main process when a device becomes slow or recovers. `balance` also divides the packs of later mini-batches over replicas by
their speed and cuts the layers of pipelines and the MLPs of tensor-parallel groups by it, and `migrate` lets slow ranks give columns of their matrix products to the others of their tensor-parallel group.
Both change the order of sums alone. `resize` lets slow ranks leave columns out, and `semi` divides between the two by what a
pretest found; these are not exact, and say so. What any of them depends on is in checkpoints.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.slow_devices import ColumnStatistics, StageCuts, pretest
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.stragglers.columns import Resizing
from hf_hotspa.stragglers.giving import GIVING, LOSSY
from hf_hotspa.stragglers.speeds import SpeedHistory, Speeds
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.run_plan import RunPlan

logger = logging.getLogger(__name__)

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

    def __init__(self, engine: HotSPaEngine, mode: str, delay: int, resizing: Resizing, stages: StageCuts) -> None:
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
        self._step_time = engine.device_step_time(mode if mode in GIVING else None)
        self.speeds = SpeedHistory(delay) if mode == "balance" else None
        self._stages = stages if mode == "balance" else None
        self._has_replicas = any(strategy.dp > 1 for strategy in engine.phases)
        self._speaks, self._said = engine.rank == 0, 0
        self._last: list[float] = []
        self._statistics = ColumnStatistics(engine, resizing) if mode in LOSSY else None
        if mode == "semi":
            assert self._step_time.giving is not None
            pretest(engine, self._step_time.giving)
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
        report, event = self._step_time.trained(plan, report)
        answer = self._answer(report.step)
        if (event is not None or answer) and self._speaks and self._said < _MOST_SAID:
            self._said += 1
            said = str(event) if event is not None else "the relative step time of a slow device changed"
            last = "; further changes are in the report alone" if self._said == _MOST_SAID else ""
            text = f"{said}; {answer}" if answer else said
            logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)%s", report.step, text, self.mode, last)
        return report

    def _answer(self, step: int) -> str:
        """What is done from some later mini-batch on; empty where nothing changes."""
        devices = self._step_time.devices
        if self.speeds is not None and self._stages is not None:
            return self._balanced(step, self.speeds, self._stages)
        giving = self._step_time.giving
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
        ranks, said = self._step_time.devices.speeds(), list[str]()
        if of_stages := stages.decide(ranks):
            self._take_cut()
            said.append(of_stages)
        first = history.trained(step - 1, Speeds(ranks, stages.loads, stages.works) if ranks is not None else None)
        if first is not None and self._has_replicas:
            said.append(f"from mini-batch {first + 1} on packs are divided {'evenly' if ranks is None else 'by speed'}")
        return "; ".join(said)

    def _take_cut(self) -> None:
        self._step_time.take_cut(self._engine.description.vector, self._engine.layouts)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, JSON-ready."""
        of_mode = {name: part.state_dict() for name, part in self._parts().items()}
        return {"devices": self._step_time.devices.state_dict(), **of_mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; one of another number of ranks is left, as those are other devices.

        Raises:
            HotspaConfigError: it is damaged.
        """
        if not self._step_time.devices.load_state_dict(state.get("devices", {})):
            return
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])
        if self._step_time.giving is not None and "giving" in state:
            self._engine.give(self._step_time.giving.shares, self._step_time.giving.resized)

    def _parts(self) -> dict[str, Any]:
        """What the mode goes by, by its name in the state; each has a state of its own."""
        parts = {"speeds": self.speeds, "stages": self._stages, "giving": self._step_time.giving}
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
    plan: RunPlan,
) -> DeviceWatch | None:
    """Whoever watches the devices of a run; None where nobody does, and for a device alone. Collective for `semi`.

    Args:
        plan: Predicts for another cut of stages and MLPs, and says what does not fit in it.

    Raises:
        HotspaConfigError: see `DeviceWatch`.
    """
    if args.hotspa_stragglers == "off" or engine.world_size == 1:
        return None
    stages = StageCuts(engine, plan.fits, plan.take_cut)
    resizing = Resizing(args.hotspa_resize_columns, args.hotspa_resize_imputation, args.hotspa_resize_period)
    return DeviceWatch(engine, args.hotspa_stragglers, 0, resizing, stages)


def _most(by_strategy: Mapping[str, Sequence[float]]) -> list[float]:
    return [max(shares) for shares in zip(*by_strategy.values(), strict=True)]


def _needs(engine: HotSPaEngine, axes: Sequence[str], mode: str, lacking: str, why: str) -> None:
    if all(getattr(strategy, axis) == 1 for strategy in engine.phases for axis in axes):
        names = ", ".join(map(str, engine.phases))
        raise HotspaConfigError(
            f"hotspa_stragglers={mode}, and {lacking} ({names})",
            why=why,
            fix=f"use a strategy with {' or '.join(f'{axis}2' for axis in axes)} or more, or hotspa_stragglers=watch",
        )
