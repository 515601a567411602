"""The golden table of the search: 120 questions, and the predicted seconds of the plans that it found for them.

    python -m tests.plan_table            # asks all again and prints the losses; some minutes
    python -m tests.plan_table --write    # writes tests/data/plan_table.json: only if plans became better

`test_plan_golden.py` compares. The questions are cells that benchmarks and pages have: 80 of the 160 gains of
docs/predicted.md and its 16 other cells that fit, as `hf-hotspa plan` asks; and 24 of `benchmarks/auto.py`, as
`hotspa_strategies=auto` asks, on devices that share two cores.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hf_hotspa.costs.hardware import Device, Hardware
from hf_hotspa.costs.model_config import model_from
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.automatic import RunQuestion, make_auto_plan
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.histogram import read_lengths
from hf_hotspa.search.offers import choose
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import SearchOptions
from hf_hotspa.search.setup import Setup

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "plan_table.json"
MOST, MOST_ON_AVERAGE = 1.03, 1.005
"""How much slower a plan may become: of one question, and on average over all."""
_SEED, _LENGTHS_SEED = 72, 81517
MACHINE = Hardware("two shared cores", Device(1 << 40, {"float32": 4e10}, 1e10), 4, 1e9, 1e9)
DOES_NOT_FIT = "Qwen3-32B r=16 4090-24g github"


@dataclass(frozen=True)
class Answer:
    """A plan, and its predicted seconds of a mini-batch."""

    plan: str
    seconds: float


def questions() -> dict[str, Callable[[], Answer]]:
    """Name and question of each cell, in the order of the table."""
    sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]
    import plan_tables as pages  # type: ignore[import-not-found]

    found: dict[str, Callable[[], Answer]] = {}
    known = json.loads(pages.GAINS.read_text())
    cells = [cell for cell in pages.GAIN_CELLS if known[" ".join(map(str, cell))]["fits"]]
    for index in sorted(np.random.default_rng(_SEED).permutation(len(cells))[:80].tolist()):
        model, cluster, lora, lengths = cells[index]
        name = f"{model}{f' r={lora}' if lora else ''} {cluster} {lengths}"
        found[name] = partial(_planned, pages.GAIN_MODELS[model], cluster, "h100-80g", lora, lengths, 32768)
    for model, cluster in product(pages.MODELS, pages.CLUSTERS):
        found[f"{model} {cluster}"] = partial(_planned, model, cluster, pages.HARDWARE, None, pages.LENGTHS, 32768)
    for model, lora, hardware, lengths, longest in pages.SHARDED_CASES:
        config = {**pages._QWEN3, **pages.CONFIGS[model]}
        name = f"{model}{f' r={lora}' if lora else ''} {hardware} {lengths}"
        found[name] = partial(_planned, config, "1x8", hardware, lora, lengths, longest)
    del found[DOES_NOT_FIT]
    for ranks, shape, number in product((2, 4), (0, 1), range(6)):
        limited = (number + shape + ranks // 2) % 2 == 0
        name = f"auto {ranks}x-{shape}-{number}{'-limit' if limited else ''}"
        found[name] = partial(_raced, ranks, shape, number, limited)
    return found


def _planned(model: Any, cluster: str, hardware: str, lora: str | None, lengths: str, longest: int) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        if not isinstance(model, str):
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(model))
            model = str(config)
        setup = Setup.read(model, cluster, hardware, lora=lora)
    drawn, top = read_lengths(lengths, 512, longest, setup.model.shape.max_position_embeddings)
    question = Question(setup.cost, Capacities(setup.cost.memory, setup.limit_bytes), drawn, 512, top)
    choice = choose(question, setup.strategies(), SearchOptions(may_go_round=True))
    return Answer(str(choice), choice.seconds)


def _raced(ranks: int, shape: int, number: int, limited: bool) -> Answer:
    """A cell of `benchmarks/auto.py`: 12,000 tokens a mini-batch, a longest row of 2048, fp32 on CPU ranks."""
    import auto  # type: ignore[import-not-found]

    config = {"model_type": "llama", **auto.shapes(_LENGTHS_SEED)[shape]}
    setup = Setup(
        model_from(config, "cell", "made up"), 1, ranks, replace(MACHINE, devices_per_node=ranks), dtype="float32"
    )
    cost = replace(setup.cost, time=replace(setup.cost.time, slots=2.0, fixed_s=0.01))
    lengths = auto.distribution(_LENGTHS_SEED, number, 2048, 2048)
    size = max(1, round(12_000 / float(np.mean(lengths)) / ranks)) * ranks
    plain = [s for s in setup.strategies() if auto.is_plain(s) and not s.rc and not s.sp]
    least = min(cost.memory.breakdown(s, max(lengths), num_packs=1).total for s in plain)
    asked = RunQuestion(
        SequenceTable.from_lengths(lengths), size, auto._LIMIT * least if limited else None, raced=True,
        has_host_memory=False,
    )  # fmt: skip
    plan = make_auto_plan(asked, setup.strategies(), cost)
    return Answer(str(plan.choice), plan.choice.seconds)


def ask(names: Sequence[str]) -> dict[str, Answer]:
    every = questions()
    return {name: every[name]() for name in names}


def losses(answers: Mapping[str, Answer]) -> dict[str, float]:
    """How much slower than in the table each plan is, as a factor."""
    table = json.loads(TABLE.read_text())
    return {name: answer.seconds / table[name]["seconds"] for name, answer in answers.items()}


def main() -> None:
    answers = ask(list(questions()))
    if "--write" in sys.argv[1:]:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(answer))}" for name, answer in answers.items())
        TABLE.write_text(f"{{\n{lines}\n}}\n")
    factors = losses(answers)
    for name, factor in sorted(factors.items(), key=lambda each: each[1]):
        if abs(factor - 1) > 1e-4:
            print(f"{factor:.4f} {name}")
    print(f"{len(answers)} questions: mean {np.mean(list(factors.values())):.4f}, most {max(factors.values()):.4f}")


if __name__ == "__main__":
    main()
