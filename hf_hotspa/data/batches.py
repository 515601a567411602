"""Rows of a user as batches of tensors, for data loaders that a Trainer, or a loop over a `SwitchedModel`, walks through.

`RowCollator` renders rows of text with the tokenizer, reads loss masks, has the user's collator do its work, or pads rows itself
where there is none, and cuts what is longer than the longest bucket. `MiniBatchSampler` deals the rows of mini-batches of a given
size out to ranks and to batches that are accumulated, evenly or not.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, Sampler, get_worker_info
from transformers.data import data_collator as stock
from transformers.trainer_utils import has_length

from hf_hotspa.data.prepare import tokenize_rows
from hf_hotspa.errors import DataError, HotspaError, UnsupportedError
from hf_hotspa.rows.features import IGNORED_LABEL, LABEL_COLUMNS, TOKEN_COLUMNS, Row, RowRules, read_row

try:
    from transformers.trainer_pt_utils import BatchRebalanceSampler
except ImportError:  # an older release takes no sampler of batches: see `Rows.of_older_release`
    BatchRebalanceSampler = None  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)

ERROR, TRUNCATE, SPLIT, DROP = "error", "truncate", "split", "drop"
SKIP = "skip"
EMPTY_POLICIES = (ERROR, SKIP)
"""What becomes of rows without anything to learn."""
COUNTS = "hotspa_cut_rows"
"""The key of a training batch that says how many rows were truncated, split, dropped and empty."""

_MASK = re.compile(r"(^|_)masks?$")
_NOT_OF_LOSS = {"attention_mask", "special_tokens_mask"}
_OF_STOCK = (
    stock.DefaultDataCollator, stock.DataCollatorWithPadding, stock.DataCollatorForLanguageModeling,
    stock.DataCollatorForSeq2Seq, stock.DataCollatorWithFlattening,
)  # fmt: skip
_FUNCTIONS = (stock.default_data_collator, stock.torch_default_data_collator)


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after the other: no random access, whether or not there is a length."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def length_facts(loader: Any) -> dict[str, str]:
    """What must be the same on all ranks of a data loader: a rank with fewer batches would leave the others waiting."""
    return {"number of batches": str(len(loader)) if has_length(loader) else "unknown"}


def release_others(loader: Any) -> None:
    """Ends the pass on the ranks for which this one reads (`dispatch_batches`), when it has failed to: they wait for a batch."""
    if isinstance(loader, DataLoaderDispatcher) and loader.state.process_index == 0:
        for _ in range(1 if loader.split_batches or loader._drop_last else 2):
            broadcast_object_list([None, True])


def is_stock(collator: Any) -> bool:
    """Whether a data collator is one of transformers', or none, whose batches hold the rows as they are."""
    return collator is None or type(collator) in _OF_STOCK or collator in _FUNCTIONS


