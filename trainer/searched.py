"""Which strategies a run may have: what `auto` searches, and what is measured of them."""

from collections.abc import Iterable
from dataclasses import replace

from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.offers import divided
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
    run = RunOptions(
        args.hotspa_pipeline_schedule,
        args.hotspa_context_parallel,
        args.device.type,
        args.hotspa_stragglers in GIVING,
        args.hotspa_expert_capacity or None,
    )
    wanted = [*plain, *(s for s in divided(plain, shape, run) if may_divide or s.cp == 1)]
    # with a capacity of experts every strategy computes whole packs; what no strategy can be is said by the engine
    return [s for s in wanted if run.runs(s, shape)] or wanted


def measured_strategies(strategies: Iterable[Strategy]) -> list[Strategy]:
    """What is measured of them: what options change follows from the others."""
    return list(dict.fromkeys(replace(s, dp=s.dp * s.cp, cp=1, sp=False, rc=0, z=0, ep=1) for s in strategies))
