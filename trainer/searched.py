"""Which strategies a run may have: what `auto` searches, and what is measured of them."""

from collections.abc import Iterable
from dataclasses import replace

from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.context import divided
from hf_hotspa.stragglers.modes import GIVING
from hf_hotspa.strategy import Strategy, strategies_with_options
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments


def searched_strategies(shape: ModelShape, args: HotSPaTrainingArguments, *, may_divide: bool) -> list[Strategy]:
    """Every strategy that a run may have, with every choice of options.

    Args:
        may_divide: Whether the loss can be computed of parts of sequences (cp).
    """
    every = args.hotspa_recompute_every
    options = strategies_with_options(args.world_size, shape)
    noisy = args.neftune_noise_alpha is not None  # noise on the embeddings of whole rows
    plain = list(dict.fromkeys(s.recomputing(every) for s in options if not (s.sp and noisy)))
    if not may_divide:
        return plain
    return [
        *plain,
        *divided(
            plain,
            shape,
            way=args.hotspa_context_parallel,
            schedule=args.hotspa_pipeline_schedule,
            device_type=args.device.type,
            flexible=args.hotspa_stragglers in GIVING,
        ),
    ]


def measured_strategies(strategies: Iterable[Strategy]) -> list[Strategy]:
    """What is measured of them: what options change follows from the others."""
    return list(dict.fromkeys(replace(s, dp=s.dp * s.cp, cp=1, sp=False, rc=0, z=0) for s in strategies))
