"""LoRA. Its hooks; see `hf_hotspa.seam`."""

from typing import TYPE_CHECKING

from hf_hotspa.costs.terms import Terms
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_hotspa.features.lora.adapters import Adapters

terms = Terms(added=Adapter.read)


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """The adapter of the model."""

    def added() -> "Adapters | None":
        from hf_hotspa.features.lora.adapters import read_adapters

        return read_adapters(model)

    return Described(added=added)
