"""A program as users write them, without a word of hf_hotspa: the stock Trainer, subclasses of it, and TRL's trainers.

`python -m tests.front_program NAME ...` prints, for each of these trainings, one line of JSON: its losses and norms, and what the
methods of the program saw. Run alone it is the reference; behind `hf-hotspa run` it must print the same.
"""

import json
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

ROWS = 24
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
seen: list[str] = []


def model() -> Any:
    set_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<pad>", "<end>", *alphabet])}, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<end>")


def rows() -> list[dict[str, list[int]]]:
    of = torch.Generator().manual_seed(1)
    lengths = [5 + 40 * (i % 4 == 0) + i % 3 for i in range(ROWS)]
    made = [torch.randint(3, 264, (length,), generator=of).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in made]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in batch], batch_first=True, padding_value=value)

    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in batch], batch_first=True)
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def settings(kind: Any = TrainingArguments, **more: Any) -> Any:
    usual: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 4 // WORLD, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "learning_rate": 1e-3, "disable_tqdm": True,
        "lr_scheduler_type": "constant", "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    asked = json.loads(os.environ.get("FRONT_ARGUMENTS", "{}"))
    return kind(output_dir=folder(), **usual | more | asked)


def folder() -> str:
    return os.path.join(os.environ["FRONT_FOLDER"], str(len(os.listdir(os.environ["FRONT_FOLDER"]))))


class Watching:
    """A mixin of the program, behind which the library's trainer stands."""

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        seen.append("log")
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class Mine(Watching, Trainer):
    """Another order of arguments, its own loss, and methods that call `super()`."""

    def __init__(self, factor: float, model: Any, args: Any, **kwargs: Any) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.factor = factor

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="sum"
        )
        loss = loss * self.factor / num_items_in_batch * (WORLD if self.args.average_tokens_across_devices else 1)
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        seen.append("save_model")
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        seen.append("_save")
        super()._save(output_dir, state_dict)


class ByClass(Trainer):
    """Calls the constructor of the Trainer by class."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        Trainer.__init__(self, model=model, args=args, **kwargs)


def plain() -> Any:
    return Trainer(model(), settings(), train_dataset=Dataset.from_list(rows()), data_collator=collate)


def from_folder() -> Any:
    """The model is loaded from a folder, and told to recompute, as front ends do it."""
    place = os.environ.get("FRONT_MODEL", os.environ["FRONT_FOLDER"] + "-model")
    if not os.path.exists(place):
        model().save_pretrained(place)
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
    loaded.gradient_checkpointing_enable()
    return Trainer(loaded, settings(), train_dataset=Dataset.from_list(rows()), data_collator=collate)


def subclass() -> Any:
    args = settings(save_strategy="steps", save_steps=2)
    return Mine(1.0, model(), args, train_dataset=Dataset.from_list(rows()), data_collator=collate)


def by_class() -> Any:
    return ByClass(model(), settings(), train_dataset=Dataset.from_list(rows()), data_collator=collate)


def sft() -> Any:
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    data = Dataset.from_list(rows())
    return SFTTrainer(model(), settings(SFTConfig, max_length=None), train_dataset=data, processing_class=tokenizer())


def dpo() -> Any:
    from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

    text = [f"question {i}" + " and more" * (i % 3) for i in range(ROWS)]
    made = [{"prompt": t, "chosen": " yes" * (1 + i % 4), "rejected": " no"} for i, t in enumerate(text)]
    data = Dataset.from_list(made)
    return DPOTrainer(model(), model(), settings(DPOConfig), train_dataset=data, processing_class=tokenizer())


def regression() -> Any:
    """A model that is not a language model."""
    torch.manual_seed(0)

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (self.layer(x) - labels).square().mean()}

    data = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([2.0 * i])} for i in range(ROWS)]
    return Trainer(Line(), settings(remove_unused_columns=False, learning_rate=0.1), train_dataset=data)


TRAININGS = {f.__name__: f for f in (plain, from_folder, subclass, by_class, sft, dpo, regression)}


def main(names: list[str]) -> None:
    for name in names:
        seen.clear()
        trainer = TRAININGS[name]()
        trainer.train()
        logs = [
            {k: e[k] for k in ("loss", "grad_norm", "rewards/margins") if k in e} for e in trainer.state.log_history
        ]
        on_meta = next(trainer.model.parameters()).is_meta  # with --model-path
        weights = 0.0 if on_meta else sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
        assert pickle.loads(pickle.dumps(trainer.args)).max_steps == trainer.args.max_steps
        if trainer.is_world_process_zero():
            kind = type(trainer)
            names_ = [cls.__name__ for cls in kind.__mro__]
            saved = sorted(p.name for p in Path(trainer.args.output_dir).glob("checkpoint-*/*.safetensors"))
            result = {"name": name, "logs": [e for e in logs if e], "weights": weights, "seen": seen, "saved": saved}
            result |= {"kind": f"{kind.__module__}.{kind.__qualname__}", "order": names_}
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("FRONT_FOLDER", tempfile.mkdtemp())
    main(sys.argv[1:])
