"""Training on rewards with TRL's GRPO, any layout: a script of TRL in which one import was changed.

On two CPU processes, in a minute, with a small new model that learns to write letters "a":

    accelerate launch --multi_gpu --num_processes 2 examples/trl_grpo.py --use_cpu --bf16 False --hotspa_strategies dp2:40@512,tp2:1024

Your own model and prompts, with a vLLM server, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/trl_grpo.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name trl-lib/tldr --use_vllm --vllm_mode server --max_completion_length 512

All fields of GRPOConfig, ModelConfig and ScriptArguments are flags, beside the hotspa_* flags.
"""

from datasets import Dataset, load_dataset
from from_trl import small_model, small_tokenizer
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_hotspa.trl import GRPOConfig, GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer

DEFAULTS = {
    "learning_rate": 1e-2, "max_steps": 15, "max_completion_length": 24,
    "output_dir": "out/trl_grpo", "logging_steps": 3, "logging_first_step": True, "save_strategy": "no",
}  # fmt: skip


def prompts(number: int = 96) -> Dataset:
    return Dataset.from_list([{"prompt": "Write a" + " please" * (i % 9)} for i in range(number)])


def letters(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of the letter "a"."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def main() -> None:
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    name, own = model.model_name_or_path, script.dataset_name
    tokenizer = AutoTokenizer.from_pretrained(name) if name else small_tokenizer()
    trainer = GRPOTrainer(
        model=name or small_model(tokenizer),
        reward_funcs=letters,
        args=training,
        train_dataset=load_dataset(own, split=script.dataset_train_split) if own else prompts(),
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
        print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
