"""Which releases of this package and of others are at work."""

import functools
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

LIBRARIES = ("hf-hotspa", "torch", "transformers", "accelerate", "tokenizers", "datasets")
"""What every run works with."""

TRIED = {
    "torch": ">=2.8,<2.15",
    "transformers": ">=5.10.1,<5.24",
    "accelerate": ">=1.10,<2",
    "datasets": ">=4,<6",
    "peft": ">=0.19,<0.22",
}
"""What runs were tried with, from the oldest release to the newest. Others may be installed: a run with them says so once. What is
overridden of the stock Trainer moves inside a major version."""

TRAIN = "pip install 'hf-hotspa[train]'  (in a clone: pip install '.[train]')"
"""What brings torch, transformers and accelerate."""

TRAIN_LIBRARIES = ("torch", "transformers", "accelerate")


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
    """The releases, also of `more` distributions, that all ranks must share for an agreement: another one may plan,
    read or compute something else. Python counts by its minor version: its sums of floats changed with one."""
    facts = {f"version of {name}": version_of(name) or "not installed" for name in (*LIBRARIES, *more)}
    return facts | {"version of Python": ".".join(platform.python_version_tuple()[:2])}


@functools.cache
def warn_of_untried_versions() -> None:
    """Tells the user, once and on rank 0, which installed libraries are outside of `TRIED`. None of them is changed."""
    from packaging.specifiers import SpecifierSet  # comes with `datasets`

    installed = {name: own for name in TRIED if (own := version_of(name)) is not None}
    untried = {n: own for n, own in installed.items() if not SpecifierSet(TRIED[n]).contains(own, prereleases=True)}
    if untried and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "hf_hotspa was not tried with %s. Nothing was changed in this environment; a run may fail, or train in another way than "
            "tested. Tried: %s.",
            ", ".join(f"{name} {own}" for name, own in untried.items()),
            ", ".join(f"{name} {TRIED[name]}" for name in untried),
        )
