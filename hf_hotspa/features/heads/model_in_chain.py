"""The transformers model in a chain of modules, such as an embedder's or a ranker's of sentence-transformers; or around a base
alone (`AutoModel`).

If the library's pooling follows directly on a base, the ranks that compute hidden states pool them. The base is then said to
have returned one token for each row, of which any of the library's poolings is this token.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_hotspa.features.heads.pooling import FIRST, LAST, LATER, MEAN, ROOT, Pooling
from hf_hotspa.features.heads.token_heads import Mark

_KINDS = {"mean": MEAN, "lasttoken": LAST, "cls": FIRST, "mean_sqrt_len_tokens": ROOT, "weightedmean": LATER}
_OF_TOKENS = "token_embeddings"


class _BaseAlone:
    """Mixin: a base of transformers without a head as a model, which returns its hidden states, or pools them."""

    base_model_prefix = "model"
    _kind: type[PreTrainedModel]
    pooling: str
    is_in_chain: bool

    def __init__(self, config: PreTrainedConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.called = "model"  # what a chain calls
        self.pool = Pooling(self.pooling) if self.pooling else None
        self.model = self._kind(config) if base is None else base
        with nullcontext() if base is None else no_init_weights():
            self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **more: object
    ) -> BaseModelOutput:
        """With a pooling, one hidden state for each row: [B, 1, h]."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        if self.pool is not None:
            return BaseModelOutput(last_hidden_state=self.pool(out.last_hidden_state, attention_mask)[:, None])
        pooled = None if self.is_in_chain else getattr(out, "pooler_output", None)
        return BaseModelOutputWithPooling(last_hidden_state=out.last_hidden_state, pooler_output=pooled)

    def of_chain(self, out: object) -> object:
        """What a call of the chain, or of its first module, returns: without the hidden states of tokens, if only pooled ones
        are here."""
        if self.pool is None or not isinstance(out, dict):
            return out
        for name in {_OF_TOKENS, "last_hidden_state"} & out.keys():
            out[name] = mark = Mark.make(out[name].detach(), ())
            mark.use, mark.fix = f"{_OF_TOKENS} of an embedder are read, and only pooled ones exist here", _FIX
        return out


_FIX = "use sentence_embedding, or put a module between the Transformer and its Pooling, such as torch.nn.Identity()"


@cache
def _alone(kind: type[PreTrainedModel], pooling: str, is_in_chain: bool = True) -> type[PreTrainedModel]:
    family = next(c for c in kind.__mro__[1:] if issubclass(c, PreTrainedModel))
    own = {"__module__": __name__, "_kind": kind, "pooling": pooling, "is_in_chain": is_in_chain}
    return type(kind.__name__, (_BaseAlone, family), own)


class _Held:
    """What an object holds, and its copies do not."""

    def __init__(self, made: PreTrainedModel | None = None) -> None:
        self.made = made

    def __reduce__(self) -> tuple[type["_Held"], tuple[()]]:
        return _Held, ()


def _around(base: PreTrainedModel) -> tuple[PreTrainedModel, str] | None:
    """A model around a base of text that `AutoModel` knows, which returns what the base returns."""
    config = base.config
    if type(base).__name__ not in _BASES or config.is_encoder_decoder or config.get_text_config() is not config:
        return None
    around = vars(base).setdefault("_hotspa_around", _Held())
    if around.made is None:
        around.made = _alone(type(base), "", False)(config, base)  # type: ignore[arg-type]
    return around.made, "-model."


_BASES = frozenset(name for name in MODEL_MAPPING_NAMES.values() if isinstance(name, str))


def _pooling_of(chain: nn.Module) -> str:
    """The kind of pooling that reads the hidden states of a chain's base, and alone does; empty if something else may."""
    base, pool = [*chain.children(), None, None][:2]
    library = "sentence_transformers."
    if not all(type(part).__module__.startswith(library) for part in (chain, base, pool)):
        return ""
    kinds = type(base).__name__, type(pool).__name__
    if kinds != ("Transformer", "Pooling") or base.module_output_name != _OF_TOKENS or not pool.include_prompt:  # type: ignore[union-attr]
        return ""
    mode = pool.pooling_mode  # type: ignore[union-attr]
    return _KINDS.get(mode, "") if isinstance(mode, str) else ""


_IN_CHAINS = WeakKeyDictionary[nn.Module, Any]()  # not in the chain, which users copy and pickle


def find(chain: nn.Module) -> tuple[Any, str] | None:
    """The only module with parameters of a chain (a base, pooling, a norm), and its name prefix; a base, also outside of
    a chain, is given as a model. None if the chain has others, or runs a vocabulary's head."""
    if isinstance(chain, PreTrainedModel):
        return _around(chain)
    if not isinstance(chain, nn.Sequential):
        return None
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
    made, pooling = _IN_CHAINS.get(chain), _pooling_of(chain)
    if made is None or made.model is not model or made.pooling != pooling:
        made = _IN_CHAINS[chain] = _alone(type(model), pooling)(model.config, model)  # type: ignore[arg-type]
    return made, f"{above}." if above else ""
