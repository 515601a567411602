"""The Hugging Face face of the package: `HotSPaTrainer` and `HotSPaTrainingArguments`, loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

__all__ = ["HotSPaTrainer", "HotSPaTrainingArguments"]

_HOMES = {"HotSPaTrainer": "hf_hotspa.trainer.trainer", "HotSPaTrainingArguments": "hf_hotspa.trainer.arguments"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
