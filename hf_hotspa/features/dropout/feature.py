"""Dropout and noise on embeddings that do not depend on the layout.

Its hooks; see `hf_hotspa.seam`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_hotspa.features.dropout.mode import Noise
from hf_hotspa.seam import Flags, settings

if TYPE_CHECKING:
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription

options = Noise

flags = Flags(arguments="hf_hotspa.features.dropout.arguments:NoiseArguments")


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> Iterator[Any]:
    from hf_hotspa.features.dropout.dropout import DropoutMasks, EmbeddingNoise

    masks = DropoutMasks(options.seed, replica.mesh.tensor, replica.mesh.strategy.sp)
    if masks.take(replica, description):
        yield masks
    noise = settings(options.features, Noise)
    if noise is not None and replica.is_first:
        added = EmbeddingNoise(noise.alpha, options.seed)
        replica.model.get_input_embeddings().register_forward_hook(added)
        yield added
