"""Lengths of rows whose ends are yet to be generated."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.trainer.protocol import HasRun


class ExpectedLengths:
    """A loader of batches with expected lengths, for `auto`: real prompts, and completions from an eighth of the
    maximum length to all of it. Generated lengths may lead to another plan later.
    """

    def __init__(self, trainer: HasRun, loader: Any) -> None:
        self._made_by: Any = trainer  # TRL's methods
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number, most = count(), self._made_by.max_completion_length
        for batch in self._loader:
            prompts = [row["prompt"] for row in batch if "prompt" in row]  # an environment may own them
            ids = self._made_by._tokenize_prompts(prompts)[0] if prompts else [[0] for _ in batch]
            lengths = [len(of_row) + max(most * (1 + next(number) % 8) // 8, 1) for of_row in ids]
            mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
            yield {"input_ids": torch.zeros(mask.shape, dtype=torch.int64), "attention_mask": mask.long()}
