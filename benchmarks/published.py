"""Predictions of published training runs, from their configurations, data sheets and the analytic link model, and their errors.

`benchmarks/data/published_inputs.json` holds the configurations of 89 runs: 81 of dense models and 8 with experts, on A100, A800, H100 and
B200; `published_results.json` the results of 41 of them, with the repository that published each. The shares of the peak of
`hf_hotspa.costs.hardware` are fitted on these 41 (`fitted`), one for each card; the other runs were not used.
`published_predictions.json` is what an earlier cost model said of all 89, with its date and commit, before any result was
known. It stays as it is.

How a configuration is read:

* `zero_stage` 3 is `+z3`: weights are gathered and gradients reduced behind the passes of each micro-batch. With 0, 1 and unknown gradients
  are reduced once a step, behind the last backward pass if the notes say so, and weights gathered at its end.
* `recompute: full` is `+rc`. `selective` of torchtitan computes about half of a layer again: `+rc2`. Of the others it means
  the core of attention.
* Pipelines run 1F1B, or its interleaved form.
* A micro-batch of b sequences is a pack of b whole sequences; all micro-batches of a replica are equal.
* Kernels: `STACKS` has what each framework runs between matrix products. Memory: what it holds by design, see `memory_of`.
* Between nodes: what `network` says; else the named machine's.

    python benchmarks/published.py [--results FILE] [--json FILE] [--rows TEXT] [--fit] [--write]
"""

import argparse
import json
import re
import subprocess
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from result_file import write_json

from hf_hotspa.costs.data_sheet import LINK_EFFICIENCY, Kernels
from hf_hotspa.costs.hardware import PRESETS, Hardware
from hf_hotspa.costs.memory import ALLOCATOR_SLACK, activation_bytes, card_bytes
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import seconds_of_links
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy

Config = Mapping[str, Any]
Runs = Sequence[Config]

DATA = Path(__file__).parent / "data"
INPUTS, RESULTS, BLIND = (DATA / f"published_{name}.json" for name in ("inputs", "results", "predictions"))
PAGE = Path(__file__).parents[1] / "docs" / "predicted.md"
TABLE = PAGE.parent / "data" / "published-errors.csv"
BEGIN, END = "<!-- begin: python benchmarks/published.py --write -->\n", "<!-- end -->\n"
WITHOUT = "each run fitted without its source"
_PRESETS = {"A100": "a100-80g", "A800": "a800-80g", "H100": "h100-80g", "B200": "b200-180g"}
LOW_POWER, LOW_POWER_SHARE = "H100 of 500 W", 0.51
"""A variant of H100 that only torchtitan used, with HBM2e and less power; its share of the peak, fitted like others."""
SHARES = {
    "A100": PRESETS["a100-80g"].device.matmul_share,
    "H100": PRESETS["h100-80g"].device.matmul_share,
    LOW_POWER: LOW_POWER_SHARE,
    "B200": PRESETS["b200-180g"].device.matmul_share,
}
"""The fitted share of the peak of matrix products, by card."""
_UPDATE_BYTES = 32
"""What one element of the master store moves in an update of AdamW: weight, two moments and gradient read, three written, and the new weight
in 16 bits."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Stack:
    """What a framework runs and holds."""

    fused: bool = True  # operations between matrix products
    attention: str = "flash2"  # a key of `ATTENTION`
    reduced_bytes: int = 4  # of a gradient on the wire
    state_bytes: int = 6  # of a parameter that ZeRO-1 does not divide: weight, gradient
    logit_bytes: int = 8  # of a logit at the moment of the loss


ATTENTION: dict[str, dict[str, float]] = {
    # FlashAttention-1 and its Triton form: "25-40 %" on A100 (Dao, 2023); on H100 fitted on mpt-h100-7b-8-s65536
    "flash1": {"A100": 0.25, "H100": 0.19},
    # scores in memory: 14 operations a pair and head element, and 20 bytes a pair and head, at bandwidth
    "scores": {"A100": 0.15},
}
"""Share of the peak by attention kernels that differ from the device's, by card."""

