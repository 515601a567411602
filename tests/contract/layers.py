"""The layer table of the source files, and the imports between them, read without importing anything."""

import ast
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A file imports its own layer or lower ones. Layers 0 to 2 import no torch. A new file gets a line here.
LAYERS: dict[int, tuple[str, ...]] = {
    0: (
        "hf_hotspa/errors.py",
        "hf_hotspa/uncaught.py",
        "hf_hotspa/model_shape.py",
        "hf_hotspa/strategy.py",
        "hf_hotspa/cluster.py",
        "hf_hotspa/report.py",
        "hf_hotspa/process_lock.py",
    ),
    1: ("hf_hotspa/layout/*.py",),
    2: (
        "hf_hotspa/switch/table.py",
        "hf_hotspa/switch/proof.py",
        "hf_hotspa/switch/plan.py",
        "hf_hotspa/switch/pieces.py",
        "hf_hotspa/switch/direct.py",
        "hf_hotspa/switch/relay/*.py",
        "hf_hotspa/switch/pool.py",
        "hf_hotspa/switch/planner.py",
        "hf_hotspa/switch/schedule.py",
        "hf_hotspa/switch/rounds.py",
        "hf_hotspa/switch/ports.py",
        "hf_hotspa/switch/phase_order.py",
        "hf_hotspa/cost/*.py",
        "hf_hotspa/data/packing.py",
        "hf_hotspa/data/chunk_cuts.py",
        "hf_hotspa/data/pipeline_order.py",
        "hf_hotspa/data/bucketing.py",
        "hf_hotspa/data/mini_batch.py",
        "hf_hotspa/data/rows.py",
        "hf_hotspa/data/scan.py",
        "hf_hotspa/data/columns.py",
        "hf_hotspa/data/formats.py",
        "hf_hotspa/data/chat.py",
        "hf_hotspa/data/chat_text.py",
        "hf_hotspa/data/table.py",
        "hf_hotspa/data/arrow.py",
        "hf_hotspa/reporting/*.py",
        "hf_hotspa/checkpoint/disk.py",
        "hf_hotspa/checkpoint/manifest.py",
        "hf_hotspa/checkpoint/folder.py",
        "hf_hotspa/checkpoint/reading.py",
    ),
    3: (
        "hf_hotspa/runtime/mesh.py",
        "hf_hotspa/runtime/tensor_parallel.py",
        "hf_hotspa/runtime/sequence_parallel.py",
        "hf_hotspa/runtime/pipeline.py",
        "hf_hotspa/runtime/token_chunks.py",
        "hf_hotspa/runtime/attention.py",
        "hf_hotspa/runtime/explicit_attention.py",
        "hf_hotspa/runtime/prefix_attention.py",
        "hf_hotspa/runtime/isolation.py",
        "hf_hotspa/runtime/stage_input.py",
        "hf_hotspa/runtime/loss.py",
        "hf_hotspa/runtime/own_loss.py",
        "hf_hotspa/runtime/head_loss.py",
        "hf_hotspa/runtime/recompute.py",
        "hf_hotspa/runtime/router_loss.py",
        "hf_hotspa/runtime/noise.py",
        "hf_hotspa/runtime/dropout.py",
        "hf_hotspa/runtime/dropout_settings.py",
        "hf_hotspa/runtime/groups.py",
        "hf_hotspa/runtime/adapters.py",
        "hf_hotspa/runtime/roll_call.py",
        "hf_hotspa/runtime/agreement.py",
        "hf_hotspa/runtime/same_rows.py",
        "hf_hotspa/runtime/verdict.py",
        "hf_hotspa/runtime/storage.py",
        "hf_hotspa/runtime/weight_files.py",
        "hf_hotspa/runtime/arena.py",
        "hf_hotspa/switch/transport.py",
        "hf_hotspa/switch/packing.py",
        "hf_hotspa/switch/executor.py",
        "hf_hotspa/switch/worker.py",
        "hf_hotspa/data/collator.py",
        "hf_hotspa/data/prepare.py",
    ),
    4: (
        "hf_hotspa/runtime/replica.py",
        "hf_hotspa/runtime/master.py",
        "hf_hotspa/runtime/cpu_adam.py",
        "hf_hotspa/runtime/sole_compiler.py",
        "hf_hotspa/runtime/loading.py",
        "hf_hotspa/runtime/skeleton.py",
        "hf_hotspa/runtime/specs.py",
        "hf_hotspa/runtime/model_kind.py",
        "hf_hotspa/runtime/tensor_plan.py",
        "hf_hotspa/runtime/model_check.py",
        "hf_hotspa/runtime/loss_check.py",
        "hf_hotspa/runtime/memory.py",
        "hf_hotspa/runtime/measures.py",
        "hf_hotspa/runtime/options.py",
        "hf_hotspa/runtime/switching.py",
        "hf_hotspa/runtime/overlap.py",
        "hf_hotspa/runtime/probe_links.py",
    ),
    5: (
        "hf_hotspa/runtime/evaluation.py",
        "hf_hotspa/runtime/non_finite.py",
        "hf_hotspa/runtime/faults.py",
        "hf_hotspa/runtime/engine.py",
        "hf_hotspa/runtime/phase.py",
        "hf_hotspa/checkpoint/tensors.py",
        "hf_hotspa/checkpoint/rng.py",
        "hf_hotspa/checkpoint/saving.py",
        "hf_hotspa/checkpoint/model_files.py",
        "hf_hotspa/checkpoint/pickles.py",
        "hf_hotspa/checkpoint/stock.py",
        "hf_hotspa/checkpoint/stock_writing.py",
        "hf_hotspa/checkpoint/export.py",
        "hf_hotspa/checkpoint/commands.py",
        "hf_hotspa/runtime/probe.py",
        "hf_hotspa/runtime/probe_timing.py",
        "hf_hotspa/runtime/probe_phases.py",
        "hf_hotspa/runtime/calibration.py",
    ),
    6: ("callbacks/*.py",),
    7: ("trainer/*.py",),
    8: (
        "hf_hotspa/calibrate_command.py",
        "hf_hotspa/input_commands.py",
        "hf_hotspa/train_command.py",
        "hf_hotspa/own_launcher.py",
        "hf_hotspa/cli.py",
    ),
}
# The package root finds and re-exports; the __init__ files of torch-free and runtime folders hold a docstring only.
ROOT_FILES = ("hf_hotspa/__init__.py", "hf_hotspa/_source_tree.py")
DOCSTRING_ONLY = (
    "hf_hotspa/layout/__init__.py",
    "hf_hotspa/switch/__init__.py",
    "hf_hotspa/switch/relay/__init__.py",
    "hf_hotspa/cost/__init__.py",
    "hf_hotspa/data/__init__.py",
    "hf_hotspa/runtime/__init__.py",
    "hf_hotspa/checkpoint/__init__.py",
    "hf_hotspa/reporting/__init__.py",
)
PACKAGE_FOLDERS = ("hf_hotspa", "trainer", "callbacks")
TORCH_FREE_LAYERS = 2


