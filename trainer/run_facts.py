"""`RunFacts`: the names, hardware and settings of a run, and the floating-point operations that the model needs.

Nothing is communicated, there are no host names, and tokens, keys and passwords in a command line are left out.
"""

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_hotspa.costs.hardware import PRESETS
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.parallel.mesh import known_nodes
from hf_hotspa.report import ModelFlops, RunFacts
from hf_hotspa.reporting.run_log import length_histogram
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.seam import SYNCHRONOUS
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.given_arguments import flags_of
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.run_plan import RunPlan
from hf_hotspa.versions import LIBRARIES, version_of


def run_facts(engine: HotSPaEngine, trainer: HasRun, table: SequenceTable | None, plan: RunPlan) -> RunFacts:
    """The facts of a run. `table`: the scan of the data set; None for a stream."""
    args, model = trainer.args, trainer.model
    overlap = engine.options.overlap(engine.device)
    shape = engine.description.shape
    single = plan.single if plan.predicts else None
    flags = (name for name, flag in flags_of(type(args)).items() if flag.recorded)
    recorded = {name.removeprefix("hotspa_"): getattr(args, name) for name in flags}
    return RunFacts(
        world_size=engine.world_size,
        versions={name.replace("-", "_"): version_of(name) or "not installed" for name in LIBRARIES}
        | {"python": platform.python_version()},
        machine=_machine(engine.device, args),
        model={
            "name": type(model).__name__,
            "family": shape.family,
            "parameters": engine.description.vector.numel,
            "layers": shape.num_layers,
            "compute_dtype": dtype_name(engine.description.compute_dtype),
        },
        settings=recorded
        | {
            "mini_batch_size": args.hotspa_rows_a_step,
            "pipeline_mode": pipeline_mode(args),
            "overlap_load": overlap.load,
            "overlap_return": overlap.return_gradients,
            "max_steps": args.max_steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "seed": args.seed,
        },
        buckets=[
            {"strategy": str(b.strategy), "low": b.low, "longest": b.longest, "pack_tokens": b.pack_tokens}
            for b in plan.pool
        ],
        plan=plan.summary(),
        lengths=length_histogram(table.sequence_lengths) if table is not None else None,
        single=str(single.bucket.strategy) if single is not None else None,
        run=_names(args, model, trainer.train_dataset),
        flops=_flops(engine, model),
    )


def _machine(device: torch.device, args: HotSPaTrainingArguments) -> dict[str, Any]:
    """The hardware of one rank; on an accelerator with its memory, or `hotspa_memory_limit_mb`."""
    machine: dict[str, Any] = {
        "device": device.type,
        "device_name": platform.machine(),
        "nodes": nodes.count if (nodes := known_nodes()) is not None else 1,
        "cpu_cores": os.cpu_count(),
        "threads_a_rank": torch.get_num_threads(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory
        limit = args.hotspa_memory_limit_mb << 20 if args.hotspa_memory_limit_mb else most
        machine |= {"device_name": torch.cuda.get_device_name(device), "memory_bytes": min(most, limit)}
    return machine


def _names(args: HotSPaTrainingArguments, model: Any, dataset: Any) -> dict[str, str]:
    source = args.hotspa_model_path or getattr(model.config, "_name_or_path", "")
    return {
        "name": args.run_name or Path(args.output_dir or ".").resolve().name,
        "model": str(source or f"{type(model).__name__}, new weights"),
        "data set": data_name(dataset),
        "command": command_line(sys.orig_argv),
        "output folder": str(Path(args.output_dir or ".").resolve()),
    }


def data_name(dataset: Any) -> str:
    """The file, or the name on the hub, of a data set, else its class; and its number of rows, if known."""
    name = getattr(getattr(dataset, "info", None), "dataset_name", None) or type(dataset).__name__
    try:
        return f"{name}, {len(dataset):,} rows"
    except TypeError:
        return str(name)


_SECRET = re.compile(r"-.*(token|key|secret|password)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\bhf_\w{16,}")
_LONGEST_COMMAND = 1000


def command_line(words: Sequence[str]) -> str:
    """A command (`sys.orig_argv`) as typed: without folders of the interpreter, `***` for tokens, keys and
    passwords."""
    if "ipykernel" in sys.modules:
        return "a notebook"
    first, *rest = words
    shown = [Path(first).name]
    if rest and Path(rest[0]).parent == Path(first).parent != Path("."):  # a command in the interpreter's folder
        shown = [Path(rest.pop(0)).name]
    hidden = False
    for word in rest:
        flag, equals, _ = word.partition("=")
        is_secret = _SECRET.match(flag) is not None
        plain = f"{flag}=***" if is_secret and equals else _SECRET_VALUE.sub("***", shlex.quote(word))
        shown.append("***" if hidden else plain)
        hidden = is_secret and not equals
    text = " ".join(shown)
    return text if len(text) <= _LONGEST_COMMAND else text[:_LONGEST_COMMAND] + " ..."


_OTHER_CARDS = {"mig", "laptop", "max", "ti", "super", "d"}
_VARIANTS = {"pcie", "nvl"}


def peak_of_card(name: str, dtype: str) -> float | None:
    """Operations per second in a GPU's data sheet; None for a card that is unknown, or has several speeds. `name`: as
    the driver reports it: `NVIDIA A100-SXM4-80GB`. `dtype`: only half precision has a peak: in fp32 it depends on
    whether tensor cores are used."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHER_CARDS or dtype not in ("bfloat16", "float16"):
        return None
    if {"6000", "ada"} <= words:
        words.add("6000ada")
    cards = [(preset.name.split("-"), preset.device.peak_flops.get(dtype)) for preset in PRESETS.values()]
    peaks = {peak for (card, *more), peak in cards if card in words and words & _VARIANTS == _VARIANTS & set(more)}
    return peaks.pop() if len(peaks) == 1 else None


def _flops(engine: HotSPaEngine, model: object) -> ModelFlops | None:
    description = engine.description
    if engine.device.type != "cuda":
        return None
    peak = peak_of_card(torch.cuda.get_device_name(engine.device), dtype_name(description.compute_dtype))
    return model_flops(description.shape, model, peak * engine.world_size) if peak else None


def model_flops(shape: ModelShape, model: Any, peak: float) -> ModelFlops:
    """The operations of a model. Per parameter and token: 2 forward, 2 for the gradient of the input, and 2 for the
    gradient of the weight if it is trained. In causal attention 6, and 12 if tokens see both sides, times the square of a
    sequence, for layers of full attention only, without sliding windows and linear attention. Recomputation does not
    count. `peak`: of all devices together."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained) / max(sum(size for size, _ in sizes), 1)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * shape.num_layers
    parameters = shape.num_layers * shape.active_parameters + shape.head_rows(1) * shape.hidden_size
    return ModelFlops(
        token=(4.0 + 2.0 * trained) * parameters,
        square=6.0 * (1 + shape.both_ways) * kinds.count("full_attention") * shape.attention_size,
        peak=peak,
    )


def pipeline_mode(args: HotSPaTrainingArguments) -> str:
    """How the stages of a run update; if they do so by themselves, including by how many packs their weights are behind."""
    features = args.hotspa_features
    strategy = args.hotspa_buckets[0].strategy if features and args.hotspa_buckets else None
    shown = {name: text for settings in features for name, text in settings.shown(strategy).items()}
    return shown.get("pipeline_mode", SYNCHRONOUS)
