"""PipeDream: the stages of a pipeline update by themselves, after every pack (`mode`)."""

import argparse
from typing import TYPE_CHECKING, Any

from hf_hotspa.features.pipedream.mode import PIPEDREAM, PIPELINE_MODES, PipeDream
from hf_hotspa.features.pipedream.terms import TERMS
from hf_hotspa.seam import SYNCHRONOUS, Flags, Options, settings

if TYPE_CHECKING:
    from hf_hotspa.features.pipedream.stage_updates import StageRunner
    from hf_hotspa.model.options import EngineOptions


def _add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline-mode",
        default=SYNCHRONOUS,
        choices=PIPELINE_MODES,
        help="hotspa_pipeline_mode: with pipedream each stage keeps several versions of its weights",
    )


def _add_partition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partition",
        action="store_true",
        help="also PipeDream's partition, with unequally replicated stages, beside the best that layouts can run",
    )


class Partitioned(Options):
    """Asks `hf-hotspa formulas` for PipeDream's partition."""

    def of_formulas(self, setup: Any, micro: int, tokens: int) -> Any:
        from hf_hotspa.features.pipedream.unequal_stages import of_formulas

        return of_formulas(setup, micro, tokens)


def _of_command(args: argparse.Namespace) -> Options | None:
    if getattr(args, "partition", False):
        return Partitioned()
    return PipeDream() if getattr(args, "pipeline_mode", SYNCHRONOUS) == PIPEDREAM else None


options = PipeDream

terms = TERMS

flags = Flags(
    arguments="hf_hotspa.features.pipedream.arguments:PipelineModeArguments",
    commands={"estimate": _add_mode, "formulas": _add_partition},
    of_command=_of_command,
)


def runner(options: "EngineOptions") -> "StageRunner | None":
    """Stages that update by themselves; None for the synchronous update."""
    mode = settings(options.features, PipeDream)
    if mode is None:
        return None
    from hf_hotspa.features.pipedream.stage_updates import StageRunner

    return StageRunner(mode)
