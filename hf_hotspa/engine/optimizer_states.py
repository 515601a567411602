"""Runs of optimizers on shares of the master store, and how their states are saved. Features know some libraries.

Features name modules that know the optimizers of certain libraries (`seam.State`). Such a module has the functions of
`Plain` and those that `states_of` names; the core calls them and does not know the libraries.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from hf_hotspa.engine.master import MasterStore
from hf_hotspa.seam import hooks


class Stored(NamedTuple):
    """A state as it is saved: 1-D values that each cover `each` consecutive elements of the parameter."""

    values: Tensor
    each: int = 1


class Plain:
    """Optimizers whose states have one value for each element, or one for the parameter."""

    def library_of(self, kind: type) -> str | None:
        """The library of an optimizer class or its bases, if a feature knows it."""
        return None

    def kind_of(self, optimizer: Optimizer) -> str:
        """The optimizer's name in checkpoints; only the same kind can load the states."""
        return type(optimizer).__name__

    def code_digest(self, optimizer: Optimizer) -> str | None:
        """A digest of what the codes in its states mean; None without codes."""
        return None

    def needs_adopting(self, kind: type) -> bool:
        """Whether optimizers of a class need `adopt`, which they have not had."""
        return False

    def overrides_of(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Id of a parameter -> settings that the optimizer has for it alone."""
        return {}

    def adopt(
        self, optimizer: Optimizer, master: MasterStore, overrides: Mapping[int, dict[str, Any]] | None = None
    ) -> None:
        """Makes an optimizer that has shares of the master store decide by complete parameters. `overrides`: from
        `overrides_of`, by the id of a share. Raises `UnsupportedError`: it cannot be honoured; it is unchanged."""

    def disown(self, optimizer: Optimizer) -> None:
        """Undoes `adopt`: the optimizer continues with parameters that are not shares."""

    def stored_states(self, optimizer: Optimizer, share: Tensor) -> tuple[dict[str, Stored], dict[str, Any]]:
        """A share's states: by name, those saved by range of elements; and those that the parameter has once."""
        stored, rest = dict[str, Stored](), dict[str, Any]()
        for key, value in optimizer.state.get(share, {}).items():
            if isinstance(value, Tensor) and value.shape == share.shape:
                stored[key] = Stored(value)
            else:
                rest[key] = value
        return stored, rest

    def loaded_states(self, optimizer: Optimizer, share: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        """The inverse of `stored_states`."""
        return dict(stored)


_PLAIN = Plain()
_OF_CLASS = WeakKeyDictionary[type, Any]()


@cache
def special() -> tuple[Any, ...]:
    """The modules that know optimizers of certain libraries."""
    return tuple(import_module(state.optimizers) for state in hooks("state") if state.optimizers)


def states_of(kind: type) -> Any:
    """Who knows how optimizers of a class run and are saved: `Plain`, or a module, for which `library_of` is not None.

    A module also has `check(optimizer)`, `cut_state(optimizer, state, share)`, `FIRST_STATE` (by library: the names of a
    stepped parameter's states), `register_types()`, which lets torch load its tensors, and of values of `--optim`:
    `library_of_optim(optim)`, `check_installed(library, optim)` and `SUGGESTED`, one that errors propose.
    """
    if kind not in _OF_CLASS:
        _OF_CLASS[kind] = next((module for module in special() if module.library_of(kind) is not None), _PLAIN)
    return _OF_CLASS[kind]