@dataclass(eq=False)
class RowCollator:
    """Rows in, a batch of tensors out: [B, L] each, padded on the right.

    Args:
        collator: The user's; None where rows are padded here.
        tokenizer: For rows without `input_ids`; None where there is none.
        columns: What the stock Trainer would leave of each row for the model; None for all.
        loss_columns: Numbers of rows or tokens that a token loss reads beside.
        policy: What becomes of sequences of more than `longest` tokens: error, truncate, split or drop.
        skips_empty: Whether rows that are null or empty are left out.
        counts: Whether the batch says how many were cut, or left out (`COUNTS`).
        refused: Columns that the model would be given and that packing cannot honour.
        borders: As of `RowRules`.

    Attributes:
        longest: Tokens of the longest sequence that is trained; None while that is not known.
        kept: Columns of a data set that are read; all where it is empty.
    """

    collator: Any = None
    tokenizer: Any = None
    columns: Collection[str] | None = None
    loss_columns: Sequence[str] = ()
    policy: str = ERROR
    skips_empty: bool = False
    counts: bool = False
    refused: frozenset[str] = frozenset()
    borders: tuple[int, ...] = ()
    longest: int | None = None
    kept: frozenset[str] = frozenset()

    def __call__(self, examples: Sequence[Any]) -> Any:
        """The batch of some rows, on the host.

        Raises:
            DataError: a row cannot be read.
            UnsupportedError: it says something about its tokens that would be passed over.
            OverlongError: a sequence is too long, and no policy says what to do.
        """
        rows = self._read(list(examples)) if len(examples) else []
        if rows:
            batch = self._collated(rows)
        else:
            empty = torch.zeros((0, 1), dtype=torch.int64)
            batch = dict.fromkeys(("input_ids", "labels", "attention_mask"), empty)
        if not isinstance(batch, Mapping):
            return batch
        counts = [0, 0, 0, len(examples) - len(rows)]
        if self.policy != ERROR:
            batch = self._cut(batch, counts)
        return {**batch, COUNTS: torch.tensor(counts)} if self.counts else batch

    def _read(self, examples: list[Any]) -> list[Any]:
        """The rows that have something to learn, as tokens where they are text, with the masks that a stock collator would pass over."""
        if not isinstance(examples[0], Mapping):
            if self.collator is None:
                raise DataError(
                    f"a row is a {type(examples[0]).__name__} instead of a mapping",
                    fix="rows must be dictionaries with 'input_ids' and, where part of the tokens counts, 'labels'",
                )
            return examples
        if self.tokenizer is not None and "input_ids" not in examples[0]:
            try:
                rendered = tokenize_rows(examples, self.tokenizer, self.skips_empty)
            except HotspaError as error:
                raise _within_batch(error) from None
            kept = [{name: e[name] for name in self.loss_columns if name in e} for e in examples]
            _refuse_two_maskings(self.collator, rendered)
            examples = [{**row, **own} for row, own in zip(rendered, kept, strict=True)]
        elif is_stock(self.collator):
            examples = [*map(with_masks, examples, count())]
        if not self.skips_empty:
            return examples
        return [example for example in examples if not _has_no_tokens(example)]

    def _collated(self, examples: list[Any]) -> Any:
        if self.collator is None:
            return self._padded(examples)
        if self.columns is not None and isinstance(examples[0], Mapping):
            examples = [{name: e[name] for name in e if name in self.columns} for e in examples]
        return self.collator(examples)

    def _padded(self, examples: list[Any]) -> dict[str, Tensor]:
        rules = RowRules(borders=self.borders, refused=self.refused, columns=tuple(self.loss_columns))
        if "input_ids" not in examples[0]:
            raise DataError(
                f"a row has no 'input_ids', only {sorted(map(str, examples[0]))}",
                why="rows of text are tokenised where there is a tokenizer",
                fix="pass the tokenizer as processing_class, or tokenise the dataset",
            )
        rows, width, is_cut = list[Row](), 1, False
        try:
            for number, example in enumerate(examples):
                rows.append(row := read_row(example, number, rules))
                width, is_cut = max(width, len(row.ids)), is_cut or len(row.cuts) > 0
        except HotspaError as error:
            raise _within_batch(error) from None
        shape = len(rows), width
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, labels = np.full(shape, pad, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        mask, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for number, row in enumerate(rows):
            length = len(row.ids)
            ids[number, :length], mask[number, :length] = row.ids, 1
            labels[number, :length] = row.ids if row.labels is None else row.labels
            labels[number, row.cuts] = IGNORED_LABEL  # nothing of its document comes before it
            if row.first and labels[number, 0] != IGNORED_LABEL:
                say_left_out()
            begins = np.zeros(length, np.int64)
            begins[row.cuts] = row.cuts
            positions[number, :length] = np.arange(length) - np.maximum.accumulate(begins)
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        batch["labels"] = torch.from_numpy(labels)
        if is_cut:
            batch["position_ids"] = torch.from_numpy(positions)
        for name in rules.columns:
            batch[name] = _stacked(name, [row.columns[name] for row in rows], width)
        return batch

    # -- sequences that are too long ----------------------------------------------------------------------------------

    def _cut(self, batch: Mapping[str, Any], counts: list[int]) -> dict[str, Any]:
        """Truncates, splits or drops rows of [B, L] tensors; the others have an entry for each row, or are left alone."""
        ids, longest, out = batch.get("input_ids"), self.longest, dict(batch)
        if isinstance(ids, Tensor) and ids.dim() == 2 and longest is not None:
            pieces = self._pieces(batch, ids, longest, counts)
            if any(counts[:3]):
                width = max((stop - first for _, first, stop in pieces), default=1)
                rows = [row for row, _, _ in pieces]
                for name, value in batch.items():
                    if isinstance(value, Tensor) and value.shape == ids.shape:
                        out[name] = _pieces_of(value, pieces, width, name)
                    elif isinstance(value, Tensor) and value.dim() and len(value) == len(ids):
                        out[name] = value[rows]
        return out

    def _pieces(
        self, batch: Mapping[str, Any], ids: Tensor, longest: int, counts: list[int]
    ) -> list[tuple[int, int, int]]:
        """What is left: the row of each piece, its first column, and the one behind it."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        pieces = list[tuple[int, int, int]]()
        for row in range(len(ids)):
            real = range(ids.shape[1]) if mask is None else mask[row].nonzero().flatten().tolist()
            begin, stop = (real[0], real[-1] + 1) if len(real) else (0, ids.shape[1])
            if stop - begin <= longest:
                pieces.append((row, 0, ids.shape[1]) if begin else (row, 0, stop))
                continue
            if positions is not None and bool((positions[row, begin + 1 : stop] == 0).any()):
                raise UnsupportedError(
                    f"hotspa_overlong={self.policy} with rows of several documents",
                    why="the documents of a row are sequences of their own, and the row alone is longer than a bucket",
                    fix="let each row hold one document, or let the last bucket take whole rows",
                )
            if self.policy == TRUNCATE:
                counts[0] += 1
                pieces.append((row, begin, begin + longest))
            elif self.policy == SPLIT:
                counts[1] += 1
                pieces += [(row, at, min(at + longest, stop)) for at in range(begin, stop, longest)]
            else:
                counts[2] += 1
        return pieces


def _pieces_of(value: Tensor, pieces: Sequence[tuple[int, int, int]], width: int, name: str) -> Tensor:
    fill = IGNORED_LABEL if name in ("labels", "shift_labels") else 0
    out = value.new_full((len(pieces), width), fill)
    for number, (row, first, stop) in enumerate(pieces):
        out[number, : stop - first] = value[row, first:stop]
        if name == "position_ids":
            out[number, : stop - first] -= value[row, first].item()
    return out


def _has_no_tokens(example: Mapping[str, Any]) -> bool:
    return "input_ids" in example and (example["input_ids"] is None or not len(example["input_ids"]))


def _within_batch(error: HotspaError) -> HotspaError:
    """The error of a row, of which nobody knows here which one of the data set it is."""
    where = f"{error.where or 'a row'}, counted within the batch"
    return HotspaError.from_dict({**error.to_dict(), "where": where})


def _stacked(name: str, values: Sequence[Any], width: int) -> Tensor:
    """A column that a loss reads: [B] with a number for each row, or [B, L]."""
    if len({value.ndim for value in values}) > 1:
        raise DataError(
            f"the column {name!r} has a number for each token in some rows and one number in others",
            fix="give every row the one or the other",
        )
    if not values[0].ndim:
        return torch.from_numpy(np.stack(values))
    return torch.from_numpy(np.stack([np.pad(value, (0, width - len(value))) for value in values]))


def with_masks(example: Any, row: int) -> Any:
    """A row whose loss mask stands in another column than `labels` (`completion_mask`, `assistant_masks`, ...) as one with labels.

    Raises:
        UnsupportedError: a mask is not one number of 0 or 1 for each token, or a column says what counts in a way that nobody
            reads.
    """
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if ids is None or any(example.get(name) is not None for name in LABEL_COLUMNS):
        return example
    masks = dict[str, Any]()
    for name, value in example.items():
        if value is not None and is_loss_mask(name):
            masks[name] = value
    if (label := example.get("label")) is not None:
        what = "one for each token" if np.ndim(label) else "one for the row"
        raise UnsupportedError(
            f"a row has 'label' ({what}), and no 'labels'",
            where=f"row {row} of a batch",
            why="a causal language model is trained on 'labels', and without them every token counts",
            fix="rename the column to 'labels', with -100 where a token does not count, or remove it",
        )
    if not masks:
        return example
    tokens = np.asarray(ids)
    labels = tokens.copy()
    for name, mask in masks.items():
        values = np.asarray(mask)
        if values.shape != tokens.shape or not np.isin(values, (0, 1)).all():
            raise UnsupportedError(
                f"the column {name!r} is not a mask of 0 and 1 with an entry for each token",
                where=f"row {row} of a batch",
                why="it would be passed over, and every token trained",
                fix=f"turn it into 'labels', with -100 where a token does not count, or remove {name!r}",
            )
        labels[values == 0] = IGNORED_LABEL
    rest = {name: value for name, value in example.items() if name not in masks}
    return {**rest, "labels": labels.tolist() if isinstance(ids, list) else labels}


def without_padded_from(batch: Any) -> Any:
    """A batch without the labels of first tokens behind padding on the left, which nothing but padding predicts.

    Args:
        batch: Tensors [B, L]; anything else comes back as it is, and so does a batch without such labels.
    """
    if not isinstance(batch, Mapping) or batch.get("shift_labels") is not None:
        return batch
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if not (isinstance(labels, Tensor) and isinstance(mask, Tensor)):
        return batch
    if labels.dim() != 2 or labels.shape != mask.shape or not labels.numel():
        return batch
    first = (mask != 0).int().argmax(1, keepdim=True)
    left_out = (first > 0) & (labels.gather(1, first) != IGNORED_LABEL)
    if not bool(left_out.any()):
        return batch
    masked: Any = copy(batch)
    masked["labels"] = labels.scatter(1, first, labels.gather(1, first).masked_fill(left_out, IGNORED_LABEL))
    return masked


@lru_cache
def say_left_out() -> None:
    """Says, once and on rank 0, that such labels are left out."""
    worker = get_worker_info()
    if os.environ.get("RANK", "0") == "0" and (worker is None or worker.id == 0):
        logger.warning(
            "Rows are padded on the left, and the first token after the padding has a label: it is left out, of the mean, too. The "
            "stock Trainer would train it from the padding before it."
        )


def is_loss_mask(name: str) -> bool:
    """Whether a column of this name says which tokens count."""
    return bool(_MASK.search(name)) and name not in _NOT_OF_LOSS


def _refuse_two_maskings(collator: Any, rendered: Sequence[Mapping[str, Any]]) -> None:
    if type(collator) is stock.DataCollatorForLanguageModeling and "labels" in rendered[0]:
        raise UnsupportedError(
            "DataCollatorForLanguageModeling, and a dataset of conversations or completions",
            why="the collator makes every token a label, also those of prompts, which carry none here",
            fix="pass no data_collator, or tokenise the dataset yourself",
        )


def kept_columns(names: Collection[str], loss_columns: Sequence[str]) -> list[str]:
    """What of a data set's columns the collator reads beside those of the model."""
    if "input_ids" not in names:
        return list(names)
    return [n for n in names if n in TOKEN_COLUMNS or n in loss_columns or n == "label" or is_loss_mask(n)]


TAKES_BATCHES = BatchRebalanceSampler is not None
"""Whether this release of transformers takes a sampler of batches."""
_BatchesOfRanks: Any = BatchRebalanceSampler or Sampler


@dataclass(eq=False)
class MiniBatchSampler(_BatchesOfRanks):
    """The rows of each batch of this rank, where a mini-batch has a given size that ranks and accumulation need not divide.

    The rows of a mini-batch are those of the order, one after the other, whatever the number of ranks; a batch may have none. It is
    a `BatchRebalanceSampler` by type, whose batches the stock Trainer does not deal out once more.

    Args:
        sampler: The order of rows.
        size: Rows of a mini-batch.
        parts: Batches that are accumulated.
        rank: This rank.
        world_size: Ranks.
        drop_last: Leave out a last mini-batch that is not full.
    """

    sampler: Any
    size: int
    parts: int
    rank: int
    world_size: int
    drop_last: bool = False
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.size)
        return (full + (rest > 0 and not self.drop_last)) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        rows = list[int]()
        for row in self.sampler:
            rows.append(int(row))
            if len(rows) == self.size:
                yield from self._batches(rows)
                rows = []
        if rows and not self.drop_last:
            yield from self._batches(rows)

    def _batches(self, rows: list[int]) -> Iterator[list[int]]:
        shares = self.parts * self.world_size
        edges = [len(rows) * share // shares for share in range(shares + 1)]
        for part in range(self.parts):
            share = part * self.world_size + self.rank
            yield rows[edges[share] : edges[share + 1]]


def seeded(sampler: Sampler[int], data_seed: int | None) -> Sampler[int]:
    """A random sampler in the order in which accelerate would seed it; any other as it is."""
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
