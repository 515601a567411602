"""Writes docs/data/plans.csv, each line an answer of `hf-hotspa plan`, and its summary in docs/predicted.md: `python docs/plan_tables.py`.

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
from hf_hotspa.search.setup import Setup, make_plan

PAGE = Path(__file__).parent / "predicted.md"
BEGIN, END = "<!-- begin: python docs/plan_tables.py -->\n", "<!-- end -->\n"
TABLE = PAGE.parent / "data" / "plans.csv"
HARDWARE, LENGTHS = "a800-80g", "commoncrawl"
MODELS, CLUSTERS = ("llama2-7b", "llama2-13b", "llama2-32b"), ("1x8", "2x8", "4x8")
COLUMNS = (
    "model", "lora_rank", "cluster", "device", "lengths", "longest", "plan", "seconds", "best_static", "static_seconds",
    "fsdp_seconds", "switch_seconds",
)  # fmt: skip
"""Of the file. Without `fsdp_seconds` FSDP cannot hold the longest row."""


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
ROWS = [
    *((model, "", cluster, HARDWARE, LENGTHS, 32768) for model in MODELS for cluster in CLUSTERS),
    *((model, lora or "", "1x8", *rest) for model, lora, *rest in SHARDED_CASES),
]
"""Model, rank of an adapter, cluster, device, lengths and longest row of each line of the file."""
GROUPS = (
    ("Llama 2 7B, 13B and 32B, full, 1, 2 and 4 nodes of eight A800 (80 GB)", ROWS[:9]),
    ("Qwen3 8B, full, eight RTX 4090 (24 GB)", ROWS[9:11]),
    ("Qwen3 8B, full, eight H100 (80 GB)", ROWS[11:13]),
    ("Qwen3 32B, LoRA r=16, eight RTX 4090 (24 GB)", ROWS[13:15]),
    ("Qwen3 32B, LoRA r=16, eight H100 (80 GB)", ROWS[15:]),
)
"""The lines of the table on the page, and the rows that each sums up."""


def row(model: str, lora: str, cluster: str, hardware: str, lengths: str, longest: int) -> list[str]:
    """The cells of a line of the file, as text. The plan of a longest row that no strategy holds is `does not fit`."""
    head = [model, lora, cluster, hardware, lengths, str(longest)]
    with tempfile.TemporaryDirectory() as folder:
        if model in CONFIGS:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps({**_QWEN3, **CONFIGS[model]}))
            model = str(config)
        try:
            plan = make_plan(Setup.read(model, cluster, hardware, lora=lora or None), lengths, longest).plan
        except DeviceMemoryError:
            return [*head, "does not fit", *[""] * 5]
    choice, fsdp = plan.choice, plan.fully_sharded.seconds
    seconds = [f"{choice.seconds:.2f}", str(choice.static), f"{choice.static_seconds:.2f}"]
    return [*head, str(choice), *seconds, "" if fsdp is None else f"{fsdp:.2f}", f"{choice.switch_seconds:.2f}"]


def plans_csv(rows: Sequence[Sequence[str]]) -> str:
    """The text of the file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    return text.getvalue()


def _span(rows: Sequence[dict[str, str]], other: str) -> str:
    ratios = [float(each[other]) / float(each["seconds"]) for each in rows if each["seconds"] and each[other]]
    if not ratios:
        return "holds none"
    missing = f"; holds {len(ratios)} of {len(rows)}" if len(ratios) < len(rows) else ""
    return f"{min(ratios):.2f} to {max(ratios):.2f}{missing}"


def plans_summary(rows: Sequence[Sequence[str]]) -> str:
    """The table of the page."""
    known = {tuple(each[:6]): dict(zip(COLUMNS, each, strict=True)) for each in rows}
    lines = ["| | fits | over the best single strategy | over FSDP |\n", "|---|---|---|---|\n"]
    for title, cases in GROUPS:
        of_group = [known[tuple(map(str, case))] for case in cases]
        fits = [each for each in of_group if each["seconds"]]
        spans = f"{_span(fits, 'static_seconds')} | {_span(fits, 'fsdp_seconds')}"
        lines.append(f"| {title} | {len(fits)} of {len(of_group)} | {spans} |\n")
    return "".join(lines)


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
            plan = make_plan(Setup.read(str(config), cluster, "h100-80g", lora=lora), lengths, 32768).plan
        except DeviceMemoryError:
            return {"fits": False}
    rivals = {rival.name: rival.seconds for rival in (*plan.rivals, *plan.layouts)}
    seconds, static = plan.choice.seconds, plan.choice.static_seconds
    others = [plan.fully_sharded.seconds, rivals.get(MEGATRON), rivals.get(DYNAMIC), static]
    ratios = [round(other / seconds, 3) if other is not None else None for other in others]
    return {"fits": True, "plan": str(plan.choice), "ratios": ratios}


Gains = dict[str, dict[str, Any]]


def gains_summary(known: Gains) -> str:
    """The table of the page: how many times as fast as each rival, over the models, lengths and clusters of a line."""
    lines = [f"| | nodes of eight | fits | {' | '.join(f'over {rival}' for rival in RIVALS)} |\n", "|---" * 7 + "|\n"]
    for kind, lora in (("full training", None), ("LoRA r=16", "16")):
        for clusters in (("1x8",), ("2x8", "4x8"), ("8x8", "16x8")):
            found = [known[" ".join(map(str, cell))] for cell in GAIN_CELLS if cell[1] in clusters and cell[2] == lora]
            ratios = [gain["ratios"] for gain in found if gain["fits"]]
            cells = []
            for at in range(len(RIVALS)):
                fit = [each[at] for each in ratios if each[at] is not None]
                if at == 1 and clusters == ("1x8",):  # a layout of clusters
                    cells.append("-")
                    continue
                without = f"; {len(ratios) - len(fit)} do not fit" if len(fit) < len(ratios) else ""
                cells.append(f"{geometric_mean(fit):.2f} ({min(fit):.2f} to {max(fit):.2f}){without}")
            nodes = ", ".join(cluster.removesuffix("x8") for cluster in clusters)
            lines.append(f"| {kind} | {nodes} | {len(ratios)} of {len(found)} | {' | '.join(cells)} |\n")
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


def _rewritten(page: str, begin: str, table: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return before + begin + table + END + after


if __name__ == "__main__":
    if sys.argv[1:2] == ["gains"]:
        write_gains(float(sys.argv[2]) if len(sys.argv) > 2 else 90.0)
        sys.exit()
    found = [row(*case) for case in ROWS]
    TABLE.write_text(plans_csv(found))
    PAGE.write_text(_rewritten(PAGE.read_text(), BEGIN, plans_summary(found)))
