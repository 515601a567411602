"""What may be done about slow devices, by name."""

from hf_hotspa.errors import HotspaConfigError

MODES = ("off", "watch", "balance", "migrate", "resize", "semi")
"""The values of `hotspa_stragglers`."""

GIVING = ("migrate", "resize", "semi")
"""Those in which ranks do not compute all of their products."""

LOSSY = ("resize", "semi")
"""Those that are not exact."""


def check_mode(mode: str, world_size: int, deterministic: bool) -> None:
    """Refuses a mode that has nothing to work with.

    Args:
        mode: One of `MODES`.
        deterministic: Whether a run must be the same as another one in every bit.

    Raises:
        HotspaConfigError: `mode` does not go together with the rest.
    """
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
