"""hf_hotspa: training that switches between parallel layouts inside one optimizer step.

Sequence lengths in a mini-batch are often long-tailed. Short sequences train fastest under data parallelism; rare long
ones need tensor or pipeline parallelism to fit. `HotSPaTrainer` is a `transformers.Trainer` that groups each mini-batch
by length into buckets, and packs and trains each bucket under its own strategy. It moves parameters between layouts by
planned peer-to-peer transfers, sums all gradients into a sharded fp32 master store and makes one optimizer step there.
The update equals, to rounding, a single process's update on the whole mini-batch.

Terms, used in code, documents and logs:

==============  ======================================================================================================
mini-batch      the sequences of one optimizer step, over all ranks
bucket          a length range ``(low, high]`` and its strategy
pack            one row of concatenated sequences, at most a capacity of tokens, isolated from each other
micro-batch     one forward/backward unit: one pack on one replica
phase           the run of one strategy inside a mini-batch
strategy        the degrees of dp, tp and pp, written ``dp4tp2``
axis            dp, tp or pp of a mesh
dim             a dimension of a tensor (never an axis)
rank            the global number of a process
coord           the position of a rank on an axis
stage           a pipeline slice of the model
replica         one data-parallel copy of the model
layout          which intervals of the parameter vector each rank holds
switch          moving parameters into the layout of the next strategy
master store    fp32 master weights, optimizer state and gradient accumulator; each element is owned by exactly one rank
==============  ======================================================================================================

Importing the package does not import torch; the names below are loaded at first use.
"""

from typing import TYPE_CHECKING

from hf_hotspa import _log_records, _source_tree
from hf_hotspa._lazy import on_demand

if TYPE_CHECKING:
    from hf_hotspa.callbacks.step_reports import SwitchOverheadCallback
    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.errors import HotspaError
    from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts
    from hf_hotspa.features.four_bit.open_qlora import open_qlora
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.strategy import Strategy, parse_buckets
    from hf_hotspa.switched.model import SwitchedModel
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

__version__ = "0.1.0"

__all__ = [
    "EngineOptions",
    "HotSPaEngine",
    "HotSPaTrainer",
    "HotSPaTrainingArguments",
    "HotspaError",
    "PackedBucketCollator",
    "Strategy",
    "SwitchOverheadCallback",
    "SwitchedModel",
    "__version__",
    "open_qlora",
    "parse_buckets",
    "quantize_experts",
]

_HOMES = {
    "EngineOptions": "hf_hotspa.model.options",
    "HotSPaEngine": "hf_hotspa.engine.engine",
    "HotSPaTrainer": "hf_hotspa.trainer.trainer",
    "HotSPaTrainingArguments": "hf_hotspa.trainer.arguments",
    "HotspaError": "hf_hotspa.errors",
    "PackedBucketCollator": "hf_hotspa.data.collator",
    "Strategy": "hf_hotspa.strategy",
    "SwitchedModel": "hf_hotspa.switched.model",
    "SwitchOverheadCallback": "hf_hotspa.callbacks.step_reports",
    "open_qlora": "hf_hotspa.features.four_bit.open_qlora",
    "parse_buckets": "hf_hotspa.strategy",
    "quantize_experts": "hf_hotspa.features.four_bit.four_bit_experts",
}

_source_tree.install()
_log_records.install()

__getattr__, __dir__ = on_demand(__name__, _HOMES)
