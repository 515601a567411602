"""Names that somebody may have meant: of flags, commands, models and files."""

from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches

_SIMILAR = 0.6  # the least likeness of two names of which one may be meant for the other, as in `difflib`

_OTHER_NAMES = {
    "strategies": "strategy",
    "strategy": "strategies",
    "dataset_split": "split",
    "split": "dataset_split",
    "data": "dataset",
    "output_dir": "output",
    "num_processes": "processes",
    "gpus": "processes",
    "model_name_or_path": "model",
}
"""Other names of a flag: of the same thing in another command, and of other tools."""


def spelled(flag: str, known: Collection[str]) -> str | None:
    """The known flag that one in another spelling means: with dashes or underscores, with or without `hotspa_` in front, or
    by another name; None if there is none."""
    name = plain(flag).removeprefix("hotspa_")
    spellings = {plain(each).removeprefix("hotspa_"): each for each in known}
    return spellings.get(name) or spellings.get(_OTHER_NAMES.get(name, ""))


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """A sentence about an unknown flag, with the nearest known one. `flag`: as written, such as ``--hotspa-overlnog``.
    `known`: without leading hyphens."""
    near = nearest(flag, known)
    return f"there is no flag {flag}" + (f"; did you mean --{near}?" if near else "")


def nearest(flag: str, known: Collection[str]) -> str | None:
    """The name most similar to a flag, whatever the order of its words; None if none is similar."""
    scores = {name: (_likeness(plain(flag), plain(name)), _ratio(plain(flag), plain(name))) for name in sorted(known)}
    best = max(scores, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best][0] >= _SIMILAR else None


def meant(name: str, known: Collection[str]) -> str:
    """The question whether one of up to three similar names was meant, with a space behind it; empty if none is
    similar. Ignores case."""
    names = {each.lower(): each for each in sorted(known)}
    near = [names[each] for each in get_close_matches(name.lower(), names, 3)]
    return f"did you mean {' or '.join(near)}? " if near else ""


def plain(flag: str) -> str:
    """A flag as the name of its attribute: without leading hyphens, with underscores."""
    return flag.lstrip("-").replace("-", "_")


def _likeness(flag: str, name: str) -> float:
    """From 0 to 1: of the texts, or with the words of the flag in the order of the name's."""
    words = name.split("_")
    places = {word: max(range(len(words)), key=lambda at: _ratio(word, words[at])) for word in flag.split("_")}
    return max(_ratio(flag, name), _ratio("_".join(sorted(flag.split("_"), key=places.__getitem__)), name))


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
