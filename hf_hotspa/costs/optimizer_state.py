"""Bytes of optimizer state per element, by `--optim` name.

Repeats the rules by which bitsandbytes and torchao quantize a parameter's state; in a run the libraries decide.
"""

from dataclasses import dataclass

_SCALE, _BLOCK, _LEAST = 4, 256, 4096
"""Bytes of a block's scale, elements of a block, and the least elements of a quantized parameter."""


@dataclass(frozen=True)
class OptimizerState:
    """State size of an optimizer.

    Args:
        full: Bytes per element of a parameter that is not quantized.
        quantized: Bytes per element of a quantized parameter; None if the optimizer quantizes none.
        whole_blocks: Whether a quantized parameter must consist of complete blocks.
        embeddings: Whether embeddings are quantized like other parameters.
    """

    full: float
    quantized: float | None = None
    whole_blocks: bool = False
    embeddings: bool = True

    def element_bytes(self, numel: int, is_embedding: bool) -> float:
        """Returns the bytes per element of a parameter with `numel` elements."""
        small = numel < _LEAST or (self.whole_blocks and numel % _BLOCK != 0)
        if self.quantized is None or small or (is_embedding and not self.embeddings):
            return self.full
        return self.quantized


ADAM = OptimizerState(8)

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
            states[optim] = OptimizerState(_FULL[kind], low, embeddings=False)
    return states


LOW_BIT_STATES = {
    **_bitsandbytes(),
    "adamw_torch_8bit": OptimizerState(8, 2 * (1 + _SCALE / _BLOCK), whole_blocks=True),
    "adamw_torch_4bit": OptimizerState(8, 2 * (1 / 2 + _SCALE / _BLOCK), whole_blocks=True),
}
"""States of bitsandbytes and torchao. The Trainer makes torchao use blocks of 256 elements, also for 4-bit states."""

OPTIMIZER_STATES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ADAM),
    **dict.fromkeys(("sgd", "adagrad", "rmsprop"), OptimizerState(4)),
    **LOW_BIT_STATES,
}
"""State by `--optim` name; SGD counts with momentum."""
