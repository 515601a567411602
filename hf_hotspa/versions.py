"""Which releases of this package and of others are at work."""

import sys
from importlib.metadata import PackageNotFoundError, version


def version_of(name: str) -> str | None:
    """The version of a distribution; None where it is not installed. Ours is known in a source tree, too."""
    if name == "hf-hotspa":
        return str(sys.modules["hf_hotspa"].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return None
