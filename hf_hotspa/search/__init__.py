"""Which strategies, buckets and packs are fastest for given lengths: plans of a run, and the choice in a mini-batch."""
