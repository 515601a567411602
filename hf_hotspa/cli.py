"""The command `hf-hotspa`.

`plan` chooses strategies, buckets and packs for a model, machines and lengths. `estimate` gives the memory of one
strategy. `formulas` prints the textbook's numbers of 3D parallelism. All three read a config.json and data sheets,
import neither torch nor transformers, and answer in seconds. `train` fine-tunes, with torch. `calibrate` measures this
machine, with torch; `plan --calibration` reads its output. `bench` measures exactness and speed, with torch. Wrong input gives one message on stderr and exit code 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from hf_hotspa._lazy import needs_training_libraries
from hf_hotspa.commands import checkpoint_files, environment, inputs
from hf_hotspa.commands.bench import command as bench
from hf_hotspa.commands.inputs import add_flags, file_to_write, whole
from hf_hotspa.commands.parser import USAGE_ERROR, CommandParser, Commands
from hf_hotspa.commands.train_help import HELP, OVERVIEW, RUN_HELP
from hf_hotspa.costs.calibration import FrozenBase
from hf_hotspa.costs.memory import UNLIMITED_TOKENS
from hf_hotspa.costs.model_config import preset_names
from hf_hotspa.costs.terms import TASKS, form_names, forms_help, optimizer_states, reduced_states
from hf_hotspa.errors import HotspaConfigError, HotspaError, printable
from hf_hotspa.layout.vector import ACCUMULATION_DTYPES, AUTO, FP32, WIRE_DTYPES, GradientDtypes
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES
from hf_hotspa.packing.pipeline_order import SCHEDULES
from hf_hotspa.reporting.compare import compare, compare_page, sentences, strategy_rows
from hf_hotspa.reporting.measure_table import rows_of, strategy_columns
from hf_hotspa.reporting.page import PAGE_NAME, SUFFIX, report_page, save_pictures
from hf_hotspa.reporting.run_log import FILE_NAME, read_run_log
from hf_hotspa.reporting.summary import advice, summarize, verdict
from hf_hotspa.reporting.svg import short
from hf_hotspa.reporting.terminal import CleanOutput, text_table
from hf_hotspa.seam import add_command_flags, settings_of_command
from hf_hotspa.search.formula_table import formulas_text, make_table
from hf_hotspa.search.histogram import DISTRIBUTIONS, LONGEST, MOST_SEQUENCES
from hf_hotspa.search.search import MOST_PHASES
from hf_hotspa.search.setup import DTYPE, Setup, make_estimate, make_plan
from hf_hotspa.search.tables import calibration_text, estimate_text, plan_text, save_plot
from hf_hotspa.strategy import Bucket
from hf_hotspa.versions import LIBRARIES, TRAIN_LIBRARIES, version_of
from hf_hotspa.whole_file import write_whole

TRAIN, RUN = "train", "run"
_MACHINES = "such as h100-80g, l40s or 4090 (`hf-hotspa hardware` lists them), or a YAML or JSON file"
_GPUS = "8xh100, one 4090 or, of four nodes, 4x8xh100: --nodes and --hardware in one"


class _Version(argparse.Action):
    """Prints the versions that a bug report needs, without importing the libraries, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        installed = {name: version_of(name) for name in (*LIBRARIES, "peft")}
        ours, *others = (f"no {name}" if own is None else f"{name} {own}" for name, own in installed.items())
        print(f"{ours} ({', '.join(others)})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-hotspa", description="Fine-tunes with hot-switched strategies; plans that without any device."
    )
    parser.add_argument("--version", action=_Version, help="print the versions")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # `main` passes its flags on: they include those from TrainingArguments, which only torch and transformers know
    commands.add_parser(TRAIN, add_help=False, help="fine-tune a model on a data set")
    commands.add_parser(RUN, add_help=False, help="run a program that trains with a Trainer, unchanged")
    model = CommandParser(add_help=False)
    presets = ", ".join(preset_names())
    add_flags(
        model,
        {"--model MODEL": f"a name on the hub, a config.json, its folder, or one of: {presets}", "--json": _JSON},
        model={"required": True},
    )
    setup = CommandParser(add_help=False, parents=[model])
    add_flags(setup, _SETUP, **_SETUP_VALUES)
    _add_plan(commands, setup)
    _add_estimate(commands, setup)
    _add_calibrate(commands, model)
    for add in (_add_formulas, inputs.add_parsers, _add_reports):
        add(commands)
    for module in (bench, checkpoint_files, environment):
        module.add_parsers(commands)
    return parser


