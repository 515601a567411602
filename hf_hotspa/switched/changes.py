"""What a caller changes on the model object between two steps: honoured from the next step on, or refused by name.

Replicas are built once. `ObjectChanges` looks at the object where a step begins, when all ranks meet anyway:

* buffers, such as the selection bias of experts, are copied into the replicas;
* a parameter that is frozen gets no gradient from then on, as with torch; one that was frozen when the replicas were built has no
  place for a gradient, and unfreezing it is refused;
* weights that were changed where they are current (`SwitchedModel.show`) are trained on;
* another value in the config, another module, or another attribute of a module is refused: what is built goes by them.
"""

import json

import torch
from torch import Tensor, nn

from hf_hotspa.checkpoint.tensors import copy_buffers
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, whole_parameters
from hf_hotspa.errors import HotspaError, UnsupportedError
from hf_hotspa.model.model_check import changed_facts, deciding_values, module_facts, weights_digest
from hf_hotspa.parallel.adapters import bare_model

_SHOWN = 3


class ObjectChanges:
    """What of a model object is no longer as the engine has it.

    Args:
        model: The object that the engine was made of.

    Attributes:
        frozen: The trained parameters that the caller has frozen since, by the names of the engine.
    """

    def __init__(self, model: nn.Module, engine: HotSPaEngine) -> None:
        self._model, self._engine, self._bare = model, engine, bare_model(model)[0]
        self._parameters = self._by_name()
        self._config, self._facts = self._values(), module_facts(self._bare)
        self._buffers = {name: buffer.clone() for name, buffer in self._bare.named_buffers()}
        self.frozen = frozenset[str]()
        self._digest: str | None = None
        self._changed = dict[str, Tensor](), self.frozen, False

    def _by_name(self) -> dict[str, tuple[nn.Parameter, bool]]:
        """Each parameter, and whether it is trained, by the name that the engine has for it."""
        specs = self._engine.description.vector.specs
        known = {name: spec for spec in specs for name in (spec.name, *spec.tied_names)}
        named = self._model.named_parameters(remove_duplicate=False)
        return {known[name].name: (p, known[name].trainable) for name, p in named if name in known}

    def _values(self) -> str:
        return json.dumps(deciding_values(self._bare.config), sort_keys=True, default=str)

    def show(self, digest: str | None = None) -> None:
        """The object has the current weights: whoever changes them means it. Not collective.

        Args:
            digest: That of its weights, where it is known.
        """
        if self._digest is None and has_weights(self._model):  # else somebody may have changed them since
            self._parameters = self._by_name()
            self._digest = digest or weights_digest(self._model)

    def hide(self) -> None:
        """The weights of the object are about to be old ones. Not collective."""
        self._digest = None

    def look(self) -> tuple[str, HotspaError | None]:
        """What was changed since the last step, in words that are the same on all ranks where the changes are; and what cannot
        be honoured. Not collective."""
        buffers = {name: b for name, b in self._bare.named_buffers() if not self._is_known(name, b)}
        flags = ((name, p.requires_grad, trained) for name, (p, trained) in self._parameters.items())
        frozen, thawed = set[str](), list[str]()
        for name, now, at_start in flags:
            if now != at_start:
                (frozen.add if at_start else thawed.append)(name)
        weights = self._digest is not None and weights_digest(self._model) != self._digest
        self._changed = buffers, frozenset(frozen), weights
        words = []
        if buffers:
            words.append(f"with other buffers {_some(sorted(buffers))}")
        if self._changed[1] != self.frozen:
            words.append(f"with requires_grad=False of {_some(sorted(frozen))}" if frozen else "with nothing frozen")
        if weights:
            words.append("with other weights")
        return "".join(f", {text}" for text in words), self._refusal(thawed)

    def _is_known(self, name: str, buffer: Tensor) -> bool:
        known = self._buffers.get(name)
        return known is not None and known.shape == buffer.shape and torch.equal(known, buffer)

    def _refusal(self, thawed: list[str]) -> HotspaError | None:
        if thawed:
            return UnsupportedError(
                f"requires_grad of {_some(thawed)} was set to True after the training had started",
                why="which parameters have gradients is laid out at the start, where these were frozen",
                fix="unfreeze them before train(), in a parameter group with a learning rate of 0 until they are to be trained",
            )
        if (now := self._values()) != self._config:
            before, after = json.loads(self._config), json.loads(now)
            names = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
            return UnsupportedError(
                f"the config values {_some(names)} were changed after the training had started",
                why="the replicas that run were built by the config as it was",
                fix="set them before train()",
            )
        if changes := changed_facts(module_facts(self._bare), self._facts, self._bare):
            return UnsupportedError(
                f"{changes[0]} when the training had started ({len(changes)} differ)",
                why="the replicas that run were built by the model as it was",
                fix="put it into the config before train()",
            )
        return None

    def apply(self) -> None:
        """Honours what `look` saw. Not collective; on all ranks, the same."""
        buffers, frozen, weights = self._changed
        if buffers:
            with torch.no_grad():
                copy_buffers(buffers, self._engine.part_models)
            self._buffers |= {name: buffer.clone() for name, buffer in buffers.items()}
        self.frozen = frozen
        if weights:
            self._engine.master.fill(whole_parameters(self._model))
            self.hide()
            self.show()
        self._changed = {}, frozen, False


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
