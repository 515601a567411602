"""Predictions of published training runs, from their configurations, data sheets and the analytic link model alone.

`benchmarks/data/published_inputs.json` holds the configurations without their results: 81 dense models and 8 with experts, on A100, A800,
H100 and B200. Each is priced as one static strategy of ours. Nothing is fitted. `benchmarks/data/published_predictions.json` holds what came
out, with the date and the commit of the cost model, so that results can be held against it later.

How a configuration is read:

* `zero_stage` 3 is `+z3`. 0, 1 and unknown have their weights gathered and their gradients scattered once a step, without overlap: as ours.
* `recompute: full` is `+rc`. `selective` of torchtitan computes about half of a layer again: `+rc2`. Of the others it means the scores of
  attention, which flash attention computes again anyway: nothing.
* Pipelines run 1F1B, or its interleaved form.
* A micro-batch of b sequences is a pack of b whole sequences; all micro-batches of a replica are equal.
* Between nodes: what `network` says; else the named machine's. ZeRO within a group of ranks and overlap of communication with
  computation are not modelled.

    python benchmarks/published.py [--json FILE] [--rows TEXT]
"""

import argparse
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from result_file import write_json

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import PRESETS, Hardware
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import HotspaError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Bucket, Strategy

Config = Mapping[str, Any]

INPUTS = Path(__file__).parent / "data" / "published_inputs.json"
_CARDS = {"A100": "a100-80g", "A800": "a800-80g", "H100": "h100-80g", "B200": "b200-180g"}
_UPDATE_BYTES = 32
"""What one element of the master store moves in an update of AdamW: weight, two moments and gradient read, three written, and the new weight
in 16 bits."""
_GIB = 1 << 30


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
    )


def strategy_of(config: Config) -> Strategy:
    """The strategy of ours that is nearest."""
    degrees, full = config["parallel"], config["recompute"] == "full"
    by_operation = config["recompute"] == "selective" and config["framework"].startswith("torchtitan")
    return Strategy(
        degrees["dp"],
        degrees["tp"],
        degrees["pp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        v=degrees["vpp"],
        sp=bool(config["sequence_parallel"]) and degrees["tp"] > 1,
        rc=1 if full else 2 if by_operation else 0,
        z=3 if config["zero_stage"] == 3 else 0,
    )


def hardware_of(config: Config) -> Hardware:
    """The machine, with what the configuration says of its memory and its links."""
    machine = PRESETS[_CARDS[config["gpu"]]]
    device = machine.device
    if "HBM2e" in config["gpu_variant"]:
        device = replace(device, memory_bytes=96 * 10**9, memory_bandwidth=2.4e12)
    machine = replace(machine, device=device, devices_per_node=config["gpus_per_node"])
    network = config["network"]
    if found := re.search(r"(\d+)x(\d+) Gb/s", network):
        nics, speed = int(found[1]), float(found[2])
        return replace(machine, nics_per_node=nics, inter_bandwidth=speed * 1e9 / 8)
    if found := re.search(r"(\d+) Gb/s", network):
        speed = float(found[1]) * 1e9 / 8
        a_node = 1 if "per node" in network or "per GPU" not in network else config["gpus_per_node"]
        return replace(machine, nics_per_node=a_node, inter_bandwidth=speed)
    return machine


def predict(config: Config) -> dict[str, Any]:
    """Seconds of a step, tokens a second and GPU, and GiB of the fullest GPU; or why there is no prediction.

    Raises:
        HotspaError: the strategy is impossible here.
    """
    strategy, hardware, tokens = strategy_of(config), hardware_of(config), config["model"]["seq_len"]
    sizes = ModelSizes(shape_of(config), tied=config["model"]["tied_embeddings"])
    ranks = config["num_gpus"]
    cost = CostModel.of_hardware(hardware, sizes, MemoryOptions(schedule="1f1b"), ranks)
    sequences, pack = config["global_batch"], [tokens] * config["micro_batch"]
    packs = max(1, round(sequences / strategy.dp / config["micro_batch"]))
    computed = cost.time.phase_seconds(strategy, [[pack] * packs] * strategy.dp)
    moved = 0.0 if strategy.z == 3 else cost.switch_seconds([strategy])[strategy]
    updated = sizes.num_parameters / ranks * _UPDATE_BYTES / hardware.device.memory_bandwidth
    seconds = computed + moved + updated
    (memory,) = cost.rank_bytes([Bucket(strategy, tokens, tokens * config["micro_batch"])])
    return {
        "strategy": str(strategy),
        "parameters_b": round(sizes.num_parameters / 1e9, 3),
        "seconds": round(seconds, 4),
        "of which": {"phase": round(computed, 4), "gather and scatter": round(moved, 4), "update": round(updated, 4)},
        "tokens_per_s_gpu": round(sequences * tokens / seconds / ranks, 1),
        "memory_gib": round(memory.total / _GIB, 2) if config["zero_stage"] is not None else None,
    }


def predictions(configs: Sequence[Config]) -> dict[str, Any]:
    """Predictions for all configurations, by id."""
    found: dict[str, Any] = {}
    for config in configs:
        try:
            found[config["id"]] = predict(config)
        except HotspaError as error:
            found[config["id"]] = {"unsupported": str(error)}
    return found


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=INPUTS.parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "not in a repository"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Predicts, prints a table and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose id contains it")
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    options = parser.parse_args(arguments)
    configs = [each for each in json.loads(INPUTS.read_text()) if options.rows in each["id"]]
    found = predictions(configs)
    print(f"{'run':<38} {'strategy':<20} {'params':>8} {'s a step':>10} {'tokens/s/GPU':>13} {'GiB':>7}")
    for name, row in found.items():
        if "unsupported" in row:
            print(f"{name:<38} {row['unsupported']}")
            continue
        memory = "-" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}"
        print(
            f"{name:<38} {row['strategy']:<20} {row['parameters_b']:>7.2f}B {row['seconds']:>10.3f} "
            f"{row['tokens_per_s_gpu']:>13.1f} {memory:>7}"
        )
    result = {"date": datetime.now(UTC).date().isoformat(), "cost model of commit": _commit(), "predictions": found}
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
