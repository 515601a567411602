"""The parameter vector, and the intervals of it that each rank holds. Plain data, no torch."""