STACKS = {
    "Megatron-LM": Stack(),
    "Megatron-DeepSpeed": Stack(attention="scores", state_bytes=8, logit_bytes=12),  # 16-bit gradients beside fp32 sums
    "InternEvo": Stack(reduced_bytes=2, state_bytes=4, logit_bytes=14),
    "llm-foundry": Stack(attention="flash1", logit_bytes=14),
    "torchtitan": Stack(fused=False, logit_bytes=14),  # 16 and 32 bits, probabilities, gradient
}


def stack_of(config: Config) -> Stack:
    """The framework's stack."""
    stack = next(each for name, each in STACKS.items() if config["framework"].startswith(name))
    reduced = 2 if "bf16 reduce" in config["notes"] else stack.reduced_bytes
    return replace(stack, reduced_bytes=reduced, fused=stack.fused or bool(config.get("compile")))


def card_of(config: Config) -> str:
    """The card whose share of the peak counts; A800 differs from A100 in its links only."""
    if "HBM2e" in config["gpu_variant"]:
        return LOW_POWER
    return {"A800": "A100"}.get(config["gpu"], config["gpu"])


def shape_of(config: Config) -> ModelShape:
    """The shape of the model; of one with experts the mean of its layers."""
    model, experts = config["model"], config.get("moe")
    hidden, heads, width = model["hidden"], model["heads"], model["heads"] * model["head_dim"]
    matrices = 3 if model["gated_mlp"] else 2
    attention = 2 * hidden * (width + model["kv_heads"] * model["head_dim"])
    mlp, of_experts = matrices * hidden * model["ffn"], 0
    if experts:
        share = 1 - experts["dense_layers"] / model["layers"]
        of_experts = round(share * experts["experts"] * matrices * hidden * experts["moe_ffn"])
        beside = experts["experts"] * hidden + matrices * hidden * experts["shared_ffn"]
        mlp = round((1 - share) * mlp + share * beside) + of_experts
        if latent := experts.get("mla"):
            rope, nope, value = latent["qk_rope"], latent["qk_nope"], latent["v"]
            query = latent["q_lora"] * (hidden + heads * (nope + rope))
            keys = hidden * (latent["kv_lora"] + rope) + latent["kv_lora"] * heads * (nope + value)
            attention, width = query + keys + heads * value * hidden, heads * (nope + rope + value) // 2
    return ModelShape(
        family=config["model_name"],
        num_layers=model["layers"],
        num_attention_heads=heads,
        num_key_value_heads=model["kv_heads"],
        hidden_size=hidden,
        attention_size=width,
        vocab_size=model["vocab"],
        layer_parameters=attention + mlp + 2 * hidden,
        num_experts=experts["experts"] if experts else 0,
        experts_per_token=experts["topk"] if experts else 0,
        expert_parameters=of_experts,
        gated=bool(model["gated_mlp"]),
    )


def _saves_by_operation(config: Config) -> bool:
    return bool(config["recompute"] == "selective" and config["framework"].startswith("torchtitan"))


