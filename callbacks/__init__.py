"""Trainer callbacks that read step reports, each loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hotspa.callbacks.progress import PhaseProgressCallback
    from hf_hotspa.callbacks.report import ReportCallback
    from hf_hotspa.callbacks.switch_overhead import SwitchOverheadCallback
    from hf_hotspa.callbacks.trace import TraceCallback

__all__ = ["PhaseProgressCallback", "ReportCallback", "SettingsCallback", "SwitchOverheadCallback", "TraceCallback"]

_HOMES = {
    "PhaseProgressCallback": "hf_hotspa.callbacks.progress",
    "ReportCallback": "hf_hotspa.callbacks.report",
    "SettingsCallback": "hf_hotspa.callbacks.settings",
    "SwitchOverheadCallback": "hf_hotspa.callbacks.switch_overhead",
    "TraceCallback": "hf_hotspa.callbacks.trace",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
