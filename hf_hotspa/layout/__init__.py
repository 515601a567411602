"""Layouts: the parameter vector, and which intervals of it each rank holds. Plain data, no torch."""
