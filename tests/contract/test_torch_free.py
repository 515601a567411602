"""The lower layers, and the package itself, import no torch: planning works where nothing is installed."""

import subprocess
import sys

import pytest

from tests.contract.layers import PACKAGE_FOLDERS, ROOT, TORCH_FREE_LAYERS, layer_of, module_of, source_files

HEAVY = ("torch", "transformers", "accelerate", "datasets")


def _torch_free_modules() -> list[str]:
    files = source_files(*PACKAGE_FOLDERS)
    low = [file for file in files if (layer := layer_of(file)) is not None and layer <= TORCH_FREE_LAYERS]
    # The __init__ files of trainer and callbacks name their classes and load them when they are used.
    return sorted({module_of(file) for file in low} | {"hf_hotspa", "hf_hotspa.trainer", "hf_hotspa.callbacks"})


@pytest.mark.parametrize("module", _torch_free_modules())
def test_importing_it_leaves_torch_out(module: str) -> None:
    code = f"import sys; import {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"importing {module} imports {done.stdout.strip()}"
