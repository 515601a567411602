"""Runs the own tests of transformers' Trainer, or of TRL's trainers, with those and with ours, and says what became of each.

    python -m tests.upstream_trainer FOLDER [--swapped | --trl] [--json FILE] [-k EXPRESSION]

FOLDER is the folder `tests` of the source of transformers in the pinned release; nothing of it is in this repository. Its
`trainer/test_trainer*.py` run on one CPU process four times: with either Trainer, with the toy regression models as they
are and with a tiny language model in their place (`--swapped`: with that alone). Only tests that pass with the stock Trainer count. With ours each must
pass, or be refused by name before the first step of the trainer made last; what is neither is listed, and makes the exit code 1.

With `--trl`, FOLDER is the folder `tests` of TRL's source, and its `test_{sft,dpo,kto,grpo,rloo}_trainer.py` run twice, each
on a folder of tiny random models and data sets in place of the Hub (`hub.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).resolve().parent
PASSES, REFUSED, THIRD = "passes", "refused by name", "neither"


def run(
    folder: Path, trainer: str, swap: bool, expression: str, of_trl: bool = False, kind: str = ""
) -> dict[str, dict[str, Any]]:
    """What became of every test, by its id: `outcome`, and for a failure `error`, the `code` of ours and the `steps` begun."""
    pattern = f"test_{kind}_trainer.py" if of_trl else "trainer/test_trainer*.py"
    files = sorted(folder.glob(pattern))
    if not files:
        raise SystemExit(f"{folder} has no {pattern}: give the folder tests of the source")
    with tempfile.TemporaryDirectory() as scratch:
        notes, place = Path(scratch) / "notes.json", folder.parent
        environment = {
            **os.environ, "HOTSPA_UPSTREAM": trainer, "HOTSPA_UPSTREAM_SWAP": str(int(swap)),
            "HOTSPA_UPSTREAM_TRL": str(int(of_trl)), "HOTSPA_UPSTREAM_NOTES": str(notes), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HOME": scratch,
        }  # fmt: skip
        if of_trl:
            from tests.upstream_trainer import hub

            place = Path(scratch) / "hub"
            hub.make(place, files)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "hotspa_upstream_plugin"]
        command += ["--rootdir", str(folder.parent), "-o", "addopts=", "-p", "no:cacheprovider", "--timeout", "300"]
        command += ["-k", expression] if expression else []
        done = subprocess.run([*command, *map(str, files)], cwd=place, env=environment, capture_output=True, text=True)
        if not notes.exists():
            raise SystemExit(f"pytest did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return json.loads(notes.read_text())


def verdict(note: dict[str, Any] | None) -> str:
    """What a test that passes with the stock Trainer comes to with ours."""
    if note is not None and note["outcome"] == "passed":
        return PASSES
    if note is not None and note.get("code") and note.get("steps") == 0:
        return REFUSED
    return THIRD


def compared(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tests that pass with the stock Trainer, and what they come to with ours."""
    passing = [name for name, note in stock.items() if note["outcome"] == "passed"]
    return {name: {"verdict": verdict(ours.get(name)), **(ours.get(name) or {})} for name in passing}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Transformers' or TRL's own trainer tests, with ours in their place.")
    parser.add_argument("folder", type=Path, help="the folder tests of the source, of the pinned release")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--swapped", action="store_true", help="only with a tiny language model in the toys' place")
    which.add_argument("--trl", nargs="?", const="sft,dpo,kto,grpo,rloo", help="TRL's tests (of these trainers)")
    parser.add_argument("--json", type=Path, help="write what became of each test here")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as for pytest")
    options = parser.parse_args()
    rounds: dict[str, dict[str, Any]] = {
        kind: {"swap": False, "of_trl": True, "kind": kind} for kind in filter(None, (options.trl or "").split(","))
    } or {"toy models swapped for a tiny language model": {"swap": True}}
    if not options.swapped and not options.trl:
        rounds = {"as they are": {"swap": False}, **rounds}
    results, wrong = {}, 0
    for kind, how in rounds.items():
        found = compared(
            *(run(options.folder.resolve(), trainer, expression=options.k, **how) for trainer in ("stock", "ours"))
        )
        count = Counter(entry["verdict"] for entry in found.values())
        print(f"{kind}: {len(found)} pass with the stock Trainer; with ours " + ", ".join(
            f"{count[name]} {name}" for name in (PASSES, REFUSED, THIRD)
        ), flush=True)  # fmt: skip
        for name, entry in found.items():
            if entry["verdict"] != PASSES and (options.trl or entry["verdict"] == THIRD):
                said = entry.get("error") or entry.get("outcome", "it did not run")
                print(f"  {entry['verdict']}: {name}: {said.splitlines()[0]}")
        wrong += count[THIRD]
        results[kind] = found
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
