"""The command line of `hf-hotspa bench`; imports torch only when something is measured."""

import argparse
from pathlib import Path

from hf_hotspa.commands.inputs import add_flags, file_to_write, whole
from hf_hotspa.commands.parser import Commands
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting.bench_result import BenchResult, compared_page, compared_rows, compared_sentences
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.whole_file import write_whole

FOLDER = "out/bench"
_STOPPED = 130


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine: exactness, links, and speed beside the stock Trainer",
        description="Trains a model with random weights under the stock Trainer with DDP and FSDP2, under single "
        "strategies and under auto, in turns, on the same rows of three lengths, after checking that losses and "
        "gradients are exact (else the exit code is 1). Uses the GPUs of this machine, else CPU processes; downloads "
        "nothing. Ctrl-C ends it with what was measured.",
    )
    parser.set_defaults(answer=_bench)
    texts = {
        "--quick": "ten minutes at most",
        "--compare FILE": "only show these results, of several people, side by side",
        "-o --output FOLDER": f"for bench.json, bench.html and logs (default: {FOLDER}); with --compare the page",
        "--processes N": "ranks (default: the GPUs, else the cores, at most 4)",
        "--use-cpu": "CPU processes, even if there are GPUs",
        "--model MODEL": "a config.json, its folder or a bundled model, with random weights (default: a Llama)",
        "--longest TOKENS": "of a row (default: as memory allows)",
        "--tokens TOKENS": "of a mini-batch, about",
        "--steps N": "mini-batches of a turn, with those that do not count",
        "--rounds N": "turns of each side",
        "--minutes N": "begin nothing after so many; 0 for no end (default: 9 with --quick)",
    }
    numbers = {name: {"type": whole()} for name in ("processes", "longest", "tokens", "steps", "rounds")}
    add_flags(parser, texts, compare={"nargs": "+"}, minutes={"type": float}, **numbers)


def _bench(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    from hf_hotspa.commands.bench.program import PAGE, RESULT, Bench  # imports torch

    args.output = args.output or FOLDER
    file_to_write("--output", str(Path(args.output) / RESULT))
    bench = Bench(args)
    bench.run()
    print(bench.result)
    print(f"result, to send: {Path(args.output) / RESULT}\npage: {Path(args.output) / PAGE}")
    return _STOPPED if bench.result.ended else int(not bench.result.exact)


def _compare(args: argparse.Namespace) -> int:
    file_to_write("--output", args.output)
    results = [BenchResult.load(path) for path in args.compare]
    rows = compared_rows(results)
    if len(rows) == 1:
        raise HotspaConfigError("no result has a contest", fix="give results that came further")
    print(text_table("", rows, 2), *compared_sentences(results), sep="\n")
    if args.output:
        print(f"page: {write_whole(args.output, compared_page(results))}")
    return 0
