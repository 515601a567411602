"""Transformers' own tests of its Trainer, run with ours in its place. See `__main__.py`."""
