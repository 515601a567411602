"""What the training arguments say to the engine: its options, and what they ask of all strategies."""

from dataclasses import replace

import torch

from hf_hotspa.costs.time import TimeModel
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.own_loss import SequenceLoss, TokenLoss
from hf_hotspa.stragglers.modes import GIVING
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.arguments import ON_OFF, HotSPaTrainingArguments


def engine_options(
    args: HotSPaTrainingArguments,
    loss: TokenLoss | SequenceLoss | None,
    stage_costs: StageCosts | None = None,
    time: TimeModel | None = None,
) -> EngineOptions:
    """The options of the engine of a run.

    Args:
        loss: A loss of the user's own, which label smoothing has no part in.
        stage_costs: What stages are cut by where seconds were measured.
        time: The time model that strategies were chosen by; chunks of tokens are cut by it. None where they were given:
            what is measured then changes nothing.
    """
    return EngineOptions(
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        pipeline_schedule=args.hotspa_pipeline_schedule,
        staging_bytes=args.hotspa_staging_mb << 20,
        timeout_s=float(args.ddp_timeout),
        overlap_load=ON_OFF[args.hotspa_overlap_load],
        overlap_return=ON_OFF[args.hotspa_overlap_return],
        switch_timeout_s=args.hotspa_switch_timeout,
        planner=args.hotspa_planner,
        second_source=ON_OFF[args.hotspa_second_source],
        memory_limit=args.hotspa_memory_limit_mb << 20 if args.hotspa_memory_limit_mb else None,
        label_smoothing=args.label_smoothing_factor if loss is None else 0.0,
        loss=loss,
        neftune_alpha=args.neftune_noise_alpha,
        seed=args.seed,
        gradients=args.hotspa_gradients,
        offload_master=args.hotspa_offload == "master",
        flexible=args.hotspa_stragglers in GIVING,
        context_parallel=args.hotspa_context_parallel,
        expert_capacity=args.hotspa_expert_capacity or None,
        pipedream=args.hotspa_pipedream,
        attention_dropout=args.hotspa_attention_dropout is None,
        stage_costs=stage_costs,
        pair_costs={tp: time.pair_cost(tp) for tp in time.layers} if time is not None else {},
    )


def given_buckets(args: HotSPaTrainingArguments) -> tuple[Bucket, ...]:
    """The buckets of `hotspa_strategies`; with `activation_checkpointing` their strategies recompute (`+rc`), with the stages
    2 and 3 of a DeepSpeed config, or `fsdp`, they are sharded (`+z2`, `+z3`), where they do not say so themselves."""
    every, deepspeed = args.hotspa_recompute_every, args.hotspa_deepspeed
    stage = max(args.fsdp_stage, deepspeed.stage if deepspeed is not None else 0)
    return tuple(
        replace(bucket, strategy=bucket.strategy.recomputing(every).sharded(stage)) for bucket in args.hotspa_buckets
    )
