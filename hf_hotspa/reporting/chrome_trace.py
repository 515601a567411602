"""A few mini-batches as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a rank, named `rank r`. Its first track holds the mini-batches, its second their phases, its third what a
phase is made of: `load`, `compute`, `wait`, `return`, one after the other; before the phases the `agreement` of all
ranks, after them the `finish`. With overlap the load is exposed only in part: the exposed part is drawn first and the
whole on a track `beside computation`. Clocks of ranks are aligned at the agreement, which is about the same
moment on all of them. Times are in microseconds, as the format wants.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hotspa.report import MEASURES, StepReport
from hf_hotspa.whole_file import write_whole

_SPANS = ("load_s", "compute_s", "wait_s", "return_s")
_TRACKS = ("mini-batch", "phases", "inside phases", "beside computation")
_STEP, _PHASE, _INSIDE, _BESIDE = range(len(_TRACKS))


@dataclass(frozen=True)
class TracedStep:
    """A mini-batch and when it began.

    Args:
        step: Counted from 1.
        start_s: Seconds from the first traced mini-batch to the begin of this one on the main process.
        report: With `ranks`; without them the phases of the report stand for every rank.
    """

    step: int
    start_s: float
    report: StepReport


def trace_events(steps: Sequence[TracedStep]) -> dict[str, Any]:
    """The trace as JSON-ready plain data."""
    events: list[dict[str, Any]] = []
    worlds = [len(t.report.ranks.agree_s) if t.report.ranks is not None else 1 for t in steps]
    for rank in range(max(worlds, default=0)):
        names = [(0, "process_name", {"name": f"rank {rank}"}), (0, "process_sort_index", {"sort_index": rank})]
        names += [(track, "thread_name", {"name": name}) for track, name in enumerate(_TRACKS)]
        events += ({"ph": "M", "pid": rank, "tid": track, "name": name, "args": args} for track, name, args in names)
    for traced, world in zip(steps, worlds, strict=True):
        for rank in range(world):
            events += _rank_events(traced, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(traced: TracedStep, rank: int) -> list[dict[str, Any]]:
    report = traced.report
    if report.ranks is not None:
        agree_s = report.ranks.agree_s
        # the main process began at start_s and agreed agree_s[0] later, at the same moment as everybody
        agreed = traced.start_s + agree_s[0]
        begin = agreed - agree_s[rank]
        phases = [dict(zip(MEASURES, row, strict=True)) for row in report.ranks.phases[rank]]
    else:
        begin = agreed = traced.start_s
        phases, start = [], 0.0
        for p in report.phases:
            known = {name: getattr(p, name) for name in _SPANS}
            busy = {"load_busy_s": p.load_s + p.hidden_load_s, "return_busy_s": p.return_s + p.hidden_return_s}
            phases.append({**dict.fromkeys(MEASURES, 0.0), **known, **busy, "start_s": start})
            start += sum(known.values())
    end = traced.start_s + report.total_s
    step = traced.step
    events: list[dict[str, Any]] = []

    def span(track: int, name: str, start_s: float, seconds: float, **args: Any) -> None:
        numbers = {"ph": "X", "pid": rank, "tid": track, "ts": start_s * 1e6, "dur": max(seconds, 0.0) * 1e6}
        events.append({**numbers, "name": name, "cat": _TRACKS[track], "args": args})

    switching = {"switch_s": report.switch_s, "load_return_s": report.load_return_s}
    span(_STEP, f"step {step}", begin, end - begin, loss=report.loss, tokens=report.num_tokens, **switching)
    if agreed > begin:
        span(_INSIDE, "agreement", begin, agreed - begin, step=step)
    last = agreed
    for phase, measured in zip(report.phases, phases, strict=True):
        named = {"strategy": phase.strategy, "step": step}
        way = {"context_parallel": phase.context} if phase.context else {}
        start = at = agreed + measured["start_s"]
        for name in _SPANS:
            others = {"with_other_ranks_s": measured["others_s"]} if name == "compute_s" else {}
            if name == "compute_s" and measured["context_bytes"]:
                others["context_bytes"] = measured["context_bytes"]
            span(_INSIDE, name.removesuffix("_s"), at, measured[name], **named, **others)
            at += measured[name]
        counts = {"packs": phase.num_packs, "sequences": phase.num_sequences, "tokens": phase.num_tokens}
        span(_PHASE, phase.strategy, start, at - start, step=step, **counts, **way)
        computed = start + measured["load_s"] + measured["compute_s"]
        load_s, return_s = measured["load_busy_s"], measured["return_busy_s"]
        if load_s > 0:
            span(_BESIDE, "load", start, load_s, **named)
        if return_s > 0:
            begun = max(start, at - return_s) if measured["return_s"] else computed - return_s
            span(_BESIDE, "return", begun, return_s, **named)
        last = at
    if end > last:
        span(_INSIDE, "finish", last, end - last, step=step)
    return events


def save_trace(path: str | os.PathLike[str], steps: Sequence[TracedStep]) -> Path:
    """Writes the trace whole or not at all."""
    return write_whole(path, json.dumps(trace_events(steps), separators=(",", ":")))
