"""What ranks do together inside of a strategy."""
