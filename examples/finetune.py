"""Fine-tunes (or trains) a causal language model with hot-switched strategies.

Without further flags: a small Llama-type model on the source files of Python's standard library, text with a long tail
of lengths that is on every machine. On 4 CPU processes, with strategies that are chosen by what the machine measures:

    accelerate launch --multi_gpu --num_processes 4 examples/finetune.py --use_cpu

or with strategies of your own:

    accelerate launch --multi_gpu --num_processes 4 examples/finetune.py --use_cpu \\
        --hotspa_strategies "dp4:1024@4096,dp2tp2:4096,tp2pp2:8192"

A model and data of your own, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/finetune.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl \\
        --bf16 --output_dir out --hotspa_strategies "dp8:4096@16384,dp2tp4:16384,tp8:32768" --learning_rate 1e-5

`--dataset` takes a local json, jsonl, parquet, csv or text file, a saved `datasets` folder or a hub name, with one of
the columns `input_ids`, `text`, `messages`, or `prompt` + `completion`. All flags of TrainingArguments work.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from stdlib_corpus import CHAT_TEMPLATE, build_corpus, build_tokenizer, print_length_histogram
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, LlamaConfig, set_seed

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source, prepare_dataset
from hf_hotspa.data.scan import scan_dataset

# what a run without flags uses; anything given on the command line wins
DEFAULTS = {
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
LONGEST = 8192  # of the new small model, where neither strategies nor --hotspa_longest say


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "A folder or hub name with weights; of a folder each process reads only its share. Default: a small new "
            "Llama-type model."
        },
    )
    config: str | None = field(
        default=None, metadata={"help": "A config path or hub name: train a new model of that shape."}
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "A tokenizer; default: the model's, or for the small new model one made of Python's sources."
        },
    )
    dataset: str = field(
        default="stdlib", metadata={"help": "A local file or folder, a hub name, or 'stdlib' (see above)."}
    )
    dataset_split: str = field(default="train", metadata={"help": "The split of the data set."})
    vocab_size: int = field(default=2048, metadata={"help": "Vocabulary of the tokenizer that is made here."})
    dtype: str = field(default="float32", metadata={"help": "The dtype in which the model is made or loaded."})


def load_data(script: ScriptArguments, args: HotSPaTrainingArguments) -> tuple[Any, Any]:
    """The tokenizer and a data set with `input_ids`; the main process makes the caches, the others read them."""
    with args.main_process_first(desc="tokenising"):
        new_model = script.model is None and script.tokenizer is None
        if new_model and (script.config is None or script.dataset == "stdlib"):
            tokenizer = build_tokenizer(script.vocab_size)
            tokenizer.chat_template = CHAT_TEMPLATE  # for `messages`
        else:
            tokenizer = AutoTokenizer.from_pretrained(script.tokenizer or script.model or script.config)
        dataset = build_corpus() if script.dataset == "stdlib" else load_source(script.dataset, script.dataset_split)
        return tokenizer, prepare_dataset(dataset, tokenizer)


def make_model(script: ScriptArguments, args: HotSPaTrainingArguments, tokenizer: Any) -> Any:
    """The model with weights on every rank (equal, because every rank uses the same seed), or the config of a folder."""
    set_seed(args.seed)
    dtype = getattr(torch, script.dtype)
    if script.model is not None and Path(script.model).is_dir():
        args.hotspa_model_path = script.model
        return AutoConfig.from_pretrained(script.model, dtype=dtype)
    if script.model is not None:
        return AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    if script.config is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.config), dtype=dtype)
    small = LlamaConfig(
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
    return AutoModelForCausalLM.from_config(small, dtype=dtype)


def parse() -> tuple[ScriptArguments, HotSPaTrainingArguments]:
    """Command line over `DEFAULTS`."""
    known = {f.name for f in fields(HotSPaTrainingArguments)}
    assert known >= DEFAULTS.keys()
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    defaults = [part for name, value in DEFAULTS.items() if name not in given for part in (f"--{name}", str(value))]
    return HfArgumentParser((ScriptArguments, HotSPaTrainingArguments)).parse_args_into_dataclasses(
        [*sys.argv[1:], *defaults]
    )


def main() -> None:
    """Trains, saves, and checks that the saved model loads."""
    script, args = parse()
    tokenizer, dataset = load_data(script, args)
    model = make_model(script, args, tokenizer)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    main_process = trainer.is_world_process_zero()
    if main_process:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        print(
            f"{type(trainer.model).__name__}, {parameters / 1e6:.1f}M parameters; lengths of the {len(dataset)} rows in tokens:"
        )
        print_length_histogram(scan_dataset(dataset, disable_progress=True).lengths.tolist())
        print(
            f"strategies {args.hotspa_strategies}; {args.hotspa_mini_batch_size} rows a mini-batch; over-long rows: {args.hotspa_overlong}"
        )
    trainer.train()
    if trainer.preempted:  # by SIGTERM: the checkpoint is what counts, and time is short
        trainer.close_engine()
        return
    trainer.save_model(args.output_dir)
    if main_process:
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
        print(f"saved to {Path(args.output_dir).resolve()}")
        if not any(p.is_meta for p in trainer.model.parameters()):  # that of a folder would not fit, perhaps
            loaded = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=trainer.model.dtype)
            pairs = zip(loaded.parameters(), trainer.model.parameters(), strict=True)
            print(
                f"loads with AutoModelForCausalLM, equal to what was trained: {all(torch.equal(a, b) for a, b in pairs)}"
            )
    trainer.close_engine()


if __name__ == "__main__":
    main()
