"""The record of a run: `hotspa_trace.jsonl`, one JSON object a line, written while the run goes on.

Owns the format (version `FORMAT`), its writer and its reader. Each line has a `kind`:

* `header`, first: `format`, `time` (unix seconds), and the fields of `RunFacts`. A resumed run adds one more.
* `step`: `step` (counted from 1), `time`, `wall_s` (seconds since the step began, optimizer included), `lr` (the one
  that was used; null when not known), `memory` (peak bytes of each rank; only where one of them grew by 1 %), and
  `report` (the `StepReport`).
* `eval`: `step`, `time`, `metrics`. `save`: `step`, `time`.
* `end`, last: `step`, `time`, `callback_s` (seconds inside callbacks of the main process, by class).
* `gain`, after it where it was asked for: `time` and the fields of `MeasuredGain`.

The writer flushes every line, so a killed run loses one line at most; the reader leaves out a torn last line, and of
steps that were trained twice (after a resume) takes the later ones. Anything else that is wrong is a `RunLogError` that
names file and line. Numbers that are not finite are written as null: strict JSON has none.
"""

import json
import logging
import math
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from hf_hotspa.errors import RunLogError
from hf_hotspa.process_lock import LOCK_NAME, ProcessLock
from hf_hotspa.report import PhaseReport, RunFacts, StepReport
from hf_hotspa.reporting.histogram import is_histogram
from hf_hotspa.reporting.measured import MeasuredGain

logger = logging.getLogger(__name__)

FORMAT = 1
FILE_NAME = "hotspa_trace.jsonl"
FOLDER_NAME = "hotspa_report"
_PREVIOUS = "hotspa_trace.previous.jsonl"
_GROWTH = 1.01
_REMEDY = "give the folder of a run that was trained with hotspa_report (the default), or its " + FILE_NAME


@dataclass(frozen=True)
class StepRecord:
    """One mini-batch of a record.

    Args:
        step: Counted from 1.
        time: Unix seconds at its end.
        wall_s: Seconds from its begin to its end, optimizer step included.
        lr: Learning rate of its update; None when not known.
        report: What the engine reported.
    """

    step: int
    time: float
    wall_s: float
    lr: float | None
    report: StepReport


@dataclass
class RunLog:
    """A record, read.

    Args:
        path: The file.
        facts: The header; that of the last start, where there are several.
        started: Unix seconds of the first header.
        steps: By step, each once.
        evaluations: (step, metrics) in order.
        saves: Steps after which a checkpoint was saved.
        memory: Peak bytes of each rank; empty when never recorded.
        starts: How often the run was started.
        callback_s: Seconds inside callbacks by class, of the last start that ended.
        ended: Whether the last line of the training says that the run ended.
        gain: What switching gained, where that was measured after training; of the last start.
    """

    path: str
    facts: RunFacts
    started: float
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    starts: int = 1
    callback_s: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    gain: MeasuredGain | None = None


# -- writing ----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value as strict JSON takes it: numbers that are not finite become None, unknown types text."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)


_MAX_FOLDERS = 1000


def _own_folder(wanted: Path) -> tuple[Path, ProcessLock]:
    """The folder, or, where another process writes a record into it, the first of `<name>-2`, `<name>-3`, ... that is
    free. Made when missing, and locked."""
    for number in range(1, _MAX_FOLDERS):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = ProcessLock(folder / LOCK_NAME)
        if lock.take():
            if number > 1:
                logger.warning("another run writes its record into %s; that of this run is in %s", wanted, folder)
            return folder, lock
    raise OSError(f"{_MAX_FOLDERS} runs write their records beside {wanted}")


