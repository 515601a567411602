"""Writes the table of docs/long-sequences.md: `python docs/long_sequences_table.py`. From the memory model only: no GPU, no torch."""

import json
import tempfile
from pathlib import Path

from hf_hotspa.costs.memory import PLANNED_SHARE, MemoryModel, MemoryOptions, Rising
from hf_hotspa.costs.model_config import load_model
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.search.offers import CHUNK_SIZES
from hf_hotspa.strategy import Strategy

PAGE = Path(__file__).parent / "long-sequences.md"
BEGIN, END = "<!-- begin: python docs/long_sequences_table.py -->\n", "<!-- end -->\n"
HEADER = (
    "| model | GPU | stock, gradient checkpointing | `+rc` | `+ck` | `+ck` with `+kh` |\n|---|---|---|---|---|---|\n"
)
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1 << 30}
MODELS = {
    "1B (Llama-3.2-1B)": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B (Llama-3.1-8B)": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "32B, LoRA r=16 (Qwen2.5-32B)": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 1 << 30,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
MOST, STEP, HOST_BYTES = 1 << 26, 1024, 512 << 30


def longest(config: dict[str, object], gib: int, lora: str | None) -> list[int]:
    """The longest sequence of each column, in tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        model = load_model(path)
    adapter = Adapter.read(lora, model.linears) if lora else None
    sizes = ModelSizes(model.shape, "bfloat16", model.tied, added=adapter)
    ours = MemoryModel(sizes, 1, MemoryOptions(offload_master=True))
    limit = PLANNED_SHARE * gib * 2**30

    def stock(tokens: int) -> float:
        """Bytes as with the stock Trainer: weights and optimizer on the device, and the logits of all tokens in fp32, twice."""
        found = MemoryModel(sizes, 1).breakdown(Strategy(rc=1), tokens)
        return found.total - found.logits + tokens * model.shape.vocab_size * 4 * 2

    def most(strategy: Strategy) -> int:
        return ours.largest_pack(strategy, limit)

    chunked = [
        max(most(Strategy(ck=size, kh=in_host, rc=rc)) for size in CHUNK_SIZES for rc in (0, 1))
        for in_host in (False, True)
    ]
    shape = model.shape
    width = shape.num_key_value_heads * shape.attention_size // shape.num_attention_heads
    chunked[1] = min(chunked[1], HOST_BYTES // (12 * width * shape.num_layers))
    return [Rising(stock, MOST).most_within(limit), most(Strategy(rc=1)), *chunked]


def table() -> str:
    """Returns the table."""
    lines = []
    for name, config in MODELS.items():
        for gib in (24, 80):
            cells = [
                "does not fit" if tokens < STEP else f"{tokens // STEP:,}K"
                for tokens in longest(config, gib, "16" if "LoRA" in name else None)
            ]
            lines.append(f"| {name} | {gib} GB | " + " | ".join(cells) + " |\n")
    return HEADER + "".join(lines)


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
