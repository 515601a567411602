"""The inputs of `hf-hotspa plan`: `hf-hotspa lengths` for data sets, and `hf-hotspa hardware` for named machines.

The Trainer's code and tokenizer read the data set, so lengths are as in training. This imports `datasets`, and
`transformers` if installed (else `rows/light_tokenizer.py` counts). A saved histogram needs neither.
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from hf_hotspa.commands.parser import Commands
from hf_hotspa.costs.hardware import PRESETS, Hardware, find_preset, load_hardware, other_forms, template
from hf_hotspa.costs.model_config import hub_file, preset_names, preset_source
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.rows.light_tokenizer import LightTokenizer
from hf_hotspa.seam import Options, hooks
from hf_hotspa.search.histogram import Counts
from hf_hotspa.search.tables import histogram

_GIB, _GB = 1 << 30, 1e9
_SHARES = (50, 90, 99)


def whole(most: int = 2**31 - 1) -> Callable[[str], int]:
    """Returns the `type=` of a flag that reads a number from 1 to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,20}", text) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.50} is not a whole number of at least 1 and at most {most}")
        return int(text)

    return read


def add_flags(parser: argparse._ActionsContainer, texts: Mapping[str, str], **options: Mapping[str, Any]) -> None:
    """Adds arguments to a parser or a group of it. `texts`: help by `--flag METAVAR`, `-f --flag METAVAR` or `name
    METAVAR`; without a metavar and options a switch. `options`: more arguments of `add_argument`, by the name of the
    attribute."""
    for words, text in texts.items():
        *names, last = words.split()
        if metavar := None if not names or last.startswith("-") else last:
            more: Mapping[str, Any] = {"metavar": metavar}
        else:
            names, more = [*names, last], {}
        more = {**more, **options.get(names[-1].strip("-").replace("-", "_"), {})}
        parser.add_argument(*names, help=text, **(more or {"action": "store_true"}))


