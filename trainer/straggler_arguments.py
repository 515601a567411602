"""The flags about slow devices, checked: a part of `HotSPaTrainingArguments`."""

from dataclasses import dataclass, field

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.stragglers.columns import CHOICES, IMPUTATIONS
from hf_hotspa.stragglers.modes import LOSSY, MODES


@dataclass
class StragglerArguments:
    """What is done about slow devices. Flags of `hotspa_resize` have a meaning where products are resized alone."""

    hotspa_stragglers: str = field(
        default="watch",
        metadata={
            "help": "What is done about slow devices: off, watch (they are named in the log and the report), balance (packs are "
            "divided over replicas, layers over stages of pipelines, and MLPs over ranks of tp, by measured speed), migrate (slow ranks of tp give columns to others), resize (they leave "
            "columns out: not exact), or semi (they do both, by what a pretest finds to cost less: not exact).",
            "choices": list(MODES),
        },
    )
    hotspa_resize_columns: str = field(
        default=CHOICES[0],
        metadata={
            "help": "Which columns resize and semi leave out: rd (at random), pri (whose weights vary least), pridiffr and "
            "pridiffe (by variation, and of each layer as many as vary little; at least 0.8 of what the slow device must lose, or "
            "of one half).",
            "choices": list(CHOICES),
        },
    )
    hotspa_resize_imputation: str = field(
        default=IMPUTATIONS[0],
        metadata={
            "help": "What the gradients of columns are that were left out: zero, same (of weights: that of the mini-batch before; a "
            "copy of the gradient is kept), or average (the mean of the other columns).",
            "choices": list(IMPUTATIONS),
        },
    )
    hotspa_resize_period: int = field(
        default=0,
        metadata={
            "help": "Mini-batches from one look at how weights vary to the next, for hotspa_resize_columns other than rd. 0: a "
            "pass over the data."
        },
    )

    def check_stragglers(self, world_size: int, deterministic: bool) -> None:
        """Raises `HotspaConfigError` for flags that do not go together with each other or with the run."""
        mode = self.hotspa_stragglers
        if mode not in ("off", "watch") and world_size == 1:
            raise HotspaConfigError(
                f"hotspa_stragglers={mode} on one process",
                why="there is no other device that work could go to",
                fix="leave it at watch, or start more processes",
            )
        if mode not in ("off", "watch") and deterministic:
            raise HotspaConfigError(
                f"hotspa_stragglers={mode} with full_determinism",
                why="what is done depends on measured seconds, which differ from run to run",
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
