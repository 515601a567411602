"""A reward model with TRL, any layout: a script of TRL in which one import was changed.

On two CPU processes, in seconds, with a small new model and made-up pairs:

    accelerate launch --multi_gpu --num_processes 2 examples/trl_reward.py --use_cpu --bf16 False --hotspa_strategies dp2:96@512,tp2:1024

Your own model and pairs, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/trl_reward.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name trl-lib/ultrafeedback_binarized --center_rewards_coefficient 0.01

All fields of RewardConfig, ModelConfig and ScriptArguments are flags, beside the hotspa_* flags.
"""

from datasets import load_dataset
from from_trl import small_model, small_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl_dpo import pairs

from hf_hotspa.trl import RewardConfig, RewardTrainer  # from trl import RewardConfig, RewardTrainer

DEFAULTS = {
    "learning_rate": 1e-3,
    "max_steps": 12,
    "output_dir": "out/trl_reward",
    "logging_steps": 3, "logging_first_step": True, "save_strategy": "no",
}  # fmt: skip


def main() -> None:
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    name, own = model.model_name_or_path, script.dataset_name
    tokenizer = AutoTokenizer.from_pretrained(name) if name else small_tokenizer()
    config = small_model(tokenizer).config
    config.num_labels = 1
    set_seed(0)
    trainer = RewardTrainer(
        model=name or AutoModelForSequenceClassification.from_config(config),
        args=training,
        train_dataset=load_dataset(own, split=script.dataset_train_split) if own else pairs(),
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        margins = [log["margin"] for log in trainer.state.log_history if "margin" in log]
        print(f"margin {margins[0]:.3f} -> {margins[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
