"""The record of a run: `hotspa_trace.jsonl`, one JSON object a line, written during the run.

Owns the format (version `FORMAT`) and its reader; `callbacks/step_reports.py` writes it. Each line has a `kind`:

* `header`, first: `format`, `time` (unix seconds), and the fields of `RunFacts`. A resumed run adds another one.
* `step`: `step` (from 1), `time`, `wall_s` (seconds since the start of the step, optimizer included), `lr` (the
  learning rate used; null if unknown), `memory` (peak bytes of each rank, if one of them grew by 1 %), `report` (the
  `StepReport`), and in a thinned record `before` (the `Sums` of the steps left out before this one).
* `eval`, and `log` for what the Trainer logs beside the fields of a step: `step`, `time`, `metrics`. `save`: `step`,
  `time`.
* `end`, last: `step`, `time`, `callback_s` (seconds inside callbacks of the main process, by class).
* `gain`, after `end` if asked for: `time` and the fields of `MeasuredGain`.

Beyond `MOST_BYTES`, every second one of the older steps is left out, and its sums are added to the next step
(`thinned`). Kept are the first step, the last steps, and steps after which a run may resume or that ended a race.

The writer flushes every line, so a killed run loses at most one. The reader skips a torn last line, and of steps
trained twice (after a resume) uses the later ones. Other faults raise a `RunLogError` with file and line. Numbers that
are not finite are written as null, as strict JSON requires.

Also owns the histogram of sequence lengths, in bins that double every second one. No torch.
"""

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from hf_hotspa.errors import RunLogError
from hf_hotspa.report import COUNTED, FIELDS, PhaseReport, RunFacts, StepReport, WithCounted
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.strategy import as_written
from hf_hotspa.typed import Count, typed

logger = logging.getLogger(__name__)


