"""Preference optimization with TRL, any layout: a script of TRL in which one import was changed.

On two CPU processes, in seconds, with a small new model and made-up pairs; the reference is scored on the same replicas:

    accelerate launch --multi_gpu --num_processes 2 examples/trl_dpo.py --use_cpu --bf16 False --hotspa_strategies dp2:96@512,tp2:1024

Your own model and pairs, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/trl_dpo.py --model_name_or_path Qwen/Qwen3-0.6B \\
        --dataset_name trl-lib/ultrafeedback_binarized --precompute_ref_log_probs

All fields of DPOConfig, ModelConfig and ScriptArguments are flags, beside the hotspa_* flags.
"""

from datasets import Dataset, load_dataset
from from_trl import small_model, small_tokenizer
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from hf_hotspa.trl import DPOConfig, DPOTrainer  # from trl import DPOConfig, DPOTrainer

DEFAULTS = {
    "learning_rate": 1e-3,
    "max_steps": 12,
    "output_dir": "out/trl_dpo",
    "logging_steps": 3, "logging_first_step": True, "save_strategy": "no",
}  # fmt: skip


def pairs(number: int = 96) -> Dataset:
    """Long-tailed answers, of which the polite one is preferred."""
    rows = [(f"How much is {i} and {i % 7}?", " well" * (i % 37 if i % 8 else 4 * (i % 37))) for i in range(number)]
    return Dataset.from_list([{"prompt": q, "chosen": f"{t} thank you", "rejected": f"{t} no"} for q, t in rows])


def main() -> None:
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    name, own = model.model_name_or_path, script.dataset_name
    tokenizer = AutoTokenizer.from_pretrained(name) if name else small_tokenizer()
    trainer = DPOTrainer(
        model=name or small_model(tokenizer),
        ref_model=None if name else small_model(tokenizer),  # TRL loads its own by the name
        args=training,
        train_dataset=load_dataset(own, split=script.dataset_train_split) if own else pairs(),
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        margins = [log["rewards/margins"] for log in trainer.state.log_history if "rewards/margins" in log]
        print(f"margin {margins[0]:.3f} -> {margins[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
