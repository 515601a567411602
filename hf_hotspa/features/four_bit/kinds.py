"""What weights in 4 bits of bitsandbytes are called in plans, and their sizes."""

BLOCK = 64  # weights that share a scale
WEIGHT_BYTES = 1 / 2 + 4 / BLOCK  # bytes of a weight, its share of a scale included
WITH_EXPERTS = "+experts"  # after the kind: `quantize_experts`
KINDS = ("nf4", "fp4", f"nf4{WITH_EXPERTS}", f"fp4{WITH_EXPERTS}")
