"""Trainer callbacks that read step reports: `SwitchOverheadCallback`, loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hotspa.callbacks.switch_overhead import SwitchOverheadCallback

__all__ = ["SwitchOverheadCallback"]

_HOMES = {"SwitchOverheadCallback": "hf_hotspa.callbacks.switch_overhead"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
