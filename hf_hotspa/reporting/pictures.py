"""Charts as PNG files for papers and slides, where matplotlib is installed (the extra `report`).

Owns everything that is asked of matplotlib, and the main charts of a run.
"""

import os
from pathlib import Path
from typing import Any

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting.run_log import RunLog
from hf_hotspa.reporting.summary import strategy_order

_SIZE, _DPI = (5.0, 3.0), 200


def check_pictures() -> None:
    """Says early whether pictures can be made.

    Raises:
        HotspaConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  # optional
    except ImportError as error:
        raise HotspaConfigError(
            f"pictures need matplotlib, and it cannot be imported: {error}",
            fix="pip install matplotlib, or ask for no picture: the page and the text hold the same figures",
        ) from error


def save_pictures(run: RunLog, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes `loss.png`, `step_time.png`, `switch_share.png` and `tokens_per_second.png`; none for a run without steps.

    Raises:
        HotspaConfigError: matplotlib is not installed.
    """
    check_pictures()
    if not run.steps:
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    steps = [record.step for record in run.steps]
    reports = [record.report for record in run.steps]
    paths = []

    axes = _axes("loss")
    axes.plot(steps, [r.loss for r in reports], label="training")
    evaluated = [(s, v) for s, m in run.evaluations for k, v in m.items() if k == "eval_loss" and v is not None]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", label="evaluation")
        axes.legend()
    paths.append(_saved(axes, folder, "loss.png"))

    axes = _axes("seconds of a step")
    rows = {s: [sum(p.compute_s for p in r.phases if p.strategy == s) for r in reports] for s in strategy_order(run)}
    rows = {name: row for name, row in rows.items() if any(row)}
    rows["load and return"] = [r.load_return_s for r in reports]
    rows["switching"] = [r.switch_s for r in reports]
    known = [sum(column) for column in zip(*rows.values(), strict=True)]
    rows["the rest"] = [max(0.0, r.total_s - k) for r, k in zip(reports, known, strict=True)]
    base = [0.0] * len(steps)
    for name, row in rows.items():
        axes.bar(steps, row, width=0.85, bottom=base, label=name)
        base = [b + v for b, v in zip(base, row, strict=True)]
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    paths.append(_saved(axes, folder, "step_time.png"))

    axes = _axes("switching, % of the step")
    axes.plot(steps, [100 * r.switch_share for r in reports])
    axes.set_ylim(bottom=0)
    paths.append(_saved(axes, folder, "switch_share.png"))

    axes = _axes("tokens per second")
    axes.plot(steps, [r.report.num_tokens / r.wall_s if r.wall_s > 0 else 0.0 for r in run.steps])
    axes.set_ylim(bottom=0)
    paths.append(_saved(axes, folder, "tokens_per_second.png"))
    return paths


def new_axes(x_label: str, y_label: str, size: tuple[float, float] = _SIZE) -> Any:
    """The axes of a figure of its own, of `size` inches; `axes.figure.savefig` writes it.

    Raises:
        HotspaConfigError: matplotlib is not installed.
    """
    check_pictures()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_axisbelow(True)
    return axes


def _axes(label: str) -> Any:
    axes = new_axes("step", label)
    axes.grid(alpha=0.3)
    return axes


def _saved(axes: Any, folder: str | os.PathLike[str], name: str) -> Path:
    path = Path(folder) / name
    axes.figure.savefig(path, dpi=_DPI)
    return path
