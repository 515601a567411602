"""Which releases of this package and of others are at work."""

import functools
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("hf-hotspa", "torch", "transformers", "accelerate", "tokenizers", "datasets")
"""What every run works with."""


@functools.cache
def version_of(name: str) -> str | None:
    """The version of a distribution; None where it is not installed. Ours is known in a source tree, too."""
    if name == "hf-hotspa":
        return str(sys.modules["hf_hotspa"].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_facts(*more: str) -> dict[str, str]:
    """The releases that all ranks must share, for an agreement: another one may plan, read or compute something else.

    Python counts by its minor version: its sums of floats changed with one.

    Args:
        more: Distributions beside `LIBRARIES`.
    """
    facts = {f"version of {name}": version_of(name) or "not installed" for name in (*LIBRARIES, *more)}
    return facts | {"version of Python": ".".join(platform.python_version_tuple()[:2])}
