"""transformers' own tensor parallelism: through the stock Trainer, and in a plain loop where the Trainer does not support it.

The plain loop is what a user has to write: every rank runs the same packs (best fit, as long as the longest sequence,
isolated by their positions), and the optimizer works tensor by tensor, as sharded and whole parameters do not mix.
"""

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer
from transformers.distributed import DistributedConfig

from hf_hotspa.packing.bucketing import pack_sequences
from peers.sides.common import LEARNING_RATE, Turns, decayed_groups, trainer_of
from peers.sides.fsdp import whole_weights
from peers.work import Work


def run(work: Work, turns: Turns, kind: str) -> Any:
    """Trains; the weights are gathered on every rank."""
    config = DistributedConfig(tp_size=work.ranks)
    model = AutoModelForCausalLM.from_pretrained(work.start_folder, distributed_config=config)
    if kind == "loop":
        _loop(model, work, turns)
        return whole_weights(model)
    rows = work.mini_batch_rows
    trainer_of(work, turns, model, DataCollatorWithFlattening(), gradient_accumulation_steps=rows).train()
    return whole_weights(model)


def _packs(rows: list[dict[str, Any]], longest: int) -> list[list[dict[str, Any]]]:
    """The rows of each pack."""
    (packs,) = pack_sequences([len(row["input_ids"]) for row in rows], capacity=longest)
    return [[rows[at] for at in pack] for pack in packs]


def _loop(model: Any, work: Work, turns: Turns) -> None:
    optimizer = torch.optim.AdamW(decayed_groups(model), lr=LEARNING_RATE, foreach=False)
    rows, size = work.rows(), work.mini_batch_rows
    flatten = turns.counting(DataCollatorWithFlattening())
    model.train()
    for step in range(work.steps):
        turns.begin(work.steps)
        batch = [rows[at] for at in range(step * size, (step + 1) * size)]
        labels = sum(len(row["input_ids"]) - 1 for row in batch)
        for pack in _packs(batch, work.longest):
            inputs = flatten(pack)
            with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bf16"):
                loss = model(**inputs, use_cache=False, num_items_in_batch=labels).loss
            loss.backward()
        Trainer._mixed_mesh_grad_norm(None, model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.end()
    turns.begin(work.steps)
    if dist.get_rank():  # every rank has seen the same tokens
        turns.tokens = turns.slots = 0
