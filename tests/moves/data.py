"""Moves: what the columns of a data set say beside `input_ids`."""

from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

from tests.moves import Kit, Move, Seen, padded

WIDTH = 64


def padded_rows(kit: Kit, side: str = "right", prompt: bool = False) -> list[dict[str, list[int]]]:
    """Rows that are all `WIDTH` tokens long, with an `attention_mask`; with `prompt`, the first token has no label."""
    rows = []
    for row in kit.rows():
        pad = WIDTH - len(row["input_ids"])
        labels = [-100, *row["labels"][1:]] if prompt else row["labels"]
        parts = {"input_ids": (row["input_ids"], 0), "labels": (labels, -100)}
        parts["attention_mask"] = ([1] * len(row["input_ids"]), 0)
        rows.append({k: v + [fill] * pad if side == "right" else [fill] * pad + v for k, (v, fill) in parts.items()})
    return rows


def packed_rows(kit: Kit, crossing: bool = False) -> list[dict[str, list[int]]]:
    """Rows of several documents each; without `crossing`, their first tokens have no label."""
    documents, rows = kit.rows(27, seed=8), []
    for begin in range(0, 27, 3):
        group = documents[begin : begin + 3]
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_lengths": []}
        for document in group:
            ids, labels = document["input_ids"], document["labels"]
            row["input_ids"] += ids
            row["labels"] += labels if crossing else [-100, *labels[1:]]
            row["position_ids"] += range(len(ids))
            row["seq_lengths"].append(len(ids))
        row["cu_seqlens"] = np.cumsum([0, *row["seq_lengths"]]).tolist()
        rows.append(row)
    return rows


