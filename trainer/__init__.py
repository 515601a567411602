"""The Hugging Face interface: `HotSPaTrainer`, `switched` and `HotSPaTrainingArguments`, loaded on first use."""

from typing import TYPE_CHECKING

from hf_hotspa._lazy import on_demand

if TYPE_CHECKING:
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer, switched

__all__ = ["HotSPaTrainer", "HotSPaTrainingArguments", "switched"]

_HOMES = dict.fromkeys(__all__, "hf_hotspa.trainer.trainer")
_HOMES["HotSPaTrainingArguments"] = "hf_hotspa.trainer.arguments"

__getattr__, __dir__ = on_demand(__name__, _HOMES)
