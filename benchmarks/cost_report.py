"""Predictions against measurements: Kendall's tau, regret, mean errors, and the tables that `cost_model.py` prints."""

import statistics
from collections.abc import Sequence
from typing import Any

from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.strategy import Strategy

TARGETS = {"tau": 0.85, "regret": 0.05, "error": 0.15, "memory": 0.08}


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs that both put in the same order, less those that they do not."""
    from scipy.stats import kendalltau

    return float(kendalltau(first, second).statistic)


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean absolute error relative to what was measured."""
    return statistics.fmean(abs(p - m) / m for p, m in zip(predicted, measured, strict=True))


def processor_seconds(model: TimeModel, strategy: Strategy, replicas: Sequence[Sequence[Sequence[int]]]) -> float:
    """What all ranks together compute in a phase."""
    packs = [pack for packs in replicas for pack in packs]
    return strategy.tp * sum(cost.of(pack) for cost in model.stage_costs(strategy) for pack in packs)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tau, regret and errors, for each case and over all."""
    by_case: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        predicted, measured = ([row[key] for row in mine] for key in ("predicted_s", "measured_s"))
        first, second = ([row["halves_s"][half] for row in mine] for half in (0, 1))
        chosen = measured[min(range(len(mine)), key=predicted.__getitem__)]
        by_case[case] = {
            "tau": kendall_tau(predicted, measured) if len(mine) > 1 else 1.0,
            "tau_of_halves": kendall_tau(first, second) if len(mine) > 1 else 1.0,
            "regret": chosen / min(measured) - 1,
            "error": mean_error(predicted, measured),
            "noise": mean_error(first, second),
        }
    predicted, measured = ([row[key] for row in rows] for key in ("predicted_s", "measured_s"))
    found = {
        "tau": kendall_tau(predicted, measured),
        "mean_tau": statistics.fmean(case["tau"] for case in by_case.values()),
        "mean_tau_of_halves": statistics.fmean(case["tau_of_halves"] for case in by_case.values()),
        "worst_regret": max(case["regret"] for case in by_case.values()),
        "mean_regret": statistics.fmean(case["regret"] for case in by_case.values()),
        "error": mean_error(predicted, measured),
        "compute_error": mean_error(
            [row["predicted_compute_s"] for row in rows], [row["measured_compute_s"] for row in rows]
        ),
        "cpu_error": mean_error([row["predicted_cpu_s"] for row in rows], [row["measured_cpu_s"] for row in rows]),
        "cpu_tau": kendall_tau([row["predicted_cpu_s"] for row in rows], [row["measured_cpu_s"] for row in rows]),
        "noise": mean_error(*([row["halves_s"][half] for row in rows] for half in (0, 1))),
        "others": statistics.fmean(row["others"] for row in rows),
    }
    return {"all": found, "cases": by_case}


def compare_memory(
    calibration: Calibration,
    sizes: ModelSizes,
    peaks: dict[tuple[Strategy, int], float],
) -> list[dict[str, Any]]:
    """Predicted and measured bytes of packs; and their error as a share of all that the fullest rank holds.

    Model states are counted, not measured, on both sides of the latter.
    """
    model = calibration.memory_model(sizes, MemoryOptions(switch_bytes=0))
    rows = []
    for (strategy, tokens), measured in peaks.items():
        found = model.breakdown(strategy, tokens, num_packs=strategy.pp)
        predicted = found.activations + found.logits
        rows.append(
            {
                "strategy": str(strategy),
                "tokens": tokens,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "error": predicted / measured - 1,
                "total_error": found.total / (found.total - predicted + measured) - 1,
                "parts": found.parts(),
            }
        )
    return rows


def print_rows(name: str, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The tables of seconds."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    print(f"\n{name}: predicted / measured ms (phase and switch)")
    print(f"| lengths | {' | '.join(strategies)} | tau | regret | mean error | noise |")
    print("|---" * (len(strategies) + 5) + "|")
    for case, found in summary["cases"].items():
        mine = [row for row in rows if row["case"] == case]
        cells = [f"{row['predicted_s'] * 1e3:.0f} / {row['measured_s'] * 1e3:.0f}" for row in mine]
        print(
            f"| {case} | {' | '.join(cells)} | {found['tau']:.2f} | {found['regret']:.1%} | {found['error']:.1%} "
            f"| {found['noise']:.1%} |"
        )
    found = summary["all"]
    print(
        f"\nover all: tau {found['tau']:.3f} (target {TARGETS['tau']}); per mini-batch {found['mean_tau']:.3f}, and of "
        f"one half of the runs against the other {found['mean_tau_of_halves']:.3f}"
        f"\nregret: worst {found['worst_regret']:.1%}, mean {found['mean_regret']:.1%} (target {TARGETS['regret']:.0%})"
        f"\nmean error {found['error']:.1%} (computation alone {found['compute_error']:.1%}), noise floor {found['noise']:.1%} "
        f"(target {TARGETS['error']:.0%}, or twice the floor); others took {found['others']:.0%} of the cores"
        f"\nprocessor seconds of all ranks: mean error {found['cpu_error']:.1%}, tau {found['cpu_tau']:.3f}"
    )


def print_memory(rows: Sequence[dict[str, Any]]) -> None:
    """The table of bytes."""
    if not rows:
        print("\nmemory: not measured")
        return
    print(
        "\n| strategy | pack tokens | predicted MiB | measured MiB | error | of all | / first |\n|---"
        + "|---" * 6
        + "|"
    )
    for row in rows:
        sizes = f"{row['predicted_bytes'] / 2**20:.1f} | {row['measured_bytes'] / 2**20:.1f}"
        first = next(other for other in rows if other["tokens"] == row["tokens"])
        share = row["measured_bytes"] / first["measured_bytes"]
        errors = f"{row['error']:+.1%} | {row['total_error']:+.1%}"
        print(f"| {row['strategy']} | {row['tokens']} | {sizes} | {errors} | {share:.2f} |")
    worst = max(abs(row["total_error"]) for row in rows)
    print(
        f"memory of packs, and its error as a share of all with Adam: worst {worst:.1%} (target {TARGETS['memory']:.0%})"
    )
