"""Writes the table of QLoRA of docs/quantized-bases.md: `python docs/qlora_table.py`. From data sheets and the memory model only."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from hf_hotspa.search.baselines import DataParallel
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.histogram import Counts
from hf_hotspa.search.offers import CHUNK_SIZES
from hf_hotspa.search.setup import Setup, make_plan

PAGE = Path(__file__).parent / "quantized-bases.md"
BEGIN, END = "<!-- begin: python docs/qlora_table.py -->\n", "<!-- end -->\n"
_LLAMA = {"model_type": "llama", "max_position_embeddings": 1 << 30, "vocab_size": 128256, "num_key_value_heads": 8}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
_QWEN = {**_LLAMA, "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
MODELS = {"8B (Llama-3.1)": {**_LLAMA, **_8B}, "32B (Qwen3)": {**_QWEN, **_32B}, "70B (Llama-3.1)": {**_LLAMA, **_70B}}
CARDS = {"24 GB (RTX 4090)": "4090", "48 GB (L40S)": "l40s", "80 GB (H100)": "h100-80g"}
DEVICES = (1, 2, 4, 8)
ROWS = [(model, devices) for model in MODELS for devices in DEVICES]
TOKENS, SEQUENCES = 4096, 64
"""Tokens per sequence and sequences per step of the predicted seconds."""
HEADER = f"| model | cards | {' | '.join(CARDS)} |\n|---|---|---|---|---|\n"


def cell(setup: Setup) -> str:
    """Longest sequence and tokens/s of a plan, and of FSDP + QLoRA."""
    memory, limit = setup.memory, setup.limit_bytes
    assert limit is not None
    assert setup.hardware is not None
    strategies, capacities = setup.strategies(), Capacities(memory, limit)
    plain = [strategy for strategy in strategies if strategy.cp == 1 and not strategy.z]
    chunked = [replace(strategy, ck=size) for strategy in plain for size in CHUNK_SIZES]
    whole, ours = (max(map(capacities.tokens, tried)) for tried in (strategies, chunked))
    theirs = DataParallel(memory, setup.cost.time, setup.hardware).largest_pack(3, True, limit)
    mine = fsdp = None
    if whole >= TOKENS:
        counts = Counts.of([TOKENS] * SEQUENCES, "one length")
        plan = make_plan(setup, counts, TOKENS, SEQUENCES, max_phases=1).plan
        mine, fsdp = plan.choice.seconds, plan.fully_sharded.seconds
    return f"{_written(max(whole, ours), mine)}<br>FSDP: {_written(theirs, fsdp)}"


def _written(longest: int, seconds: float | None) -> str:
    if longest < 1024:
        return "does not fit"
    speed = f", {TOKENS * SEQUENCES / seconds:,.0f}/s" if seconds is not None else ""
    return f"{longest // 1024:,}K{speed}"


def row(model: str, devices: int) -> str:
    """The line of a model on some cards of a node."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODELS[model]))
        setups = [
            Setup.read(str(config), f"1x{devices}", hardware, lora="16", quantization="nf4")
            for hardware in CARDS.values()
        ]
    return f"| {model} | {devices} | {' | '.join(map(cell, setups))} |\n"


def lines_of(page: str) -> list[str]:
    """The table lines of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].splitlines(keepends=True)[2:]


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = HEADER + "".join(row(*case) for case in ROWS)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
    sys.exit(0)
