"""DeepSpeed's ZeRO-1, 2 and 3 through the stock Trainer, and Ulysses sequence parallelism.

On CPU processes accelerate does not set DeepSpeed up by itself (it would see a world of one), so its state is made
first and handed over as configured: `use_configured_state` is the documented way.
"""

import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
from accelerate import PartialState
from contest import make_model
from transformers import DataCollatorWithFlattening

from peers.sides.common import Turns, trainer_of
from peers.work import Work


class _ToLongest(DataCollatorWithFlattening):
    """One row a batch, padded to the longest of the data set: Ulysses gathers the rows of all ranks, and gloo gathers
    tensors of one size only."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._places = -(-work.longest // work.ranks) * work.ranks

    def __call__(self, features: Any, return_tensors: Any = None, separator_id: Any = None) -> Any:
        batch = super().__call__(features, return_tensors, separator_id)
        more = self._places - batch["input_ids"].shape[1]
        for name, value in (("input_ids", 0), ("labels", -100)):
            batch[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
        batch["position_ids"] = torch.arange(self._places)[None]
        return batch


def run(work: Work, turns: Turns, stage: int, ulysses: bool = False) -> Any:
    """Trains; the weights are gathered on every rank."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=False, backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    more: dict[str, Any] = {
        "deepspeed": config,
        "use_cpu": False,
        "accelerator_config": {"use_configured_state": True},
    }
    collator: Any = DataCollatorWithFlattening()
    if ulysses:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        more["parallelism_config"] = ParallelismConfig(
            sp_backend="deepspeed", sp_size=work.ranks, dp_shard_size=1, sp_handler=handler
        )
        more["gradient_accumulation_steps"] = work.mini_batch_rows
        collator = _ToLongest(work)
    trainer = trainer_of(work, turns, make_model(work.model), collator, **more)
    if trainer.accelerator.num_processes != work.ranks:
        raise RuntimeError(f"accelerate sees {trainer.accelerator.num_processes} process instead of {work.ranks}")
    trainer.train()
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        return {name: parameter.detach().float().clone() for name, parameter in named.items()}
