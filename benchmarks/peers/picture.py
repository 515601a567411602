"""The picture of `side_by_side.py`: trained tokens per second of every side, one panel a cell; a row for each model and dtype."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.tables import AUTO, LIMITED, Line, fits, kinds_of, lines_of


def save_picture(data: dict[str, Any], path: Path) -> None:
    """Writes a PNG.

    Raises:
        ImportError: matplotlib is not installed; benchmarks/requirements.txt has it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {kind: {file: lines_of(cell) for file, cell in of_kind.items()} for kind, of_kind in kinds_of(data).items()}
    files = list(dict.fromkeys(file for of_kind in kinds.values() for file in of_kind))
    cells = [lines for of_kind in kinds.values() for lines in of_kind.values()]
    names = list(dict.fromkeys(name for lines in cells for name in lines if not name.endswith(LIMITED)))[::-1]
    figure, panels = plt.subplots(
        len(kinds),
        len(files),
        figsize=(3.0 + 2.6 * len(files), len(kinds) * (0.8 + 0.28 * len(names))),
        sharey=True,
        squeeze=False,
    )
    for row, (kind, of_kind) in enumerate(kinds.items()):
        for column, file in enumerate(files):
            if file in of_kind:
                _draw(panels[row][column], f"{kind} {file}", names, of_kind[file])
            else:
                panels[row][column].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(panel: Any, title: str, names: Sequence[str], lines: dict[str, Line]) -> None:
    for at, name in enumerate(names):
        line, limited = lines.get(name), lines.get(name + LIMITED)
        speed = line.tokens_per_s if line is not None and line.tokens_per_s else 0.0
        color = "tab:orange" if name == AUTO else "tab:blue" if name.startswith("ours") else "tab:gray"
        panel.barh(at, speed, height=0.8, color=color)
        if limited is not None and limited.tokens_per_s and fits(limited) is not False:
            panel.plot([limited.tokens_per_s] * 2, [at - 0.4, at + 0.4], color="black", linewidth=2)
        if not speed:
            panel.text(0, at, " no number", va="center", fontsize=6)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("tokens/s (black: fits under the limit)", fontsize=8)
    panel.tick_params(labelsize=7)
