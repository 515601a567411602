"""`auto` of two versions of this package, step by step in turn: `python benchmarks/auto_beside.py --before ../old/.venv/bin/python --seed 7`.

`--before` is the interpreter of an environment where the other version is installed. Cells as in `auto.py`. Both sides
train the same rows with `auto` in the Trainer, a side at a time: one waits while the other starts or takes a step. When both have
ended the race of their plans, or after `--raced` steps, they take `--repeats` further steps. Printed by cell: the median of the
ratios of these steps, now by before, and the ratio of the seconds of all steps, the race included. Kept in `out/auto-beside-SEED.json`.
With this version's own interpreter the ratios show the noise.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

SIDES = ("now", "before")


def train(name: str, folder: Path) -> None:
    """One side, on each rank: started by torchrun in the environment of its version, so it imports no other benchmark before its turn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    cell = json.loads((folder / "cell.json").read_text())
    rank, other = int(os.environ["RANK"]), SIDES[1 - SIDES.index(name)]
    os.environ["HF_HOTSPA_CACHE"] = str(folder / f"cache-{name}")
    seconds, plans, settled = list[float](), list[str](), list[int]()

    def wait() -> None:
        while (folder / "turn").read_text() != name:
            time.sleep(0.002)

    def hand_over() -> None:
        if rank == 0 and not (folder / f"ended-{other}").exists():
            (folder / f"turn-{name}").write_text(other)
            os.replace(folder / f"turn-{name}", folder / "turn")

    wait()
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    class InTurn(TrainerCallback):
        """Waits before a step, times it, and hands over after it."""

        begin = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0:
                if seconds:  # what follows a step, and the rows of this one, took this side's turn
                    hand_over()
                wait()
            torch.distributed.barrier()
            self.begin = time.perf_counter()

        def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
            plans.append(" + ".join(str(phase.strategy) for phase in report.phases))
            if not settled and (report.race is not None or len(seconds) >= cell["raced"]):
                settled.append(len(seconds) + 1)
                (folder / f"settled-{name}-{rank}").write_text(f"{settled[0]} {report.race}")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.distributed.barrier()
            seconds.append(time.perf_counter() - self.begin)
            theirs = folder / f"settled-{other}-{rank}"
            if settled and theirs.exists():
                last = max(settled[0], int(theirs.read_text().split(maxsplit=1)[0])) + cell["repeats"] + 1
                control.should_training_stop = len(seconds) >= last

    def arguments(limit: int | None) -> Any:
        return HotSPaTrainingArguments(
            output_dir=str(folder), max_steps=cell["steps"], hotspa_mini_batch_size=cell["rows"], hotspa_memory_limit_mb=limit,
            use_cpu=True, save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, hotspa_report=False,
            hotspa_staging_mb=4,
        )  # fmt: skip

    torch.manual_seed(0)
    model, limit = LlamaForCausalLM(LlamaConfig(**cell["shape"])), None
    if cell["limited"]:
        if name == SIDES[0]:  # the first one; the other side has the same limit
            from auto import least_limit

            (folder / f"limit-{rank}").write_text(str(least_limit(model, arguments(None), cell["longest"])[0]))
        limit = int((folder / f"limit-{rank}").read_text())
    trainer = HotSPaTrainer(model=model, args=arguments(limit), train_dataset=cell["data"], callbacks=[InTurn()])
    trainer.train()
    trainer.close_engine()
    if rank == 0:
        (folder / f"seconds-{name}").write_text(json.dumps(seconds))
        (folder / f"plans-{name}").write_text(json.dumps(plans))
        (folder / f"ended-{name}").touch()
        hand_over()


