"""What ratios of seconds say, in the same words in `hf-hotspa plan`, at the start of `auto`, after training, in the report and in `hf-hotspa bench`.

Two questions, never mixed: whether this product is faster than what one would run without it (`against_others`), and
whether switching is faster than the best single strategy of ours (`of_switching`). A ratio is of their seconds by ours.
"""

PREDICTED_ERROR = 0.09
"""Predicted ratios nearer to 1 say nothing: 90 % of published runs are predicted within it (docs/predicted.md)."""
CORRECTED_ERROR = 0.03
"""The same for predictions that were corrected by measured seconds of the run."""


def against_others(ratio: float, name: str, error: float = PREDICTED_ERROR, how: str = "predicted") -> str:
    """Returns the answer to the first question, without a full stop. `name`: of the fastest alternative. `how`: how the
    ratio is known."""
    if ratio > 1 + error:
        return f"Yes: {ratio:.2f}x over {name}, {how}"
    if 1 / ratio > 1 + error:
        return f"No: {name} is {1 / ratio:.2f}x as fast, {how}"
    same = "About the same as" if error <= PREDICTED_ERROR else "Not clear, against"
    return f"{same} {name}: {ratio:.2f}x, {how} within {error:.0%}"


def of_switching(ratio: float, single: str, how: str, low: float, high: float, clear: bool = True) -> str:
    """Returns the answer to the second question, without a full stop.

    Args:
        single: The name of the best single strategy.
        how: How the ratio is known.
        low: The least that the ratio may be, and `high` the most.
        clear: Whether a ratio that may be 1 is so near that it counts as the same.
    """
    fast = f"{ratio:.2f}x as fast as {single}, the best single strategy ({how})"
    if low > 1:
        return f"Switching pays: {fast}"
    if high < 1:
        return f"Switching does not pay: {fast}"
    return f"Switching is about the same: {fast}" if clear else f"Whether switching pays is not clear: {fast}"


def of_predicted_switching(ratio: float, single: str, error: float = PREDICTED_ERROR) -> str:
    return of_switching(ratio, single, "predicted", ratio / (1 + error), ratio * (1 + error))


def of_one_strategy(single: str) -> str:
    """Returns the answer to the second question where the plan does not switch."""
    return f"Switching would not gain more: {single} alone trains all rows (predicted)"
