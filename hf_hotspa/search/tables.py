"""Plans and estimates as text for a terminal, and a plan as a picture."""

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.memory import size
from hf_hotspa.costs.model_config import EXPERTS
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.costs.terms import Hop, form_names
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting.gain_words import PREDICTED_ERROR
from hf_hotspa.reporting.page import lengths_figure, picture
from hf_hotspa.reporting.run_log import length_histogram
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.search.bucket_plan import limit_text, memory_table, wrapped
from hf_hotspa.search.setup import Estimate, PlannedSetup, Setup
from hf_hotspa.strategy import Bucket
from hf_hotspa.whole_file import write_whole

_BAR = 40


def _heading(setup: Setup) -> str:
    machine = f" of {setup.hardware.name}" if setup.hardware is not None else ""
    lines = [
        f"{setup.model.name}: {setup.model.shape.family}, {setup.sizes.num_parameters / 1e9:,.2f}B parameters, {setup.dtype}"
    ]
    if setup.adapter is not None:
        lines.append(f"{setup.adapter}: {setup.sizes.num_trained / 1e6:,.1f}M parameters are trained")
    if setup.packed is not None:
        lines.append(
            f"its linear layers are frozen in {setup.packed.kind}, {setup.packed.weight_bytes * 8:.1f} bits a weight"
        )
        lines += _of_experts(setup)
    lines.append(f"{setup.nodes} x {setup.devices_per_node} devices{machine}")
    lines.append(limit_text(setup.limit_bytes, setup.limit_source))
    return "\n".join(part for line in lines for part in wrapped(line))


def _of_experts(setup: Setup) -> list[str]:
    """What the experts of a mixture take beside packed linear layers, and where they are packed, too."""
    packed, num_layers = setup.packed, setup.model.shape.num_layers
    weights = num_layers * sum(one.numel * one.count for one in setup.model.experts.values())
    if not weights or packed is None:
        return []
    plain, name = weights * dtype_bytes(setup.dtype) / 2**30, f"{packed.kind}+{EXPERTS}"
    if packed.kind.endswith(f"+{EXPERTS}"):
        return [
            f"its experts take {weights * packed.weight_bytes / 2**30:,.2f} GiB, and {plain:,.2f} GiB in {setup.dtype}"
        ]
    less = f"; --quantization {name}: {weights * packed.weight_bytes / 2**30:,.2f} GiB" if name in form_names() else ""
    return [f"its experts stay in {setup.dtype}, {plain:,.2f} GiB{less}"]


def _source(setup: Setup) -> str:
    if setup.calibration is None:
        return f"Times are from data sheets, not measured: 9 of 10 published runs are within {PREDICTED_ERROR:.0%}."
    plain = setup.adapter is not None and not setup.calibration.key.base
    whole = ", with all weights trained: with an adapter it is faster" if plain else ""
    return f"Times are from a calibration of {setup.calibration.measured_at}{whole}."


def _notes(notes: Sequence[str]) -> list[str]:
    return [part for note in notes for part in wrapped(f"Note: {note}")]


def histogram(lengths: Sequence[int], buckets: Sequence[Bucket]) -> str:
    """Tabulates shares of sequences and tokens by length, in powers of two, with the edges of buckets as lines."""
    ordered = sorted(lengths)
    longest = buckets[-1].longest if buckets else ordered[-1]
    first = 1 << max(0, math.ceil(math.log2(ordered[0])))
    edges = {bucket.longest: str(bucket.strategy) for bucket in buckets}
    doubled = {first << i for i in range(64) if first << i < longest}
    highs = sorted(doubled | set(edges) | {longest})
    rows, total = [], sum(ordered)
    for low, high in pairwise([0, *highs]):
        i, j = bisect_right(ordered, low), bisect_right(ordered, high)
        rows.append((low, high, (j - i) / len(ordered), sum(ordered[i:j]) / total))
    most, width = max(row[2] for row in rows), len(str(longest))
    lines = [f"{'tokens':>{2 * width + 3}}  sequences  tokens"]
    for low, high, share, tokens in rows:
        bar = "#" * round(_BAR * share / most)
        lines.append(f"{low + 1:>{width}} - {high:>{width}}  {share:9.1%}  {tokens:6.1%}  {bar}".rstrip())
        if high in edges:
            lines.append(f"{'-' * (2 * width + 3)}  {edges[high]} up to {high}")
    return "\n".join(lines)


