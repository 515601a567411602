"""8-bit and 4-bit optimizers. Its hooks; see `hf_hotspa.seam`."""

from hf_hotspa.features.low_bit_optimizers.terms import TERMS
from hf_hotspa.seam import State

terms = TERMS

state = State(optimizers="hf_hotspa.features.low_bit_optimizers.adoption")
