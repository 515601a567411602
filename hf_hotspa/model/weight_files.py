"""The safetensors files of a Hugging Face folder, and reading ranges of their tensors.

Finds the files that hold a folder's weights (as `from_pretrained` chooses them), and reads a part of a tensor without
the rest. Never opens pickles. `loading.py` knows what the tensors mean for a model.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError, UnsupportedError
from hf_hotspa.model.replica import to_storage

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""transformers' names of a model in one file, and of the index of several."""

T = TypeVar("T")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a safetensors file; the dtype as in the format (`BF16`)."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of a Hugging Face folder by the names in its files. Opening reads the headers only. Raises
    `HotspaConfigError`: there is no such folder, or no weights in it. Raises `UnsupportedError`: its weights are
    pickles. Raises `DamagedCheckpointError`: a file is missing, cannot be read, or repeats a tensor. `folder`: has
    `model.safetensors`, or an index and its files. `only`: the one file to read instead."""

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self.folder = folder
        self.tensors: dict[str, SavedTensor] = {}  # saved name -> tensor
        for file in [only] if only else self._files():
            for name, (shape, dtype) in self._reading(file, _header).items():
                if name in self.tensors:
                    raise self._damaged(file, f"{name!r} is also in {self.tensors[name].file!r}")
                self.tensors[name] = SavedTensor(file, shape, dtype)

    def digest(self) -> str:
        """Equal on ranks with the same files, judging by their headers."""
        return hashlib.sha256(repr(sorted(self.tensors.items())).encode()).hexdigest()

    def read(self, name: str, shard_dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns elements `[start, stop)` of a tensor in storage order; reads only their rows (columns, for dim 1).
        `shard_dim`: the outermost dim in storage; None for the natural order. `stop`: None for the end of the
        tensor. Raises `DamagedCheckpointError`: the file cannot be read. Returns 1-D, on the CPU, in the saved
        dtype. May be a view of the file: copy it and drop it."""
        saved = self.tensors[name]
        shape, dim = saved.shape, shard_dim or 0
        numel = torch.Size(shape).numel()
        stop = numel if stop is None else stop
        if not shape or not numel:
            return self.whole(name).reshape(-1)[start:stop]
        row = numel // shape[dim]
        first, last = start // row, -(-stop // row)
        index = (slice(None),) * dim + (slice(first, last),)
        block = self._reading(saved.file, lambda opened: opened.get_slice(name)[index])
        return to_storage(block, shard_dim)[start - first * row : stop - first * row]

    def whole(self, name: str) -> Tensor:
        """Returns a complete tensor, in its saved shape. See `read`."""
        return self._reading(self.tensors[name].file, lambda opened: opened.get_tensor(name))

    def _files(self) -> list[str]:
        if not self.folder.is_dir():
            raise HotspaConfigError(
                f"there is no folder {str(self.folder)!r} to load a model from",
                fix="give the folder of a saved model; one of the hub is downloaded with: hf download NAME --local-dir FOLDER",
            )
        if (self.folder / WEIGHTS).is_file():
            return [WEIGHTS]
        if (self.folder / INDEX).is_file():
            return self._indexed()
        pickles = sorted(path.name for path in self.folder.glob("*model*.bin"))
        if pickles:
            raise UnsupportedError(
                f"the weights are in the pickle {pickles[0]!r}",
                where=str(self.folder),
                why="reading a pickle can run any program, and gives whole tensors only",
                fix="convert them once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)",
            )
        raise HotspaConfigError(
            f"there is no {WEIGHTS!r} and no {INDEX!r}",
            where=str(self.folder),
            fix="give a folder that save_pretrained, save_model() or hf download NAME --local-dir FOLDER has filled",
        )

    def _indexed(self) -> list[str]:
        try:
            files = set(json.loads((self.folder / INDEX).read_bytes())["weight_map"].values())
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(INDEX, f"{type(error).__name__}: {error}") from error
        for file in files:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise self._damaged(INDEX, f"it names the file {str(file)[:200]!r}")
        return sorted(files)

    def _reading(self, file: str, action: Callable[[Any], T]) -> T:
        """Opens a file for one action: an open file's pages would stay in memory."""
        try:
            with safe_open(self.folder / file, framework="pt", device="cpu") as opened:
                return action(opened)
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, str(error)) from error

    def _damaged(self, file: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{file!r} cannot be loaded from: {what}",
            where=str(self.folder),
            fix="copy or download the folder again, or use another one",
        )


def _header(opened: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return {name: (tuple(piece.get_shape()), piece.get_dtype()) for name, piece in slices.items()}
