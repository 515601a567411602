"""Flags that have a meaning together, checked: how pipelines update, and what is done about slow devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.packing.pipeline_order import PIPEDREAM, PIPELINE_MODES, SYNCHRONOUS, PipeDream, check_pipedream
from hf_hotspa.stragglers.columns import CHOICES, IMPUTATIONS
from hf_hotspa.stragglers.giving import GIVING, LOSSY, MODES
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.given_arguments import Number, flag

_NAMED, _BACK = f"hotspa_pipeline_mode={PIPEDREAM}", f"hotspa_pipeline_mode={SYNCHRONOUS}"

# name -> (values that are fine, why another one is not)
_NOT_WITH: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hotspa_overlap_load": (("auto", "off"), "a stage loads its weights anew after every pack, and waits for that"),
    "hotspa_overlap_return": (("auto", "off"), "a stage updates as soon as a pack has run backward"),
    "hotspa_offload": (("none",), "every update would cross the bus to the host and back"),
    "hotspa_stragglers": (
        ("off", "watch"),
        "what slow ranks do less is agreed on for a whole mini-batch, and a stage keeps its layers",
    ),
    "hotspa_skip_non_finite": ((0,), "packs before the one that is not finite have changed the weights already"),
}


@dataclass
class PipelineModeArguments:
    """How the stages of a pipeline update. The last two flags have a meaning with `hotspa_pipeline_mode=pipedream` alone."""

    hotspa_pipeline_mode: str = field(
        default=SYNCHRONOUS,
        metadata=flag(
            "synchronous (one update a mini-batch, exact), or pipedream: stages update after the backward pass of every "
            "pack, with weights that are behind, which is not the synchronous update. For one strategy with pp.",
            choices=PIPELINE_MODES,
        ),
    )
    hotspa_vertical_sync: bool = field(
        default=False,
        metadata=flag("With pipedream: all stages run a pack with the version of weights of the first."),
    )
    hotspa_clip_per_stage: bool = field(
        default=False,
        metadata=flag(
            "With pipedream: max_grad_norm holds for the gradient of each stage and pack, by itself. Else it must be 0: no "
            "stage knows the norm over all."
        ),
    )

    @property
    def hotspa_pipedream(self) -> PipeDream | None:
        """How stages update by themselves; None for the synchronous update."""
        if self.hotspa_pipeline_mode != PIPEDREAM:
            return None
        most: float | None = vars(self)["max_grad_norm"]  # of transformers
        return PipeDream(self.hotspa_vertical_sync, most if self.hotspa_clip_per_stage and most else None)

    def check_pipeline_mode(self, buckets: Sequence[Bucket]) -> None:
        """Refuses what does not go together.

        Args:
            buckets: Those that were given; none with `auto`.

        Raises:
            HotspaConfigError: a flag without a meaning.
            UnsupportedError: something that the mode cannot honour.
        """
        if self.hotspa_pipeline_mode == SYNCHRONOUS:
            for name in ("hotspa_vertical_sync", "hotspa_clip_per_stage"):
                if getattr(self, name):
                    raise HotspaConfigError(
                        f"{name}=True with {_BACK}",
                        why="all stages update together there, and clip to the norm over all",
                        fix=f"leave it out, or use it with {_NAMED}",
                    )
            return
        if not buckets:
            raise UnsupportedError(
                f"{_NAMED} with hotspa_strategies=auto",
                why="auto chooses strategies to switch between, and stages that update by themselves cannot switch",
                fix=f"give one strategy with pp of at least 2, such as pp2:2048, or {_BACK}",
            )
        values = vars(self)
        check_pipedream(buckets, schedule=values["hotspa_pipeline_schedule"])
        most = values["max_grad_norm"]
        if most and not self.hotspa_clip_per_stage:
            raise UnsupportedError(
                f"{_NAMED} with max_grad_norm={most} (1.0 is its default)",
                why="it is the norm of the whole gradient, and no moment exists at which the gradients of all stages are there",
                fix=f"set max_grad_norm=0, or hotspa_clip_per_stage=True to clip each stage by itself, or {_BACK}",
            )
        if self.hotspa_clip_per_stage and not most:
            raise HotspaConfigError(
                f"hotspa_clip_per_stage=True with max_grad_norm={most}", fix="give the norm, such as max_grad_norm=1.0"
            )
        for name, (fine, why) in _NOT_WITH.items():
            if values[name] not in fine:
                raise UnsupportedError(
                    f"{_NAMED} with {name}={values[name]}", why=why, fix=f"use {name}={fine[0]}, or {_BACK}"
                )


@dataclass
class StragglerArguments:
    """What is done about slow devices. Flags of `hotspa_resize` have a meaning where products are resized alone."""

    hotspa_stragglers: str = field(
        default="watch",
        metadata=flag(
            "What is done about slow devices: off, watch (they are named in the log and the report), balance (packs are "
            "divided over replicas, layers over stages of pipelines, and MLPs over ranks of tp, by measured speed), migrate (slow ranks of tp give columns to others), resize (they leave "
            "columns out: not exact), or semi (they do both, by what a pretest finds to cost less: not exact).",
            choices=MODES,
            option="flexible",
            made=lambda mode: mode in GIVING,
            recorded=True,
        ),
    )
    hotspa_resize_columns: str = field(
        default=CHOICES[0],
        metadata=flag(
            "Which columns resize and semi leave out: rd (at random), pri (whose weights vary least), pridiffr and "
            "pridiffe (by variation, and of each layer as many as vary little; at least 0.8 of what the slow device must lose, or "
            "of one half).",
            choices=CHOICES,
        ),
    )
    hotspa_resize_imputation: str = field(
        default=IMPUTATIONS[0],
        metadata=flag(
            "What the gradients of columns are that were left out: zero, same (of weights: that of the mini-batch before; a "
            "copy of the gradient is kept), or average (the mean of the other columns).",
            choices=IMPUTATIONS,
        ),
    )
    hotspa_resize_period: int = field(
        default=0,
        metadata=flag(
            "Mini-batches from one look at how weights vary to the next, for hotspa_resize_columns other than rd. 0: a "
            "pass over the data.",
            number=Number(0, whole=True, fix="use some mini-batches, or 0 for a pass"),
        ),
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
