"""Moves: data collators."""

from collections.abc import Callable
from typing import Any

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

from tests.moves import STRATEGIES, Kit, Move, Seen

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


def train(rows: Callable[[Kit], Any], collator: Any) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        return kit.train(kit.trainer(train_dataset=rows(kit), data_collator=collator()))

    return run


def of_language_modeling(**changes: Any) -> Any:
    side, pad = changes.pop("side", "right"), changes.pop("pad", PAD)
    return lambda: DataCollatorForLanguageModeling(tokenizer(side, pad), **{"mlm": False, **changes})


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
    return default_data_collator(examples)


def packed_bucket(strategies: str = "", **changes: Any) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        from hf_hotspa import PackedBucketCollator, parse_buckets

        collator = None
        args = kit.arguments()
        if not kit.stock:
            buckets = parse_buckets(strategies or STRATEGIES[kit.world_size])
            own = {"rank": args.process_index, "vocab_size": 163, **changes}
            collator = PackedBucketCollator(buckets, **own)
        return kit.train(kit.trainer(args=args, data_collator=collator))

    return run


MOVES: tuple[Move, ...] = (
    Move("`DataCollatorForLanguageModeling(mlm=False)`", train(unlabelled, of_language_modeling())),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` whose padding is the EOS token; evaluation during training",
        with_evaluation,
        ours="the EOS token is no label, as there",
    ),
    Move("`DataCollatorForLanguageModeling(mlm=False)` over `labels`", train(blocks, of_language_modeling())),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` padding on the left, blocks of one length",
        train(lambda kit: blocks(kit, labels=False), of_language_modeling(side="left")),
    ),
    Move(
        "`DataCollatorForLanguageModeling(mlm=False)` padding on the left, rows of unequal lengths",
        train(unlabelled, of_language_modeling(side="left")),
        refused="the data collator pads on the left",
        instead='the stock `Trainer` trains first tokens from padding; set `tokenizer.padding_side = "right"`',
    ),
    Move(
        "`DataCollatorForLanguageModeling(mlm=True)`",
        train(unlabelled, of_language_modeling(mlm=True)),
        refused="DataCollatorForLanguageModeling with mlm=True",
        instead="no causal language modeling",
    ),
    Move("`DataCollatorForSeq2Seq`", train(Kit.rows, lambda: DataCollatorForSeq2Seq(tokenizer()))),
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
        refused="label_pad_token_id=0",
        instead="padding would be trained; leave it at -100",
    ),
    Move("`DataCollatorWithPadding`", train(blocks, lambda: DataCollatorWithPadding(tokenizer()))),
    Move("`default_data_collator`", train(blocks, lambda: default_data_collator)),
    Move("`DefaultDataCollator`", train(blocks, DefaultDataCollator)),
    Move("`DataCollatorWithFlattening`", train(Kit.rows, DataCollatorWithFlattening)),
    Move(
        "`DataCollatorWithFlattening(separator_id=0)`",
        train(Kit.rows, lambda: DataCollatorWithFlattening(separator_id=0)),
        refused="DataCollatorWithFlattening with separator_id=0",
        instead="first tokens would be trained from another row",
    ),
    Move(
        "a subclass of a collator",
        train(unlabelled, lambda: Completions(tokenizer(), mlm=False)),
        refused="the data collator Completions cannot be honoured",
        instead="do its work in the data set",
    ),
    Move(
        "a collator of one's own",
        train(blocks, lambda: own_function),
        refused="the data collator own_function cannot be honoured",
        instead="do its work in the data set",
    ),
    Move("`PackedBucketCollator` with the strategies of the arguments", packed_bucket()),
    Move(
        "`PackedBucketCollator` with other strategies",
        packed_bucket("dp1:60@60"),
        refused="the buckets of the data collator and of the arguments differ",
        instead="give both the same",
    ),
    Move(
        "`PackedBucketCollator` of another vocabulary",
        packed_bucket(vocab_size=100),
        refused="vocabulary of 100 ids and the model of 163",
        instead="give it that of the model",
    ),
)
