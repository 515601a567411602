"""The files of a checkpoint: folders, manifest, hashes. No torch."""
