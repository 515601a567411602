"""Checkpoints: master store, optimizer and run state on disk, committed by a rename and readable in any layout.

Why not torch's distributed checkpoint: it reads its metadata with pickle, which can run code from the file, and never
verifies what it reads (a flipped bit, or shards of two saves in one directory, load silently). Here every file is
safetensors or JSON, and a manifest holds the size and SHA-256 of each.
"""
