"""What the ranks of a strategy do together."""
