"""Slow devices: finding them, and how much of their work goes elsewhere. Pure functions of plain numbers, no torch."""
