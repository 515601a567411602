"""Supervised fine-tuning with TRL, any layout: a script of TRL in which one import was changed.

On two CPU processes, in seconds, with a small new model:

    accelerate launch --multi_gpu --num_processes 2 examples/trl_sft.py --use_cpu --bf16 False --hotspa_strategies dp2:256@1024,tp2:1024

Your own model and chats, on 8 GPUs (strategies are chosen by measured speed and memory):

    accelerate launch --multi_gpu --num_processes 8 examples/trl_sft.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name chats.jsonl --packing

All fields of SFTConfig, ModelConfig and ScriptArguments are flags, beside the hotspa_* flags.
"""

from pathlib import Path

from datasets import load_dataset
from from_trl import CHATS, small_model, small_tokenizer
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_hotspa.trl import SFTConfig, SFTTrainer  # from trl import SFTConfig, SFTTrainer

DEFAULTS = {
    "dataset_name": str(CHATS), "assistant_only_loss": True, "max_length": 1024, "learning_rate": 1e-2, "max_steps": 20,
    "output_dir": "out/trl_sft", "logging_steps": 5, "logging_first_step": True, "save_strategy": "no",
}  # fmt: skip


def main() -> None:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    if Path(script.dataset_name).is_file():
        dataset = load_dataset("json", data_files=script.dataset_name, split="train")
    else:
        dataset = load_dataset(script.dataset_name, script.dataset_config, split=script.dataset_train_split)
    tokenizer = (
        AutoTokenizer.from_pretrained(model.model_name_or_path) if model.model_name_or_path else small_tokenizer()
    )
    trainer = SFTTrainer(
        model=model.model_name_or_path or small_model(tokenizer),
        args=training,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
