"""Front ends and kernels that act before a Trainer exists."""

from collections.abc import Callable
from types import ModuleType

HOOKS: dict[str, Callable[[ModuleType], None]] = {}