_JSON = "print JSON instead of tables"
_QUANTIZATION = {"--quantization": f"the form of the frozen model, with --lora ({forms_help()})"}
_SETUP = {  # what `_setup` reads, except the hardware
    "--nodes NODESxDEVICES": "the cluster, such as 4x8",
    "--memory-limit SIZE": "device memory that a plan may use, such as 70GiB (default: 90 %% of the device's memory)",
    "--dtype DTYPE": "of weights and activations (default: the calibration's, else bfloat16)",
    "--sequence-parallel": "all strategies with tp are sequence parallel (+sp): norms and residuals divided over tp; "
    "`plan` tries both",
    "--recompute": "all strategies recompute (+rc): layers keep their input only; `plan` tries both",
    "--lora ADAPTER": "train a LoRA adapter, the model frozen: its r, such as 16, or r=16,targets=q_proj+v_proj "
    "(default: all-linear)",
    **_QUANTIZATION,
    "--optim NAME": f"the optimizer, as in TrainingArguments, such as {next(iter(reduced_states()), 'sgd')}, for its state's size "
    "(default: %(default)s)",
    "--task": "what is trained; with dpo a step also scores its rows, and with a reference (default: %(default)s)",
    "--teacher MODEL": "the teacher of --task distill, as --model",
    "--grad-accum-dtype": "dtype in which micro-batches add up gradients",
    "--grad-wire-dtype": "dtype in which gradients travel to the master store (auto: the accumulation dtype)",
    "--pipeline-schedule": "hotspa_pipeline_schedule: gpipe holds more tokens than the others, up to a bucket's limit",
}
_SETUP_VALUES: dict[str, dict[str, Any]] = {
    "quantization": {"choices": form_names()},
    "optim": {"default": "adamw_torch", "choices": tuple(optimizer_states())},
    "task": {"default": "sft", "choices": list(TASKS)},
    "grad_accum_dtype": {"default": FP32, "choices": ACCUMULATION_DTYPES},
    "grad_wire_dtype": {"default": AUTO, "choices": WIRE_DTYPES},
    "pipeline_schedule": {"default": "auto", "choices": SCHEDULES},
}


def _add_plan(commands: Commands, setup: CommandParser) -> None:
    parser = commands.add_parser("plan", parents=[setup], help="choose strategies, buckets and packs")
    parser.set_defaults(answer=_plan)
    source = parser.add_mutually_exclusive_group(required=True)
    calibration = "output of `hf-hotspa calibrate`, instead"
    add_flags(source, {"--gpus GPUS": _GPUS, "--hardware HARDWARE": _MACHINES, "--calibration FILE": calibration})
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--lengths", help=f"{', '.join(DISTRIBUTIONS)}, or a JSON histogram from `hf-hotspa lengths`")
    inputs.add_data_arguments(rows, parser)
    texts = {
        "--longest TOKENS": "the longest sequence that must fit (default: the histogram's longest; for named lengths "
        f"{LONGEST}, or the model's positions, if fewer)",
        "--overlong": "hotspa_overlong: what to do with sequences above --longest (default: %(default)s)",
        "--mini-batch SEQUENCES": "of one optimizer step (default: %(default)s)",
        "--max-buckets N": f"the most buckets, up to {MOST_PHASES} (default: %(default)s)",
        "--strategies LIST": "also predict these: as in hotspa_strategies, or names alone (tp16pp2,dp4tp2pp4), for which "
        "the best edges and packs are chosen; may be given several times",
        f"--plot FILE{SUFFIX}": "draw the histogram with the bucket edges",
    }
    add_flags(
        parser,
        texts,
        longest={"type": whole(UNLIMITED_TOKENS - 1)},
        overlong={"default": "error", "choices": OVERLONG_POLICIES},
        mini_batch={"type": whole(MOST_SEQUENCES), "default": 512},
        max_buckets={"type": whole(MOST_PHASES), "default": 3},
        strategies={"action": "append", "default": []},
    )
    add_command_flags("plan", parser)


def _add_estimate(commands: Commands, setup: CommandParser) -> None:
    parser = commands.add_parser("estimate", parents=[setup], help="memory of one strategy")
    parser.set_defaults(answer=_estimate)
    machine = {"--gpus GPUS": _GPUS, "--hardware HARDWARE": f"{_MACHINES}; gives the limit"}
    add_flags(parser.add_mutually_exclusive_group(), machine)
    add_flags(
        parser,
        {"--strategy STRATEGY": "such as dp4tp2pp4", "--pack-tokens TOKENS": "tokens of a pack"},
        strategy={"required": True},
        pack_tokens={"type": whole(UNLIMITED_TOKENS - 1), "required": True},
    )
    add_command_flags("estimate", parser)


