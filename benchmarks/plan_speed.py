"""How long every `hf-hotspa plan` of README.md and docs/ takes: `python benchmarks/plan_speed.py`.

Each is one cold process, as a user starts it; seconds are of the wall clock and of the processor, which is steadier where
other programs run. The aim is 1.5 s each on a quiet machine. Phases are what the search packed and simulated:
`tests/contract/test_outputs.py` keeps them from growing.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Prints a line for each command, the slowest last."""
    from hf_hotspa.reporting.terminal import text_table
    from tests.contract.commands import all_commands
    from tests.contract.outputs import is_plan, make_files, prepared

    rows = []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        make_files(Path(name))
        for command in all_commands():
            if not is_plan(command.text):
                prepared(command.text)
                continue
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            words = [sys.executable, "-m", "hf_hotspa.cli", *shlex.split(command.text)[1:], "--json"]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
            processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            phases = json.loads(done.stdout)["phases_simulated"]
            words = [f"{command.page}: {command.text.removeprefix('hf-hotspa ')}"]
            rows.append((processor, [*words, f"{wall:.2f}", f"{processor:.2f}", str(phases)]))
    print(text_table("", [["command", "s", "s of the processor", "phases"], *(row for _, row in sorted(rows))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