def calibration_text(calibration: Calibration) -> str:
    key = calibration.key
    layers, ends = calibration.fitted
    rows = [["tp", "a ns", "b us", "c ms", "head b us", "head c ms", "bytes/token", "head bytes"]]
    for tp, cost in layers.items():
        of_layer, end = _scaled(cost.a * 1e9, cost.b * 1e6, cost.c * 1e3), ends.get(tp)
        of_end = _scaled(end.b * 1e6, end.c * 1e3) if end is not None else ["", ""]
        num_bytes = (f"{known[tp]:,.0f}" if tp in known else "" for known in calibration.memory_per_token)
        rows.append([str(tp), *of_layer, *of_end, *num_bytes])
    links = [["links", "latency us", "MB/s", "hop us", "hop ns/token"]]
    for name, link, hop in (
        ("in a node", calibration.intra, calibration.hop_intra),
        ("between nodes", calibration.inter, calibration.hop_inter),
    ):
        if link is not None and hop is not None:
            links.append([name, f"{link.latency_s * 1e6:,.1f}", f"{link.bandwidth / 1e6:,.0f}", *_hop(hop)])
    efficiency, fixed_s = calibration.switch_fit
    slots = "" if math.isinf(calibration.slots) else f", {calibration.slots:.1f} of them at a time"
    return "\n".join(
        [
            f"{calibration.model.family}, hidden size {calibration.model.hidden_size}, {key.dtype}, "
            f"{calibration.model.layer_parameters:,} parameters a layer",
            f"{key.world_size} ranks on {key.device} ({key.cores} cores a node){slots}; "
            f"measured {calibration.measured_at} in {calibration.seconds:.1f} s",
            "",
            "one layer, forward and backward: a * sum(l^2) + b * sum(l) + c seconds for a pack of sequences of l tokens"
            + (", on a core" if slots else ""),
            text_table("", rows),
            "",
            text_table("", links),
            "",
            f"switches: {efficiency:.0%} of the links' speed, and {fixed_s * 1e3:.1f} ms each; packs in stages cost "
            f"{calibration.pipeline_factor:.2f} times as much",
            *_exchanges(calibration),
            *_layers(calibration),
            *_phases(calibration),
            *_notes(calibration.notes),
        ]
    )


def _hop(hop: Hop) -> tuple[str, str]:
    """Microseconds, and nanoseconds a token."""
    return f"{hop.latency_s * 1e6:,.1f}", f"{hop.token_s * 1e9:,.1f}"


def _exchanges(calibration: Calibration) -> list[str]:
    rows = [
        [f"cp{cp}" + (f"tp{tp}" if tp > 1 else ""), *_hop(rates.all_to_all), *_hop(rates.gather)]
        for (cp, tp), rates in calibration.context_exchanges.items()
    ]
    heads = ["exchanges", "all-to-all us", "ns/token", "gather us", "ns/token"]
    return ["", text_table("", [heads, *rows]), ""] if rows else []


def _layers(calibration: Calibration) -> list[str]:
    each = ", ".join(
        f"{sample.seconds * 1e3:,.4g} ms ({len(sample.layers)} like layer {sample.layers[0]})"
        for sample in calibration.layers
    )
    return [f"layers alone, {sum(calibration.layers[0].lengths):,} tokens: {each}"] if each else []


def _phases(calibration: Calibration) -> list[str]:
    seconds: dict[str, list[str]] = {}
    for sample in calibration.phases:
        seconds.setdefault(sample.strategy, []).append(f"{sample.seconds:,.3f}")
    each = ", ".join(f"{strategy} {' and '.join(values)} s" for strategy, values in seconds.items())
    return [f"complete phases of mixed lengths: {each}"] if each else []


def _scaled(*values: float) -> list[str]:
    return [f"{value:,.4g}" for value in values]


def plan_text(planned: PlannedSetup) -> str:
    plan, setup = planned.plan, planned.setup
    return "\n".join(
        [
            *plan.answers,
            *wrapped(f"Why: {plan.why}"),
            "Copy:",
            plan.to_copy,
            "",
            _heading(setup),
            *wrapped(f"{plan.mini_batch_size} sequences a step, lengths {planned.source}, longest {plan.longest}"),
            "",
            str(plan),
            "",
            histogram(planned.lengths, plan.choice.buckets),
            "",
            *_notes([*planned.notes(), _source(setup)]),
        ]
    )


def estimate_text(estimate: Estimate) -> str:
    memory, setup = estimate.memory, estimate.setup
    lines = [_heading(setup), "", memory_table([f"{estimate.strategy}@{estimate.pack_tokens}"], [memory]), ""]
    if setup.hardware is None or not setup.hardware.name.startswith("cpu"):
        lines += [f"As nvidia-smi shows it, with context and communicators: about {size(estimate.card_bytes)}", ""]
    if estimate.largest_pack is None:
        lines.append("No limit was given; --memory-limit or --hardware show how long a pack may be.")
    elif not estimate.largest_pack:
        lines.append("Not even a pack of one token fits.")
    else:
        lines.append(f"Largest pack that fits: {estimate.largest_pack} tokens")
    if estimate.longest:
        lines += ["", "longest sequence that fits    tokens"]
        width = len(lines[-1]) - 12
        lines += [
            f"{strategy!s:<{width}}{tokens or 'none':>12{',' if tokens else ''}}"
            for strategy, tokens in estimate.longest
        ]
        if any(strategy.kh for strategy, _ in estimate.longest):
            lines.append("(+kh: what host memory must hold is not counted.)")
    return "\n".join(lines)


def save_plot(planned: PlannedSetup, path: str | os.PathLike[str]) -> None:
    """Writes the histogram with the edges of buckets as SVG. Raises `HotspaConfigError`: the file cannot be written."""
    setup, buckets = planned.setup, planned.plan.choice.buckets
    figure = lengths_figure(length_histogram(planned.lengths), [(str(b.strategy), b.longest) for b in buckets])
    title = f"{setup.model.name}, {setup.nodes} x {setup.devices_per_node} devices: lengths in tokens"
    try:
        write_whole(path, picture(replace(figure, title=title)))
    except OSError as error:
        raise HotspaConfigError(
            f"the plot cannot be written: {error.strerror or error}", where=str(path), fix="give another path"
        ) from None