def _add_calibrate(commands: Commands, model: CommandParser) -> None:
    parser = commands.add_parser(
        "calibrate",
        parents=[model],
        help="measure this machine",
        description="Measures a model on this machine for some seconds. Runs on the processes of torchrun or "
        "accelerate launch, or starts its own.",
    )
    parser.set_defaults(answer=_calibrate)
    texts = {
        "--processes N": "processes to start without a launcher (default: GPUs, else cores)",
        "--dtype DTYPE": "of weights and activations (default: the config's, else float32)",
        **_QUANTIZATION,
        "--lora R": "the rank of the adapter, with --quantization (default: 16)",
        "--output FILE": "also write the calibration here",
        "--force": "measure even if the cache has a result",
    }
    add_flags(
        parser, texts, processes={"type": whole()}, quantization={"choices": form_names()}, lora={"type": whole()}
    )


def _setup(args: argparse.Namespace) -> Setup:
    return Setup.read(
        args.model,
        *inputs.machines(args),
        args.memory_limit,
        getattr(args, "calibration", None),
        gradients=GradientDtypes(args.grad_accum_dtype, args.grad_wire_dtype),
        schedule=args.pipeline_schedule,
        features=settings_of_command(args),
        **{name: getattr(args, name) for name in _OPTIONS},
    )


_OPTIONS = ("dtype", "lora", "quantization", "recompute", "sequence_parallel", "optim", "task", "teacher")


def _print(result: Any, args: argparse.Namespace, text: Callable[[Any], str]) -> None:
    print(json.dumps(result.to_dict(), indent=1) if args.json else text(result), flush=True)


def _plan(args: argparse.Namespace) -> None:
    if args.plot and not args.plot.endswith(SUFFIX):
        raise HotspaConfigError(f"--plot draws SVG, and the file is {args.plot!r}", fix=f"end its name in {SUFFIX}")
    file_to_write("--plot", args.plot)
    setup = _setup(args)  # first, so that its errors come before a data set is read
    lengths = args.lengths
    if args.dataset is not None:
        lengths, of_rows = inputs.data_counts(args, args.model)
        setup = replace(setup, features=(*setup.features, *of_rows))
    limits = args.longest, args.mini_batch, args.max_buckets, args.overlong
    plan = make_plan(setup, lengths, *limits, args.strategies)
    _print(plan, args, plan_text)
    if args.plot:
        save_plot(plan, args.plot)
        print(printable(f"picture: {args.plot}"), file=sys.stderr if args.json else sys.stdout)


def _estimate(args: argparse.Namespace) -> None:
    estimate = make_estimate(_setup(args), args.strategy, args.pack_tokens)
    _print(estimate, args, estimate_text)
    if not estimate.fits:
        bucket = Bucket(estimate.strategy, estimate.pack_tokens, estimate.pack_tokens)
        estimate.setup.memory.check_pool((bucket,), estimate.setup.limit_bytes)


def _calibrate(args: argparse.Namespace) -> None:
    from hf_hotspa.commands.calibrate import run  # imports torch

    file_to_write("--output", args.output)
    if args.lora is not None and args.quantization is None:
        raise HotspaConfigError(
            f"--lora {args.lora} without --quantization",
            why="without --quantization the whole model is measured, which also serves a plan with --lora",
            fix=f"leave --lora out, or add --quantization {form_names()[0]}",
        )
    base = FrozenBase(args.quantization, args.lora or 16) if args.quantization else None
    calibration = run(args.model, args.processes, args.dtype, args.force, quiet=args.json, base=base)
    if calibration is None:  # a rank that prints nothing
        return
    if args.output:
        calibration.save(args.output)
    _print(calibration, args, calibration_text)


def _missing(command: str, error: ModuleNotFoundError) -> int:
    if error.name not in TRAIN_LIBRARIES:
        raise error
    print(f"hf-hotspa: {needs_training_libraries(command, error)}", file=sys.stderr)
    return USAGE_ERROR