def columns(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The same rows with some of their columns."""
    return [{name: row[name] for name in names} for row in rows]


def train(kit: Kit, rows: Any, **kwargs: Any) -> Seen:
    return kit.train(kit.trainer(**{"train_dataset": rows, "data_collator": default_data_collator, **kwargs}))


def of_dataset(kit: Kit) -> Seen:
    from datasets import Dataset

    rows = padded_rows(kit)
    for row in rows:
        row["token_type_ids"] = [0] * WIDTH
    return train(kit, Dataset.from_list(rows))


def of_stream(kit: Kit) -> Seen:
    from datasets import Dataset

    stream = Dataset.from_list(padded_rows(kit, "left", prompt=True)).to_iterable_dataset()
    return train(kit, stream)


def with_metrics(kit: Kit) -> Seen:
    def metrics(seen: Any) -> dict[str, float]:
        shown = seen.label_ids[:, 1:] != -100
        hits = (seen.predictions[:, :-1].argmax(-1) == seen.label_ids[:, 1:])[shown]
        at = np.arange(WIDTH - 1) * shown  # tokens stand where the data set has them
        return {"hits": float(hits.sum()), "labels": float(shown.sum()), "places": float(at.sum())}

    rows = padded_rows(kit, "left", prompt=True)
    trainer = kit.trainer(
        train_dataset=rows, eval_dataset=rows, compute_metrics=metrics, data_collator=default_data_collator
    )
    names = ("eval_loss", "eval_hits", "eval_labels", "eval_places")
    seen, found = kit.train(trainer), trainer.evaluate()
    return {**seen, **{name: found[name] for name in names}}


def refused_rows(change: Any) -> Any:
    def run(kit: Kit) -> Seen:
        rows = padded_rows(kit)
        change(rows[5])
        return train(kit, rows)

    return run


def labels_on_padding(row: dict[str, Any]) -> None:
    row["labels"][-1] = 7


def hole(row: dict[str, Any]) -> None:
    row["attention_mask"][1] = 0


def documents_by_mask(row: dict[str, Any]) -> None:
    row["attention_mask"][2] = 2


def packed(*names: str) -> Any:
    """Trains packed rows one at a time, by `position_ids`; ours by the given columns."""

    def run(kit: Kit) -> Seen:
        rows = columns(packed_rows(kit), "input_ids", "labels", *(("position_ids",) if kit.stock else names))
        args = kit.arguments(per_device_train_batch_size=1, gradient_accumulation_steps=3)
        return train(kit, rows, args=args, data_collator=default_data_collator if kit.stock else None)

    return run


def crossing(kit: Kit) -> Seen:
    """The last token of a document is trained to predict the first one of the next."""
    rows = columns(packed_rows(kit, crossing=True), "input_ids", "labels", "position_ids")
    return train(kit, rows, args=kit.arguments(per_device_train_batch_size=1, gradient_accumulation_steps=3))


def wrong_lengths(kit: Kit) -> Seen:
    rows = columns(packed_rows(kit), "input_ids", "labels", "seq_lengths")
    rows[4]["seq_lengths"][-1] += 1
    return train(kit, rows)


def wrong_positions(kit: Kit) -> Seen:
    rows = columns(packed_rows(kit), "input_ids", "labels", "position_ids")
    rows[4]["position_ids"] = [position + 2 for position in rows[4]["position_ids"]]
    return train(kit, rows)


def absolute(*names: str) -> Any:
    """GPT-2, whose positions are learned, on rows padded on the left."""

    def run(kit: Kit) -> Seen:
        torch.manual_seed(0)
        sizes = {"vocab_size": 163, "n_positions": WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        rows = padded_rows(kit, "left", prompt=True)
        for row in rows:
            row["position_ids"] = np.maximum(np.cumsum(row["attention_mask"]) - 1, 0).tolist()
            row["token_type_ids"] = [0] * WIDTH
        rows = columns(rows, "input_ids", "labels", "attention_mask", *names)
        args = kit.arguments(hotspa_strategies=f"dp{kit.world_size}:64@64")
        return train(kit, rows, model=model, args=args)

    return run


def label_ids(kit: Kit) -> Seen:
    rows = [{"label_ids" if k == "labels" else k: v for k, v in row.items()} for row in padded_rows(kit)]
    return train(kit, rows)


def empty_rows(kit: Kit, stream: bool = False) -> Seen:
    """The stock Trainer has a collator that leaves out empty rows."""
    from datasets import Dataset

    rows: Any = kit.rows()
    for at in (1, 2, 8, 13):
        rows[at] = dict.fromkeys(("input_ids", "labels"), None if at % 2 else [])

    def full(examples: Any) -> Any:
        return padded([example for example in examples if example["input_ids"]])

    if stream or not kit.stock:
        rows = Dataset.from_list(rows)
    if stream:
        rows = rows.to_iterable_dataset()
    own: dict[str, Any] = {} if stream else {"eval_strategy": "steps", "eval_steps": 2}
    if stream:  # accelerate's own way with streams needs batches of one size
        own["accelerator_config"] = {"dispatch_batches": False}
    args = kit.arguments(hotspa_empty_rows="skip", **own)
    evaluated = None if stream else rows
    return train(
        kit, rows, args=args, eval_dataset=evaluated, data_collator=full if kit.stock else padded if stream else None
    )


def null_row(kit: Kit) -> Seen:
    rows = kit.rows()
    rows[5] = {"input_ids": None, "labels": None}
    return train(kit, rows, data_collator=None)


MOVES: tuple[Move, ...] = (
    Move(
        'rows that are empty or null, with `hotspa_empty_rows="skip"`',
        empty_rows,
        ours="the log counts them (`hotspa/empty`)",
    ),
    Move("the same in a stream, with a custom collator", lambda kit: empty_rows(kit, stream=True)),
    Move(
        "a row that is null",
        null_row,
        error="input_ids is missing .*row 5.*hotspa_empty_rows=skip",
        instead='remove it, or set `hotspa_empty_rows="skip"`',
    ),
    Move("rows padded on the right, with `attention_mask`", lambda kit: train(kit, padded_rows(kit))),
    Move(
        "rows padded on the left, with `attention_mask`; the first token is a prompt's",
        lambda kit: train(kit, padded_rows(kit, "left", prompt=True)),
    ),
    Move(
        "rows padded on the left whose first token has a label",
        lambda kit: train(kit, padded_rows(kit, "left", prompt=kit.stock)),
        ours="that label is left out of the loss and its mean, and a log line reports it; compared with the stock `Trainer` without it, as "
        "it would train that token from padding",
    ),
    Move("GPT-2, rows padded on the left, with `position_ids` from 0", absolute("position_ids")),
    Move(
        "GPT-2, rows padded on the left, without `position_ids`",
        absolute(),
        error="begins with .* tokens of padding, and the model has absolute positions",
        instead="the stock `Trainer` counts positions from the padding; pad on the right, or give `position_ids`",
    ),
    Move(
        "a column that the forward of the model takes (`token_type_ids`, GPT-2)",
        absolute("position_ids", "token_type_ids"),
        error=r"has the columns \['token_type_ids'\]",
        instead="remove the column",
    ),
    Move(
        "labels on padding",
        refused_rows(labels_on_padding),
        left=True,
        error="is padding .* and has a label.*row 5",
        instead="set labels to -100 wherever `attention_mask` is 0",
    ),
    Move(
        "an `attention_mask` with 0 between tokens",
        refused_rows(hole),
        left=True,
        error="attention_mask is 0 at position 1, between tokens.*row 5",
        instead="set the label to -100 to leave a token out of the loss",
    ),
    Move(
        "an `attention_mask` that numbers documents",
        refused_rows(documents_by_mask),
        left=True,
        error="attention_mask holds 2.*row 5",
        instead="give `position_ids` that begin again at 0, or `seq_lengths`",
    ),
    Move("a padded `datasets.Dataset` with columns that the model does not take", of_dataset),
    Move("a stream of padded rows", of_stream),
    Move("`compute_metrics` over padded rows", with_metrics),
    Move("labels in a column `label_ids`", label_ids),
    Move(
        "rows of several documents, by `position_ids` that begin again at 0",
        packed("position_ids"),
        ours="also in mini-batches, and with a collator that pads, where the stock `Trainer` joins the documents",
    ),
    Move("rows of several documents, by `seq_lengths`", packed("seq_lengths"), ours="stock compared by `position_ids`"),
    Move("rows of several documents, by `cu_seqlens`", packed("cu_seqlens"), ours="stock compared by `position_ids`"),
    Move("labels on first tokens of later documents", crossing),
    Move(
        "`seq_lengths` that are not as long as the row",
        wrong_lengths,
        error="documents of a packed row have .* tokens by seq_lengths.*row 4",
        instead="make them cover all of `input_ids`",
    ),
    Move(
        "`position_ids` that neither count from 0 nor begin again there",
        wrong_positions,
        error="position_ids holds 2 at token 0.*row 4",
        instead="leave the column out, or count each document from 0",
    ),
)
