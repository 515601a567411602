"""Bytes of 8-bit and 4-bit optimizer states, by `--optim` name.

Repeats the rules by which bitsandbytes and torchao quantize a parameter's state; in a run the libraries decide.
"""

from hf_hotspa.costs.sizes import OptimizerState
from hf_hotspa.costs.terms import Terms

_SCALE, _BLOCK, _LEAST = 4, 256, 4096
"""Bytes of a block's scale, elements of a block, and the least elements of a quantized parameter."""

_FULL = {"adamw": 8, "lion": 4, "rmsprop": 4, "ademamix": 12}


def _bitsandbytes() -> dict[str, OptimizerState]:
    """Embeddings keep 32 bits when the Trainer makes the optimizer."""
    names = {
        "adamw": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
        "lion": ("lion_8bit", "paged_lion_8bit", "lion_32bit", "paged_lion_32bit"),
        "rmsprop": ("rmsprop_bnb_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit"),
        "ademamix": ("ademamix_8bit", "paged_ademamix_8bit", "ademamix", "paged_ademamix_32bit"),
    }
    states = {}
    for kind, optims in names.items():
        numbers = _FULL[kind] / 4
        for optim in optims:
            low = numbers * (1 + _SCALE / _BLOCK) if "8bit" in optim else None
            states[optim] = OptimizerState(_FULL[kind], low, _LEAST, embeddings=False)
    return states


LOW_BIT_STATES = {
    **_bitsandbytes(),
    "adamw_torch_8bit": OptimizerState(8, 2 * (1 + _SCALE / _BLOCK), _LEAST, _BLOCK),
    "adamw_torch_4bit": OptimizerState(8, 2 * (1 / 2 + _SCALE / _BLOCK), _LEAST, _BLOCK),
}
"""States of bitsandbytes and torchao. The Trainer makes torchao use blocks of 256 elements, also for 4-bit states."""

TERMS = Terms(optimizer_states=LOW_BIT_STATES)
