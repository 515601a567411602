"""What to read from which file of a checkpoint, for any range of any parameter: interval intersection, no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_hotspa.checkpoint.format.manifest import Manifest, SavedParameter
from hf_hotspa.errors import ResumeError


@dataclass(frozen=True)
class Piece:
    """Elements `[low, high)` of a rank's share of a parameter, to be put at `target` of what is read."""

    rank: int
    low: int
    high: int
    target: int


@dataclass(frozen=True)
class Expected:
    """A parameter as the run that reads it has it.

    Args:
        shape: Its Hugging Face shape.
        dtype: The dtype of its weight in the master store.
        trainable: Whether it is trained.
        tied_names: Further names of it.
    """

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied_names: tuple[str, ...]


def pieces(manifest: Manifest, parameter: SavedParameter, start: int, stop: int) -> list[Piece]:
    """Where elements `[start, stop)` of a parameter's storage lie; together the pieces cover them once, in order."""
    overlaps = []
    for rank, first, last in manifest.holders(parameter, start, stop):
        low, _ = manifest.share(parameter, rank)
        overlaps.append(Piece(rank, first - low, last - low, first - start))
    return overlaps


def check_structure(manifest: Manifest, expected: Mapping[str, Expected], where: str) -> None:
    """Compares the parameters of a checkpoint with those of the model that is to go on from it.

    Args:
        expected: Hugging Face name -> parameter.
        where: The checkpoint, for messages.

    Raises:
        ResumeError: naming the first difference.
    """
    saved = {
        p.name: Expected(p.shape, p.states["weight"], p.trainable, tuple(sorted(p.tied_names)))
        for p in manifest.parameters
    }
    for name in _in_order(saved, expected):
        present, wanted = saved.get(name), expected.get(name)
        if wanted is not None:
            wanted = Expected(wanted.shape, wanted.dtype, wanted.trainable, tuple(sorted(wanted.tied_names)))
        if present != wanted:
            raise ResumeError(
                f"parameter {name!r} is {_text(present)} in the checkpoint and {_text(wanted)} in the model",
                where=where,
                why="a run goes on only with the model that it was saved with",
                fix="build the model from the config.json of the checkpoint, with the same dtype and frozen parts",
            )


def _in_order(saved: Iterable[str], expected: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*expected, *saved]))


def _text(parameter: Expected | None) -> str:
    if parameter is None:
        return "missing"
    tied = f", tied to {', '.join(parameter.tied_names)}" if parameter.tied_names else ""
    return f"{parameter.dtype} {list(parameter.shape)}{'' if parameter.trainable else ', frozen'}{tied}"
