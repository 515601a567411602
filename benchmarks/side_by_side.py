"""Side by side with what people use today: stock Trainer, TRL, FSDP2, tensor parallelism, DeepSpeed, and ours.

    make bench-peers                                          # 0.9M in fp32, five length files, with and without a limit
    python benchmarks/side_by_side.py --model 7M --lengths github --rounds 1
    python benchmarks/side_by_side.py --sides padded auto --lengths chat --limit off
    python benchmarks/side_by_side.py --table                        # tables and picture of everything that was measured so far
    python benchmarks/side_by_side.py --profile                      # the slowest phases of our sides: who waits for whom

All sides train the same mini-batches of one seeded list of rows, from the same weights, with the same optimizer and the
token mean as their loss. Every side has its own processes; all of them are alive at once and train one mini-batch each
when it is their turn, so that a slow minute of the machine hits all alike. Rounds after the first leave out sides that
are far behind. What a side cannot do is its row.

Results are kept by cell (model, dtype, length file) in one JSON file; a later run adds to it.
"""

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from contest import MODELS
from peers.live import PRELOAD, LiveSide, SideError, in_turns, seconds_alone
from peers.memory import Ladder, measure_memory
from peers.pages import csv_files, families_block, update_block
from peers.plan import LIMIT_MARGIN, PLAN_MARGIN, our_works, plan_limited, plan_ours
from peers.profile import profile_tables
from peers.results import Results, json_text, published
from peers.sides import Side, sides_of
from peers.tables import LIMITED, cell_tables, lines_of, near_the_fastest
from peers.work import Work

from hf_hotspa.commands.bench.workload import LENGTHS, draw, heaviest_first, micro_batch_choices, rows_of_mini_batch
from hf_hotspa.commands.rank_world import WorldError, run_world

_LIBRARY_BYTES, _KERNEL_BYTES = 250 << 20, 950 << 20
"""What a rank holds beside its model, its activations and what the system has not got back of them, about; and the kernels
that oneDNN keeps for every shape that it has met in bf16."""
_REPEATED = 1.15
"""Sides that took more than so many times the fastest in the rounds so far are not timed again; neither under the limit."""
DEFAULT_LENGTHS = tuple(LENGTHS)


@dataclass(frozen=True)
class Contestant:
    """A side and what it trains in this cell."""

    name: str
    side: Side
    work: Work


