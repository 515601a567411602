"""What the server of rank processes imports of the Trainer and of ours, so that no rank pays for it (`tests/harness.py`).

A module that cannot be imported is left out: the rank that needs it fails then, with a traceback. Nothing is imported
where torch sees a GPU: the Trainer imports peft, and that bitsandbytes, which initializes CUDA, and a fork cannot use CUDA after that.
"""

import contextlib
from importlib import import_module

from torch.cuda import device_count

from tests.contract.layers import ROOT, module_of

FEATURES = [module_of(str(path.relative_to(ROOT))) for path in sorted(ROOT.glob("hf_hotspa/features/*/*.py"))]
MODULES = (
    "transformers.trainer",
    "trl",
    "sentence_transformers",
    "hf_hotspa.trainer.trainer",
    "hf_hotspa.calibrate.model_calibration",
    "tests.families",
    "tests.oracle",
    *FEATURES,
)

if device_count() == 0:  # asks the driver without initializing CUDA
    for name in MODULES:
        with contextlib.suppress(Exception):
            import_module(name)
