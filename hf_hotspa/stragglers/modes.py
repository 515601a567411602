"""What may be done about slow devices, by name."""

from hf_hotspa.errors import HotspaConfigError, UnsupportedError

MODES = ("off", "watch", "balance", "migrate", "resize", "semi")
"""The values of `hotspa_stragglers`."""

GIVING = ("migrate", "resize")
"""Those in which ranks do not compute all of their products."""

_BUILT = ("off", "watch", "balance", "migrate", "resize")


def check_mode(mode: str, world_size: int, deterministic: bool) -> None:
    """Refuses what is no mode, one that is not there yet, and one that has nothing to work with.

    Args:
        mode: By name.
        world_size: Ranks.
        deterministic: Whether a run must be the same as another one in every bit.

    Raises:
        HotspaConfigError: `mode` is not one of `MODES`, or does not go together with the rest.
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
    if mode in ("off", "watch"):
        return
    if world_size == 1:
        raise HotspaConfigError(
            f"hotspa_stragglers={mode} on one process",
            why="there is no other device that work could go to",
            fix="leave it at watch, or start more processes",
        )
    if deterministic:
        raise HotspaConfigError(
            f"hotspa_stragglers={mode} with full_determinism",
            why="what is done depends on measured seconds, which differ from run to run",
            fix="use hotspa_stragglers=watch, or leave out full_determinism",
        )