def strategy_of(config: Config) -> Strategy:
    """The strategy of ours that is nearest."""
    degrees, full = config["parallel"], config["recompute"] == "full"
    return Strategy(
        degrees["dp"],
        degrees["tp"],
        degrees["pp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        v=degrees["vpp"],
        sp=bool(config["sequence_parallel"]) and degrees["tp"] > 1,
        rc=1 if full else 2 if _saves_by_operation(config) else 0,
        z=3 if config["zero_stage"] == 3 else 0,
    )


def hardware_of(config: Config, shares: Mapping[str, float] = SHARES) -> Hardware:
    """The machine, with what the configuration says of its memory and its links; `shares` as `SHARES`."""
    machine = PRESETS[_PRESETS[config["gpu"]]]
    device = replace(machine.device, matmul_share=shares[card_of(config)])
    if card_of(config) == LOW_POWER:
        device = replace(device, memory_bytes=96 * 10**9, memory_bandwidth=2.4e12)
    machine = replace(machine, device=device, devices_per_node=config["gpus_per_node"])
    network = config["network"]
    if links := re.search(r"(\d+)x(\d+) Gb/s", network):
        nics, speed = int(links[1]), float(links[2])
        return replace(machine, nics_per_node=nics, inter_bandwidth=speed * 1e9 / 8)
    if links := re.search(r"(\d+) Gb/s", network):
        speed = float(links[1]) * 1e9 / 8
        a_node = 1 if "per node" in network or "per GPU" not in network else config["gpus_per_node"]
        return replace(machine, nics_per_node=a_node, inter_bandwidth=speed)
    return machine


def kernels_of(config: Config, hardware: Hardware) -> Kernels:
    """What runs between the matrix products, and the share of attention."""
    stack = stack_of(config)
    share = ATTENTION.get(stack.attention, {}).get(card_of(config), hardware.device.attention_share)
    if config["recompute"] == "selective" and not _saves_by_operation(config):
        share *= 7 / 9  # the core of attention runs forward again
    return Kernels(stack.fused, share)


# -- seconds -----------------------------------------------------------------------------------------------------------


def _exchanged(config: Config, strategy: Strategy, sizes: ModelSizes, hardware: Hardware) -> tuple[float, float]:
    """Seconds of gathering the weights, and of reducing the gradients, of what replicas share."""
    if strategy.dp * strategy.cp == 1:
        return 0.0, 0.0
    cluster, group = hardware.cluster(config["num_gpus"]), config.get("zero_group")
    shared = sizes.num_parameters
    if strategy.ep > 1:  # as many experts as ranks: each is on one replica
        shared -= sizes.shape.expert_parameters * sizes.shape.num_layers

    def seconds(num_bytes: float) -> float:
        return max(seconds_of_links(strategy, num_bytes, cluster)) / LINK_EFFICIENCY

    gather, reduce = seconds(2 * shared), seconds(stack_of(config).reduced_bytes * shared)
    if group and group <= hardware.devices_per_node < config["num_gpus"]:
        # sharded inside nodes: gradients are summed over all nodes, and weights gathered in a node
        inside = 2 * shared / (strategy.tp * strategy.pp) * (1 - 1 / group)
        return inside / hardware.intra_bandwidth / LINK_EFFICIENCY, 2 * reduce
    return gather, reduce


def seconds_of(config: Config, shares: Mapping[str, float] = SHARES) -> dict[str, float]:
    """Seconds of a step: of its passes, of what its exchanges add, and of the update.

    Raises:
        HotspaError: the strategy is impossible here.
    """
    strategy, hardware, tokens = strategy_of(config), hardware_of(config, shares), config["model"]["seq_len"]
    sizes = ModelSizes(shape_of(config), tied=config["model"]["tied_embeddings"])
    way = "ulysses" if config.get("cp_comm") == "a2a" else "auto"
    time = TimeModel.analytic(sizes, hardware, kernels=kernels_of(config, hardware))
    time, plain = replace(time, schedule="1f1b", context_parallel=way), replace(strategy, z=0)
    num_packs = max(1, round(config["global_batch"] / strategy.dp / config["micro_batch"]))
    alone = time.phase_seconds(plain, [[[tokens] * config["micro_batch"]] * num_packs] * strategy.dp)
    gather, reduce = _exchanged(config, plain, sizes, hardware)
    again = 1 / strategy.rc if strategy.rc else 0.0
    forward = alone / num_packs / (3 + again)
    backward = alone / num_packs - forward
    if strategy.z == 3:  # the first gather and the last reduction overlap with nothing
        streamed = num_packs * (max(forward, gather) + max(backward, gather + reduce))
        more = streamed - alone + (gather + reduce) / (sizes.shape.num_layers + 2)
    else:
        overlaps = "overlap on" in config["notes"]
        more = gather + (max(0.0, reduce - backward) if overlaps else reduce)
    updated = sizes.num_parameters / config["num_gpus"] * _UPDATE_BYTES / hardware.device.memory_bandwidth
    return {"phase": alone, "exchanges": more, "update": updated}


# -- memory ------------------------------------------------------------------------------------------------------------


def packs_in_flight(strategy: Strategy, stage: int, num_packs: int) -> float:
    """Packs of 1F1B whose activations a rank holds at most; with v stages a rank holds parts of them (Narayanan et al., 2021)."""
    pp, v = strategy.pp, strategy.v
    if v == 1:
        return min(pp - stage, num_packs)
    return min(2 * (pp - 1 - stage) + (v - 1) * pp + 1, num_packs * v) / v


def _states(config: Config, strategy: Strategy, sizes: ModelSizes, stage: int) -> float:
    """Bytes of weights, gradients and optimizer."""
    replicas, kept = strategy.dp * strategy.cp, stack_of(config).state_bytes
    parameters = sizes.stages(replace(strategy, z=0))[stage].weight_bytes / 2
    if strategy.z == 3:  # all in fp32; two layers are gathered in 16 bits, and one is reduced
        shape = sizes.shape
        layer = max(shape.layer_parameters, shape.vocab_size * shape.hidden_size) / strategy.tp
        return 16 * parameters / replicas + (2 * 2 + 4) * layer
    stage_of_zero = 1 if config["zero_stage"] is None else config["zero_stage"]  # nothing else would fit
    sharers = replicas if stage_of_zero else 1
    experts = sizes.shape.expert_parameters / strategy.ep / strategy.tp * -(-sizes.shape.num_layers // strategy.pp)
    divided = (parameters - experts) / sharers + experts / max(1, sharers / strategy.ep)
    return kept * parameters + 12 * divided


def _activations(config: Config, strategy: Strategy, shape: ModelShape, stage: int, num_packs: int) -> float:
    """Bytes of the packs in flight, and of a layer that runs again."""
    tokens = config["model"]["seq_len"] * config["micro_batch"] / strategy.cp
    fused, sp = stack_of(config).fused, strategy.sp
    layer = activation_bytes(shape, strategy.tp, sequence_parallel=sp, ep=strategy.ep, fused=fused)
    if stack_of(config).attention == "scores":  # as they are, softmax, and 8-bit mask of dropout
        layer += 5 * shape.num_attention_heads / strategy.tp * config["model"]["seq_len"]
    hidden, peak = 2 * shape.hidden_size / (strategy.tp if sp else 1), 0.0
    kept = layer
    if config["recompute"] == "full":
        kept, peak = hidden, layer
    elif _saves_by_operation(config):  # the input, attention, and every second product
        inner = shape.active_mlp_parameters / shape.hidden_size * 2 / 3
        heads = shape.attention_parameters / shape.hidden_size - shape.attention_size  # queries, keys, values
        products = (heads + shape.hidden_size + inner + shape.hidden_size) / strategy.tp
        kept, peak = hidden + 2 * shape.attention_size / strategy.tp + products, layer
    layers = shape.num_layers / strategy.pp
    return tokens * (kept * layers * packs_in_flight(strategy, stage, num_packs) + peak)


def memory_of(config: Config) -> dict[str, float]:
    """GiB on the fullest device: what torch allocates, what it reserves, and what the whole card shows."""
    strategy, shape = strategy_of(config), shape_of(config)
    sizes = ModelSizes(shape, tied=config["model"]["tied_embeddings"])
    num_packs = max(1, round(config["global_batch"] / strategy.dp / config["micro_batch"]))
    tokens = config["model"]["seq_len"] * config["micro_batch"] / strategy.cp
    most = 0.0
    for stage in range(strategy.pp):
        held = _activations(config, strategy, shape, stage, num_packs) + _states(config, strategy, sizes, stage)
        if stage == strategy.pp - 1:
            held += tokens * shape.vocab_size / strategy.tp * stack_of(config).logit_bytes
        most = max(most, held)
    reserved = most * (1 + ALLOCATOR_SLACK)
    card = card_bytes(most, config["num_gpus"])
    return {"allocated": most / _GIB, "reserved": reserved / _GIB, "card": card / _GIB}


KINDS = {"allocated": "allocated", "torchtitan": "reserved", "nvidia-smi": "card", "integer": "card"}
"""Which of these a source measured, by a word of `peak_mem_kind`."""


def kind_of(result: Config) -> str:
    """Which memory a result has."""
    return next(kind for word, kind in KINDS.items() if word in result["peak_mem_kind"])


# -- predictions and errors --------------------------------------------------------------------------------------------


def predict(config: Config) -> dict[str, Any]:
    """Seconds of a step, tokens a second and GPU, and GiB of the fullest GPU.

    Raises:
        HotspaError: the strategy is impossible here.
    """
    parts = seconds_of(config)
    seconds, sizes = sum(parts.values()), ModelSizes(shape_of(config), tied=config["model"]["tied_embeddings"])
    tokens = config["global_batch"] * config["model"]["seq_len"]
    return {
        "strategy": str(strategy_of(config)),
        "parameters_b": round(sizes.num_parameters / 1e9, 3),
        "seconds": round(seconds, 4),
        "of which": {name: round(part, 4) for name, part in parts.items()},
        "tokens_per_s_gpu": round(tokens / seconds / config["num_gpus"], 1),
        "memory_gib": {kind: round(value, 2) for kind, value in memory_of(config).items()},
    }


def predictions(configs: Runs) -> dict[str, Any]:
    """Predictions for all configurations, by id."""
    by_id: dict[str, Any] = {}
    for config in configs:
        try:
            by_id[config["id"]] = predict(config)
        except HotspaError as error:
            by_id[config["id"]] = {"unsupported": str(error)}
    return by_id


def measured_seconds(result: Config) -> float:
    """Of a step, as published, or from the tokens a second."""
    return float(result["step_time_s"] if "step_time_s" in result else result["step_time_s_derived"])


def errors_of(configs: Runs, results: Mapping[str, Config], shares: Mapping[str, float] = SHARES) -> dict[str, float]:
    """Relative errors of the seconds, by id."""
    return {
        each["id"]: sum(seconds_of(each, shares).values()) / measured_seconds(results[each["id"]]) - 1
        for each in configs
        if each["id"] in results
    }


def fitted(configs: Runs, results: Mapping[str, Config]) -> dict[str, float]:
    """The share of the peak, in percent steps, of each card with results with which the median of its signed errors is nearest
    to 0: the median falls with the share."""
    shares = {}
    for card in SHARES:
        runs = [each for each in configs if card_of(each) == card and each["id"] in results]

        def middle(percent: int, card: str = card, runs: Runs = tuple(runs)) -> float:
            return median(errors_of(runs, results, {card: percent / 100}).values())

        if runs:
            below = bisect_left(range(30, 95), 0, key=lambda percent: -middle(percent)) + 30
            shares[card] = min((below - 1, below), key=lambda percent: abs(middle(percent))) / 100
    return shares


def without_source(configs: Runs, results: Mapping[str, Config]) -> dict[str, dict[str, float]]:
    """Errors of each source's runs with shares fitted on all others. A card that only this source has used gets the share of
    the nearest card that others used."""
    by_source: dict[str, dict[str, float]] = {}
    for source in sorted({result["source"] for result in results.values()}):
        others = {name: result for name, result in results.items() if result["source"] != source}
        shares = fitted(configs, others)
        for card, nearest in ((LOW_POWER, "H100"), ("B200", "H100")):
            shares.setdefault(card, shares[nearest])
        own = [each for each in configs if results.get(each["id"], {}).get("source") == source]
        by_source[source] = errors_of(own, results, shares)
    return by_source


def memory_errors(configs: Runs, results: Mapping[str, Config]) -> dict[str, dict[str, float]]:
    """Relative errors of memory, by what was measured and by id."""
    errors: dict[str, dict[str, float]] = {}
    for config in configs:
        result = results.get(config["id"], {})
        if "peak_mem_gib" in result:
            kind = kind_of(result)
            errors.setdefault(kind, {})[config["id"]] = memory_of(config)[kind] / result["peak_mem_gib"] - 1
    return errors


def blind_errors(results: Mapping[str, Config]) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors of seconds and of memory of the predictions that were made before any result was known."""
    of = json.loads(BLIND.read_text())["predictions"]
    rows = {name: of[name] for name in results if "seconds" in of[name]}
    seconds = {name: row["seconds"] / measured_seconds(results[name]) - 1 for name, row in rows.items()}
    memory = {
        name: row["memory_gib"] / results[name]["peak_mem_gib"] - 1
        for name, row in rows.items()
        if row["memory_gib"] is not None and "peak_mem_gib" in results[name]
    }
    return seconds, memory


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _line(name: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"| {name} | {len(errors)} | {median(sizes):.1%} | {percentile(sizes, 0.9):.1%} | {median(errors):+.1%} |"


def _lines(configs: Runs, results: Mapping[str, Config]) -> dict[str, list[float]]:
    """What is counted, and its relative errors: seconds, by card and by source; memory; the blind predictions."""
    errors, of_memory = errors_of(configs, results), memory_errors(configs, results)
    blind, blind_memory = blind_errors(results)
    known, date = {each["id"]: each for each in configs}, json.loads(BLIND.read_text())
    lines = {"**seconds**, shares fitted on these runs": list(errors.values())}
    for card, share in SHARES.items():
        own = [error for name, error in errors.items() if card_of(known[name]) == card]
        lines[f"{card}, {share:.2f} of the peak"] = own
    lines["deterministic runs"] = [error for name, error in errors.items() if "deterministic" in known[name]["notes"]]
    without = {source: list(own.values()) for source, own in without_source(configs, results).items()}
    lines[WITHOUT] = [error for own in without.values() for error in own]
    lines |= {f"{source}, fitted without it": own for source, own in without.items()}
    lines["**memory**, slack of the allocator fitted on whole cards"] = [
        error for kind in of_memory.values() for error in kind.values()
    ]
    lines |= {f"memory, {kind}": list(own.values()) for kind, own in of_memory.items()}
    when = f"blind, {date['date']}, commit `{date['cost model of commit'][:8]}`"
    lines[f"**{when}**: seconds"] = list(blind.values())
    for card in SHARES:
        lines[f"blind: {card}"] = [error for name, error in blind.items() if card_of(known[name]) == card]
    lines["blind: memory"] = list(blind_memory.values())
    return {name: own for name, own in lines.items() if own}


def report(configs: Runs, results: Mapping[str, Config]) -> list[str]:
    """The table of errors of the page, in Markdown: in total, and by card."""
    lines = ["| errors of | runs | median | 90th percentile | signed median |", "|---|---|---|---|---|"]
    for name, errors in _lines(configs, results).items():
        if name in (WITHOUT, "blind: memory") or name.startswith(("**", *SHARES)):
            lines.append(_line(name, errors))
    return lines


def errors_csv(configs: Runs, results: Mapping[str, Config]) -> str:
    """The text of the file with all lines, also by source and by kind of memory."""
    lines = ["errors_of,runs,median,90th_percentile,signed_median"]
    for name, errors in _lines(configs, results).items():
        cells = _line(name.replace("*", "").replace("`", "").replace(", ", ": "), errors).strip("| ").split(" | ")
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=INPUTS.parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "not in a repository"


def _print_rows(rows: Mapping[str, Any], results: Mapping[str, Config]) -> None:
    print(f"{'run':<38} {'strategy':<20} {'params':>8} {'s a step':>10} {'published':>10} {'GiB':>7} {'published':>10}")
    for name, row in rows.items():
        if "unsupported" in row:
            print(f"{name:<38} {row['unsupported']}")
            continue
        result = results.get(name, {})
        seconds = f"{measured_seconds(result):.3f}" if result else "-"
        kind = kind_of(result) if "peak_mem_gib" in result else "allocated"
        print(
            f"{name:<38} {row['strategy']:<20} {row['parameters_b']:>7.2f}B {row['seconds']:>10.3f} {seconds:>10} "
            f"{row['memory_gib'][kind]:>7.1f} {result.get('peak_mem_gib', '-'):>10} {kind}"
        )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Predicts, prints tables and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose id contains it")
    parser.add_argument("--results", default=str(RESULTS), metavar="FILE", help="results by id (default: the 41)")
    parser.add_argument("--fit", action="store_true", help="also print the shares that these results would give")
    parser.add_argument("--write", action="store_true", help="also write the errors into docs/predicted.md")
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    options = parser.parse_args(arguments)
    configs = [each for each in json.loads(INPUTS.read_text()) if options.rows in each["id"]]
    results = {
        name: each for name, each in json.loads(Path(options.results).read_text()).items() if options.rows in name
    }
    rows = predictions(configs)
    _print_rows(rows, results)
    if results and not options.rows:
        lines = report(configs, results)
        print("", *lines, sep="\n")
        if options.write:
            before, begin, rest = PAGE.read_text().partition(BEGIN)
            PAGE.write_text(before + begin + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
            TABLE.write_text(errors_csv(configs, results))
    if options.fit:
        print(f"\nfitted on these results: {fitted(configs, results)}")
    result = {"date": datetime.now(UTC).date().isoformat(), "cost model of commit": _commit(), "predictions": rows}
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
