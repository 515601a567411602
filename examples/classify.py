"""Classes of texts, any layout: a script in the style of transformers' run_glue in which one import was changed.

On two CPU processes, in seconds, with a small new model and made-up texts:

    accelerate launch --multi_gpu --num_processes 2 examples/classify.py --use_cpu --hotspa_strategies dp2:96@512,tp2:1024

Your own model and data set (splits `train` and `test`, columns `text` and `label`), on 8 GPUs; all TrainingArguments are flags:

    accelerate launch --multi_gpu --num_processes 8 examples/classify.py --model Qwen/Qwen3-0.6B --dataset fancyzhx/ag_news
"""

from datasets import Dataset, load_dataset
from from_trl import small_model, small_tokenizer
from numpy import ndarray
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, HfArgumentParser

# it was: from transformers import Trainer, TrainingArguments
from hf_hotspa import HotSPaTrainer as Trainer, HotSPaTrainingArguments as TrainingArguments  # isort: skip


def texts(number: int = 128) -> Dataset:
    """Long-tailed answers, of three kinds."""
    rows = [(" well" * (i % 37 if i % 8 else 4 * (i % 37)), i % 3) for i in range(number)]
    return Dataset.from_list([{"text": words + (" no", " yes", " perhaps")[k], "label": k} for words, k in rows])


def accuracy(given: tuple[ndarray, ndarray]) -> dict[str, float]:
    predictions, labels = given
    return {"accuracy": (predictions.argmax(-1) == labels).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model")
    parser.add_argument("--dataset")
    parser.set_defaults(output_dir="out/classify", learning_rate=1e-3, max_steps=24, logging_steps=3, logging_first_step=True)  # fmt: skip
    training, given = parser.parse_args_into_dataclasses()
    data = load_dataset(given.dataset) if given.dataset else texts().train_test_split(0.25, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(given.model) if given.model else small_tokenizer()
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=1024), batched=True)
    settings = {"num_labels": max(data["train"]["label"]) + 1, "pad_token_id": tokenizer.pad_token_id}
    if given.model:
        model = AutoModelForSequenceClassification.from_pretrained(given.model, **settings)
    else:
        (config := small_model(tokenizer).config).update(settings)
        model = AutoModelForSequenceClassification.from_config(config)
    collator, splits = DataCollatorWithPadding(tokenizer), (data["train"], data["test"])
    trainer = Trainer(model, training, collator, *splits, processing_class=tokenizer, compute_metrics=accuracy)
    trainer.train()
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_state()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
