"""What may be done about slow devices, by name."""

from hf_hotspa.errors import HotspaConfigError, UnsupportedError

MODES = ("off", "watch", "balance", "migrate", "resize", "semi")
"""The values of `hotspa_stragglers`."""

_BUILT = ("off", "watch")


def check_mode(mode: str) -> None:
    """Refuses what is no mode, and one that is not there yet.

    Raises:
        HotspaConfigError: `mode` is not one of `MODES`.
        UnsupportedError: it is one, and this version cannot do it.
    """
    if mode not in MODES:
        raise HotspaConfigError(f"hotspa_stragglers is {mode!r}", fix=f"use one of {', '.join(_BUILT)}")
    if mode not in _BUILT:
        raise UnsupportedError(
            f"hotspa_stragglers={mode} is not there yet",
            why=f"slow devices are found, and this version has no answer to them by the name of {mode}",
            fix=f"use one of {', '.join(_BUILT)}",
        )