class CellRun:
    """The contest of one cell: plans, trials, turns, memory. Everything found goes into `results` at once."""

    def __init__(self, options: argparse.Namespace, results: Results, cell: tuple[str, str, str], folder: str) -> None:
        self.options, self.results = options, results
        self.model, self.dtype, self.lengths_name = cell
        self.key = " ".join(cell)
        self.logs = Path(options.logs) / self.key.replace(" ", "-")
        self.began = time.monotonic()
        rows = rows_of_mini_batch(self.lengths_name, options.longest, options.tokens, options.ranks)
        lengths = draw(self.lengths_name, rows * options.steps, options.longest, seed=1)
        self.work = Work(self.model, self.dtype, options.ranks, tuple(lengths), rows, options.steps, folder)
        self.all_sides = sides_of(options.ranks)
        self.sides = [side for side in self.all_sides if _chosen(side.name, options.sides)]
        self.broken: list[str] = []  # of ours, which are legal and should run
        self.short_peaks: dict[str, float] = {}  # of our static strategies, by bucket list

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"  {time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def run(self) -> None:
        """Runs everything of this cell."""
        options = self.options
        print(f"\n{self.key}: {self.work.mini_batch_rows} rows a mini-batch, longest {self.work.longest}", flush=True)
        self.say("calibrating and planning ours")
        force = (self.model, self.dtype) not in self.results.calibrated and not options.keep_calibration
        plan = run_world(options.ranks, plan_ours, self.work, force, preload=PRELOAD)
        self.results.calibrated.add((self.model, self.dtype))
        self.results.begin_cell(self.key, self.work, self.options)
        contestants = self._peers() + self._ours(plan)
        for number in range(options.rounds):
            again = self._worth_another_round(contestants) if number else contestants
            turned = random.Random(number).sample(again, len(again))  # others share a group each time
            for group in _groups(
                turned, options.together or _held_by_memory(options.ranks, plan["rank_bytes"], self.dtype)
            ):
                self._take_turns(group, f"round {number + 1} of {options.rounds}")
            self.results.save()
        if options.memory:
            self._memory(contestants, self.results.data["cells"][self.key]["limit_bytes"])
        self.results.save()

    def _ours(self, plan: dict[str, Any]) -> list[Contestant]:
        names = [side.name for side in self.sides if side.ours]
        sides = {side.name: side for side in self.sides}
        self._measure_short_packs(plan)
        least = self.short_peaks.get(plan["short"][plan["least"]], plan["need_bytes"] + plan["given_bytes"])
        limit = LIMIT_MARGIN * least
        self.results.set_limit(self.key, limit)
        # what the memory model leaves out is much the same under every strategy
        plan["plan_bytes"] = plan["need_bytes"] + (PLAN_MARGIN - 1) * least
        if self.options.limit != "off":
            plan |= run_world(self.options.ranks, plan_limited, self.work, plan["plan_bytes"], preload=PRELOAD)
        rooms = plan.get("room", {})
        found: list[Contestant] = []
        for limited, suffix in ((False, ""), (True, LIMITED)):
            if self.options.limit == ("off" if limited else "on"):
                continue
            for name, work in our_works(self.work, plan, limited, names).items():
                if isinstance(work, str):
                    self.results.fail(self.key, name + suffix, work)
                    continue
                self.results.note(self.key, name + suffix, strategies=work.strategies)
                same = [c for c in found if c.side.name == name and c.work.strategies == work.strategies != "auto"]
                short = name.removeprefix("ours, ")
                room, peak = rooms.get(short, work.longest), self.short_peaks.get(work.strategies, 0.0)
                if same:
                    self.results.note(self.key, name + suffix, same_as=same[0].name)
                elif limited and room < work.longest and peak > limit:
                    reason = f"takes {peak / 2**20:.0f} MiB; packs of at most {room} tokens fit always"
                    self.results.note(self.key, name + suffix, reason=reason, longest_held=room, peak_bytes=peak)
                else:
                    found.append(Contestant(name + suffix, sides[name], work))
        return found

    def _measure_short_packs(self, plan: dict[str, Any]) -> None:
        """What static strategies take with packs as short as the longest sequence: the limit follows from it."""
        sides, shown = {side.name: side for side in self.all_sides}, []
        for short, strategies in plan["short"].items() if self.options.memory and self.options.limit != "off" else ():
            side = sides[f"ours, {short}"]
            try:
                found = measure_memory(
                    side,
                    replace(self.work, strategies=strategies),
                    math.inf,
                    self._log(short),
                    self.options.limit_s,
                    None,
                )
            except SideError as error:
                self.say(f"memory of {short}: {error.reason}")
                self.broken.append(f"{self.key}: memory of ours, {short}: {error.reason}")
                continue
            self.short_peaks[strategies] = found["peak_bytes"]
            shown.append(f"{short} {found['peak_bytes'] / 2**20:.0f} MiB")
        self.say(f"packs as short as the longest sequence: {', '.join(shown) or 'not measured'}")

    def _peers(self) -> list[Contestant]:
        """The others, each with its micro-batch size."""
        found: list[Contestant] = []
        for side in self.sides:
            if side.ours:
                continue
            try:
                size = self._fastest_size(side) if side.tuned else 1
            except SideError as error:
                self._failed(side.name, error)
                continue
            self.results.note(
                self.key, side.name, micro_batch_rows=size, differs=side.differs, own_batches=side.own_batches or None
            )
            steps = min(side.steps or self.work.steps, self.work.steps)
            found.append(Contestant(side.name, side, replace(self.work, micro_batch_rows=size, steps=steps)))
        return found

    def _fastest_size(self, side: Side) -> int:
        """Rows of a micro-batch with which a side is fastest: a short trial of each, the heaviest mini-batch in it."""
        steps = min(self.options.trial_steps, self.work.steps)
        sizes = micro_batch_choices(self.work.mini_batch_rows, self.work.ranks)
        if len(sizes) == 1:
            return 1
        heavy = heaviest_first(self.work.lengths, self.work.mini_batch_rows)
        seconds: dict[int, float] = {}
        for size in sizes:  # larger ones as long as they are faster
            work = replace(self.work, lengths=heavy, micro_batch_rows=size, steps=steps)
            seconds[size] = seconds_alone(side, work, self._log(side.name), self.options.limit_s)
            if seconds[size] > min(seconds.values()):
                break
        best = min(seconds, key=lambda size: seconds[size])
        tried = ", ".join(f"{size}: {took:.2f} s" for size, took in seconds.items())
        self.say(f"{side.name}: {best} rows a micro-batch ({tried})")
        self.results.note(self.key, side.name, tried={str(size): took for size, took in seconds.items()})
        return best

    def _take_turns(self, group: Sequence[Contestant], title: str) -> None:
        """One round of some sides; those that fail get their reason."""
        live: dict[str, LiveSide] = {}
        for contestant in group:
            one = LiveSide(contestant.side, contestant.work, self._log(contestant.name), self.options.limit_s)
            try:
                one.ready()
                live[contestant.name] = one
            except SideError as error:
                self._failed(contestant.name, error)
        self.say(f"{title}: {len(live)} sides take turns, {self.work.steps} mini-batches each")
        turns, failed = in_turns(list(live.values()), list(live))
        for name, one in live.items():
            try:
                if name in failed:
                    raise failed[name]
                self.results.add_round(self.key, name, turns[name], one.finish())
            except SideError as error:
                self._failed(name, error)

    def _worth_another_round(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Those that are not far behind the fastest, of all and of ours under the limit."""
        lines = lines_of(self.results.data["cells"][self.key])
        running = {name: line for name, line in lines.items() if not self.results.failed(self.key, name)}
        near = near_the_fastest(running, _REPEATED)
        return [each for each in contestants if each.name in near]

    def _memory(self, contestants: Sequence[Contestant], limit: float) -> None:
        for number, (name, side, work) in enumerate((c.name, c.side, c.work) for c in contestants):
            if self.results.failed(self.key, name):
                continue
            if side.ours and (peak := self.short_peaks.get(work.strategies)) is not None:
                self.results.note(self.key, name, peak_bytes=peak, fits=peak <= limit)
                continue
            try:
                found = measure_memory(
                    side, work, limit, self._log(name + " memory"), self.options.limit_s, self._peaks(side)
                )
            except SideError as error:
                self.results.note(self.key, name, memory_reason=error.reason)
                self.say(f"memory of {name}: {error.reason}")
                continue
            self.results.note(self.key, name, **found)
            text = f", holds {found['longest_held']} tokens" if "longest_held" in found else ""
            self.say(
                f"memory of {name} ({number + 1} of {len(contestants)}): {found['peak_bytes'] / 2**20:.0f} MiB{text}"
            )

    def _peaks(self, side: Side) -> Ladder | None:
        """Peaks of a peer by length, of this run: they are the same for every length file."""
        if side.ours:
            return None
        return self.results.ladders.setdefault((self.model, self.dtype, side.name), Ladder(self.options.longest))

    def _failed(self, name: str, error: SideError) -> None:
        self.say(f"{name}: {error.reason}")
        self.results.fail(self.key, name, error.reason, text=str(error))
        if name.startswith("ours, "):
            self.broken.append(f"{self.key}: {name}: {error.reason}")

    def _log(self, name: str) -> Path:
        return self.logs / "".join(letter if letter.isalnum() else "-" for letter in name)


def _chosen(name: str, wanted: Sequence[str] | None) -> bool:
    return not wanted or any(text.lower() in name.lower() for text in wanted)


def _held_by_memory(ranks: int, rank_bytes: float, dtype: str) -> int:
    """Sides that the memory of this machine holds at a time."""
    from bf16_products import has_instructions  # brings in torch

    kernels = _KERNEL_BYTES if dtype == "bf16" and has_instructions() else 0
    return max(2, int(psutil.virtual_memory().available * 0.8 / ((_LIBRARY_BYTES + kernels + rank_bytes) * ranks)))


def _groups(contestants: Sequence[Contestant], together: int) -> list[list[Contestant]]:
    """Sides that are alive together, about as many in each group."""
    parts = -(-len(contestants) // together)
    return [list(contestants[part::parts]) for part in range(parts)]


def run_cells(options: argparse.Namespace, results: Results) -> list[str]:
    """Runs the cells that were asked for; what of ours should have run and did not."""
    cells = [(m, d, n) for m in options.model for d in options.dtype for n in options.lengths]
    began, broken = time.monotonic(), []
    for number, cell in enumerate(cells):
        with tempfile.TemporaryDirectory(prefix="hotspa-peers-") as folder:
            run = CellRun(options, results, cell, folder)
            try:
                run.run()
            except WorldError as error:
                print(f"  {run.key} failed: {error}", flush=True)
                broken.append(f"{run.key}: {error}")
                continue
            finally:
                broken += run.broken
        print("\n" + cell_tables(results.data, [run.key]), flush=True)
        took, left = time.monotonic() - began, len(cells) - number - 1
        print(
            f"{took / 60:.1f} min so far, {left} cells left, about {took / (number + 1) * left / 60:.0f} min",
            flush=True,
        )
    return broken


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Side by side with what people use today.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["0.9M"], help="parameters of the Llama")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(DEFAULT_LENGTHS), help="length files")
    parser.add_argument("--sides", nargs="+", metavar="TEXT", help="only sides whose names contain one of these")
    parser.add_argument("--limit", choices=("both", "on", "off"), default="both", help="ours under a memory limit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="how often mini-batches are timed, from new processes")
    parser.add_argument("--steps", type=int, default=10, help="mini-batches")
    parser.add_argument("--warmup", type=int, default=2, help="mini-batches at the beginning that do not count")
    parser.add_argument("--trial-steps", type=int, default=3, help="mini-batches to try a micro-batch size with")
    parser.add_argument("--tokens", type=int, default=3072, help="of a mini-batch, about")
    parser.add_argument("--longest", type=int, default=2048, help="tokens at which lengths are cut")
    parser.add_argument("--together", type=int, default=0, help="sides alive at a time; 0: as memory allows")
    parser.add_argument("--keep-calibration", action="store_true", help="use an earlier run's, do not measure again")
    parser.add_argument("--cache", default=".cache/peers", help="folder of calibrations")
    parser.add_argument("--limit-s", type=float, default=180.0, help="what a side may take to be ready or for a step")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure no memory")
    parser.add_argument("--json", metavar="FILE", default="out/peers.json", help="results; a later run adds to them")
    parser.add_argument("--png", metavar="FILE", help="also draw a picture (needs matplotlib)")
    parser.add_argument("--logs", metavar="FOLDER", default="out/peers-logs", help="what the sides print")
    parser.add_argument("--table", action="store_true", help="only print the tables of what was measured")
    parser.add_argument("--profile", action="store_true", help="only print the slowest phases of our sides")
    parser.add_argument(
        "--pages",
        action="store_true",
        help="only write --model and --dtype into docs/measured.md, and all cells into docs/data and docs/side-by-side.json",
    )
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.warmup, options.trial_steps, options.rounds = 4, 1, 2, 1
        options.tokens, options.longest = 512, 256
    if options.rounds < 1 or not 0 <= options.warmup < options.steps or options.trial_steps < 2:
        parser.error("--rounds must be at least 1, --trial-steps at least 2, and --warmup below --steps")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    results, broken = Results(Path(options.json)), []
    if options.pages:
        kinds = [f"{model} {dtype}" for model in options.model for dtype in options.dtype]
        root = Path(__file__).resolve().parents[1]
        update_block(root / "docs" / "measured.md", families_block(results.data, kinds))
        for name, text in csv_files(results.data).items():
            (root / "docs" / "data" / name).write_text(text)
        (root / "docs" / "side-by-side.json").write_text(json_text(published(results.data)))
    elif options.profile:
        print(profile_tables(results.data))
    elif options.table:
        print(cell_tables(results.data, list(results.data["cells"])))
    else:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["HF_HOTSPA_CACHE"] = str(Path(options.cache).resolve())
        print(", ".join(f"{key} {value}" for key, value in results.begin_run(options).items()), flush=True)
        broken = run_cells(options, results)
        print(f"\nresults: {options.json}; what the sides printed: {options.logs}")
    if options.png:
        from peers.picture import save_picture

        save_picture(results.data, Path(options.png))
        print(f"picture: {options.png}")
    if broken:
        raise SystemExit("sides of ours that are legal did not run:\n" + "\n".join(broken))


if __name__ == "__main__":
    main()
