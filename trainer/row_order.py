"""Orders of rows beside the seeded shuffle: grouped by length, and those of a user's `_get_train_sampler`.

Promises that all ranks follow the same one, whatever their random generators do.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.rows.table import SequenceTable

_FIX = "return a sampler of single rows with a length, or leave the order to train_sampling_strategy"


def order_seed(args: TrainingArguments) -> int:
    """The seed of the order of rows: `data_seed`, or `seed` where that is None."""
    return args.seed if args.data_seed is None else args.data_seed


class LengthGroupedRows(Sampler[int]):
    """Rows of about the same length beside one another, in an order that depends on ``seed + epoch`` only; else as
    transformers' `LengthGroupedSampler`, whose order hangs on the state of torch's generator.

    Args:
        group_size: Rows of a mini-batch, inside which lengths are sorted.
    """

    def __init__(self, table: SequenceTable, group_size: int, seed: int) -> None:
        self._lengths, self._group_size, self._seed, self._epoch = table.lengths, group_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(get_length_grouped_indices(self._lengths.tolist(), self._group_size, generator=generator))


class RowsOfUser(Sampler[int]):
    """The rows of a user's sampler, as its copy on the main process gives them. Every rank iterates at the same time.

    Args:
        sampler: What `_get_train_sampler` returned.
        texts: Every rank's text; a collective call.

    Raises:
        UnsupportedError: the sampler has no length; while iterating, on all ranks: it gives other things than rows.
    """

    def __init__(self, sampler: Any, num_rows: int, texts: Callable[[str], list[str]]) -> None:
        if not hasattr(sampler, "__len__"):
            raise UnsupportedError(
                f"_get_train_sampler returns a {type(sampler).__name__}, which has no length",
                why="the number of steps of an epoch would not be known",
                fix=_FIX,
            )
        self._sampler, self._num_rows, self._texts = sampler, num_rows, texts

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler, if it wants to know."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        order: list[int] | str
        try:
            order = [int(row) for row in itertools.islice(self._sampler, len(self._sampler))]
            wrong = next((row for row in order if not 0 <= row < self._num_rows), None)
            if wrong is not None:
                order = f"the row {wrong}, and the data set has {self._num_rows}"
        except Exception as error:  # whatever the code of a user raises
            order = f"{type(error).__name__}: {error}"
        ranks = self._texts(json.dumps(order))
        bad = next((text for text in map(json.loads, ranks) if isinstance(text, str)), None)
        if bad is not None:
            raise UnsupportedError(
                f"the {type(self._sampler).__name__} of _get_train_sampler gives no single rows: {bad}", fix=_FIX
            )
        rows: list[int] = json.loads(ranks[0])
        return iter(rows)


def rows_of(sampler: Any, num_rows: int, seed: int, texts: Callable[[str], list[str]]) -> Sampler[int]:
    """What a sampler of the user's becomes: a random one is seeded, as accelerate does; others are followed as they are.

    Args:
        sampler: What `_get_train_sampler` returned; None for the order of the data set.

    Raises:
        UnsupportedError: it has no length.
    """
    if sampler is None:
        return SequentialSampler(range(num_rows))
    if isinstance(sampler, RandomSampler):
        source = sampler.data_source
        count, generator = sampler._num_samples, sampler.generator
        return SeedableRandomSampler(
            source, replacement=sampler.replacement, num_samples=count, generator=generator, data_seed=seed
        )
    return RowsOfUser(sampler, num_rows, texts)
