"""4-bit bases. Its hooks; see `hf_hotspa.seam`."""

from hf_hotspa.features.four_bit.terms import TERMS

terms = TERMS
