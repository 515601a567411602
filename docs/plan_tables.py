"""Writes the tables of docs/strategies.md: `python docs/plan_tables.py`. Each line is one answer of `hf-hotspa plan`."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.search.plan import Plan
from hf_hotspa.search.planning import Setup, make_plan

PAGE = Path(__file__).parent / "strategies.md"
BEGIN, END = "<!-- begin: python docs/plan_tables.py -->\n", "<!-- end -->\n"
HARDWARE, LENGTHS = "a800-80g", "commoncrawl"
MODELS, CLUSTERS = ("llama2-7b", "llama2-13b", "llama2-32b"), ("1x8", "2x8", "4x8")
LONGEST = (32768, 16384, 8192, 4096)
HEADER = (
    "| model | cluster | longest sequence | strategies | s a step | best static strategy | s a step | gain | switch s |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


SHARDED_BEGIN = "<!-- begin: fully sharded, python docs/plan_tables.py -->\n"
_QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "Qwen3-32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
}  # fmt: skip
SHARDED_CASES = [
    (model, lora, hardware, lengths, longest)
    for model, lora in (("Qwen3-8B", None), ("Qwen3-32B", "16"))
    for hardware in ("4090-24g", "h100-80g")
    for lengths, longest in (("chat", 8192), ("github", 32768))
]
SHARDED_HEADER = (
    "| model | 8 devices | lengths, longest | strategies | s a step | best static strategy | s a step | FSDP, s a step |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def sharded_row(model: str, lora: str | None, hardware: str, lengths: str, longest: int) -> str:
    """The line of a model under a limit that makes fully sharded strategies worth it, or not."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**_QWEN3, **CONFIGS[model]}))
        head = f"| {model}{f', LoRA r={lora}' if lora else ''} | {hardware} | {lengths}, {longest} |"
        try:
            found = make_plan(Setup.read(str(config), "1x8", hardware, lora=lora), lengths, longest)
        except DeviceMemoryError:
            return f"{head} does not fit |" + " |" * 4 + "\n"
    choice, fsdp = found.plan.choice, found.plan.baselines[-1]
    buckets = "<br>".join(f"`{bucket}`" for bucket in choice.buckets)
    theirs = f"{fsdp.seconds:.2f}" if fsdp.seconds is not None else f"holds up to {fsdp.pack_tokens}"
    return f"{head} {buckets} | {choice.seconds:.2f} | `{choice.static}` | {choice.static_seconds:.2f} | {theirs} |\n"


def plan(model: str, cluster: str, longest: int) -> Plan | None:
    """The plan; None when the longest sequence does not fit."""
    try:
        return make_plan(Setup.read(model, cluster, HARDWARE), LENGTHS, longest).plan
    except DeviceMemoryError:
        return None


def row(model: str, cluster: str) -> str:
    """The line of a model on a cluster, with the longest sequence that fits."""
    found = next(filter(None, (plan(model, cluster, longest) for longest in LONGEST)), None)
    if found is None:
        return f"| {model} | {cluster} | none of {LONGEST[-1]} tokens fits |" + " |" * 6 + "\n"
    choice = found.choice
    buckets = "<br>".join(f"`{bucket}`" for bucket in choice.buckets)
    return (
        f"| {model} | {cluster} | {found.longest} | {buckets} | {choice.seconds:.2f} | `{choice.static}` | "
        f"{choice.static_seconds:.2f} | {choice.static_seconds / choice.seconds:.2f}x | {choice.switch_seconds:.2f} |\n"
    )


ROWS = [
    *((row, (model, cluster)) for model in MODELS for cluster in CLUSTERS),
    *((sharded_row, case) for case in SHARDED_CASES),
]  # fmt: skip
"""What writes each line of the tables, and of what."""


def rewritten_tables(lines: Sequence[str]) -> str:
    """The page with these lines, one for each of `ROWS`."""
    of_first = len(MODELS) * len(CLUSTERS)
    page = _rewritten(PAGE.read_text(), BEGIN, HEADER + "".join(lines[:of_first]))
    return _rewritten(page, SHARDED_BEGIN, SHARDED_HEADER + "".join(lines[of_first:]))


def lines_of(page: str) -> list[str]:
    """The lines of the tables that a page has."""
    tables = [page.partition(begin)[2].partition(END)[0] for begin in (BEGIN, SHARDED_BEGIN)]
    return [line for table in tables for line in table.splitlines(keepends=True)[2:]]


def _rewritten(page: str, begin: str, table: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return before + begin + table + END + after


if __name__ == "__main__":
    PAGE.write_text(rewritten_tables([write(*case) for write, case in ROWS]))
    sys.exit(0)
