"""The Trainer's flags for stages that update by themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.features.pipedream.mode import PIPEDREAM, PIPELINE_MODES, PipeDream, check_strategies
from hf_hotspa.seam import SYNCHRONOUS
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.given_arguments import flag

_NAMED, _BACK = f"hotspa_pipeline_mode={PIPEDREAM}", f"hotspa_pipeline_mode={SYNCHRONOUS}"

# name -> (accepted values, why another one is not)
_NOT_WITH: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "hotspa_overlap_load": (("auto", "off"), "a stage loads its weights again after every pack, and waits for that"),
    "hotspa_overlap_return": (("auto", "off"), "a stage updates as soon as a pack has run backward"),
    "hotspa_offload": (("none",), "every update would cross the bus to the host and back"),
    "hotspa_stragglers": (
        ("off", "watch"),
        "the reduction of slow ranks' work is agreed on for a complete mini-batch, and a stage keeps its layers",
    ),
    "hotspa_skip_non_finite": ((0,), "packs before the one that is not finite have changed the weights already"),
}


@dataclass
class PipelineModeArguments:
    """How the stages of a pipeline update. The last two flags need `hotspa_pipeline_mode=pipedream`."""

    hotspa_pipeline_mode: str = flag(
        SYNCHRONOUS,
        "synchronous (one update per mini-batch, exact), or pipedream: stages update after the backward pass of every "
        "pack, with stale weights, which is not the synchronous update. For one strategy with pp.",
        choices=PIPELINE_MODES,
    )
    hotspa_vertical_sync: bool = flag(
        False, "With pipedream: all stages run a pack with the first stage's version of the weights."
    )
    hotspa_clip_per_stage: bool = flag(
        False,
        "With pipedream: max_grad_norm applies to the gradient of each stage and pack separately. Else it must be 0: no "
        "stage knows the norm over all.",
    )

    def feature_settings(self) -> PipeDream | None:
        """The settings for stages that update by themselves; None for the synchronous update."""
        if self.hotspa_pipeline_mode != PIPEDREAM:
            return None
        most: float | None = vars(self)["max_grad_norm"]  # of transformers
        return PipeDream(self.hotspa_vertical_sync, most if self.hotspa_clip_per_stage and most else None)

    def check_feature(self, buckets: Sequence[Bucket]) -> None:
        """Rejects flags that do not go together. `buckets`: the given buckets; none with `auto`. Raises
        `HotspaConfigError`: a flag without a meaning. Raises `UnsupportedError`: something that the mode cannot
        honour."""
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
        check_strategies(buckets, schedule=values["hotspa_pipeline_schedule"])
        most = values["max_grad_norm"]
        if most and not self.hotspa_clip_per_stage:
            raise UnsupportedError(
                f"{_NAMED} with max_grad_norm={most} (1.0 is its default)",
                why="it is the norm of the complete gradient, and the gradients of all stages never exist at the same time",
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
