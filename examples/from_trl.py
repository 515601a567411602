"""A TRL fine-tuning script, moved over: chats in, loss on the answers only, lengths with a long tail.

On two CPU processes, in seconds, with a small new model:

    accelerate launch --multi_gpu --num_processes 2 examples/from_trl.py --use_cpu --strategies dp2:256@1024,tp2:1024

With your own model and chats, on 8 GPUs (strategies are chosen by measured speed and memory):

    accelerate launch --multi_gpu --num_processes 8 examples/from_trl.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl --bf16

The script it comes from:

    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir="out/from_trl", max_length=1024, packing=True, packing_strategy="bfd", assistant_only_loss=True,
        per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=2e-5, bf16=True,
    )
    dataset = load_dataset("json", data_files="chats.jsonl", split="train")
    trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)
    trainer.train()

docs/migration.md says what becomes of every field of SFTConfig. TRL is not needed here.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, set_seed

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.data.prepare import load_source

CHATS = Path(__file__).parent / "chats.jsonl"
# chat_template_path becomes tokenizer.chat_template. Real models bring theirs; if it has no generation marks,
# the answers are found by rendering the beginnings of the conversation, or an error: never a guess.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def small_tokenizer() -> Any:
    """Every byte is a token: a stand-in that needs no download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def small_model(tokenizer: Any, positions: int = 1024) -> Any:
    """A new Llama of 0.5M parameters, the same on every rank."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; a small new model when left out")
    parser.add_argument("--dataset", default=str(CHATS), help="a JSONL with a column `messages`, or a hub name")
    parser.add_argument("--output_dir", default="out/from_trl")
    parser.add_argument("--strategies", default="auto", help="auto, or such as dp2:256@1024,tp2:1024")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    dataset = load_source(options.dataset)  # model_init_kwargs, trust_remote_code: give them to from_pretrained
    if options.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if options.bf16 else "auto")
    else:
        tokenizer = small_tokenizer()
        model = small_model(tokenizer, options.max_length)

    args = HotSPaTrainingArguments(
        output_dir=options.output_dir,
        hotspa_strategies=options.strategies,
        # max_length=1024 with packing_strategy="bfd", which truncates what is longer. "bfd_split" is "split" here;
        # "wrapped", which cuts sequences anywhere to fill rows, does not exist: packs are filled by cost instead.
        # With your own strategies, max_length is the longest bucket.
        hotspa_overlong="truncate",
        hotspa_longest=options.max_length if options.strategies == "auto" else None,
        # packing=True, eval_packing, padding_free: rows are always packed and never padded, and sequences of a pack never
        # see each other. pad_to_multiple_of has nothing to do.
        # assistant_only_loss=True: what `messages` mean here. completion_only_loss: what `prompt` + `completion` mean.
        #
        # per_device_train_batch_size=1, gradient_accumulation_steps=4 with packing are 4 *rows of max_length tokens* a
        # process in TRL. Here a mini-batch is counted in sequences, over all processes: a row of 1024 tokens held about 5
        # of these chats, and there are 2 processes.
        hotspa_mini_batch_size=40,
        # gradient_checkpointing=True is TRL's default; activation_checkpointing is its name now, and off by default.
        activation_checkpointing=False,
        # learning_rate=2e-5 is TRL's default, and right for a model that has been trained; this one has not.
        learning_rate=2e-5 if options.model is not None else 1e-2,
        lr_scheduler_type="cosine",
        bf16=options.bf16,  # TRL's default is on
        max_steps=options.max_steps,
        logging_steps=10,  # TRL's default; the Trainer's is 500
        logging_first_step=True,
        use_cpu=options.use_cpu,
        save_strategy="no",
    )
    # dataset_text_field: rename the column to `text`. dataset_kwargs skip_prepare_dataset: give `input_ids` and `labels`.
    # shuffle_dataset: rows are shuffled by the Trainer's sampler, as ever. eos_token: set tokenizer.eos_token.
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(options.output_dir)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {options.output_dir}")
    trainer.close_engine()


if __name__ == "__main__":
    main()
