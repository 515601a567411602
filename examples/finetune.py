"""Fine-tunes (or trains) a causal language model with hot-switched strategies: `hf-hotspa train`, and a demonstration.

Without further flags: a small Llama-type model on the source files of Python's standard library, text with a long tail
of lengths that is on every machine. On 4 CPU processes, with strategies that are chosen by what the machine measures:

    accelerate launch --multi_gpu --num_processes 4 examples/finetune.py --use_cpu

or with strategies of your own:

    accelerate launch --multi_gpu --num_processes 4 examples/finetune.py --use_cpu \\
        --hotspa_strategies "dp4:1024@4096,dp2tp2:4096,tp2pp2:8192"

A model and data of your own, on 8 GPUs; the settings of the demonstration are left out then:

    accelerate launch --multi_gpu --num_processes 8 examples/finetune.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl

`--dataset` takes a local json, jsonl, parquet, csv or text file, a saved `datasets` folder or a hub name, with one of
the columns of docs/data.md. All flags of TrainingArguments work. `hf-hotspa train` does the same without the
demonstration, and starts the processes itself.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch
from stdlib_corpus import CHAT_TEMPLATE, build_corpus, build_tokenizer, print_length_histogram
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source, prepare_dataset
from hf_hotspa.data.scan import scan_dataset
from hf_hotspa.trainer import script as own

# of the small new model; anything given on the command line wins
DEMONSTRATION = {
    "output_dir": "out/finetune",
    "max_steps": 20,
    "hotspa_mini_batch_size": 8,
    "learning_rate": 8e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "logging_steps": 2,
    "hotspa_overlong": "split",
    "hotspa_phase_table": True,
}
LONGEST = 8192  # of the small new model, where neither strategies nor --hotspa_longest say


@dataclass
class ScriptArguments(own.ScriptArguments):
    """What is trained on what; without a model and a config the small new model."""

    dataset: str | None = field(default="stdlib", metadata={"help": "As for hf-hotspa train, or 'stdlib' (see above)."})
    vocab_size: int = field(default=2048, metadata={"help": "Vocabulary of the tokenizer that is made here."})


def is_demonstration(script: Any) -> bool:
    """Whether the small new model is trained."""
    return script.model is None and script.config is None


def defaults(given: Namespace) -> dict[str, Any]:
    """The settings of the demonstration belong to its model only."""
    return DEMONSTRATION if is_demonstration(given) else own.fine_tuning_defaults(given)


def demonstration_data(script: ScriptArguments, args: HotSPaTrainingArguments) -> tuple[Any, Any]:
    """The tokenizer and a data set with `input_ids`; the main process makes the caches, the others read them."""
    with args.main_process_first(desc="tokenising"):
        if script.tokenizer is None:
            tokenizer = build_tokenizer(script.vocab_size)
            tokenizer.chat_template = CHAT_TEMPLATE  # for `messages`
        else:
            tokenizer = AutoTokenizer.from_pretrained(script.tokenizer)
        dataset = build_corpus() if script.dataset == "stdlib" else load_source(script.dataset, script.dataset_split)
        return tokenizer, prepare_dataset(dataset, tokenizer)


def small_model(args: HotSPaTrainingArguments, tokenizer: Any) -> Any:
    """A new model, equal on every rank, because every rank uses the same seed."""
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max((b.longest for b in args.hotspa_buckets), default=args.hotspa_longest or LONGEST),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Trains, saves, and checks that the saved model of the demonstration loads."""
    settings = own.parse(own.parser_of(ScriptArguments), sys.argv[1:], defaults)
    script, args = settings.script, settings.args
    if not is_demonstration(script):
        own.run(settings)
        return
    tokenizer, dataset = demonstration_data(script, args)
    trainer = HotSPaTrainer(
        model=small_model(args, tokenizer), args=args, train_dataset=dataset, processing_class=tokenizer
    )
    main_process = trainer.is_world_process_zero()
    if main_process:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        print(f"a new Llama of {parameters / 1e6:.1f}M parameters; lengths of the {len(dataset)} rows in tokens:")
        print_length_histogram(scan_dataset(dataset, disable_progress=True).lengths.tolist())
    if own.train(trainer) and main_process:
        loaded = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=trainer.model.dtype)
        pairs = zip(loaded.parameters(), trainer.model.parameters(), strict=True)
        print(f"loads with AutoModelForCausalLM, equal to what was trained: {all(torch.equal(a, b) for a, b in pairs)}")
    trainer.close_engine()


if __name__ == "__main__":
    main()
