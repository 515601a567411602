"""The one place that reads pickles: those of a stock `Trainer`'s checkpoint, when a run goes on from one.

Only tensors and plain values are built (`weights_only=True`): a file that asks for anything else is refused. Nothing of
our own is a pickle, and `training_args.bin` is never read.
"""

from pathlib import Path
from typing import Any

import torch
from transformers.trainer_pt_utils import safe_globals

from hf_hotspa.errors import DamagedCheckpointError


def read_pickle(folder: Path, name: str) -> Any:
    """The tensors and plain values of a file that `torch.save` wrote; tensors stay on the disk until they are used.

    Raises:
        DamagedCheckpointError: it cannot be read, or holds something else.
    """
    try:
        with safe_globals():  # what the saved state of numpy's generator is made of
            return torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a file of unknown contents raises
        text = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"{name!r} cannot be read as tensors and plain values: {type(error).__name__}: {text}", where=str(folder)
        ) from error
