"""Relay plans: what a node lacks enters it once and is forwarded inside. Not needed on one node. No torch."""
