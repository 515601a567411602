"""Embeddings of texts, any layout: a script in the style of sentence-transformers in which one import was changed.

On two CPU processes, in seconds, with a small new model and made-up pairs:

    accelerate launch --multi_gpu --num_processes 2 examples/embed.py --use_cpu --hotspa_strategies dp2:96@512,tp2:1024

Your own model and pairs, on 8 GPUs; all SentenceTransformerTrainingArguments are flags:

    accelerate launch --multi_gpu --num_processes 8 examples/embed.py --model Qwen/Qwen3-Embedding-0.6B \\
        --dataset sentence-transformers/natural-questions
"""

from datasets import Dataset, load_dataset
from from_trl import small_model, small_tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import HfArgumentParser

# it was: from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from hf_hotspa.trainer.sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments


def pairs(number: int = 96) -> Dataset:
    """A letter, and the same a long-tailed number of times."""
    rows = [(chr(33 + i % 90), 2 + (i % 37 if i % 8 else 16 * (i % 37))) for i in range(number)]
    return Dataset.from_list([{"anchor": letter, "positive": letter * times} for letter, times in rows])


def small_embedder(training: SentenceTransformerTrainingArguments) -> SentenceTransformer:
    """A new Llama whose tokens' hidden states are averaged."""
    folder, tokenizer = f"{training.output_dir}/new", small_tokenizer()
    with training.main_process_first():  # it writes
        if training.process_index == 0:
            small_model(tokenizer).model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return SentenceTransformer(folder)


def main() -> None:
    parser = HfArgumentParser(SentenceTransformerTrainingArguments)
    parser.add_argument("--model")
    parser.add_argument("--dataset")
    parser.set_defaults(output_dir="out/embed", learning_rate=1e-4, max_steps=24, logging_steps=3, logging_first_step=True)  # fmt: skip
    training, given = parser.parse_args_into_dataclasses()
    model = SentenceTransformer(given.model) if given.model else small_embedder(training)
    data = load_dataset(given.dataset, split="train") if given.dataset else pairs()
    trainer = SentenceTransformerTrainer(model, training, train_dataset=data, loss=MultipleNegativesRankingLoss(model))
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {training.output_dir}")


if __name__ == "__main__":
    main()
