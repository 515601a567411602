"""Cost models: seconds and bytes of a strategy. Plain data, no torch."""
