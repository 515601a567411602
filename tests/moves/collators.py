"""Moves: data collators."""

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from tests.moves import Drawn, Kit, Move, Seen, padded

PAD = 3


def tokenizer(side: str = "right", pad: int = PAD) -> PreTrainedTokenizerFast:
    """One token for each id of the tiny models."""
    words = {f"t{token}": token for token in range(163)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t1")),
        pad_token=f"t{pad}", eos_token="t2", mask_token="t4", padding_side=side,
    )  # fmt: skip


def unlabelled(kit: Kit) -> list[dict[str, Any]]:
    """Rows of unequal lengths without labels, with an `attention_mask`; each ends with the EOS token."""
    return [
        {"input_ids": [*row["input_ids"], 2], "attention_mask": [1] * (len(row["input_ids"]) + 1)} for row in kit.rows()
    ]


def blocks(kit: Kit, labels: bool = True) -> list[dict[str, Any]]:
    """Rows of 12 tokens each."""
    stream = [token for row in kit.rows(40) for token in row["input_ids"]]
    ids = [stream[begin : begin + 12] for begin in range(0, 240, 12)]
    return [{"input_ids": row, "labels": [-100, *row[1:]]} if labels else {"input_ids": row} for row in ids]


def fixed_length(kit: Kit) -> list[dict[str, Any]]:
    """Rows as from `tokenizer(..., padding="max_length", max_length=64)`."""
    rows = unlabelled(kit)
    for row in rows:
        pad = 64 - len(row["input_ids"])
        row["input_ids"], row["attention_mask"] = row["input_ids"] + [PAD] * pad, row["attention_mask"] + [0] * pad
    return rows


def train(rows: Callable[[Kit], Any], collator: Any) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        return kit.train(kit.trainer(train_dataset=rows(kit), data_collator=collator()))

    return run


def of_language_modeling(**changes: Any) -> Any:
    side, pad = changes.pop("side", "right"), changes.pop("pad", PAD)
    return lambda: DataCollatorForLanguageModeling(tokenizer(side, pad), **{"mlm": False, **changes})


class LeftWithoutFirst(DataCollatorForLanguageModeling):
    """Masks the label on the first token after padding on the left, as ours does, for the stock Trainer."""

    def torch_call(self, examples: Any) -> Any:
        batch = super().torch_call(examples)
        for row, mask in enumerate(batch["attention_mask"]):
            if (first := int(mask.argmax())) > 0:
                batch["labels"][row, first] = -100
        return batch


def padding_left(kit: Kit, rows: Any = None, **changes: Any) -> Seen:
    kind = LeftWithoutFirst if kit.stock else DataCollatorForLanguageModeling
    args = kit.arguments(eval_strategy="steps", eval_steps=2, **changes)
    rows = unlabelled(kit) if rows is None else rows
    collator = kind(tokenizer("left"), mlm=False)
    return kit.train(
        kit.trainer(args=args, train_dataset=rows, eval_dataset=unlabelled(kit)[:9], data_collator=collator)
    )


def padding_left_stream(kit: Kit) -> Seen:
    from datasets import Dataset

    stream = Dataset.from_list(unlabelled(kit)).to_iterable_dataset()
    changes = {"accelerator_config": {"dispatch_batches": False}, "label_smoothing_factor": 0.1}
    return padding_left(kit, stream, **changes)


def with_evaluation(kit: Kit) -> Seen:
    rows = unlabelled(kit)
    collator = of_language_modeling(pad=2)()
    args = kit.arguments(eval_strategy="steps", eval_steps=2)
    return kit.train(kit.trainer(args=args, train_dataset=rows, eval_dataset=rows[:9], data_collator=collator))


class Completions(DataCollatorForLanguageModeling):
    """A user's subclass: masks more."""

    def torch_call(self, examples: Any) -> Any:
        batch = super().torch_call(examples)
        batch["labels"][:, :4] = -100
        return batch


def own_function(examples: Any) -> Any:
    """Pads, without an `attention_mask`, and trains the tokens after `prompt_length`."""
    longest = max(len(example["input_ids"]) for example in examples)
    ids = torch.full((len(examples), longest), PAD)
    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        length, prompt = len(example["input_ids"]), example["prompt_length"]
        ids[row, :length] = torch.tensor(example["input_ids"])
        labels[row, prompt:length] = ids[row, prompt:length]
    return {"input_ids": ids, "labels": labels}


def own_rows(kit: Kit) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "prompt_length": at % 5} for at, row in enumerate(kit.rows())]


def of_own(kit: Kit) -> Seen:
    rows = own_rows(kit)
    args = kit.arguments(remove_unused_columns=False, eval_strategy="steps", eval_steps=2)
    return kit.train(kit.trainer(args=args, train_dataset=rows, eval_dataset=rows[:7], data_collator=own_function))


