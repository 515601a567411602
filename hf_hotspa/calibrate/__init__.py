"""Measures this machine: packs, phases, links, memory."""
