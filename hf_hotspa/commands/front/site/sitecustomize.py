"""Runs at the start of every Python process of `hf-hotspa run`, whose PYTHONPATH has this folder. Imports nothing heavy."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _start() -> None:
    try:
        from hf_hotspa.run_flags import is_active
    except ModuleNotFoundError:  # another environment, such as of a tool that the command starts
        return
    if is_active():
        from hf_hotspa.commands.front.hooks import install

        install()


def _run_next() -> None:
    here = Path(__file__).resolve().parent
    for folder in map(Path, filter(None, sys.path)):
        file = folder / "sitecustomize.py"
        if folder.resolve() != here and file.is_file():
            spec = spec_from_file_location("_sitecustomize_behind", file)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(module_from_spec(spec))
            return


_run_next()
_start()
