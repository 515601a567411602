"""In which dtypes gradients exist: while micro-batches add them up, and while they travel to the master store.

Owns the two options and what each means for a parameter. Whatever they are, the sums in the master store and in relay
buffers are of the master's precision, as are the master's weights. Plain data, no torch: the engine and the cost models
ask the same functions.
"""

from dataclasses import dataclass

from hf_hotspa.errors import check_choice

FP32, BF16, AUTO = "fp32", "bf16", "auto"
ACCUMULATION_DTYPES = (FP32, BF16)
WIRE_DTYPES = (AUTO, FP32, BF16)
_BF16 = "bfloat16"


def master_dtype(dtype: str) -> str:
    """The dtype of the masters of trained weights of a dtype: fp32, and fp64 stays fp64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes of the gradients of trained weights.

    Args:
        accumulation: The dtype of the buffer that the micro-batches of a phase add into: `fp32` (that of the masters,
            so fp64 for fp64 weights) or `bf16`.
        wire: The dtype in which they travel to the master store: `fp32` (as above), `bf16`, or `auto`: the one that
            they were accumulated in.

    Raises:
        HotspaConfigError: one of them is none of these.
    """

    accumulation: str = FP32
    wire: str = AUTO

    def __post_init__(self) -> None:
        check_choice("the dtype in which gradients accumulate", self.accumulation, ACCUMULATION_DTYPES)
        check_choice("the dtype in which gradients travel", self.wire, WIRE_DTYPES)

    def accumulated(self, dtype: str) -> str:
        """The dtype of the buffers of a strategy's gradients, of weights of a dtype."""
        return _BF16 if self.accumulation == BF16 else master_dtype(dtype)

    def moved(self, dtype: str) -> str:
        """The dtype on the wire, of weights of a dtype."""
        if self.wire == AUTO:
            return self.accumulated(dtype)
        return _BF16 if self.wire == BF16 else master_dtype(dtype)


IN_FP32 = GradientDtypes()
"""The default: nothing is rounded below the precision of the masters."""