def file_to_write(flag: str, path: str | None) -> None:
    """Creates the folder of a command's output file, so that errors come before the work. Raises `HotspaConfigError`:
    naming the flag."""
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(Path(path).parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "name a file in a writable folder"
        raise HotspaConfigError(f"{flag} {path} cannot be written: {reason}", fix=fix) from None


def machines(args: argparse.Namespace) -> tuple[str, str | None]:
    """Returns `--nodes` and `--hardware`, given directly or by `--gpus`; says which of several machines of a name is
    meant. Raises `HotspaConfigError`: neither `--gpus` nor `--nodes` is given, or both are."""
    example = "give --gpus 8xh100, or --nodes 1x8 and --hardware h100"
    nodes, hardware = args.nodes, args.hardware
    if args.gpus is None:
        if nodes is None:
            raise HotspaConfigError("nothing says how many GPUs there are", fix=example)
    else:
        match = re.fullmatch(r"(?:([0-9]+)x)?(?:([0-9]+)x)?(.*[A-Za-z].*|[0-9]{3,})", args.gpus)
        if match is None:
            raise HotspaConfigError(f"--gpus {args.gpus!r} names no kind of GPU", fix=example)
        if nodes is not None:
            raise HotspaConfigError("--gpus and --nodes both say how many GPUs there are", fix="leave --nodes out")
        groups = [count for count in match.groups()[:2] if count is not None]
        nodes, hardware = "x".join(["1", "1", *groups][-2:]), match[3]
    if hardware is not None and not Path(hardware).is_file() and (others := other_forms(hardware)):
        chosen = cast(Hardware, find_preset(hardware)).name
        print(f"hf-hotspa: {hardware} is read as {chosen}; others: {', '.join(others)}", file=sys.stderr)
    return nodes, hardware


def add_parsers(commands: Commands) -> None:
    lengths = commands.add_parser(
        "lengths",
        help="count the tokens of a data set's rows",
        description="Counts the tokens of each row as training will see it, and saves the counts for `hf-hotspa plan --lengths`.",
    )
    add_data_arguments(lengths, lengths, required=True)
    add_flags(lengths, {"-o --output FILE": "save the counts by length here, for plan --lengths"})
    lengths.set_defaults(answer=_lengths)
    machines = commands.add_parser(
        "hardware",
        help="list the named machines, or print one as a file",
        description="Lists the machines that --hardware knows by name. With a name it prints that machine as YAML, to "
        "edit and pass to --hardware: hf-hotspa hardware l40s > mine.yaml",
    )
    machines.add_argument("name", nargs="?", help="of a machine, such as l40s")
    machines.set_defaults(answer=_hardware)


def add_data_arguments(source: argparse._ActionsContainer, parser: argparse.ArgumentParser, **of_dataset: Any) -> None:
    """Adds the flags of a data set; `source`, the parser or its group of sources, gets `--dataset`."""
    files = "a .jsonl, .json, .csv, .parquet or .txt file, a folder of them, a saved data set, or a name on the hub"
    add_flags(source, {"--dataset DATA": files}, dataset=of_dataset)
    texts = {
        "--split SPLIT": "of the data set, such as train[:1000] (default: %(default)s)",
        "--tokenizer NAME": "a name on the hub or a folder; not needed for rows with input_ids",
        "--rows N": "read only N rows, drawn at random",
    }
    add_flags(parser, texts, split={"default": "train"}, rows={"type": whole()})


def data_counts(args: argparse.Namespace, model: str | None = None) -> tuple[Counts, list[Options]]:
    """Returns the sequence lengths of the data set of `add_data_arguments`, and the settings that follow from its rows. `model`: the model of a plan, whose
    tokenizer is the default. Raises `HotspaError`: the data set or its tokenizer cannot be read, a row cannot be
    tokenised, or there are no rows."""
    from hf_hotspa.data.prepare import load_source, prepare_dataset
    from hf_hotspa.rows.read_row import RowRules
    from hf_hotspa.rows.scan import scan_dataset

    quiet = not sys.stderr.isatty()
    if quiet:
        import datasets

        datasets.disable_progress_bars()
    dataset = load_source(args.dataset, args.split)
    num_rows = len(dataset)
    if args.rows is not None and args.rows < num_rows:
        rows = np.random.default_rng(0).permutation(num_rows)[: args.rows]
        dataset = dataset.select(np.sort(rows))
    more, of_rows = np.zeros(len(dataset), np.int64), list[Options]()
    for flags in hooks("flags"):
        if (beside := flags.of_rows(args, dataset)) is not None:
            dataset, more = beside.dataset, more + beside.tokens
            of_rows += [beside.settings] if beside.settings is not None else []
    tokenizer = None if "input_ids" in dataset.column_names else _tokenizer(args.tokenizer or _of_model(model))
    prepared = prepare_dataset(dataset, tokenizer, skips_empty=True)
    lengths = scan_dataset(prepared, rules=RowRules(skips_empty=True), disable_progress=quiet).sequence_lengths
    lengths = lengths + more if more.any() else lengths
    some = "" if len(dataset) == num_rows else f", {len(dataset):,} of {num_rows:,} rows"
    if not lengths.all():  # training skips empty rows or raises an error
        some += f", {int((lengths == 0).sum()):,} empty rows left out"
        lengths = lengths[lengths > 0]
    counts = Counts.of(lengths, f"{args.dataset}{some}")
    if not counts.total:
        raise HotspaConfigError("no row has a token", where=str(args.dataset), fix="look at its columns")
    return counts, of_rows


def _of_model(model: str | None) -> str:
    if model is not None and (of_hub := preset_source(model)) is not None:
        return of_hub
    if model is None or model in preset_names() or Path(model).is_file():
        of = "" if model is None else f"{model} comes without one; "
        fix = f"{of}give --tokenizer NAME_OR_FOLDER"
        raise HotspaConfigError("the rows are text, and there is no tokenizer for them", fix=fix)
    return model


def _tokenizer(name: str) -> Any:
    """Uses transformers if installed, as in training; else only the files of the tokenizer."""
    try:
        folder = Path(name).expanduser()
        try:
            from transformers import AutoTokenizer as auto
        except ImportError:  # a light installation
            if not folder.is_dir():  # use the folder of the hub's cache
                with suppress(HotspaConfigError):  # not every model has a separate template file
                    hub_file(name, "chat_template.jinja")
                hub_file(name, "tokenizer_config.json")
                folder = hub_file(name, "tokenizer.json").parent
            return LightTokenizer(folder)
        if folder.is_dir():
            return auto.from_pretrained(folder)
        try:
            return auto.from_pretrained(name, local_files_only=True)
        except Exception:  # the cache is incomplete
            hub_file(name, "tokenizer_config.json")
            return auto.from_pretrained(name)
    except HotspaConfigError as error:
        what = f"there is no tokenizer {name!r}: {error.what}"
        raise HotspaConfigError(what, where=error.where, fix=error.fix) from None
    except Exception as error:  # missing, damaged or unreachable files raise many kinds of errors
        lines = str(error).strip().splitlines() or [""]
        raise HotspaConfigError(
            f"there is no tokenizer {name!r}: {type(error).__name__}: {lines[0]}",
            fix="give --tokenizer a folder with tokenizer.json (tokenizer.save_pretrained makes one), or a name that the "
            "hub or its cache has",
        ) from None


def _lengths(args: argparse.Namespace) -> None:
    file_to_write("--output", args.output)
    counts, _ = data_counts(args)
    if args.output:
        counts.save(args.output)
    ends, tokens = np.cumsum(counts.sizes), int((counts.lengths * counts.sizes).sum())
    shares = [f"{counts.lengths[np.searchsorted(ends, share / 100 * counts.total)]:,} ({share} %)" for share in _SHARES]
    lines = [
        f"{counts.total:,} sequences of {counts.source}; {tokens:,} tokens",
        f"tokens of a row: at most {', '.join(shares)}; the longest {int(counts.lengths.max()):,}",
        "",
        histogram(counts.drawn(), ()),
    ]
    if args.output:
        lines += ["", f"saved: {args.output}; next: hf-hotspa plan --lengths {args.output} ..."]
    print("\n".join(lines))


def _hardware(args: argparse.Namespace) -> None:
    print(template(load_hardware(args.name)).rstrip() if args.name else _machines())


def _machines() -> str:
    rows = [["machine", "GiB", "TFLOPS", "memory GB/s", "link GB/s", "NICs x Gb/s"]]
    for preset in PRESETS.values():
        device, nics = preset.device, preset.nics_per_node or preset.devices_per_node
        dtype = next(name for name in ("bfloat16", "float16") if name in device.peak_flops)
        speed = device.peak_flops[dtype] / 1e12
        flops = f"{speed:,.{0 if speed >= 1 else 2}f}" + ("" if dtype == "bfloat16" else " (float16)")
        links = (f"{speed / _GB:,.0f}" for speed in (device.memory_bandwidth, preset.intra_bandwidth))
        outside = f"{nics} x {preset.inter_bandwidth * 8 / _GB:,.0f}"
        rows.append([preset.name, f"{device.memory_bytes / _GIB:.1f}", flops, *links, outside])
    sources = "From data sheets: dense bfloat16; links inside a node and NICs in one direction; nodes of 8 devices."
    own = "Your own: `hf-hotspa hardware NAME > mine.yaml`, change it, `--hardware mine.yaml`."
    return "\n".join([text_table("", rows), "", sources, own])
