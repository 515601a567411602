"""The commands `hf-hotspa report` and `hf-hotspa compare`: pages from records, without torch."""

import argparse
from pathlib import Path
from typing import Any

from hf_hotspa.commands.inputs import file_to_write
from hf_hotspa.reporting.compare import compare, compare_page, sentences, strategy_rows
from hf_hotspa.reporting.page import PAGE_NAME, report_page, save_pictures
from hf_hotspa.reporting.run_log import FILE_NAME, read_run_log
from hf_hotspa.reporting.summary import advice, summarize, verdict
from hf_hotspa.reporting.svg import short
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.whole_file import write_whole

_RUN = f"an output directory, its hotspa_report folder, or a {FILE_NAME}"


def add_parsers(commands: Any) -> None:
    """Adds both commands to the sub-parsers of `hf-hotspa`."""
    report = commands.add_parser("report", help="the page of a run, made anew from its record")
    report.set_defaults(answer=_report)
    report.add_argument("run", metavar="RUN_DIR", help=_RUN)
    report.add_argument("-o", "--output", metavar="FILE", help=f"where to; default: {PAGE_NAME} beside the record")
    report.add_argument("--pictures", metavar="FOLDER", help="SVG files of the main charts, too")
    both = commands.add_parser("compare", help="two runs side by side: losses and speed")
    both.set_defaults(answer=_compare)
    both.add_argument("a", metavar="A", help=_RUN)
    both.add_argument("b", metavar="B", help="the same for the other run")
    both.add_argument("-o", "--output", metavar="FILE", help="a page of it, too")


def _report(args: argparse.Namespace) -> None:
    file_to_write("--output", args.output)
    record = read_run_log(args.run)
    target = Path(args.output) if args.output else Path(record.path).with_name(PAGE_NAME)
    write_whole(target, report_page(record))
    summary = summarize(record)
    rows = [["strategy", "packs", "tokens", "compute s", "tokens/s", "wait s", "load+return s", "hidden s"]]
    for s in summary.strategies:
        times = (f"{s.wait_s:.2f}", f"{s.moved_s:.2f}", f"{s.hidden_s:.2f}")
        rows.append(
            [s.strategy, f"{s.num_packs}", f"{s.num_tokens}", f"{s.compute_s:.2f}", short(s.tokens_per_s), *times]
        )
    title = f"{summary.num_steps} steps, {short(summary.num_tokens)} tokens, {short(summary.tokens_per_s)} tokens/s"
    said = [text_table(title, rows), *verdict(record), *advice(record), f"page: {target}"]
    if args.pictures:
        said += [f"picture: {path}" for path in save_pictures(record, args.pictures)]
    print("\n".join(said))


def _compare(args: argparse.Namespace) -> None:
    file_to_write("--output", args.output)
    a, b = read_run_log(args.a), read_run_log(args.b)
    comparison = compare(a, b)
    said = [text_table(f"A: {a.path}\nB: {b.path}", strategy_rows(comparison)), *sentences(comparison)]
    if args.output:
        said.append(f"page: {write_whole(args.output, compare_page(a, b, comparison))}")
    print("\n".join(said))
