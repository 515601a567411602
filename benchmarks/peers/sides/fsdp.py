"""Fully sharded data parallelism (FSDP2) through the stock Trainer: the model's own, and accelerate's."""

from typing import Any

import torch
from contest import make_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer
from transformers.distributed import DistributedConfig

from peers.sides.common import Turns, arguments
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
    if kind == "native":
        model = AutoModelForCausalLM.from_pretrained(
            work.start_folder, distributed_config=DistributedConfig(fsdp_size=work.ranks)
        )
    else:
        model = make_model(work.model)
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        more = {"fsdp": True, "fsdp_config": wrapped}
    trainer = Trainer(
        model=model,
        args=arguments(work, **more),
        train_dataset=work.rows(),
        data_collator=turns.counting(DataCollatorWithFlattening()),
        callbacks=[turns.callback()],
    )
    if kind == "accelerate" and not trainer.is_fsdp_enabled:
        raise RuntimeError(
            f"accelerate sets FSDP aside on CPU processes (distributed type {trainer.accelerator.distributed_type.value}, "
            "accelerate/state.py), and the Trainer would train with DDP without a word"
        )
    trainer.train()
    return whole_weights(trainer.accelerator.unwrap_model(trainer.model))
