"""`hotspa_stragglers`: what a run knows about slow devices, and what it does about them.

Watching adds no communication: the engine gathers all ranks' seconds at the end of a mini-batch anyway, and all ranks
come to the same conclusion. Step reports have the relative step times and slow ranks; the main process logs when a
device becomes slow or recovers. `balance` also divides by speed: packs of later mini-batches over replicas, layers over
pipeline stages, and tensor-parallel MLPs. `migrate` lets slow ranks hand over columns of their matrix products to their
tensor-parallel group. Both only change the order of sums. `resize` lets slow ranks leave columns out, and `semi`
divides between the two by a pretest; these are not exact, and log a warning. Checkpoints contain everything that the
modes depend on.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.features.slow_devices.columns import Resizing
from hf_hotspa.features.slow_devices.device_step_time import DeviceStepTime
from hf_hotspa.features.slow_devices.flexible_linear import give
from hf_hotspa.features.slow_devices.mode import GIVING, LOSSY
from hf_hotspa.features.slow_devices.reaction import ColumnStatistics, StageCuts, pretest
from hf_hotspa.features.slow_devices.speeds import SpeedHistory
from hf_hotspa.packing.bucketing import MiniBatchPlan, Speeds
from hf_hotspa.report import StepReport
from hf_hotspa.seam import RunPart
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.run_plan import RunPlan

logger = logging.getLogger(__name__)

_MOST_LOGGED = 10
_WORTH_LOGGING = 0.05  # smaller changes of shares since the last log line are only in the report
_IMPUTED = {"zero": "0", "same": "the previous mini-batch's", "average": "the mean of the others"}


class DeviceWatch(RunPart):
    """The slow devices of a run, in a mode that is not `off`. `resizing` is used in `resize` and `semi`, `stages` in `balance`.

    Raises `HotspaConfigError`: no strategy has replicas, stages or groups to divide packs, layers or MLPs over, or shards whose
    columns could go elsewhere. Raises `UnsupportedError`: `migrate`, `resize` or `semi` with a strategy of `+z` or cp.
    """

    name = "devices"

    def __init__(self, engine: HotSPaEngine, mode: str, resizing: Resizing, stages: StageCuts) -> None:
        self.mode, self._engine = mode, engine
        if mode == "balance":
            why = "packs are divided over the replicas of dp, layers over the stages of pp, and dense MLPs over the shards of tp"
            shares = stages.can_share
            lacking = "no strategy has replicas, stages or shards" if shares else "no strategy has replicas or stages"
            if not shares and any(strategy.tp > 1 for strategy in engine.phases):
                lacking += ", and no layer has a dense MLP that its plan divides"
            _needs(engine, ("dp", "pp", "tp") if shares else ("dp", "pp"), mode, lacking, why)
        if mode in GIVING:
            why = "a tensor-parallel group must share the products whose columns are handed over"
            _needs(engine, ("tp",), mode, "no strategy is tensor parallel", why)
            if untried := [str(s) for s in engine.phases if s.z or s.cp > 1]:
                raise UnsupportedError(
                    f"hotspa_stragglers={mode} with {', '.join(untried)}",
                    why="columns cannot be handed over yet if weights come layer by layer or tokens are shared (+z, cp)",
                    fix="leave these strategies out, or use hotspa_stragglers=watch",
                )
        self._step_time = DeviceStepTime(engine, mode if mode in GIVING else None)
        self.history = SpeedHistory() if mode == "balance" else None
        self._stages = stages if mode == "balance" else None
        self._has_replicas = any(strategy.dp > 1 for strategy in engine.phases)
        self._logs, self._num_logged = engine.rank == 0, 0
        self._last: list[float] = []
        self._statistics = ColumnStatistics(engine, resizing) if mode in LOSSY else None
        if mode == "semi":
            assert self._step_time.giving is not None
            pretest(engine, self._step_time.giving)
        if mode in LOSSY and self._logs:
            logger.warning(
                "hotspa_stragglers=%s: this run is not exact. While a device is slow, columns of its products are left out, "
                "and their gradients are %s (migrate and balance are exact)",
                mode,
                _IMPUTED[resizing.imputation],
            )

    def start(self) -> None:
        """Keeps the latest speeds."""
        if self.history is not None:
            self.history.restart()

    def speeds(self, step: int) -> Speeds | None:
        return self.history.of(step) if self.history is not None else None

    def begin_step(self, step: int, pass_steps: int) -> None:
        """Collective if columns are chosen by variation, or resuming changes the partition."""
        if self._statistics is not None:
            self._statistics.begin(step, pass_steps)
        if self._stages is not None and (change := self._stages.begin()):
            self._step_time.take_cut()
            if self._logs:
                logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)", step + 1, change, self.mode)

    def trained(self, plan: MiniBatchPlan, of_pass: StepReport, report: StepReport) -> StepReport:
        """Adds the facts about devices, for which one pass is enough. Collective if the partition changes."""
        watched, event = self._step_time.trained(plan, of_pass)
        report = replace(report, paces=watched.paces, slow=watched.slow)
        action = self._act(of_pass.step)
        if (event is not None or action) and self._logs and self._num_logged < _MOST_LOGGED:
            self._num_logged += 1
            what = str(event) if event is not None else "the relative step time of a slow device changed"
            last = "; further changes are only in the report" if self._num_logged == _MOST_LOGGED else ""
            text = f"{what}; {action}" if action else what
            logger.warning("mini-batch %d: %s (hotspa_stragglers=%s)%s", of_pass.step, text, self.mode, last)
        return report

    def _act(self, step: int) -> str:
        """Decides anew; returns what changes in later mini-batches, or an empty string."""
        devices = self._step_time.devices
        if self.history is not None and self._stages is not None:
            return self._balanced(step, self.history, self._stages)
        giving = self._step_time.giving
        if giving is None or not giving.decide(devices.known, devices.slow):
            return ""
        give(self._engine, giving.shares, giving.resized)
        most = [_most(by_strategy) for by_strategy in (giving.shares, giving.resized)]
        now = [share for shares in most for share in shares]
        if (
            len(now) == len(self._last)
            and max(abs(a - b) for a, b in zip(now, self._last, strict=True)) < _WORTH_LOGGING
        ):
            return ""
        self._last = now
        lines = []
        for rank, (given, left) in enumerate(zip(*most, strict=True)):
            does = [f"hands over {given:.0%} of its columns"] if given > 0.0 else []
            does += [f"leaves {left:.0%} of its columns out"] if left > 0.0 else []
            lines += [f"rank {rank} {' and '.join(does)}"] if does else []
        return ", ".join(lines) or "every rank computes all of its columns"

    def _balanced(self, step: int, history: SpeedHistory, stages: StageCuts) -> str:
        ranks, lines = self._step_time.devices.speeds(), list[str]()
        if of_stages := stages.decide(ranks):
            self._step_time.take_cut()
            lines.append(of_stages)
        first = history.trained(step - 1, Speeds(ranks, stages.loads, stages.works) if ranks is not None else None)
        if first is not None and self._has_replicas:
            lines.append(
                f"from mini-batch {first + 1} on packs are divided {'evenly' if ranks is None else 'by speed'}"
            )
        return "; ".join(lines)

    def state_dict(self) -> dict[str, Any] | None:
        if self.mode == "watch":  # nothing depends on it
            return None
        of_mode = {name: part.state_dict() for name, part in self._parts().items()}
        return {"devices": self._step_time.devices.state_dict(), **of_mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, unless it has another number of ranks: those are other devices."""
        if not self._step_time.devices.load_state_dict(state.get("devices", {})):
            return
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])
        if self._step_time.giving is not None and "giving" in state:
            give(self._engine, self._step_time.giving.shares, self._step_time.giving.resized)

    def _parts(self) -> dict[str, Any]:
        """The mode's parts, by their name in the state."""
        parts = {"speeds": self.history, "stages": self._stages, "giving": self._step_time.giving}
        return {name: part for name, part in parts.items() if part is not None}

    def rank_tensors(self) -> dict[str, Tensor]:
        return self._statistics.tensors() if self._statistics is not None else {}

    def load_rank_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self._statistics is not None:
            self._statistics.load(tensors)


def watch_devices(engine: HotSPaEngine, args: HotSPaTrainingArguments, plan: RunPlan) -> DeviceWatch | None:
    """Makes the `DeviceWatch` of a run, and raises its errors; None if off, or with a single device. Collective for `semi`.
    The plan predicts for another partition, and raises if it does not fit."""
    if args.hotspa_stragglers == "off" or engine.world_size == 1:
        return None
    stages = StageCuts(engine, plan.fits, plan.take_cut)
    resizing = Resizing(args.hotspa_resize_columns, args.hotspa_resize_imputation, args.hotspa_resize_period)
    return DeviceWatch(engine, args.hotspa_stragglers, resizing, stages)


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
