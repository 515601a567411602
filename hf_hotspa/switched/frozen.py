"""A second model on the replicas of a switched one: a reference that is never trained."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from torch import nn

from hf_hotspa.engine.loading import whole_parameters
from hf_hotspa.parallel.adapters import bare_model
from hf_hotspa.switched.model_object import as_built, unroute

_Base: Any = object


class Frozen(_Base):
    """In front of `SwitchedModel`: weights of a second model that another one computes with. See `SwitchedModel.frozen`.

    Args:
        owner: The `SwitchedModel` on whose replicas it runs.
    """

    _own: Any
    _window: Any
    _calls: list[Any]
    _waiting: list[Any]
    step: Any = property(lambda self: self._owner.step)

    def __init__(self, owner: Any, model: nn.Module) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        self.engine, self._passes, self._logit_bytes = owner.engine, owner._passes, owner._logit_bytes
        with as_built(bare_model(model)[0]):
            self._store = owner.engine.frozen_weights(model)
        self._take_object(model)
        self._own, self._guards, self._in_pass = None, False, False
        object.__setattr__(self, "_owner", owner)  # not a submodule
        self._meet = copy(owner._meet)
        self._meet.of_model = ", of a frozen model"
        self._version = self._written = self.missed = 0
        self._calls, self._waiting, self._window = [], [], None
        self.eval()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """None: nothing of it is trained."""
        return iter(())

    def _drop(self) -> None:
        self._owner._drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there are no gradients."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Other weights for the second model. On all ranks, the same."""
        keys = self.module.load_state_dict(state_dict, strict, assign)
        assert self._store is not None
        self._passes.let_go()
        self._store.fill(whole_parameters(self.module))
        return keys

    def write_back(self) -> None:
        """Nothing: the model has its weights."""

    def flush(self) -> None:
        """Nothing: there are no gradients."""

    def close(self) -> None:
        """Calls of the model object are its own again. The engine stays."""
        unroute(self._bare)
