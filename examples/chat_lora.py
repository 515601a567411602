"""LoRA on conversations, under strategies that switch; only what the assistant says is learned.

On four CPU processes, in a minute, with a small new model as the base:

    accelerate launch --multi_gpu --num_processes 4 examples/chat_lora.py --use_cpu

Your own model and chats, on 8 GPUs (strategies are chosen by measured speed and memory):

    accelerate launch --multi_gpu --num_processes 8 examples/chat_lora.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl --bf16
"""

import sys
from dataclasses import dataclass
from typing import Any

from from_trl import CHATS, small_model, small_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source

SMALL = {"max_steps": 20, "learning_rate": 1e-2, "hotspa_mini_batch_size": 40, "hotspa_overlong": "truncate"}
OWN = {"learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.03}


@dataclass
class Script:
    model: str | None = None
    dataset: str = str(CHATS)
    lora_r: int = 16


def parse() -> Any:
    parser = HfArgumentParser((Script, HotSPaTrainingArguments))  # type: ignore[arg-type]
    is_own = any(word.partition("=")[0] == "--model" for word in sys.argv)
    parser.set_defaults(output_dir="out/chat_lora", logging_steps=5, logging_first_step=True, **(OWN if is_own else SMALL))  # fmt: skip
    return parser.parse_args_into_dataclasses()


def main() -> None:
    script, args = parse()
    tokenizer = AutoTokenizer.from_pretrained(script.model) if script.model else small_tokenizer()
    base = AutoModelForCausalLM.from_pretrained(script.model) if script.model else small_model(tokenizer)
    set_seed(args.seed)
    adapter = LoraConfig(r=script.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter)
    trainer = HotSPaTrainer(model, args, train_dataset=load_source(script.dataset), processing_class=tokenizer)
    trainer.train()
    if not trainer.preempted:  # a SIGTERM has saved a checkpoint
        trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the adapter is in {args.output_dir}")


if __name__ == "__main__":
    main()
