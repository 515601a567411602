"""8-bit and 4-bit optimizers. Its hooks; see `hf_hotspa.seam`."""

from hf_hotspa.features.low_bit_optimizers.terms import TERMS

terms = TERMS