@dataclass(frozen=True)
class Import:
    """One import statement: which module it names, and where it stands."""

    file: str
    line: int
    module: str


def source_files(*folders: str) -> list[str]:
    """The Python files below the folders, as paths relative to the repository."""
    return sorted(str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / folder).rglob("*.py"))


def layer_of(file: str) -> int | None:
    """The layer of a file; None when the table does not name it."""
    if file in DOCSTRING_ONLY:
        return 0
    found = [layer for layer, patterns in LAYERS.items() if any(fnmatch(file, p) for p in patterns)]
    assert len(found) <= 1, f"{file} has several layers: {found}"
    return found[0] if found else None


def module_of(file: str) -> str:
    """The name under which a file is imported."""
    parts = list(Path(file).with_suffix("").parts)
    if parts[0] in ("trainer", "callbacks"):
        parts.insert(0, "hf_hotspa")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def modules() -> dict[str, str]:
    """Module name -> file, for the files of the package."""
    return {module_of(file): file for file in source_files(*PACKAGE_FOLDERS)}


def imports_of(file: str, known: dict[str, str], text: str | None = None) -> list[Import]:
    """Every import of a file, also inside functions; `from package import module` names the module."""
    found = []
    own = module_of(file).split(".")
    package = own if file.endswith("__init__.py") else own[:-1]
    for node in ast.walk(ast.parse((ROOT / file).read_text() if text is None else text, file)):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""] if node.level else [])
            base = base.rstrip(".") or node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.append(Import(file, node.lineno, name if name in known else base))
    return found
