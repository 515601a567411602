"""Bytes of state that an optimizer keeps for an element, by the name that `--optim` has for it.

Owns the rules of bitsandbytes and torchao by which a parameter is quantized or not, as far as memory is concerned; what decides in a run
is the libraries' own code. Plain data, no torch.
"""

from dataclasses import dataclass

_SCALE, _BLOCK, _LEAST = 4, 256, 4096
"""Bytes of the scale of a block, its elements, and those from which a parameter is quantized."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps.

    Args:
        full: Bytes of an element of a parameter that is not quantized.
        quantized: The same of one that is; None where none is.
        whole_blocks: Whether the elements of a quantized parameter have to fill its blocks.
        embeddings: Whether embeddings are quantized like other parameters.
    """

    full: float
    quantized: float | None = None
    whole_blocks: bool = False
    embeddings: bool = True

    def element_bytes(self, numel: int, is_embedding: bool) -> float:
        """Bytes for each element of a parameter of so many."""
        small = numel < _LEAST or (self.whole_blocks and numel % _BLOCK != 0)
        if self.quantized is None or small or (is_embedding and not self.embeddings):
            return self.full
        return self.quantized


ADAM = OptimizerState(8)

_FULL = {"adamw": 8, "lion": 4, "rmsprop": 4, "ademamix": 12}


def _bitsandbytes() -> dict[str, OptimizerState]:
    """Of the names of its optimizers. Where the Trainer makes them, embeddings keep 32 bits."""
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
"""Those of bitsandbytes and torchao; the Trainer has torchao scale blocks of 256 elements, of 4-bit states, too."""

OPTIMIZER_STATES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ADAM),
    **dict.fromkeys(("sgd", "adagrad", "rmsprop"), OptimizerState(4)),
    **LOW_BIT_STATES,
}
"""Name of `--optim` -> what it keeps; that of SGD with momentum."""
