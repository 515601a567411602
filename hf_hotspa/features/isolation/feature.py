"""Layers that mix tokens in other ways than packed attention: recurrent ones, convolutions, custom masks.

Its hooks; see `hf_hotspa.seam`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> Iterator[Any]:
    """Layers treat the sequences of packs by their kind."""
    from hf_hotspa.features.isolation.isolation import PackLender, take_packs
    from hf_hotspa.model.pass_through import PassThrough

    for layer, kind in zip(replica.layers, description.layer_kinds, strict=True):
        if not isinstance(layer, PassThrough):
            take_packs(layer, kind)
    if not any(kind.num_attentions for kind in description.layer_kinds):
        yield PackLender(replica.layers)
