"""Lengths in, buckets, packs and micro-batches out: plain numbers, the same on every rank."""
