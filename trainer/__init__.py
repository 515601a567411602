"""The Hugging Face interface: `HotSPaTrainer`, `switched` and `HotSPaTrainingArguments`, loaded on first use."""

from typing import TYPE_CHECKING

from hf_hotspa._lazy import on_demand

if TYPE_CHECKING:
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer, switched

__all__ = ["HotSPaTrainer", "HotSPaTrainingArguments", "switched"]

_HOMES = {
    "HotSPaTrainer": "hf_hotspa.trainer.trainer",
    "HotSPaTrainingArguments": "hf_hotspa.trainer.arguments",
    "switched": "hf_hotspa.trainer.trainer",
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
