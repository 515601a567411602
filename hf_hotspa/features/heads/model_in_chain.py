"""The transformers model in a chain of modules, such as an embedder's or a ranker's of sentence-transformers."""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput


class _BaseAlone:
    """Mixin: a base of transformers without a head as a model, which returns its hidden states."""

    base_model_prefix = "model"
    _kind: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.called = "model"  # what a chain calls
        if base is None:
            self.model = self._kind(config)
            self.post_init()  # type: ignore[attr-defined]
        else:
            self.model = base
            with no_init_weights():
                self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **more: object
    ) -> BaseModelOutput:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state
        return BaseModelOutput(last_hidden_state=hidden)


@cache
def _alone(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    family = next(c for c in kind.__mro__[1:] if issubclass(c, PreTrainedModel))
    return type(kind.__name__, (_BaseAlone, family), {"__module__": __name__, "_kind": kind})


_IN_CHAINS = WeakKeyDictionary[nn.Module, Any]()  # not in the chain, which users copy and pickle


def find(chain: nn.Module) -> tuple[Any, str] | None:
    """The only module with parameters of a chain (a base, pooling, a norm), and its name prefix; a base is given as a
    model. None if the chain has others, or runs a vocabulary's head."""
    inner = next(((name, m) for name, m in chain.named_modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None or hasattr(inner[1], "lm_head"):
        return None
    (name, model), of_chain = inner, dict(chain.named_parameters(remove_duplicate=False))
    if not all(own.startswith(f"{name}.") for own in of_chain):
        return None
    if model.base_model is not model:
        return model, f"{name}."
    above, _, last = name.rpartition(".")
    if last != "model":
        return None
    made = _IN_CHAINS.get(chain)
    if made is None or made.model is not model:
        made = _IN_CHAINS[chain] = _alone(type(model))(model.config, model)  # type: ignore[arg-type]
    return made, f"{above}." if above else ""
