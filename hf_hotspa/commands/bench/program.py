"""`hf-hotspa bench`: exactness, links and predictions first, then sides in turn, on the processes that it starts.

Owns the order of parts, what a part may take, and what is kept: the result is written after every part, so Ctrl-C, a part
that fails or a time that is over end the run with all that was measured. No process is left behind.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from tqdm import tqdm

from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
from hf_hotspa.commands import environment
from hf_hotspa.commands.bench import contestants, exactness
from hf_hotspa.commands.bench.contestants import ALONE, OURS, STOCK, Contestant, save_model
from hf_hotspa.commands.bench.workload import LengthFile, Work, llama
from hf_hotspa.commands.rank_world import SHARED_GPU, WorldError, run_world
from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.model_config import read_config
from hf_hotspa.errors import HotspaConfigError, HotspaError, printable
from hf_hotspa.reporting.bench_result import (
    AUTO,
    BenchResult,
    FileResult,
    Links,
    PoolErrors,
    Prediction,
    SideResult,
    bench_page,
)
from hf_hotspa.search.bucket_plan import Plan
from hf_hotspa.search.histogram import Counts
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy
from hf_hotspa.versions import version_of
from hf_hotspa.whole_file import write_whole

T = TypeVar("T")
RESULT, PAGE = "bench.json", "bench.html"
FILES = ("chat", "commoncrawl", "github")
_MOST_CPU_PROCESSES = 4
_PRELOAD = (
    "torch.distributed.pipelining", "torch.distributed.fsdp", "accelerate", "datasets", "deepspeed",
    "transformers.distributed",
    "transformers.models.llama.modeling_llama", "hf_hotspa.commands.bench.contestants",
    "hf_hotspa.commands.bench.exactness",
)  # fmt: skip
_SINGLES = 2  # single strategies that run, beside replicas alone
_LEFT_S = 5.0  # a turn does not begin with less time left
_LARGE_GPU = 30 << 30  # bytes from which a GPU gets longer rows


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    longest: int  # tokens of a row
    tokens: int  # of a mini-batch, about
    steps: int  # mini-batches of a turn, warm-up included
    warmup: int
    rounds: int
    minutes: float  # after which nothing begins; 0 for no end
    limit_s: float  # of a part


def size_of(quick: bool, memory_bytes: int) -> Size:
    """Returns what fits this machine. `memory_bytes`: of a GPU; 0 on CPU."""
    if not memory_bytes:
        return Size(1024, 2048, 4, 1, 2, 9.5, 200.0) if quick else Size(2048, 3072, 10, 2, 3, 0.0, 600.0)
    longest = 8192 if memory_bytes >= _LARGE_GPU else 2048
    if quick:
        return Size(longest, 4 * longest, 5, 2, 2, 9.5, 200.0)
    return Size(4 * longest, 16 * longest, 10, 2, 3, 0.0, 900.0)


class _Stopped(Exception):
    """The user, or a signal, ends the run."""


class Bench:
    """One run, and the result so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        gpus = torch.cuda.device_count()
        self.cuda = bool(gpus) and not options.use_cpu
        self.ranks = processes_of(options.processes, gpus if self.cuda else 0)
        memory = torch.cuda.get_device_properties(0).total_memory if self.cuda else 0
        self.size = _sized(size_of(options.quick, memory), options)
        self.bf16 = self.cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        small = llama(1024, 16, 32000, self.size.longest) if self.cuda else llama(128, 4, 512, self.size.longest)
        self.config = read_config(options.model) if options.model else small
        self.folder, self.began = Path(options.output), time.monotonic()
        self.bar = tqdm(total=1, unit="part", disable=not sys.stderr.isatty(), leave=False, file=sys.stderr)
        self.result = BenchResult(
            program=_program(),
            started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
            settings={
                "form": "quick" if options.quick else "full",
                "dtype": "bfloat16 with fp32 weights" if self.bf16 else "float32",
                **{name: str(value) for name, value in asdict(self.size).items()},
            },
            model={},
            machine=environment.facts(),
            ranks=self.ranks,
            devices=_devices(self.cuda, self.ranks),
            topology=_output("nvidia-smi", "topo", "-m") if self.cuda else "",
        )

    # -- parts ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all parts, until one of the ends; see the file's head."""
        self.save()
        try:
            with _stopping(), tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder:
                self._parts(folder)
        except _Stopped as stop:
            self._change(ended=str(stop))
        finally:
            self.bar.close()
            self.save()

    def _parts(self, folder: str) -> None:
        self.say(f"{self.result.devices}, {self.ranks} ranks, {self.result.settings['dtype']}")
        errors = self.part("exactness", exactness.run, self.cuda)
        if errors is not None:
            self._change(exactness={pool: PoolErrors(**each) for pool, each in errors.items()})
        self.say(self.result.exact_sentence)
        start = str(Path(folder) / "start")
        parameters = self.part("model", save_model, self.config, start, ranks=1)
        if parameters is None:
            self._change(ended="the model could not be made")
            return
        vocabulary = int(self.config["vocab_size"])
        self._change(model={"model": str(self.config["model_type"]), "parameters": f"{parameters:,}"})
        calibration = self._calibrated(folder)
        size = self.size
        files = [LengthFile.of(name, size.longest, size.tokens, self.ranks, size.steps) for name in FILES]
        work = Work(
            start, vocabulary, self.bf16, self.cuda, files[0], size.warmup, str(Path(folder) / "run"), calibration,
            micro_tokens=4 * size.longest,
        )  # fmt: skip
        contests = [(file, self._predicted(file, start, calibration)) for file in files]
        self.bar.total = 3 + sum(len(sides) for _, sides in contests) * size.rounds
        for number in range(size.rounds):
            for file, sides in contests:
                for at in range(len(sides)):
                    side = sides[(at + number) % len(sides)]
                    self._turn(number, side, replace(work, file=file))

    def part(self, name: str, fn: Callable[..., T], *args: object, ranks: int | None = None) -> T | None:
        """Runs a part on its own processes; None if it failed or was left out, which the result then says."""
        left = self._left()
        if left < _LEFT_S:
            self._leave_out(name, f"the {self.size.minutes:g} minutes were over")
            return None
        self.bar.set_description(name)
        began, log = time.monotonic(), self.folder / "logs" / "".join(c if c.isalnum() else "-" for c in name)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            value = run_world(
                ranks or self.ranks, fn, *args, limit_s=min(left, self.size.limit_s), log=str(log), preload=_PRELOAD,
                device="cuda" if self.cuda else "cpu", timeout_s=self.size.limit_s,
            )  # fmt: skip
        except (WorldError, HotspaError) as error:
            write_whole(f"{log}.error", f"{error}\n")
            self._leave_out(name, error.reason if isinstance(error, WorldError) else str(error))
            return None
        finally:
            self._change(parts={**self.result.parts, name: round(time.monotonic() - began, 1)})
            self.bar.update()
            self.save()
        return value

    def _calibrated(self, folder: str) -> str | None:
        measured = self.part("links", measure, self.config, self.bf16)
        if measured is None:
            return None
        slots = None if measured.slots == float("inf") else measured.slots
        self._change(links=Links(measured.intra.latency_s, measured.intra.bandwidth, slots))
        measured.save(path := Path(folder) / "calibration.json")
        return str(path)

    def _predicted(self, file: LengthFile, model: str, calibration: str | None) -> list[Contestant]:
        """Records what is predicted for a file before anything of it runs, and returns the sides that will run."""
        stock, prediction = STOCK if self.ranks > 1 else ALONE, None
        singles = [Contestant(f"{OURS}, dp{self.ranks}", OURS, strategies=f"dp{self.ranks}:{file.longest}")]
        if calibration is not None:
            try:
                prediction, singles = predict(self.ranks, file, model, calibration)
            except HotspaError as error:
                self._leave_out(f"prediction for {file.name}", str(error))
        auto = Contestant(AUTO, OURS, strategies="auto")
        sides = [*stock, *singles, *([auto] if calibration is not None else [])]
        of_file = FileResult(
            file.name, file.digest, file.rows, sum(file.lengths) / self.size.steps, file.longest, prediction,
            {side.name: SideResult(side.kind, side.strategies) for side in sides},
        )  # fmt: skip
        self._change(files=(*self.result.files, of_file))
        return sides

    def _turn(self, number: int, side: Contestant, work: Work) -> None:
        at = next(i for i, file in enumerate(self.result.files) if file.name == work.file.name)
        file = self.result.files[at]
        known = file.sides[side.name]
        if known.failed:  # it would fail again, and the others' time is better spent
            return
        name = f"{work.file.name}, {side.name}, round {number + 1}"
        turn = self.part(name, contestants.run, side, work, known.micro_rows)
        if turn is None and side.kind != OURS and known.micro_rows != 1 and self._left() > _LEFT_S:
            turn = self.part(f"{name}, single rows", contestants.run, side, work, 1)
        if turn is None:
            failed = "" if known.rounds else self.result.not_done[-1].partition(": ")[2]
            done = replace(known, failed=failed)
        else:
            done = replace(
                known,
                rounds=(*known.rounds, tuple(turn["seconds"])),
                losses=tuple(turn["losses"]),
                peak_bytes=turn["peak_bytes"],
                micro_rows=turn["micro_rows"],
                ran=tuple(turn["ran"]),
            )
        changed = replace(file, sides={**file.sides, side.name: done})
        self._change(files=(*self.result.files[:at], changed, *self.result.files[at + 1 :]))

    # -- the result -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        tqdm.write(printable(f"[{time.monotonic() - self.began:4.0f} s] {text}"), file=sys.stderr)

    def save(self) -> None:
        self.result.save(self.folder / RESULT)
        write_whole(self.folder / PAGE, bench_page(self.result))

    def _left(self) -> float:
        return 60 * self.size.minutes - (time.monotonic() - self.began) if self.size.minutes else float("inf")

    def _leave_out(self, name: str, why: str) -> None:
        why = printable(why.replace(str(Path.home()), "~"))[:300]
        self.say(f"{name}: {why}")
        self._change(not_done=(*self.result.not_done, f"{name}: {why}"))

    def _change(self, **changes: object) -> None:
        self.result = replace(self.result, **cast(dict[str, Any], changes))


