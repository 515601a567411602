"""Checkpoints: the master store, the optimizer and the run's state on disk, committed by a rename and readable in any
layout.

Why not torch's distributed checkpoint: it reads its metadata with pickle, which can run arbitrary code from the file,
and never compares what it reads with what was written (a flipped bit, or shards of two saves in one directory, load
silently). Here every file is safetensors or JSON, and a manifest holds the size and SHA-256 of each.
"""
