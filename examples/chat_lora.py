"""Fine-tunes a LoRA adapter on conversations with hot-switched strategies; only what the assistant says is learned.

Without further flags: a small new model as the frozen base and conversations that the script makes up, without network.
On 4 CPU processes:

    accelerate launch --multi_gpu --num_processes 4 examples/chat_lora.py --use_cpu

A model and conversations of your own, on 8 GPUs:

    accelerate launch --multi_gpu --num_processes 8 examples/chat_lora.py --model Qwen/Qwen3-0.6B --dtype bfloat16 \\
        --dataset chats.jsonl --bf16 --output_dir out \\
        --hotspa_strategies "dp8:4096@16384,dp2tp4:16384,tp8:32768"

Each line of `--dataset` is `{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}`.
What is saved is an adapter in PEFT's format. All flags of TrainingArguments work.
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    set_seed,
)

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source, prepare_dataset
from hf_hotspa.trainer.script import LORA_LEARNING_RATE

# Where the command line says nothing: for the new small model, and for one of your own, as `hf-hotspa train` has it.
SMALL_MODEL = {
    "output_dir": "out/chat_lora",
    "max_steps": 20,
    "hotspa_strategies": "dp4:64@512,dp2tp2:256@512,tp2pp2:1024",
    "hotspa_mini_batch_size": 16,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 2,
    "hotspa_overlong": "truncate",
}
OWN_MODEL = {
    "output_dir": "out/chat_lora",
    "learning_rate": LORA_LEARNING_RATE,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "logging_steps": 10,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model: str | None = field(
        default=None, metadata={"help": "A folder or hub name of the base model. Default: a small new one."}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "A jsonl file with a column 'messages'. Default: conversations made up here."}
    )
    dtype: str = field(default="float32", metadata={"help": "The dtype in which the frozen base model is kept."})
    lora_r: int = field(default=8, metadata={"help": "The rank of the adapter."})
    lora_alpha: int = field(default=16, metadata={"help": "Its factor is lora_alpha / lora_r."})
    target_modules: str = field(
        default="all-linear", metadata={"help": "Layers with an adapter, separated by commas; or 'all-linear'."}
    )


def made_up_chats(count: int = 240, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations about sums; most are short, some are long."""
    rng = random.Random(seed)
    chats = []
    for _ in range(count):
        messages = []
        for _ in range(min(int(rng.paretovariate(1.0)), 24)):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            question = rng.choice(["What is {} plus {}?", "Add {} and {}.", "{} and {} together, please."])
            messages.append({"role": "user", "content": question.format(a, b)})
            messages.append({"role": "assistant", "content": f"{a} plus {b} is {a + b}."})
        chats.append({"messages": messages})
    return chats


def new_tokenizer(chats: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with a chat template that marks what the assistant says."""
    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for chat in chats for m in chat["messages"]), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def load_data(script: ScriptArguments, args: HotSPaTrainingArguments) -> tuple[Any, Any]:
    """The tokenizer and a data set with `input_ids` and `labels`; the main process goes first."""
    with args.main_process_first(desc="conversations"):
        path, chats = Path(args.output_dir, "chats.jsonl"), made_up_chats()
        if script.dataset is None and args.should_save:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        tokenizer = new_tokenizer(chats) if script.model is None else AutoTokenizer.from_pretrained(script.model)
        return tokenizer, prepare_dataset(load_source(script.dataset or str(path)), tokenizer)


def base_model(script: ScriptArguments, tokenizer: Any) -> Any:
    """The base model with its weights, the same on every rank."""
    dtype = getattr(torch, script.dtype)
    if script.model is not None:
        return AutoModelForCausalLM.from_pretrained(script.model, dtype=dtype)
    set_seed(0)  # whatever the seed of the run, so that the adapter fits again
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def parse() -> tuple[ScriptArguments, HotSPaTrainingArguments]:
    """Command line over `SMALL_MODEL`, or with `--model` over `OWN_MODEL`."""
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    settings = OWN_MODEL if "model" in given else SMALL_MODEL
    defaults = [part for name, value in settings.items() if name not in given for part in (f"--{name}", str(value))]
    return HfArgumentParser((ScriptArguments, HotSPaTrainingArguments)).parse_args_into_dataclasses(
        [*sys.argv[1:], *defaults]
    )


def main() -> None:
    """Trains, saves the adapter, and checks that PEFT loads it."""
    script, args = parse()
    tokenizer, dataset = load_data(script, args)
    targets = script.target_modules
    config = LoraConfig(
        r=script.lora_r,
        lora_alpha=script.lora_alpha,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        task_type="CAUSAL_LM",
    )
    model = base_model(script, tokenizer)
    set_seed(args.seed)
    model = get_peft_model(model, config)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        trained, every = model.get_nb_trainable_parameters()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"{trained:,} of {every:,} parameters trained on {len(dataset)} conversations")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
        loaded = PeftModel.from_pretrained(base_model(script, tokenizer), args.output_dir)
        pairs = zip(loaded.parameters(), model.parameters(), strict=True)
        print(f"adapter in {Path(args.output_dir).resolve()}")
        print(f"loads with PeftModel, equal to what was trained: {all(torch.equal(a, b) for a, b in pairs)}")
    trainer.close_engine()


if __name__ == "__main__":
    main()