def predict(ranks: int, file: LengthFile, model: str, calibration: str) -> tuple[Prediction, list[Contestant]]:
    """Predicts a file's seconds, by the plan that `hf-hotspa plan` makes, and returns the single strategies to run: replicas
    alone, and the fastest as predicted. Raises `HotspaError`: nothing holds the longest row."""
    setup = Setup.read(model, f"1x{ranks}", calibration=calibration)
    known = [s for s in setup.strategies() if s.is_common and setup.cost.time.knows(s)]
    wide = str(Strategy(ranks))
    names = list(dict.fromkeys([wide, *map(str, known)]))
    planned = make_plan(setup, Counts.of(file.lengths), file.longest, file.rows, written=names).plan
    priced = {rival.name: rival for rival in planned.written if rival.seconds is not None}
    fastest = sorted(priced, key=lambda name: priced[name].seconds or 0.0)
    chosen = list(dict.fromkeys([*([wide] if wide in priced else []), *fastest]))[: 1 + _SINGLES]
    sides = [
        Contestant(f"{OURS}, {name}", OURS, strategies=",".join(map(str, priced[name].buckets))) for name in chosen
    ]
    seconds = {AUTO: planned.choice.seconds} | _predicted_stock(planned, ranks)
    seconds |= {f"{OURS}, {name}": float(priced[name].seconds or 0.0) for name in chosen}
    return Prediction(str(planned.choice), seconds, planned.answer, planned.switching), sides


