"""Token chunks (`+ck`). Its hooks; see `hf_hotspa.seam`."""

from hf_hotspa.features.token_chunks.terms import TERMS

terms = TERMS
