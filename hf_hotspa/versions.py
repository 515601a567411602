"""Installed releases of this package and of the libraries that it uses."""

import functools
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

LIBRARIES = ("hf-hotspa", "torch", "transformers", "accelerate", "tokenizers", "datasets")
"""Libraries that every run uses."""

COMPARED = (*LIBRARIES, "numpy", "safetensors")
"""Libraries that every run uses, and that all ranks must have in one release."""

TRIED = {
    "torch": ">=2.8,<2.15",
    "transformers": ">=5.10.1,<5.24",
    "accelerate": ">=1.10,<2",
    "datasets": ">=4,<6",
    "peft": ">=0.19,<0.22",
    "trl": ">=1.9,<1.17",
}
"""Releases that runs were tested with, from oldest to newest. With others a run warns once. The overridden parts of
the stock Trainer change even within a major version."""

TRAIN = "pip install 'hf-hotspa[train]'  (in a clone: pip install '.[train]')"
"""Installs torch, transformers and accelerate."""

TRAIN_LIBRARIES = ("torch", "transformers", "accelerate")


@functools.cache
def version_of(name: str) -> str | None:
    """Returns the version of a distribution, or None; also of this package in a source tree."""
    if name == "hf-hotspa":
        return str(sys.modules["hf_hotspa"].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_facts(*more: str) -> dict[str, str]:
    """Returns the releases, also of `more` distributions, that all ranks must share: another release may plan, read or
    compute differently. For Python the minor version counts: its sums of floats changed with one."""
    facts = {f"version of {name}": version_of(name) or "not installed" for name in (*COMPARED, *more)}
    return facts | {"version of Python": ".".join(platform.python_version_tuple()[:2])}


@functools.cache
def warn_of_untried_versions() -> None:
    """Warns, once and on rank 0, of installed libraries outside of `TRIED`."""
    from packaging.specifiers import SpecifierSet  # comes with `datasets`

    installed = {name: own for name in TRIED if (own := version_of(name)) is not None}
    untried = {n: own for n, own in installed.items() if not SpecifierSet(TRIED[n]).contains(own, prereleases=True)}
    if untried and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "hf_hotspa was not tried with %s. Nothing was changed in this environment; a run may fail, or train "
            "differently than tested. Tried: %s.",
            ", ".join(f"{name} {own}" for name, own in untried.items()),
            ", ".join(f"{name} {TRIED[name]}" for name in untried),
        )