def _predicted_stock(plan: Plan, ranks: int) -> dict[str, float]:
    """The plan's predictions for stock sides, by their names."""
    sides, seconds = STOCK if ranks > 1 else ALONE, dict[str, float]()
    for side in sides:
        stage = 3 if side.kind == contestants.FSDP else 0
        fitting = [
            baseline.seconds
            for baseline in plan.baselines
            if baseline.stage == stage
            and bool(baseline.padded) == (side.rows == contestants.PADDED)
            and not baseline.liger
            and baseline.seconds is not None
        ]
        if fitting:
            seconds[side.name] = min(fitting)
    return seconds


# -- on the ranks -----------------------------------------------------------------------------------------------------


def measure(rank: int, world_size: int, config: dict[str, Any], bf16: bool) -> Calibration:
    """Calibrates the model on these ranks: links, packs, switches, memory. Collective."""
    from transformers import AutoConfig

    fields = {name: value for name, value in config.items() if name != "model_type"}
    return calibrate(
        AutoConfig.for_model(str(config["model_type"]), **fields),
        compute_dtype=torch.bfloat16 if bf16 else torch.float32,
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None,
        force=True,
        procedure=Procedure(),
    )


# -- the machine ------------------------------------------------------------------------------------------------------


def processes_of(asked: int | None, gpus: int) -> int:
    """Returns how many ranks to start. `gpus`: that are used; 0 on CPU. Raises `HotspaConfigError`: more ranks than GPUs."""
    if not gpus:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return asked or min(cores, _MOST_CPU_PROCESSES)
    if asked is not None and asked > gpus and os.environ.get(SHARED_GPU) != "1":
        raise HotspaConfigError(
            f"--processes {asked} on {gpus} GPUs",
            why="ranks that share a GPU need NCCL 2.30 or newer",
            fix=f"use at most {gpus}, or set {SHARED_GPU}=1",
        )
    return asked or gpus


def _sized(size: Size, options: argparse.Namespace) -> Size:
    given = {name: getattr(options, name) for name in ("longest", "tokens", "steps", "rounds", "minutes")}
    size = replace(size, **{name: value for name, value in given.items() if value is not None})
    if size.steps <= size.warmup:
        size = replace(size, warmup=size.steps - 1)
    if size.steps < 2:
        raise HotspaConfigError(f"--steps {size.steps}", why="the first one does not count", fix="use at least 2")
    return size


def _devices(cuda: bool, ranks: int) -> str:
    if not cuda:
        return f"{ranks} CPU processes"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _program() -> str:
    """Version and, in a clone, commit; `+` if files of it were changed."""
    root, version = Path(__file__).resolve().parents[3], f"hf_hotspa {version_of('hf-hotspa')}"
    if not (root / ".git").exists():
        return version
    commit = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
    changed = "+" if _output("git", "-C", str(root), "status", "--porcelain", "-uno") else ""
    return f"{version} ({commit}{changed})" if commit else version


@contextmanager
def _stopping() -> Iterator[None]:
    """Makes the first Ctrl-C or SIGTERM end the run with what it has; the second one acts as always."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        restore()
        raise _Stopped(f"stopped by {signal.Signals(number).name}")

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
