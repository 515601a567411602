"""Made-up runs for the tests of reports: known numbers, no training."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_hotspa.callbacks.step_reports import RunLogWriter
from hf_hotspa.report import MEASURES, PhaseReport, RaceReport, RankMeasures, RunFacts, StepReport
from hf_hotspa.reporting.run_log import length_histogram
from hf_hotspa.strategy import Strategy

SHORT, LONG = "dp2", "tp2"
LENGTHS = [3, 5, 5, 9, 17, 33, 60, 100]


def of_earlier_releases(text: str) -> str:
    """JSON in which strategies are written as they once were: `dp1tp4pp1` for `tp4`."""
    return re.sub(
        r'"((?:(?:dp|cp|tp|pp)\d+)+[^": ]*)(?=[":])', lambda found: '"' + Strategy.parse(found[1]).spelled_out, text
    )


def made_phase(strategy: str, seconds: float, predicted: bool = True, **changes: Any) -> PhaseReport:
    """A phase of `seconds`: a tenth each for load and return, the rest computation."""
    numbers: dict[str, Any] = {
        "num_packs": 4, "num_sequences": 10, "num_tokens": 200, "load_s": seconds / 10, "compute_s": seconds * 0.8,
        "wait_s": seconds / 20, "return_s": seconds / 10, "load_bytes": 2_000_000, "return_bytes": 4_000_000,
        "hidden_load_s": seconds / 50, "predicted_s": seconds * 1.1 if predicted else None, "capacity_tokens": 256,
        "busiest_tokens": 110, "longest_tokens": 60, "squared_tokens": 5000,
    }  # fmt: skip
    return PhaseReport(strategy=strategy, **{**numbers, **changes})


def made_phases(faster: float = 1.0) -> tuple[PhaseReport, PhaseReport]:
    """The short sequences under one strategy, the long ones under another."""
    return made_phase(SHORT, 0.4 / faster, longest_tokens=16), made_phase(LONG, 0.8 / faster, longest_tokens=100)


def made_report(
    step: int, *phases: PhaseReport, loss: float = 2.0, world_size: int = 2, single_s: float | None = None
) -> StepReport:
    """A mini-batch of two phases, with 10 ms of agreement and 10 ms at the end."""
    phases = phases or made_phases()
    rows, start = [], 0.0
    for p in phases:
        spans = [p.load_s, p.compute_s, p.wait_s, p.return_s, p.hidden_load_s, 0.0, 1e6, 2e6, start, p.compute_s / 10]
        rows.append([*spans, *[0.0] * (len(MEASURES) - len(spans))])
        start += p.seconds + p.wait_s
    ranks = RankMeasures([0.01] * world_size, [(5 + rank) << 20 for rank in range(world_size)], [rows] * world_size)
    return StepReport(
        step=step, loss=loss, grad_norm=1.0, num_labels=390, num_rows=20, num_truncated=0, num_split=0, num_dropped=0,
        num_empty=0, phases=phases, total_s=start + 0.02, ranks=ranks, single_s=single_s,
        paces=(1.0, None, *[2.0] * (world_size - 2)), slow=tuple(range(2, world_size)),
    )  # fmt: skip


def made_facts(**changes: Any) -> RunFacts:
    facts: dict[str, Any] = {
        "world_size": 2,
        "versions": {"hf_hotspa": "0.1.0", "torch": "2.13.0"},
        "machine": {"device": "cpu", "cpu_cores": 2},
        "model": {"name": "LlamaForCausalLM <&>", "family": "llama", "parameters": 12345},
        "settings": {"strategies": "auto", "pipeline_schedule": "auto"},
        "buckets": [
            {"strategy": SHORT, "low": 0, "longest": 16, "pack_tokens": 64},
            {"strategy": LONG, "low": 16, "longest": 100, "pack_tokens": 100},
        ],
        "plan": {
            "seconds": 1.2, "switch_s": 0.2, "static": LONG, "static_s": 2.4,
            "rows": [{"strategy": SHORT, "compute_s": 0.3, "switch_s": 0.1}],
        },
        "lengths": length_histogram(LENGTHS),
        "single": LONG,
        "run": {
            "name": "first try", "model": "Qwen/Qwen3-0.6B", "data set": "chats.jsonl, 8 rows",
            "command": "hf-hotspa train --dataset chats.jsonl", "output folder": "/home/ada/out",
        },
    }  # fmt: skip
    return RunFacts(**{**facts, **changes})


def write_run(
    folder: Path,
    steps: int = 6,
    *,
    begin: int = 1,
    faster: float = 1.0,
    end: bool = True,
    single_s: float | None = 2.64,
    **facts: Any,
) -> Path:
    """Writes a record and returns its folder; a run that is twice as `faster` takes half the seconds."""
    writer = RunLogWriter(folder, goes_on=begin > 1)
    writer.header(made_facts(**facts))
    for step in range(begin, begin + steps):
        report = made_report(step, *made_phases(faster), loss=3.0 - 0.1 * step, single_s=single_s)
        if step == 4:
            report = replace(report, race=RaceReport("dp2 + tp2", "dp2 + cp2", 3, 12, 1.06, 1.02, 1.1, 0.8))
        if step % 5 == 0:
            report = replace(report, num_truncated=2, num_dropped=1)
        writer.write("step", report, step=step, wall_s=report.total_s + 0.05, lr=1e-3 / step)
        if step % 2 == 0:
            writer.metrics("eval", step, {"eval_loss": 3.1 - 0.1 * step, "eval_runtime": 0.5, "eval_note": "text"})
    writer.write("save", step=begin + steps - 1)
    if end:
        writer.write("end", step=begin + steps - 1, callback_s={"ReportCallback": 0.002, "ProgressCallback": 0.001})
    writer.close()
    return folder