def _add_formulas(commands: Commands) -> None:
    parser = commands.add_parser(
        "formulas",
        help="the textbook's numbers of 3D parallelism, a row for each (p, t, d)",
        description="Bubble, C_inter, C_intra, T_tp, T_dp, T_pp, bytes by ZeRO stage, activations and arithmetic intensity "
        "of every division of the devices into stages p, tensor-parallel ranks t and replicas d, beside the "
        "predictions of our time and memory models.",
    )
    parser.set_defaults(answer=_formulas)
    texts = {
        "config MODEL": "the model, as --model",
        "--model MODEL": "a config.json, its folder, a bundled model or a name on the hub",
        "--gpus GPUS": _GPUS,
        "--nodes NODESxDEVICES": "the cluster, such as 4x8",
        "--hardware HARDWARE": "`hf-hotspa hardware` lists them (default: %(default)s)",
        "--batch SEQUENCES": "of one optimizer step (default: %(default)s)",
        "--micro-batch SEQUENCES": "of one micro-batch (default: %(default)s)",
        "--sequence TOKENS": "of each (default: %(default)s)",
    }
    add_flags(
        parser,
        texts,
        config={"nargs": "?"},
        hardware={"default": "h100-80g"},
        batch={"type": whole(), "default": 512},
        micro_batch={"type": whole(), "default": 1},
        sequence={"type": whole(UNLIMITED_TOKENS - 1), "default": 2048},
    )
    add_command_flags("formulas", parser)
    add_flags(parser, {"--json": "print JSON instead of a table"})


def _formulas(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.config is None):
        raise HotspaConfigError("formulas are of one model", fix="give --model, such as --model llama2-7b")
    setup = Setup.read(args.model or args.config, *inputs.machines(args), dtype=DTYPE)
    result = make_table(setup, args.batch, args.micro_batch, args.sequence)
    more = (each.of_formulas(setup, args.micro_batch, args.sequence) for each in settings_of_command(args))
    _print(replace(result, more=tuple(more)), args, formulas_text)


_RUN = f"an output directory, its hotspa_report folder, or a {FILE_NAME}"


def _add_reports(commands: Commands) -> None:
    report = commands.add_parser("report", help="rebuild the page of a run from its record")
    report.set_defaults(answer=_report)
    page = f"the page (default: {PAGE_NAME} beside the record)"
    pictures = "also write the main charts as SVG files, and as PNG with hf_hotspa[pictures]"
    add_flags(report, {"run RUN_DIR": _RUN, "-o --output FILE": page, "--pictures FOLDER": pictures})
    both = commands.add_parser("compare", help="two runs side by side: losses and speed")
    both.set_defaults(answer=_compare)
    add_flags(both, {"a A": _RUN, "b B": "the same for the other run", "-o --output FILE": "also write a page"})


def _report(args: argparse.Namespace) -> None:
    file_to_write("--output", args.output)
    record = read_run_log(args.run)
    target = Path(args.output) if args.output else Path(record.path).with_name(PAGE_NAME)
    write_whole(target, report_page(record))
    summary = summarize(record)
    rows = rows_of(strategy_columns("report", {s.strategy: partial(getattr, s) for s in summary.strategies}))
    title = f"{summary.num_steps} steps, {short(summary.num_tokens)} tokens, {short(summary.tokens_per_s)} tokens/s"
    lines = [text_table(title, rows), *verdict(record), *advice(record), f"page: {target}"]
    if args.pictures:
        lines += [f"picture: {path}" for path in save_pictures(record, args.pictures)]
    print("\n".join(lines))


def _compare(args: argparse.Namespace) -> None:
    file_to_write("--output", args.output)
    a, b = read_run_log(args.a), read_run_log(args.b)
    comparison = compare(a, b)
    lines = [text_table(f"A: {a.path}\nB: {b.path}", strategy_rows(comparison)), *sentences(comparison)]
    if args.output:
        lines.append(f"page: {write_whole(args.output, compare_page(a, b, comparison))}")
    print("\n".join(lines))


def _start(command: str, *words: str) -> int:
    """Runs a command that passes its flags on to what it starts."""
    own = words[: words.index("--")] if "--" in words else words
    if {"-h", "--help"} & set(own):
        print(RUN_HELP if command == RUN else HELP, end="")
        return 0
    try:
        if command == RUN:
            from hf_hotspa.commands import run_program

            return run_program.main(words)
        from hf_hotspa.commands import train  # imports torch
    except ModuleNotFoundError as error:
        return _missing(f"hf-hotspa {command}", error)
    return train.main(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command for some arguments (None: the process's). Returns the exit code: 0; 2 when the input is wrong or
    does not fit; 1 when `verify` finds a damaged checkpoint."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        print(OVERVIEW, end="")
        return 0
    if words[0] in (RUN, TRAIN):
        return _start(*words)
    with redirect_stderr(cast(Any, CleanOutput(sys.stderr))):  # a wrong line is quoted there
        args = _parser().parse_args(words)
    try:
        with redirect_stdout(cast(Any, CleanOutput(sys.stdout))):
            code: int | None = args.answer(args)
            sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HotspaError, OSError) as error:
        print(f"hf-hotspa: {printable(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except ModuleNotFoundError as error:
        return _missing(f"hf-hotspa {args.command}", error)


if __name__ == "__main__":
    sys.exit(main())
