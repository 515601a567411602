"""Switching: plans of transfers between layouts, and their execution."""
