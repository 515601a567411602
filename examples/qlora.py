"""QLoRA: an adapter on a base in 4 bits, under strategies that switch.

On two CPU processes, in seconds, with a small new model as the base:

    accelerate launch --multi_gpu --num_processes 2 examples/qlora.py --use_cpu --hotspa_strategies dp2:256@1024,tp2:1024

Your own model and chats, on 8 GPUs (strategies are chosen by measured speed and memory):

    accelerate launch --multi_gpu --num_processes 8 examples/qlora.py --model Qwen/Qwen3-8B --dataset chats.jsonl --bf16
"""

from dataclasses import dataclass
from typing import Any

from from_trl import CHATS, small_model, small_tokenizer
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser, set_seed

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
DEFAULTS = {
    "max_steps": 20, "learning_rate": 1e-2, "logging_steps": 5, "logging_first_step": True, "hotspa_mini_batch_size": 40,
}  # fmt: skip


@dataclass
class Script:
    model: str | None = None
    dataset: str = str(CHATS)


def quantized(script: Script, tokenizer: Any) -> Any:
    if script.model is not None:
        return AutoModelForCausalLM.from_pretrained(script.model, quantization_config=NF4)
    small = small_model(tokenizer)
    given = {"config": small.config, "state_dict": small.state_dict()}
    return type(small).from_pretrained(None, **given, quantization_config=NF4)


def main() -> None:
    parser = HfArgumentParser((Script, HotSPaTrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS, hotspa_overlong="truncate")
    script, args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model) if script.model else small_tokenizer()
    base = prepare_model_for_kbit_training(quantized(script, tokenizer))
    set_seed(args.seed)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = HotSPaTrainer(model, args, train_dataset=load_source(script.dataset), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the adapter is in {args.output_dir}")


if __name__ == "__main__":
    main()
