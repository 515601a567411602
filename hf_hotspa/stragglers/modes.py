"""What may be done about slow devices, by name."""

MODES = ("off", "watch", "balance", "migrate", "resize", "semi")
"""The values of `hotspa_stragglers`."""

GIVING = ("migrate", "resize", "semi")
"""Those in which ranks do not compute all of their products."""

LOSSY = ("resize", "semi")
"""Those that are not exact."""
