"""A few rows much longer than the others: they run context parallel, the short ones data parallel.

On two CPU processes, in seconds, with a small new model:

    accelerate launch --multi_gpu --num_processes 2 examples/long_context.py --use_cpu --hotspa_strategies dp2:512@1024,cp2:4096

Your own model and rows, on 8 GPUs; `auto` (the default) finds what holds the longest row, in chunks where nothing else does:

    accelerate launch --multi_gpu --num_processes 8 examples/long_context.py --model Qwen/Qwen3-0.6B --dataset my.jsonl --bf16
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from from_trl import CHATS, small_model, small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source

SMALL = {"max_steps": 10, "learning_rate": 1e-2, "hotspa_mini_batch_size": 40, "hotspa_overlong": "truncate"}


@dataclass
class Script:
    model: str | None = None
    dataset: str | None = None


def small_rows() -> Any:
    """Short texts, and a few that are up to 4,096 tokens long: a token is a byte here."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    texts = ["\n".join(message["content"] for message in chat) for chat in chats]
    long = ["\n\n".join(texts[at : at + 20])[:4000] for at in range(0, 100, 20)]
    return Dataset.from_list([{"text": text} for text in texts + long])


def main() -> None:
    parser = HfArgumentParser((Script, HotSPaTrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(output_dir="out/long_context", logging_steps=2, logging_first_step=True, **({} if "--model" in sys.argv else SMALL))  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model) if script.model else small_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(script.model) if script.model else small_model(tokenizer, 4096)
    rows = load_source(script.dataset) if script.dataset else small_rows()
    trainer = HotSPaTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {args.output_dir}")


if __name__ == "__main__":
    main()
