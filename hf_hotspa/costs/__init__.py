"""What a strategy costs in seconds and bytes, and the choice of strategies, buckets and packs that follows from it."""
