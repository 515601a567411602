"""The Trainer's flags for the reaction to slow devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.slow_devices.columns import CHOICES, IMPUTATIONS
from hf_hotspa.features.slow_devices.mode import GIVING, LOSSY, MODES, HandOver
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.given_arguments import Number, flag


@dataclass
class StragglerArguments:
    """The reaction to slow devices. Flags of `hotspa_resize` only apply if products are resized."""

    hotspa_stragglers: str = flag(
        "watch",
        "The reaction to slow devices: off, watch (they are named in the log and the report), balance (packs are "
        "divided over replicas, layers over stages of pipelines, and MLPs over ranks of tp, by measured speed), migrate "
        "(slow ranks of tp hand columns over to others), resize (they leave columns out: not exact), or semi (they do "
        "both; a pretest finds which costs less: not exact).",
        choices=MODES,
        recorded=True,
    )
    hotspa_resize_columns: str = flag(
        CHOICES[0],
        "Which columns resize and semi leave out: rd (at random), pri (whose weights vary least), pridiffr and "
        "pridiffe (by variation, and of each layer as many as vary little; at least 0.8 of the slow device's excess, or "
        "of one half).",
        choices=CHOICES,
    )
    hotspa_resize_imputation: str = flag(
        IMPUTATIONS[0],
        "The gradients of columns that were left out: zero, same (of weights: the gradient of the previous mini-batch; a "
        "copy of it is kept), or average (the mean of the other columns).",
        choices=IMPUTATIONS,
    )
    hotspa_resize_period: int = flag(
        0,
        "Mini-batches between two measurements of how weights vary, for hotspa_resize_columns other than rd. 0: a "
        "pass over the data.",
        number=Number(0, whole=True, fix="use some mini-batches, or 0 for a pass"),
    )

    def feature_settings(self) -> HandOver | None:
        """The option of engines in modes that hand columns over or leave them out."""
        return HandOver() if self.hotspa_stragglers in GIVING else None

    def check_feature(self, buckets: Sequence[Bucket]) -> None:
        """Raises `HotspaConfigError` for flags that do not go together with each other or with the run."""
        run: Any = self  # and the arguments of transformers
        mode = self.hotspa_stragglers
        if mode not in ("off", "watch") and run.world_size == 1:
            raise HotspaConfigError(
                f"hotspa_stragglers={mode} on one process",
                why="there is no other device that could take work over",
                fix="leave it at watch, or start more processes",
            )
        if mode not in ("off", "watch") and run.full_determinism:
            raise HotspaConfigError(
                f"hotspa_stragglers={mode} with full_determinism",
                why="the reaction depends on measured seconds, which differ from run to run",
                fix="use hotspa_stragglers=watch, or leave out full_determinism",
            )
        for name, choices in (("hotspa_resize_columns", CHOICES), ("hotspa_resize_imputation", IMPUTATIONS)):
            value = getattr(self, name)
            if value != choices[0] and mode not in LOSSY:
                raise HotspaConfigError(
                    f"{name}={value} with hotspa_stragglers={mode}",
                    why="no columns are left out there",
                    fix=f"use it with hotspa_stragglers={' or '.join(LOSSY)}",
                )
