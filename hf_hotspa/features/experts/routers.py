"""Which modules of a model are routers with a balance loss, and the family's own function of it."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.attention import names_in_forward

_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def router_layers(model: PreTrainedModel) -> int:
    """How many routers of a model add to its loss; 0 if none does. Raises `UnsupportedError`: the family has another
    kind of balance loss."""
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return 0
    if _FUNCTION not in names_in_forward(model):
        return 0  # the family records its router's logits and adds nothing
    family, count = model.config.get_text_config().model_type, recordable_routers(model)
    if not count:
        raise UnsupportedError(
            f"{family} config has output_router_logits=True",
            why="the family's router loss is not defined for each sequence, so it would depend on how the mini-batch is packed",
            fix="set config.output_router_logits = False",
        )
    return count


def recordable_routers(model: PreTrainedModel) -> int:
    """How many routers would add to a model's loss if asked for their logits; 0 if none, or if the family does not use
    transformers' own function of a batch."""
    recorder = router_outputs(model)
    if recorder is None or not hasattr(model, "router_aux_loss_coef") or _FUNCTION not in names_in_forward(model):
        return 0
    if list(inspect.signature(balance_function(model)).parameters) != _ARGUMENTS:
        return 0
    return sum(isinstance(module, recorder.target_class) for module in model.modules())


def balance_function(model: PreTrainedModel) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = inspect.unwrap(type(model).forward).__globals__[_FUNCTION]
    return function


def router_outputs(model: PreTrainedModel) -> Any:
    """The class of modules, and the output, from which the family's base model records its routers' logits."""
    for module in (model, *model.children()):
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if getattr(recorder, "target_class", None) is not None:
            return recorder
    return None
