"""LoRA. Its hooks; see `hf_hotspa.seam`."""

from typing import TYPE_CHECKING

from hf_hotspa.costs.terms import Terms
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_hotspa.features.lora.adapters import Adapters
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription

terms = Terms(added=Adapter.read)


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    def added() -> "Adapters | None":
        from hf_hotspa.features.lora.adapters import read_adapters

        return read_adapters(model)

    return Described(added=added)


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> tuple[()]:
    """DoRA, biases and trained rows on shards; nothing is called in a step."""
    if description.added is not None:
        from hf_hotspa.features.lora.variants import use_shards

        use_shards(replica, description)
    return ()