class RunLogWriter:
    """Writes a record, line by line.

    Args:
        folder: Where the record lies; made when missing. While another process writes one there, this one's is in a
            folder beside it (`hotspa_report-2`), which is said in a warning.
        goes_on: Whether the run was resumed: its lines are added to those that are there. Else a record that is
            there is kept as `hotspa_trace.previous.jsonl`, one at most.
    """

    def __init__(self, folder: str | os.PathLike[str], goes_on: bool = False) -> None:
        own, self._lock = _own_folder(Path(folder))
        self.path = own / FILE_NAME
        if goes_on:
            self._cut_torn_line()
        elif self.path.exists():
            os.replace(self.path, self.path.with_name(_PREVIOUS))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._memory: list[int] = []

    def _cut_torn_line(self) -> None:
        if self.path.exists():
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                os.truncate(self.path, data.rfind(b"\n") + 1)

    def _write(self, kind: str, **values: Any) -> None:
        line = json.dumps(plain({"kind": kind, **values, "time": time.time()}), allow_nan=False, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()

    def header(self, facts: RunFacts) -> None:
        """The first line."""
        self._write("header", format=FORMAT, **facts.to_dict())

    def step(self, step: int, report: StepReport, wall_s: float, lr: float | None) -> None:
        """One mini-batch."""
        values: dict[str, Any] = {"step": step, "wall_s": wall_s, "lr": lr, "report": report.to_dict()}
        if report.ranks is not None:
            memory = report.ranks.memory_bytes
            grown = len(memory) != len(self._memory) or any(
                new > _GROWTH * old for new, old in zip(memory, self._memory, strict=True)
            )
            if grown:
                self._memory = values["memory"] = memory
        self._write("step", **values)

    def evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """An evaluation; metrics that are no numbers are left out."""
        numbers = {key: plain(value) for key, value in metrics.items()}
        self._write(
            "eval", step=step, metrics={k: v for k, v in numbers.items() if v is None or isinstance(v, int | float)}
        )

    def save(self, step: int) -> None:
        """A checkpoint was saved."""
        self._write("save", step=step)

    def end(self, step: int, callback_s: dict[str, float]) -> None:
        """The last line."""
        self._write("end", step=step, callback_s=callback_s)

    def gain(self, gain: MeasuredGain) -> None:
        """What was measured after training."""
        self._write("gain", **gain.to_dict())

    def close(self) -> None:
        """Closes the file; nothing may follow."""
        try:
            self._file.close()
        finally:
            self._lock.release()


_BEFORE = {"capacity_tokens": "room_tokens"}
"""Names under which the first records have a field."""

_LATER: dict[str, Any] = {
    **dict.fromkeys(("frozen_bytes", "context_bytes", "unit_load_bytes", "unit_return_bytes"), 0),
    **dict.fromkeys(("expert_tokens", "busiest_expert_tokens", "dropped_expert_tokens"), 0),
    **dict.fromkeys(("unit_load_s", "unit_return_s", "hidden_unit_load_s", "hidden_unit_return_s"), 0.0),
    "context": "",
    "single": None,
    "single_s": None,
}
"""Fields that the first records do not have, and what they count as there."""

# -- reading ----------------------------------------------------------------------------------------------------------


def find_run_log(path: str | os.PathLike[str]) -> Path:
    """The record of a run.

    Args:
        path: The file, its folder, or the output directory above.

    Raises:
        RunLogError: there is none.
    """
    given = Path(path)
    for candidate in (given, given / FILE_NAME, given / FOLDER_NAME / FILE_NAME):
        if candidate.is_file():
            return candidate
    raise RunLogError(f"there is no {FILE_NAME}", where=str(given), fix=_REMEDY)


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Reads a record.

    Args:
        path: As for `find_run_log`.

    Raises:
        RunLogError: there is none, or a line is none; the message names the line.
    """
    file = find_run_log(path)
    lines = file.read_bytes().split(b"\n")
    torn = lines.pop()  # a whole file ends with a newline
    run: RunLog | None = None
    steps: dict[int, StepRecord] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{file}:{number}"
        try:
            data = json.loads(line)
            kind = data["kind"]
            if kind == "header":
                run = _with_header(run, data, str(file))
            elif run is None:
                raise ValueError("the first line is no header")
            elif kind == "step":
                record = _step_record(data)
                steps[record.step] = record
                run.memory = [_count(n) for n in data["memory"]] if "memory" in data else run.memory
            elif kind == "eval":
                metrics = {str(k): None if v is None else _number(v) for k, v in data["metrics"].items()}
                run.evaluations.append((_count(data["step"]), metrics))
            elif kind == "save":
                run.saves.append(_count(data["step"]))
            elif kind == "end":
                run.callback_s = {str(k): _number(v) for k, v in data["callback_s"].items()}
            elif kind == "gain":
                run.gain = MeasuredGain.from_dict(data)
            if run is not None and kind != "gain":
                run.ended = kind == "end"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise RunLogError(f"this line is not one of a run's record: {reason}", where=where, fix=_REMEDY) from error
    if run is None:
        raise RunLogError(
            "the record is empty" if not torn else "the record has no whole line", where=f"{file}:1", fix=_REMEDY
        )
    run.steps = [steps[step] for step in sorted(steps)]
    return run


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no finite number")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _with_header(run: RunLog | None, data: dict[str, Any], path: str) -> RunLog:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, and this version reads {FORMAT}")
    facts = RunFacts(**{f.name: data[f.name] for f in fields(RunFacts) if f.name in data or f.name not in _LATER})
    _count(facts.world_size)
    for bucket in facts.buckets:
        _count(bucket["low"]), _count(bucket["longest"]), _count(bucket["pack_tokens"])
        if not isinstance(bucket["strategy"], str):
            raise TypeError("the strategy of a bucket is no text")
    if not all(isinstance(d, dict) for d in (facts.versions, facts.machine, facts.model, facts.settings)):
        raise TypeError("versions, machine, model or settings are no objects")
    if facts.lengths is not None and not is_histogram(facts.lengths):
        raise ValueError("the lengths are no histogram")
    if facts.plan is not None:
        for name in ("seconds", "static_s"):
            _number(facts.plan[name])
        if not isinstance(facts.plan["rows"], list) or not isinstance(facts.plan["static"], str):
            raise TypeError("the plan has no rows or no best single strategy")
    if not isinstance(facts.single, str | None):
        raise TypeError("the best single strategy is no text")
    if run is None:
        return RunLog(path, facts, _number(data["time"]))
    run.facts, run.starts, run.gain = facts, run.starts + 1, None
    return run


_PHASE_FIELDS = {f.name: f.type for f in fields(PhaseReport)}
_STEP_FIELDS = {f.name: f.type for f in fields(StepReport) if f.name not in ("phases", "ranks", "paces", "slow")}


def _checked(data: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    """The known fields, each of its type; a newer version may have written more."""
    values: dict[str, Any] = {}
    for name, kind in types.items():
        key = name if name in data else _BEFORE.get(name, name)
        value = data[key] if key in data or key not in _LATER else _LATER[key]
        if kind is int:
            values[name] = _count(value)
        elif kind is str:
            if not isinstance(value, str):
                raise TypeError(f"{name} is no text")
            values[name] = value
        else:
            values[name] = None if value is None and kind is not float else _number(value)
    return values


def _devices(data: dict[str, Any]) -> dict[str, Any]:
    """Pace of each rank and the slow ones; older records have neither."""
    paces, slow = data.get("paces"), data.get("slow", [])
    if not isinstance(paces, list | None) or not isinstance(slow, list):
        raise TypeError("paces or slow ranks are no list")
    paced = None if paces is None else tuple(None if pace is None else _number(pace) for pace in paces)
    return {"paces": paced, "slow": tuple(map(_count, slow))}


def _step_record(data: dict[str, Any]) -> StepRecord:
    report = data["report"]
    phases = tuple(PhaseReport(**_checked(phase, _PHASE_FIELDS)) for phase in report["phases"])
    return StepRecord(
        step=_count(data["step"]),
        time=_number(data["time"]),
        wall_s=_number(data["wall_s"]),
        lr=None if data["lr"] is None else _number(data["lr"]),
        report=StepReport(**_checked(report, _STEP_FIELDS), phases=phases, **_devices(report)),
    )
