"""Modules that a feature adds beside the weights of the user's model.

Features find them (hook `describe`). Their parameters are in the parameter vector, cut where the weight beside them is cut. A
replica has the same modules, on its shards.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.model_kind import refuse_quantized
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.seam import hooks

INPUTS, OUTPUTS = "inputs", "outputs"
"""The dim that an added parameter shares with the weight beside it, and along which it is cut like that weight. If the
weight is cut along the other one, every shard holds the complete parameter, with a part of its gradient."""


class AddedModules(Protocol):
    """What was added to a model, as plain data.

    Attributes:
        name: Its name in the user's model.
        rank: The width of what is added to a weight, for plans.
        scalings: The factor of each added module's output, by the name of its layer in the transformers model.
        ep_unsupported_reason: Why fused experts cannot be divided over ranks beside them, or None.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def scalings(self) -> Mapping[str, float]: ...
    @property
    def ep_unsupported_reason(self) -> str | None: ...

    def digest(self) -> str:
        """Equal on ranks whose added modules compute the same from the same weights."""

    def beside(self, name: str) -> tuple[str, str | None]:
        """The parameter that a name of the transformers model stands for under tensor parallelism, by its name in a model
        without added modules, and `INPUTS` or `OUTPUTS` for an added one. Any other name unchanged, and None."""

    def put(self, model: nn.Module) -> None:
        """Puts the modules, on the meta device, into a model freshly built by its class from its config."""


def unwrap(model: nn.Module) -> tuple[Any, str, AddedModules | None]:
    """`bare_model`, and what features added to it. Raises `UnsupportedError`: it cannot be trained exactly, or several
    features added to the model."""
    bare, prefix = bare_model(model)
    refuse_quantized(bare, adapted=bool(prefix))
    added = [own for hook in hooks("describe") if (own := hook(model, None).added()) is not None]
    if len(added) > 1:
        raise UnsupportedError(f"{len(added)} features add modules to the model: {[each.name for each in added]}")
    return bare, prefix, added[0] if added else None
