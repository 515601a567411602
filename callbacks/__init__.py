"""Trainer callbacks that read step reports, loaded on first use."""

from typing import TYPE_CHECKING

from hf_hotspa._lazy import on_demand

if TYPE_CHECKING:
    from hf_hotspa.callbacks.progress import PhaseProgressCallback
    from hf_hotspa.callbacks.step_reports import ReportCallback, SwitchOverheadCallback, TraceCallback

__all__ = ["PhaseProgressCallback", "ReportCallback", "SettingsCallback", "SwitchOverheadCallback", "TraceCallback"]

_HOMES = {
    "PhaseProgressCallback": "hf_hotspa.callbacks.progress",
    "ReportCallback": "hf_hotspa.callbacks.step_reports",
    "SettingsCallback": "hf_hotspa.callbacks.progress",
    "SwitchOverheadCallback": "hf_hotspa.callbacks.step_reports",
    "TraceCallback": "hf_hotspa.callbacks.step_reports",
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
