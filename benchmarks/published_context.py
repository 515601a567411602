"""Seconds of a step and memory of published training runs with context parallelism, predicted from data sheets alone.

    python benchmarks/published_context.py

The rows (`tests/data/published_context_rows.json`) are configurations without their results, so that nothing is fitted to
them: the predictions (`tests/data/predicted_context_rows.json`) are what the cost models said before anything was compared; they stay as
they are, also where a formula has changed since. Sequences are full and
causal, packs are of `micro_batch` sequences, recomputation as the row has it (selective counts as none: attention keeps no
scores here either). Gradients of dp are summed after the last micro-batch, at the speed that switches are predicted with.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_hotspa.costs.divided import choose_way
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import estimate
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
ROWS, PREDICTED = DATA / "published_context_rows.json", DATA / "predicted_context_rows.json"
CARDS = {"B200": "b200-180g", "H100": "h100-80g", "A100": "a100-80g", "A800": "a800-80g"}
WAYS = {"a2a": "ulysses", "all_gather": "allgather", "p2p": "ring"}


def shape_of(row: dict[str, Any]) -> ModelShape:
    """The model of a row."""
    model = row["model"]
    width, hidden = model["head_dim"], model["hidden"]
    attention = 2 * hidden * width * (model["heads"] + model["kv_heads"])
    mlp = (3 if model["gated_mlp"] else 2) * hidden * model["ffn"]
    return ModelShape(
        family="llama",
        num_layers=model["layers"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        hidden_size=hidden,
        attention_size=width * model["heads"],
        vocab_size=model["vocab"],
        layer_parameters=attention + mlp + 2 * hidden,
    )


def predict(row: dict[str, Any]) -> dict[str, Any]:
    """What the cost models say of a row."""
    degrees, shape = row["parallel"], shape_of(row)
    strategy = Strategy(
        degrees["dp"],
        degrees["tp"],
        degrees["pp"],
        row["sequence_parallel"] and degrees["tp"] > 1,
        int(row["recompute"] == "full"),
        cp=degrees["cp"],
    )
    sizes = ModelSizes(shape, row["dtype"].replace("bf16", "bfloat16"), row["model"]["tied_embeddings"])
    hardware, way = load_hardware(CARDS[row["gpu"]]), WAYS.get(row.get("cp_comm"), "auto")
    time = replace(TimeModel.analytic(sizes, hardware), context_parallel=way)
    pack = (row["model"]["seq_len"],) * row["micro_batch"]
    packs = [pack] * (row["global_batch"] // (row["micro_batch"] * strategy.dp))
    seconds = time.phase_seconds(strategy, [packs] * strategy.dp)
    seconds += estimate([strategy], sizes, hardware.cluster(row["num_gpus"]))[strategy]
    tokens = row["global_batch"] * row["model"]["seq_len"]
    memory = MemoryModel(sizes, row["num_gpus"], MemoryOptions(context_parallel=way))
    return {
        "id": row["id"],
        "strategy": str(strategy),
        "way": choose_way(strategy, shape, way),
        "step_s": float(f"{seconds:.4g}"),
        "tokens_per_second_per_gpu": float(f"{tokens / seconds / row['num_gpus']:.4g}"),
        "memory_gib": float(f"{memory.breakdown(strategy, sum(pack), num_packs=len(packs)).total / 2**30:.4g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for row, predicted in zip(json.loads(ROWS.read_text()), json.loads(PREDICTED.read_text()), strict=True):
        print(f"predicted {predicted}\nnow       {predict(row)}")


if __name__ == "__main__":
    main()
