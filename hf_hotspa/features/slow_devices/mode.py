"""The modes of `hotspa_stragglers`, and the option of an engine whose ranks need not compute all of their products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_hotspa.errors import StrategyError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.seam import Options
from hf_hotspa.strategy import Bucket, Strategy

if TYPE_CHECKING:
    from hf_hotspa.model.specs import ModelDescription

MODES = ("off", "watch", "balance", "migrate", "resize", "semi")  # the values of `hotspa_stragglers`
GIVING = ("migrate", "resize", "semi")  # modes in which ranks do not compute all of their products
LOSSY = ("resize", "semi")  # modes that are not exact


@dataclass(frozen=True)
class HandOver(Options):
    """Linears that tp cuts can hand over columns of their products, or leave them out (`flexible_linear`)."""

    def check_strategy(self, strategy: Strategy, shape: ModelShape, schedule: str) -> None:
        if strategy.v > 1:
            raise StrategyError(
                f"strategy {strategy} has several stages on each rank, beside ranks that offload work (hotspa_stragglers)",
                why="what a rank offloads is chosen for one stage",
                fix=f"use hotspa_stragglers=balance or watch, or leave +v{strategy.v} out",
            )
        if strategy.exchanges_tokens:
            raise UnsupportedError(
                f"strategy {strategy} with ranks that hand over work (hotspa_stragglers)",
                why="they have not been made exact together",
                fix="use hotspa_stragglers=balance or watch",
            )

    def check_model(self, description: "ModelDescription", buckets: Sequence[Bucket], options: object) -> None:
        if forms := sorted({layer.form for layer in description.packed.values()}):
            raise UnsupportedError(
                f"columns of slow devices are handed over, and the model has weights in {forms[0]}",
                why="the rank that computes them for another rank would need its codes",
                fix="use hotspa_stragglers=watch, or load the model in bf16",
            )
