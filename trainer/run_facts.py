"""What a run's record says of it at the beginning: versions, machine, model, flags, buckets, plan, lengths."""

import os
import platform

import torch
from transformers import PreTrainedModel

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.report import RunFacts
from hf_hotspa.reporting.histogram import length_histogram
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.auto import AutoStrategies
from hf_hotspa.trainer.predictions import Predictions
from hf_hotspa.versions import version_of

_LIBRARIES = ("hf-hotspa", "torch", "transformers", "accelerate", "datasets")
_FLAGS = (
    "strategies", "mini_batch_size", "overlong", "planner", "pipeline_schedule", "context_parallel", "expert_capacity",
    "stragglers",
)  # fmt: skip


def run_facts(
    engine: HotSPaEngine,
    model: PreTrainedModel,
    args: HotSPaTrainingArguments,
    table: SequenceTable | None,
    predictions: AutoStrategies | Predictions | None,
) -> RunFacts:
    """The facts of a run. No communication, no host names.

    Args:
        table: The scan of the data set; None for a stream.
        predictions: What `hotspa_strategies=auto` chose, or the predictions for strategies that were given; None without.
    """
    shape = engine.description.shape
    single = predictions.single if predictions is not None else None
    return RunFacts(
        world_size=engine.world_size,
        versions={name.replace("-", "_"): version_of(name) or "not installed" for name in _LIBRARIES}
        | {"python": platform.python_version()},
        machine={
            "device": engine.device.type,
            "device_name": torch.cuda.get_device_name(engine.device)
            if engine.device.type == "cuda"
            else platform.machine(),
            "cpu_cores": os.cpu_count(),
            "threads_a_rank": torch.get_num_threads(),
            "system": platform.system(),
        },
        model={
            "name": type(model).__name__,
            "family": shape.family,
            "parameters": engine.description.vector.numel,
            "layers": shape.num_layers,
            "compute_dtype": dtype_name(engine.description.compute_dtype),
        },
        settings={
            **{name: getattr(args, f"hotspa_{name}") for name in _FLAGS},
            "pipeline_mode": pipeline_mode(args),
            "overlap_load": engine.overlap.load,
            "overlap_return": engine.overlap.return_gradients,
            "max_steps": args.max_steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "seed": args.seed,
        },
        buckets=[
            {"strategy": str(b.strategy), "low": b.low, "longest": b.longest, "pack_tokens": b.pack_tokens}
            for b in engine.buckets
        ],
        plan=predictions.plan.summary() if isinstance(predictions, AutoStrategies) else None,
        lengths=length_histogram(table.sequence_lengths) if table is not None else None,
        single=str(single.bucket.strategy) if single is not None else None,
    )


def pipeline_mode(args: HotSPaTrainingArguments) -> str:
    """How the stages of a run update: with `pipedream`, by how many packs their weights are behind."""
    mode = args.hotspa_pipedream
    return args.hotspa_pipeline_mode if mode is None else mode.text(args.hotspa_buckets[0].strategy.pp)
