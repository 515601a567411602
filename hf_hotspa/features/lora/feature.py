"""LoRA. Its hooks; see `hf_hotspa.seam`."""

from hf_hotspa.costs.terms import Terms
from hf_hotspa.features.lora.terms import Adapter

terms = Terms(added=Adapter.read)
