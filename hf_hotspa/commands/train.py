"""`hf-hotspa train`: fine-tunes a model on the processes of a launcher, or starts processes without one.

Owns the number of processes and the command that starts them; each runs `trainer/script.py`. Errors in the command line
or in a name are reported once, before any process starts.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hf_hotspa.commands.inputs import whole
from hf_hotspa.data.collator import SKIP
from hf_hotspa.errors import HotspaConfigError, HotspaError, LaunchError
from hf_hotspa.parallel import backends
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.trainer.arguments import AUTO, HotSPaTrainingArguments, evaluation_strategy
from hf_hotspa.trainer.given_arguments import check_values
from hf_hotspa.trainer.script import FlagParser, check_script, parse, parser_of, read, run

_MOST_CPU_PROCESSES = 4  # without --processes: each process has its own copy of the data, so more must be asked for
_PROCESSES, _ALL = "--processes", "--help-all"


def main(words: Sequence[str]) -> int:
    """Runs the command. If it starts processes, this process becomes their launcher. `words`: the arguments after
    `hf-hotspa train`. Returns the exit code, 0; 2 when the input is wrong. Raises `HotspaError`: in a process of a
    launcher, which shows it."""
    own = FlagParser((), prog="hf-hotspa train", add_help=False)
    own.add_argument(_PROCESSES, type=whole(), default=None)
    own.add_argument("--verbose", action="store_true")
    ours, rest = own.parse_known_args(list(words))
    rest += ["--log_level", "info"] * ours.verbose
    parser = parser_of(prog="hf-hotspa train")
    if _ALL in rest:
        parser_of(everything=True, prog="hf-hotspa train").print_help()
        return 0
    launched = int(os.environ.get("WORLD_SIZE", "0"))
    if launched:
        if ours.processes not in (None, launched):
            fix = f"leave {_PROCESSES} out"
            raise LaunchError(f"{_PROCESSES} {ours.processes}, and the launcher started {launched}", fix=fix)
        run(parse(parser, rest))
        return 0
    try:
        given = read(parser, rest)
        check_values(given, HotSPaTrainingArguments)
        evaluation_strategy(given.hotspa_eval_strategy)
        check_script(given, given.hotspa_empty_rows == SKIP)
        count = number_of_processes(ours.processes, given, torch.cuda.device_count())
        if count > 1:
            _launch(count, rest)
        run(parse(parser, rest))
    except HotspaError as error:
        print(f"hf-hotspa train: {error}", file=sys.stderr)  # `str` of the error escapes text from files
        return 2
    return 0


def number_of_processes(asked: int | None, given: Any, gpus: int) -> int:
    """Returns how many processes to start. `asked`: the value of --processes, or None. Raises `HotspaConfigError`:
    there is no GPU and --use_cpu is not given, or there are too few GPUs."""
    strategies = (given.hotspa_strategies or "").strip()
    needed = parse_buckets(strategies)[0].strategy.world_size if strategies not in ("", AUTO) else None
    if asked is not None and needed is not None and asked != needed:
        raise LaunchError(f"{_PROCESSES} {asked}, and --hotspa_strategies need {needed}", fix=f"leave {_PROCESSES} out")
    if not gpus and not given.use_cpu:
        raise HotspaConfigError(
            "this machine has no GPU that torch can use",
            fix=f"for CPU processes add --use_cpu (and {_PROCESSES} N); for a GPU check nvidia-smi, and that torch is a CUDA build",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = asked or needed or (min(cores, _MOST_CPU_PROCESSES) if given.use_cpu else gpus)
    if not given.use_cpu and count > gpus:
        raise HotspaConfigError(f"{count} processes on {gpus} GPUs", fix="use at most one process a GPU")
    return count


def _launch(count: int, words: Sequence[str]) -> NoReturn:
    """Becomes the launcher, so that one program receives Ctrl-C and SIGTERM."""
    environment = dict(os.environ)
    backends.prefer_loopback(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    line = [sys.executable, "-m", "hf_hotspa.commands.own_launcher", "--rdzv-backend", "loopback"]
    line += ["--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(count)]
    sys.stdout.flush()
    os.execve(sys.executable, [*line, "-m", "hf_hotspa.cli", "train", *words], environment)
