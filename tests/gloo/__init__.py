"""Tests on several gloo ranks (CPU)."""
