"""LoRA. Its hooks; see `hf_hotspa.seam`."""

from typing import Any

from hf_hotspa.costs.terms import Terms
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.seam import Described

terms = Terms(added=Adapter.read)


def describe(model: Any, compute_dtype: Any) -> Described:
    """The adapter of the model."""

    def added() -> Any:
        from hf_hotspa.features.lora.adapters import read_adapters

        return read_adapters(model)

    return Described(added=added)
