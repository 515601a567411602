"""Which strategies a run may have: what `auto` searches, and what is measured of them."""

from collections.abc import Iterable
from dataclasses import replace

from hf_hotspa.costs.experts import runs_experts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.context import divided
from hf_hotspa.search.experts import runnable_experts
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
    schedule, flexible = args.hotspa_pipeline_schedule, args.hotspa_stragglers in GIVING
    capacity = args.hotspa_expert_capacity or None
    way, device_type = args.hotspa_context_parallel, args.device.type
    wanted = list(plain)
    if may_divide:
        wanted += divided(plain, shape, way=way, schedule=schedule, device_type=device_type, flexible=flexible)
    wanted += runnable_experts(plain, shape, schedule=schedule, flexible=flexible, capacity=capacity)
    # with a capacity of experts every strategy computes whole packs; what no strategy can be is said by the engine
    whole = [s for s in wanted if runs_experts(s, shape, schedule, flexible, capacity)]
    return whole or wanted


def measured_strategies(strategies: Iterable[Strategy]) -> list[Strategy]:
    """What is measured of them: what options change follows from the others."""
    return list(dict.fromkeys(replace(s, dp=s.dp * s.cp, cp=1, sp=False, rc=0, z=0, ep=1) for s in strategies))