def bin_edges(longest: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, 16, ... up to the first edge that is not below `longest`."""
    edges = [1]
    while (last := edges[-1]) < longest:
        is_power = last & (last - 1) == 0
        edges.append(2 if last == 1 else last * 3 // 2 if is_power else last * 4 // 3)
    return edges


def length_histogram(lengths: ArrayLike) -> dict[str, list[int]]:
    """Counts sequences and tokens by length. `lengths`: [N] integers, tokens of each row; rows without tokens are left
    out. Returns `edges` [B + 1]: bin i holds the lengths in `(edges[i], edges[i + 1]]`, without empty bins at the short
    end; `sequences` [B]; `tokens` [B]."""
    array = np.asarray(lengths, dtype=np.int64)
    array = array[array > 0]
    if not len(array):
        return {"edges": [0, 1], "sequences": [0], "tokens": [0]}
    edges = bin_edges(int(array.max()))
    index = np.searchsorted(edges, array, side="left")
    sequences = np.bincount(index, minlength=len(edges))
    tokens = np.bincount(index, weights=array, minlength=len(edges))
    first = int(index.min())
    return {
        "edges": [0, *edges][first:],
        "sequences": sequences[first:].tolist(),
        "tokens": tokens[first:].astype(np.int64).tolist(),
    }


@dataclass(frozen=True)
class Histogram:
    """What `length_histogram` returns."""

    edges: tuple[Count, ...]
    sequences: tuple[Count, ...]
    tokens: tuple[Count, ...]

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in pairwise(self.edges))
        if not ordered or not len(self.sequences) == len(self.tokens) == len(self.edges) - 1 > 0:
            raise ValueError("the lengths are not a histogram")


FORMAT = 1
FILE_NAME = "hotspa_trace.jsonl"
FOLDER_NAME = "hotspa_report"
MOST_BYTES = 32 << 20  # the largest record: about 20,000 steps of two phases
_LAST = 1000  # how many of the last steps, saves and evaluations are always kept
_REMEDY = "give the folder of a run that was trained with hotspa_report (the default), or its " + FILE_NAME


@dataclass(frozen=True)
class StrategyTotals(WithCounted):
    """Sums over all phases of one strategy; the fields after `num_phases` are attributes of `PhaseReport`. `counted` has what
    the report page shows of features."""

    strategy: str
    num_phases: int
    num_packs: int
    num_sequences: int
    num_tokens: int
    compute_s: float
    wait_s: float
    moved_s: float
    hidden_s: float
    moved_bytes: int
    frozen_bytes: int
    context_bytes: int
    squared_tokens: Count = 0
    counted: Mapping[str, Count] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of computation."""
        return self.num_tokens / self.compute_s if self.compute_s > 0 else 0.0


@dataclass(frozen=True)
class Sums:
    """Sums over steps: seconds of forward, backward and switches (`StepReport.total_s`), and changed `rows` by `ROW_CHANGES`."""

    num_steps: Count = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    switch_s: float = 0.0
    strategies: tuple[StrategyTotals, ...] = ()
    rows: dict[str, Count] = field(default_factory=dict)


_SUMMED = tuple(f.name for f in fields(StrategyTotals)[2:-1])
_COUNTED = tuple(measure.name for measure in COUNTED if measure.title)
ROW_CHANGES = ("truncated", "split", "dropped", "empty")  # changes of rows; `num_truncated` and so on in `StepReport`


@dataclass(frozen=True)
class StepRecord:
    """A line of the kind `step`; `memory` is empty if no rank's grew, `before` sums up steps left out."""

    step: Count
    time: float
    wall_s: float
    lr: float | None
    report: StepReport
    memory: list[Count] = field(default_factory=list)
    before: Sums | None = None


def sums_of(records: Iterable[StepRecord], earlier: Sums | None = None) -> Sums:
    """Sums over steps, the steps left out before them, and `earlier` sums."""
    parts = [earlier or Sums()]
    for record in records:
        report = record.report
        parts += [record.before] if record.before is not None else []
        rows = {change: getattr(report, f"num_{change}") for change in ROW_CHANGES}
        phases = tuple(_totals(phase.strategy, 1, [phase]) for phase in report.phases)
        parts.append(Sums(1, report.total_s, record.wall_s, report.switch_s, phases, rows))
    of_strategies = dict[str, list[StrategyTotals]]()
    for part in parts:
        for totals in part.strategies:
            of_strategies.setdefault(totals.strategy, []).append(totals)
    return Sums(
        num_steps=sum(part.num_steps for part in parts),
        seconds=sum(part.seconds for part in parts),
        wall_s=sum(part.wall_s for part in parts),
        switch_s=sum(part.switch_s for part in parts),
        strategies=tuple(_totals(name, sum(t.num_phases for t in of), of) for name, of in of_strategies.items()),
        rows={change: n for change in ROW_CHANGES if (n := sum(part.rows.get(change, 0) for part in parts))},
    )


def _totals(strategy: str, num_phases: int, parts: Sequence[PhaseReport | StrategyTotals]) -> StrategyTotals:
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    counted = {name: sum(getattr(part, name) for part in parts) for name in _COUNTED}
    return StrategyTotals(strategy, num_phases, **sums, counted=counted)


@dataclass
class RunLog:
    """A record in memory."""

    path: str
    facts: RunFacts  # of the last header
    started: float  # unix seconds of the first header
    steps: list[StepRecord] = field(default_factory=list)  # in order, each once
    evaluations: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)  # step, metrics
    logs: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)  # the same of what is logged
    saves: list[int] = field(default_factory=list)  # steps after which a checkpoint was saved
    memory: list[int] = field(default_factory=list)  # peak bytes of each rank; empty if never recorded
    starts: int = 1  # how often the run was started
    callback_s: dict[str, float] = field(default_factory=dict)  # of the last start that ended, by class of callback
    ended: bool = False  # whether the training's last line has the kind `end`
    gain: MeasuredGain | None = None  # of the last start


# -- writing ----------------------------------------------------------------------------------------------------------


def plain(value: object) -> Any:
    """Converts a value for strict JSON: numbers that are not finite become None, unknown types text."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leaves out every second one of the older steps, saves and evaluations, and the earlier runs of steps trained
    twice. Adds the sums of left-out steps to the next step that is kept, in place."""
    places: dict[str, dict[int, int]] = {"step": {}, "save": {}, "eval": {}, "log": {}}
    for place, line in enumerate(lines):
        if line["kind"] in places:
            places[line["kind"]][line["step"]] = place
    kept = {place for place, line in enumerate(lines) if line["kind"] not in places}
    for of_kind in (places["save"], places["eval"], places["log"]):
        order = sorted(of_kind)
        kept.update(of_kind[step] for step in (*order[:-_LAST:2], *order[-_LAST:]))
    newest = next((line["step"] for line in reversed(lines) if line["kind"] == "step"), 0)
    steps = sorted(step for step in places["step"] if step <= newest)  # a resumed run will train later ones again
    resumes = {*sorted(places["save"])[-_LAST:], *steps[:1], *steps[-_LAST:]}
    resumes.update(step for step in steps if lines[places["step"][step]]["report"].get("race"))
    left, odd = list[StepRecord](), False
    for step in steps:
        line = lines[places["step"][step]]
        odd = not odd
        if step not in resumes and odd:
            left.append(typed(_renamed(line), StepRecord))
            continue
        if left:
            own = typed(line["before"], Sums) if "before" in line else None
            line["before"] = plain(asdict(sums_of(left, own)))
            if memory := next((record.memory for record in reversed(left) if record.memory), []):
                line.setdefault("memory", memory)
            left = []
        kept.add(places["step"][step])
    return [line for place, line in enumerate(lines) if place in kept]


