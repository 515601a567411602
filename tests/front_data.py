"""A tiny random Qwen3 with tokenizer and chat template, and chats, for `tests.front_ends`; `--load` loads what a run saved."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

WORDS = ["alpha", "beta", "gamma", "delta", "eps", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    draw = random.Random(0)
    say = lambda n: " ".join(draw.choice(WORDS) for _ in range(n))  # noqa: E731
    chats: list[dict[str, Any]] = []
    for i in range(64):
        said = say(draw.choice([3, 5, 8, 12, 20, 40, 90]))
        chats.append(
            {"messages": [{"role": "user", "content": f"Repeat {i}: {said}"}, {"role": "assistant", "content": said}]}
        )
    pairs = [
        {
            "messages": c["messages"][:1],
            "chosen": c["messages"][1],
            "rejected": {"role": "assistant", "content": say(6)},
        }
        for c in chats
    ]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [m["content"] for c in chats for m in c["messages"]]
    bare.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>", model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    set_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=4,
    )  # fmt: skip
    config.dtype = "float32"
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def load(folder: Path, base: Path) -> None:
    if (folder / "adapter_config.json").exists():
        from peft import PeftModel

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    else:
        AutoModelForCausalLM.from_pretrained(folder)
    print("LOADED")


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        load(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        make(Path(sys.argv[1]))
