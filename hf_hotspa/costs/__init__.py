"""Cost models: seconds and bytes of a strategy."""
