"""How well seconds are predicted before and after a calibration has learned from a run, in one run.

    python benchmarks/learned_factors.py --ranks 4 --model 0.9M

Each strategy runs two mini-batches with lengths of one distribution in turn, round after round. The first teaches, as a
run under `auto` does. Printed are measured over predicted seconds of the second, without switches: by the calibration with which `auto` starts, after it has learned, and after it has learned
from the other strategies only, by the trend over degrees; and how much slower the strategy that is predicted to be
fastest is than the fastest one.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from contest import MODELS, make_model
from cost_model import Case, make_mini_batch
from worlds import run_world

STRATEGIES = {
    2: ("dp2", "tp2", "cp2", "pp2", "dp2+z3"),
    4: ("dp4", "dp2tp2", "tp4", "dp2cp2", "cp4", "cp2tp2", "dp2pp2", "dp4+z3", "dp2tp2+z3"),
}
_PACK = 2048


def cases() -> tuple[Case, Case]:
    """What teaches, and what is predicted: two draws of log-normal lengths."""
    rng = np.random.default_rng(5)
    drawn = [np.clip(rng.lognormal(5.5, 0.8, 24), 16, 2048).astype(int) for _ in range(2)]
    return Case("taught", tuple(map(int, drawn[0]))), Case("predicted", tuple(map(int, drawn[1])))


def measure(rank: int, world_size: int, options: argparse.Namespace, folder: str) -> Any:
    """The calibration, and by case and strategy predicted and measured seconds; the work of one rank."""
    from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
    from hf_hotspa.costs.cost_model import CostModel
    from hf_hotspa.costs.memory import MemoryOptions
    from hf_hotspa.costs.sizes import ModelSizes
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.strategy import Bucket, Strategy
    from hf_hotspa.trainer.run_plan import START_S

    model, strategies = make_model(options.model), [Strategy.parse(name) for name in STRATEGIES[world_size]]
    calibration = calibrate(
        model.config, strategies=strategies, cache=Path(folder), procedure=Procedure(seconds=START_S)
    )
    engine = HotSPaEngine(model, [Bucket(s, edge, edge) for edge, s in enumerate(strategies, 1)])
    made = {(case.name, s): make_mini_batch(engine, case, s, _PACK) for case in cases() for s in strategies}
    seconds: dict[Any, list[float]] = {key: [] for key in made}
    for index in range(options.rounds + 1):
        for key, mini_batch in made.items():
            (phase,) = engine.forward_backward(mini_batch).phases
            if index:  # the first pays for memory and kernels
                seconds[key].append(phase.compute_s)
    sizes = ModelSizes(engine.description.shape, "float32", vector=engine.description.vector)
    engine.close()

    def predicted(known: Any) -> dict[Any, float]:
        time = CostModel.of_calibration(known, sizes, MemoryOptions()).time
        return {
            key: time.phase_seconds(key[1], [[p.lengths for p in packs] for packs in batch.plan.phases[0].replicas])
            for key, batch in made.items()
        }

    return rows_of(calibration, seconds, strategies, predicted) if rank == 0 else None


def rows_of(calibration: Any, seconds: Any, strategies: Sequence[Any], predicted: Any) -> dict[str, tuple[float, ...]]:
    """By strategy: measured seconds of the second case, and those predicted before, after, and from the others."""
    from hf_hotspa.costs.calibration import RunSample

    before = predicted(calibration)
    taught = {
        s: RunSample(str(s), median(seconds["taught", s]) / before["taught", s], len(seconds["taught", s]))
        for s in strategies
    }
    after, rows = predicted(calibration.with_runs(taught.values())), {}
    for s in strategies:
        of_others = predicted(calibration.with_runs(sample for other, sample in taught.items() if other != s))
        key = "predicted", s
        rows[str(s)] = median(seconds[key]), before[key], after[key], of_others[key]
    return rows


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=STRATEGIES, default=4)
    parser.add_argument("--model", choices=MODELS, default="0.9M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_world(options.ranks, measure, options, folder)
    print(f"{options.model}, {options.ranks} ranks: measured over predicted seconds\n")
    print("| strategy | measured s | before | after | learned from the others |\n|---|---|---|---|---|")
    for name, (measured, *each) in rows.items():
        print(f"| {name} | {measured:.3f} | {' | '.join(f'{measured / one:.2f}' for one in each)} |")
    errors = [geometric_mean(max(m[0] / m[i], m[i] / m[0]) for m in rows.values()) for i in (1, 2, 3)]
    fastest = min(m[0] for m in rows.values())
    regrets = [min(rows.values(), key=lambda m, i=i: m[i])[0] / fastest for i in (1, 2, 3)]
    print(f"| mean factor of error | | {' | '.join(f'{one:.2f}' for one in errors)} |")
    print(f"| predicted fastest over fastest | | {' | '.join(f'{one:.2f}' for one in regrets)} |")


if __name__ == "__main__":
    main()
