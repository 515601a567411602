"""Distillation with TRL, any layout: a script of TRL in which one import was changed.

On two CPU processes, in a minute, with small new models:

    accelerate launch --multi_gpu --num_processes 2 examples/trl_distill.py --use_cpu --bf16 False --hotspa_strategies dp2:40@512,tp2:1024

Your own models and prompts, with a vLLM server, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/trl_distill.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --teacher_model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/tldr --use_vllm --vllm_mode server

All fields of DistillationConfig, ModelConfig and ScriptArguments are flags, beside the hotspa_* flags.
"""

import torch
from datasets import Dataset, load_dataset
from from_trl import small_model, small_tokenizer
from transformers import AutoTokenizer, PreTrainedModel
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_hotspa.trl import DistillationConfig, DistillationTrainer  # from trl import DistillationConfig, ...

DEFAULTS = {
    "learning_rate": 1e-2, "max_steps": 15, "max_completion_length": 24, "beta": 0.5,
    "output_dir": "out/trl_distill", "logging_steps": 3, "logging_first_step": True, "save_strategy": "no",
}  # fmt: skip


def sharper(model: PreTrainedModel) -> PreTrainedModel:
    """A teacher that prefers a few tokens."""
    with torch.no_grad():
        model.get_output_embeddings().weight *= 8
    return model


def main() -> None:
    parser = TrlParser((ScriptArguments, DistillationConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    name, own = model.model_name_or_path, script.dataset_name
    tokenizer = AutoTokenizer.from_pretrained(name) if name else small_tokenizer()
    prompts = Dataset.from_list([{"prompt": "Write a" + " please" * (i % 9)} for i in range(96)])
    trainer = DistillationTrainer(
        model=name or small_model(tokenizer), args=training, processing_class=tokenizer,
        teacher_model=training.teacher_model_name_or_path or sharper(small_model(tokenizer)),
        train_dataset=load_dataset(own, split=script.dataset_train_split) if own else prompts,
        peft_config=get_peft_config(model),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
