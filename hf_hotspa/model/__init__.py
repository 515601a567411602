"""A family's own class, cut for one strategy."""