def run_cell(pythons: dict[str, Path], ranks: int, cell: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a cell in turn: the seconds of each, by step, and the step at which each race had ended."""
    import numpy as np
    from auto import distribution

    from hf_hotspa.commands.bench.workload import make_rows

    lengths = distribution(options.seed, cell["distribution"], 4096, options.longest)
    size = max(1, round(options.tokens / float(np.mean(lengths)) / ranks)) * ranks
    rows = make_rows(lengths[: max(40 * size, 1024)], cell["shape"]["vocab_size"], options.seed)
    data = [{key: np.asarray(values).tolist() for key, values in row.items()} for row in rows]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        known = vars(options)
        (folder / "cell.json").write_text(
            json.dumps(
                {**cell, **{k: known[k] for k in ("raced", "repeats", "steps", "longest")}, "rows": size, "data": data}
            )
        )
        (folder / "turn").write_text(SIDES[0])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        running = {}
        for name, python in pythons.items():
            command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            with (folder / f"errors-{name}").open("w") as errors:
                running[name] = subprocess.Popen(
                    [*command, __file__, "--side", name, made],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
        while any(process.poll() != 0 for process in running.values()):
            failed = [name for name, process in running.items() if process.poll()]
            if failed:  # the other one would wait for its turn for ever
                for process in running.values():
                    process.terminate()
                    process.wait()
                lines = (folder / f"errors-{failed[0]}").read_text().strip().splitlines()
                return {"error": lines[-40:] or [f"the side {failed[0]!r} ended with {running[failed[0]].returncode}"]}
            time.sleep(0.1)
        settled = {name: (folder / f"settled-{name}-0").read_text() for name in SIDES}
        found = {name: json.loads((folder / f"seconds-{name}").read_text()) for name in SIDES}
        plans = {name: json.loads((folder / f"plans-{name}").read_text()) for name in SIDES}
        return {"rows": size, "settled": settled, "plans": plans, **found}


def table(results: dict[str, Any], repeats: int) -> str:
    """All cells: now by before."""
    lines = [
        "| cell | steps | s a step, before | now by before, after the races | all steps |",
        "|---|---|---|---|---|",
    ]
    after, whole = list[float](), list[float]()
    for name, cell in sorted(results.items()):
        if "error" in cell:
            lines.append(f"| {name} | {cell['error'][-1]} ||||")
            continue
        now, before = cell["now"], cell["before"]
        compared = slice(-repeats - 1, -1)  # one side ends beside the other's last step
        after.append(median(a / b for a, b in zip(now[compared], before[compared], strict=True)))
        whole.append(sum(now[1:]) / sum(before[1:]))  # the first step holds the search
        lines.append(f"| {name} | {len(now)} | {median(before[compared]):.3f} | {after[-1]:.3f} | {whole[-1]:.3f} |")
    if after:
        lines.append(
            f"\n{len(after)} cells: geometric mean after the races {geometric_mean(after):.3f} ({min(after):.2f} to {max(after):.2f}), "
            f"all steps {geometric_mean(whole):.3f} ({min(whole):.2f} to {max(whole):.2f})"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs cells that have not run yet, and prints all."""
    from auto import cells
    from result_file import write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="python of the other version's environment")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cells", nargs="+", default=[""], help="expressions, one of which their names must hold")
    parser.add_argument("--tokens", type=int, default=3072, help="of a mini-batch, about")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200, help="of the run whose first steps these are")
    parser.add_argument("--raced", type=int, default=24, help="steps after which a race counts as ended")
    parser.add_argument("--repeats", type=int, default=8, help="steps that are compared")
    parser.add_argument("--minutes", type=float, default=90, help="after which no cell begins")
    options = parser.parse_args()
    options.published = False
    path = Path("out") / f"auto-beside-{options.seed}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    pythons = dict(zip(SIDES, (Path(sys.executable), options.before), strict=True))
    for name, ranks, cell in cells(options):
        if name not in results and any(re.search(part, name) for part in options.cells) and time.monotonic() < end:
            results[name] = run_cell(pythons, ranks, cell, options)
            write_json(path, results)
            print(table({name: results[name]}, options.repeats).splitlines()[2], flush=True)
    print(table(results, options.repeats))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
