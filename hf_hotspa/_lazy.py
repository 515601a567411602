"""Loads public names of packages at first use, so that importing a package does not import torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from hf_hotspa.versions import TRAIN, TRAIN_LIBRARIES


def on_demand(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose public names are in these modules."""

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in TRAIN_LIBRARIES:
                raise
            raise needs_training_libraries(name, error) from None
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})


def needs_training_libraries(who: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error to raise when a library is missing that only training needs."""
    return ModuleNotFoundError(
        f"{who} needs {error.name}, which is not installed; the light installation plans and reports only. To train: {TRAIN}",
        name=error.name,
    )