# -- reading ----------------------------------------------------------------------------------------------------------


def find_run_log(path: str | os.PathLike[str]) -> Path:
    """Finds the record in a file, its folder, or the output directory above. Raises `RunLogError`: there is no
    record."""
    given = Path(path)
    for candidate in (given, given / FILE_NAME, given / FOLDER_NAME / FILE_NAME):
        if candidate.is_file():
            return candidate
    raise RunLogError(f"there is no {FILE_NAME}", where=str(given), fix=_REMEDY)


def read_run_log(path: str | os.PathLike[str]) -> RunLog:
    """Reads the record that `find_run_log` finds. Raises `RunLogError`: there is no record, or a line is malformed."""
    file = find_run_log(path)
    lines = file.read_bytes().split(b"\n")
    torn = lines.pop()  # a complete file ends with a newline
    run: RunLog | None = None
    steps: dict[int, StepRecord] = {}
    for number, line in enumerate(lines, start=1):
        try:
            data = _renamed(msgspec.json.decode(line))
            if data["kind"] == "header":
                run = _with_header(run, data, str(file))
            elif run is None:
                raise ValueError("the first line is not a header")
            else:
                _take(run, steps, data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            what = f"this line is not one of a run's record: {reason}"
            raise RunLogError(what, where=f"{file}:{number}", fix=_REMEDY) from error
    if run is None:
        what = "the record has no whole line" if torn else "the record is empty"
        raise RunLogError(what, where=f"{file}:1", fix=_REMEDY)
    run.steps = [steps[step] for step in sorted(steps)]
    return run


@dataclass(frozen=True)
class _Metrics:
    step: Count
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class _Save:
    step: Count


@dataclass(frozen=True)
class _End:
    callback_s: dict[str, float]


def _take(run: RunLog, steps: dict[int, StepRecord], data: Mapping[str, Any]) -> None:
    """Takes a line after a header; newer versions may write other kinds."""
    kind = data["kind"]
    run.ended = kind == "end" or (kind == "gain" and run.ended)
    match kind:
        case "step":
            record = typed(data, StepRecord)
            steps[record.step] = record
            run.memory = record.memory or run.memory
        case "eval" | "log":
            logged = typed(data, _Metrics)
            (run.evaluations if kind == "eval" else run.logs).append((logged.step, logged.metrics))
        case "save":
            run.saves.append(typed(data, _Save).step)
        case "end":
            run.callback_s = typed(data, _End).callback_s
        case "gain":
            run.gain = typed(data, MeasuredGain)


@dataclass(frozen=True)
class _Bucket:
    """What pages need of a bucket."""

    strategy: str
    low: Count
    longest: Count
    pack_tokens: Count


@dataclass(frozen=True)
class _Plan:
    """What pages need of a plan."""

    seconds: float
    static: str
    static_s: float
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class _Header:
    """What pages need of a header beyond the types of `RunFacts`."""

    time: float
    buckets: list[_Bucket]
    plan: _Plan | None = None
    lengths: Histogram | None = None


def _with_header(run: RunLog | None, data: dict[str, Any], path: str) -> RunLog:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, and this version reads {FORMAT}")
    header, facts = typed(data, _Header), typed(data, RunFacts)
    if run is None:
        return RunLog(path, facts, header.time)
    run.ended = False
    run.facts, run.starts, run.gain = facts, run.starts + 1, None
    return run


def _renamed(data: Any) -> Any:
    """Converts a line to the current names: the first records have `room_tokens`, and `dp1tp4pp1` for `tp4`. What features
    counted is among the fields of phases."""
    match data:
        case {"kind": "step", "report": {"phases": [*named]}}:
            named = [phase for phase in named if isinstance(phase, dict)]
            for phase in named:
                phase["counted"] = {name: phase[name] for name in FIELDS if name in phase}
        case {"kind": "header", "buckets": [*named]}:
            named += [data, data.get("plan")]
            match data.get("plan"):
                case {"rows": [*rows]}:
                    named += rows
        case {"kind": "gain", "singles": dict(singles)}:
            return {**data, "singles": {as_written(name): seconds for name, seconds in singles.items()}}
        case _:
            return data
    for part in named:
        _rename(part)
    return data


def _rename(part: object) -> None:
    if isinstance(part, dict):
        if "room_tokens" in part:
            part["capacity_tokens"] = part.pop("room_tokens")
        for key in ("strategy", "single", "static"):
            if isinstance(part.get(key), str):
                part[key] = as_written(part[key])
