"""Converts rows of a dataset to the packed micro-batches of one rank."""
