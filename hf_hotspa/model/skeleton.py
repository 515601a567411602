"""The model as its class builds it from its config, adapters included, without weights: what every replica starts as."""

import copy
from typing import Any

from accelerate import init_empty_weights
from transformers.initialization import no_init_weights

from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.model.text_half import keep_text
from hf_hotspa.parallel.adapters import inject
from hf_hotspa.parallel.attention import ATTENTION
from hf_hotspa.parallel.four_bit import put_four_bit


def build_skeleton(description: ModelDescription) -> Any:
    """The whole model with parameters on the meta device and buffers as the class computes them.

    Returns:
        An instance of `description.model_class` that attends with the packed attention, without a PEFT wrapper.
    """
    with init_empty_weights(include_buffers=False):
        with no_init_weights():  # drawing numbers for parameters without data takes most of the time
            model = description.model_class._from_config(
                copy.deepcopy(description.config), attn_implementation=ATTENTION, dtype=description.compute_dtype
            )
        keep_text(model)
        model.tie_weights()
        put_four_bit(model, description.four_bit)
        if description.adapters is not None:
            inject(model, description.adapters)
    for name, module in model.named_modules():
        if name in description.paddings:
            module.padding_idx = description.paddings[name]
    return model
