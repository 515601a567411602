"""Writes the tables of docs/predicted.md: `python docs/plan_tables.py`. Each line is one answer of `hf-hotspa plan`.

`python docs/plan_tables.py gains [MINUTES]` plans the cells of the table of gains that docs/gains.json lacks, for at most MINUTES, and
writes the summary and docs/data/gains.csv. It takes some minutes per cluster size, so no test recomputes it.
"""

import csv
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.search.baselines import DYNAMIC, MEGATRON
from hf_hotspa.search.bucket_plan import Plan
from hf_hotspa.search.setup import Setup, make_plan

PAGE = Path(__file__).parent / "predicted.md"
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
    """The line of a model under a limit at which fully sharded strategies may pay off."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**_QWEN3, **CONFIGS[model]}))
        head = f"| {model}{f', LoRA r={lora}' if lora else ''} | {hardware} | {lengths}, {longest} |"
        try:
            found = make_plan(Setup.read(str(config), "1x8", hardware, lora=lora), lengths, longest)
        except DeviceMemoryError:
            return f"{head} does not fit |" + " |" * 4 + "\n"
    choice, fsdp = found.plan.choice, found.plan.fully_sharded
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
"""The function and the arguments of each line of the tables."""


GAINS_BEGIN, GAINS = "<!-- begin: python docs/plan_tables.py gains -->\n", PAGE.parent / "gains.json"
GAINS_TABLE = PAGE.parent / "data" / "gains.csv"
RIVALS = ("FSDP", "Megatron-like static", "dynamic cp", "the best single strategy")
_LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
_MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
GAIN_MODELS = {
    **{name: {**_QWEN3, **config} for name, config in CONFIGS.items()},
    "Qwen3-30B-A3B": {**_QWEN3, **_MIXTURE},
    "Llama-3.1-70B": _LLAMA_70B,
}
GAIN_CELLS = [
    (model, cluster, lora, lengths)
    for cluster in ("1x8", "2x8", "4x8", "8x8", "16x8")
    for model in GAIN_MODELS
    for lora in (None, "16")
    for lengths in ("commoncrawl", "github", "uniform", "chat")
]


def gain_cell(model: str, cluster: str, lora: str | None, lengths: str) -> dict[str, object]:
    """The gain of a plan over common setups, on H100 (80 GB), longest sequence 32768."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(GAIN_MODELS[model]))
        try:
            plan = make_plan(Setup.read(str(config), cluster, "h100-80g", lora=lora), lengths, LONGEST[0]).plan
        except DeviceMemoryError:
            return {"fits": False}
    rivals = {rival.name: rival.seconds for rival in (*plan.rivals, *plan.layouts)}
    seconds, static = plan.choice.seconds, plan.choice.static_seconds
    others = [plan.fully_sharded.seconds, rivals.get(MEGATRON), rivals.get(DYNAMIC), static]
    ratios = [round(other / seconds, 3) if other is not None else None for other in others]
    return {"fits": True, "plan": str(plan.choice), "ratios": ratios}


Gains = dict[str, dict[str, Any]]


def gains_summary(known: Gains) -> str:
    """The table of the page: how many times as fast as each rival, over the models and lengths of a cluster."""
    lines = [f"| | cluster | fits | {' | '.join(f'over {rival}' for rival in RIVALS)} |\n", "|---" * 7 + "|\n"]
    for kind, lora in (("full training", None), ("LoRA r=16", "16")):
        for cluster in dict.fromkeys(cell[1] for cell in GAIN_CELLS):
            found = [known[" ".join(map(str, cell))] for cell in GAIN_CELLS if cell[1:3] == (cluster, lora)]
            ratios = [gain["ratios"] for gain in found if gain["fits"]]
            cells = []
            for at in range(len(RIVALS)):
                fit = [each[at] for each in ratios if each[at] is not None]
                if at == 1 and cluster.startswith("1x"):  # a layout of clusters
                    cells.append("-")
                    continue
                without = f"; {len(ratios) - len(fit)} do not fit" if len(fit) < len(ratios) else ""
                cells.append(f"{geometric_mean(fit):.2f} ({min(fit):.2f} to {max(fit):.2f}){without}")
            lines.append(f"| {kind} | {cluster} | {len(ratios)} of {len(found)} | {' | '.join(cells)} |\n")
    return "".join(lines)


def gains_csv(known: Gains) -> str:
    """All cells, the text of the file beside the page."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "lora_rank", "cluster", "lengths", "plan", *(f"over {rival}" for rival in RIVALS)])
    for cell in GAIN_CELLS:
        model, cluster, lora, lengths = cell
        gain = known[" ".join(map(str, cell))]
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in gain.get("ratios", [])]
        writer.writerow([model, lora or "", cluster, lengths, gain.get("plan", "does not fit"), *ratios])
    return text.getvalue()


def write_gains(minutes: float) -> None:
    """Plans the missing cells, for at most `minutes`, and writes the tables if none is missing."""
    known, end = json.loads(GAINS.read_text()), time.monotonic() + 60 * minutes
    for cell in GAIN_CELLS:
        key = " ".join(map(str, cell))
        if key not in known and time.monotonic() < end:
            known[key] = gain_cell(*cell)
            GAINS.write_text(json.dumps(known, indent=1) + "\n")
    if len(known) == len(GAIN_CELLS):
        GAINS_TABLE.write_text(gains_csv(known))
        PAGE.write_text(_rewritten(PAGE.read_text(), GAINS_BEGIN, gains_summary(known)))


def rewritten_tables(lines: Sequence[str]) -> str:
    """The page with these lines, one for each entry of `ROWS`."""
    of_first = len(MODELS) * len(CLUSTERS)
    page = _rewritten(PAGE.read_text(), BEGIN, HEADER + "".join(lines[:of_first]))
    return _rewritten(page, SHARDED_BEGIN, SHARDED_HEADER + "".join(lines[of_first:]))


def lines_of(page: str) -> list[str]:
    """The table lines of a page."""
    tables = [page.partition(begin)[2].partition(END)[0] for begin in (BEGIN, SHARDED_BEGIN)]
    return [line for table in tables for line in table.splitlines(keepends=True)[2:]]


def _rewritten(page: str, begin: str, table: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return before + begin + table + END + after


if __name__ == "__main__":
    if sys.argv[1:2] == ["gains"]:
        write_gains(float(sys.argv[2]) if len(sys.argv) > 2 else 90.0)
        sys.exit(0)
    PAGE.write_text(rewritten_tables([write(*case) for write, case in ROWS]))
    sys.exit(0)
