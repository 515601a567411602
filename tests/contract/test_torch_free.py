"""The lower layers, and the package itself, import no torch: planning works where nothing is installed."""

import json
import subprocess
import sys

from tests.contract.layers import PACKAGE_FOLDERS, ROOT, TORCH_FREE_LAYERS, layer_of, module_of, source_files

HEAVY = ("torch", "transformers", "accelerate", "datasets")
# one process for all: whatever imports torch first is named, and what comes after it is not judged
PROGRAM = """
import importlib, json, sys
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    if heavy:
        sys.exit(f"importing {module} imports {', '.join(heavy)}")
print("none")
"""


def _torch_free_modules() -> list[str]:
    files = source_files(*PACKAGE_FOLDERS)
    low = [file for file in files if (layer := layer_of(file)) is not None and layer <= TORCH_FREE_LAYERS]
    # The __init__ files of trainer and callbacks name their classes and load them when they are used.
    return sorted({module_of(file) for file in low} | {"hf_hotspa", "hf_hotspa.trainer", "hf_hotspa.callbacks"})


def _imported(modules: list[str]) -> subprocess.CompletedProcess[str]:
    arguments = [json.dumps(modules), json.dumps(HEAVY)]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_importing_them_leaves_torch_out() -> None:
    modules = _torch_free_modules()
    assert len(modules) > 90
    done = _imported(modules)
    assert (done.returncode, done.stdout.strip()) == (0, "none"), done.stderr


def test_the_program_sees_torch() -> None:
    assert "importing hf_hotspa.parallel.loss imports torch" in _imported(["hf_hotspa.parallel.loss"]).stderr
