"""Fully sharded data parallelism (FSDP2) through the stock Trainer: the model's own, and accelerate's; and in a plain loop.

The plain loop is torch's own `fully_shard` as its tutorial has it: every decoder layer, then the whole; a summed gradient
that is reduced and scattered after every micro-batch, so that it is never whole. The context parallelism of accelerate's
`ParallelismConfig` needs its FSDP2.
"""

from typing import Any

import torch
import torch.distributed as dist
from contest import make_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening
from transformers.distributed import DistributedConfig

from peers.sides.common import LEARNING_RATE, Turns, decayed_groups, trainer_of
from peers.work import Work


def whole_weights(model: torch.nn.Module) -> dict[str, Any]:
    """The weights, gathered. Collective."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def run(work: Work, turns: Turns, kind: str) -> Any:
    """Trains; the weights are gathered on every rank."""
    more: dict[str, Any] = {}
    if kind == "loop":
        return _loop(work, turns)
    if kind == "native":
        model = AutoModelForCausalLM.from_pretrained(
            work.start_folder, distributed_config=DistributedConfig(fsdp_size=work.ranks)
        )
    else:
        model = make_model(work.model)
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        more = {"fsdp": True, "fsdp_config": wrapped}
    if kind == "context":
        from accelerate import ParallelismConfig

        more["parallelism_config"] = ParallelismConfig(cp_size=work.ranks)
    trainer = trainer_of(work, turns, model, DataCollatorWithFlattening(), **more)
    if kind != "native" and not trainer.is_fsdp_enabled:
        raise RuntimeError(
            f"accelerate sets FSDP aside on CPU processes (distributed type {trainer.accelerator.distributed_type.value}, "
            "accelerate/state.py), and the Trainer would train with DDP without a word"
        )
    trainer.train()
    return whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _loop(work: Work, turns: Turns) -> Any:
    model = make_model(work.model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=LEARNING_RATE)
    rows, flatten, rank = work.rows(), turns.counting(DataCollatorWithFlattening()), dist.get_rank()
    model.train()
    for step in range(work.steps):
        turns.begin(work.steps)
        first = step * work.mini_batch_rows
        batch = [rows[at] for at in range(first, first + work.mini_batch_rows)]
        labels = sum(len(row["input_ids"]) - 1 for row in batch)
        own = batch[rank :: work.ranks]
        for at in range(0, len(own), work.micro_batch_rows):
            inputs = flatten(own[at : at + work.micro_batch_rows])
            with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bf16"):
                loss = model(**inputs, use_cache=False, num_items_in_batch=labels).loss
            (loss * work.ranks).backward()  # what is reduced is divided by the ranks, and the loss was by all labels
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.end()
    turns.begin(work.steps)
    return whole_weights(model)
