"""Features of a run: one folder each, behind the hooks of `hf_hotspa.seam`."""