def of_own_stream(kit: Kit) -> Seen:
    from datasets import Dataset

    stream = Dataset.from_list(own_rows(kit)).to_iterable_dataset()
    # accelerate's handling of streams needs batches of equal width
    args = kit.arguments(remove_unused_columns=False, accelerator_config={"dispatch_batches": False})
    return kit.train(kit.trainer(args=args, train_dataset=stream, data_collator=own_function))


class RandomLabels:
    """Leaves random tokens out of the loss."""

    def __call__(self, examples: Any) -> Any:
        batch = padded([{**example, "labels": example["input_ids"]} for example in examples])
        batch["labels"][torch.rand(batch["labels"].shape) < 0.15] = -100
        return batch


def shortest(examples: Any) -> Any:
    length = min(len(example["input_ids"]) for example in examples)
    return padded([{key: value[:length] for key, value in example.items()} for example in examples])


def with_embeddings(examples: Any) -> Any:
    batch = padded(examples)
    return {**batch, "inputs_embeds": torch.zeros(*batch["input_ids"].shape, 32)}


def packed_bucket(kit: Kit) -> Seen:
    from hf_hotspa import PackedBucketCollator, parse_buckets

    args = kit.arguments()
    own = PackedBucketCollator(parse_buckets("dp1:60@60"), rank=args.process_index, vocab_size=163)
    return kit.train(kit.trainer(args=args, data_collator=None if kit.stock else own))


MOVES: tuple[Move, ...] = (
    Move("`DataCollatorForLanguageModeling(mlm=False)`", Drawn("collator", "language")),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` whose padding is the EOS token; evaluation during training",
        with_evaluation,
        ours="the EOS token is not a label, as in the stock `Trainer`",
    ),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)`, rows that the tokenizer padded to a fixed length",
        train(fixed_length, of_language_modeling()),
    ),
    Move("`DataCollatorForLanguageModeling(mlm=False)` over `labels`", train(blocks, of_language_modeling())),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` padding on the left, blocks of one length",
        train(lambda kit: blocks(kit, labels=False), of_language_modeling(side="left")),
    ),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` padding on the left, rows of unequal lengths",
        padding_left,
        ours="the first token after the padding is left out of the loss and its mean, and a log line reports it; compared with the stock "
        "`Trainer` on labels without it, as it would train that token from padding",
    ),
    Move("the same with a stream, and label smoothing", padding_left_stream, ours="as above"),
    Move(
        "`DataCollatorForLanguageModeling(mlm=True)`",
        train(unlabelled, of_language_modeling(mlm=True)),
    ),
    Move("`DataCollatorForSeq2Seq`", Drawn("collator", "completions")),
    Move(
        "`DataCollatorForSeq2Seq` padding to a fixed length on the left, prompts without labels",
        train(
            lambda kit: [{**row, "labels": [-100, *row["labels"][1:]]} for row in kit.rows()],
            lambda: DataCollatorForSeq2Seq(tokenizer("left"), padding="max_length", max_length=64),
        ),
    ),
    Move(
        "`DataCollatorForSeq2Seq(label_pad_token_id=0)`",
        train(Kit.rows, lambda: DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=0)),
        error="is padding .* and has a label",
        instead="padding would be trained; leave it at -100",
    ),
    Move("`DataCollatorWithPadding`", train(blocks, lambda: DataCollatorWithPadding(tokenizer()))),
    Move("`default_data_collator`", train(blocks, lambda: default_data_collator)),
    Move("`DefaultDataCollator`", train(blocks, DefaultDataCollator)),
    Move("`DataCollatorWithFlattening`", Drawn("collator", "flattened")),
    Move(
        "`DataCollatorWithFlattening(separator_id=0)`",
        train(Kit.rows, lambda: DataCollatorWithFlattening(separator_id=0)),
    ),
    Move(
        "a subclass of a collator, which masks more",
        train(unlabelled, lambda: Completions(tokenizer(), mlm=False)),
    ),
    Move(
        "a custom collator, which pads, and reads an extra column",
        of_own,
    ),
    Move("the same with a stream", of_own_stream),
    Move(
        "a collator that draws random numbers",
        train(unlabelled, lambda: RandomLabels()),
    ),
    Move(
        "a collator that cuts rows to the shortest of the batch",
        train(Kit.rows, lambda: shortest),
    ),
    Move(
        "a collator that gives the model more than tokens",
        train(Kit.rows, lambda: with_embeddings),
        error=r"called with \['inputs_embeds'\]",
        instead="only tokens, labels, padding and positions are read",
    ),
    Move(
        "`PackedBucketCollator`",
        packed_bucket,
        ours="a log line reports that the trainer packs rows itself, by the strategies of the arguments",
    ),
)
