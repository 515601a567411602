"""What the server of rank processes imports of ours, so that no rank pays for it (`tests/harness.py`).

A module that cannot be imported is left out: the rank that needs it fails then, with a traceback.
"""

import contextlib
from importlib import import_module

MODULES = (
    "hf_hotspa.trainer.trainer",
    "hf_hotspa.calibrate.calibration",
    "tests.families",
    "tests.oracle",
)

for name in MODULES:
    with contextlib.suppress(Exception):
        import_module(name)
