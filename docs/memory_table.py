"""Writes the table of docs/planning.md that says what fits, and docs/data/memory.csv: `python docs/memory_table.py`. From data
sheets and the memory model only: no GPU, no torch."""

import csv
import io
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

PAGE = Path(__file__).parent / "planning.md"
TABLE = PAGE.parent / "data" / "memory.csv"
BEGIN, END = "<!-- begin: python docs/memory_table.py -->\n", "<!-- end -->\n"
_LLAMA = {"model_type": "llama", "max_position_embeddings": 1 << 30, "vocab_size": 128256, "num_key_value_heads": 8}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
_QWEN = {**_LLAMA, "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
MODELS = {"8B (Llama-3.1)": {**_LLAMA, **_8B}, "32B (Qwen3)": {**_QWEN, **_32B}, "70B (Llama-3.1)": {**_LLAMA, **_70B}}
CARDS = {"24 GB (RTX 4090)": "4090", "48 GB (L40S)": "l40s", "80 GB (H100)": "h100-80g"}
METHODS: dict[str, dict[str, str]] = {
    "full": {},
    "LoRA": {"lora": "16"},
    "QLoRA": {"lora": "16", "quantization": "nf4"},
}
DEVICES, SHOWN = (1, 2, 4, 8), ("1", "8")
"""Cards of a node, and those on the page."""
ROWS = [
    (model, method, devices, card) for model in MODELS for method in METHODS for devices in DEVICES for card in CARDS
]
TOKENS, SEQUENCES = 4096, 64
"""Tokens per sequence and sequences per step of the predicted seconds."""
HEADER = ("model", "method", "cards", "card", "longest", "tokens_per_second", "longest_fsdp", "tokens_per_second_fsdp")
Row = list[str]


def row(model: str, method: str, devices: int, card: str) -> Row:
    """Longest sequence and tokens/s of a plan, and of FSDP with packing; empty where it does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(MODELS[model]))
        setup = Setup.read(str(config), f"1x{devices}", CARDS[card], **METHODS[method])
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
    return [model, method, str(devices), card, *_written(max(whole, ours), mine), *_written(theirs, fsdp)]


def _written(longest: int, seconds: float | None) -> Row:
    if longest < 1024:
        return ["", ""]
    return [f"{longest // 1024}K", f"{TOKENS * SEQUENCES / seconds:.0f}" if seconds is not None else ""]


def read_rows() -> list[Row]:
    """The rows of the file."""
    return list(csv.reader(TABLE.read_text().splitlines()))[1:]


def csv_text(rows: list[Row]) -> str:
    """The file's text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEADER, *rows])
    return text.getvalue()


def shown(rows: list[Row]) -> str:
    """The table of the page: longest sequence and tokens/s, where a card of it holds any."""
    lines = [f"| model | method | cards | {' | '.join(CARDS)} |\n", "|---" * (3 + len(CARDS)) + "|\n"]
    cells = {tuple(row[:4]): row[4:6] for row in rows}
    for model, method in dict.fromkeys((row[0], row[1]) for row in rows):
        for devices in SHOWN:
            texts = []
            for card in CARDS:
                longest, speed = cells[model, method, devices, card]
                texts.append((longest + (f", {int(speed):,}/s" if speed else "")) or "does not fit")
            if any(text != "does not fit" for text in texts):
                lines.append(f"| {model} | {method} | {devices} | {' | '.join(texts)} |\n")
    return "".join(lines)


def main() -> None:
    """Writes the file and the table of the page."""
    rows = [row(*case) for case in ROWS]
    TABLE.write_text(csv_text(rows))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + shown(rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
    sys.exit(0)
