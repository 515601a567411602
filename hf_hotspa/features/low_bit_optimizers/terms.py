"""Bytes of 8-bit and 4-bit optimizer states, by `--optim` name.

Repeats the rules by which bitsandbytes and torchao quantize a parameter's state; in a run the libraries decide.
"""

from hf_hotspa.costs.sizes import OptimizerState
from hf_hotspa.costs.terms import Terms

_SCALE, BLOCK, LEAST = 4, 256, 4096
"""Bytes of a block's scale, elements of a block, and the least elements of a quantized parameter, which no library names."""

_BITSANDBYTES = (
    (8, ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")),
    (4, ("lion_8bit", "paged_lion_8bit", "lion_32bit", "paged_lion_32bit")),
    (4, ("rmsprop_bnb_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit")),
    (12, ("ademamix_8bit", "paged_ademamix_8bit", "ademamix", "paged_ademamix_32bit")),
)
"""Bytes of an element's states in 32 bits, and the optimizers. Embeddings keep these when the Trainer makes the optimizer."""


def _in_8_bits(full: int) -> float:
    return full / 4 * (1 + _SCALE / BLOCK)


LOW_BIT_STATES = {
    **{
        optim: OptimizerState(full, _in_8_bits(full) if "8bit" in optim else None, LEAST, embeddings=False)
        for full, optims in _BITSANDBYTES
        for optim in optims
    },
    "adamw_torch_8bit": OptimizerState(8, _in_8_bits(8), LEAST, BLOCK),
    "adamw_torch_4bit": OptimizerState(8, 2 * (1 / 2 + _SCALE / BLOCK), LEAST, BLOCK),
}
"""States of bitsandbytes and torchao. The Trainer makes torchao use blocks of 256 elements, also for 4-bit states."""

TERMS = Terms(optimizer_states=LOW_BIT_STATES)
