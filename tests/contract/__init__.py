"""Tests of the repository itself: layers, imports, packaging."""
