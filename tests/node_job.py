"""`examples/finetune.py` with strategies for as many processes as were started, resumed where there is a checkpoint.

For a launcher that starts a job again with fewer nodes: `torchrun --nnodes 1:2 --max-restarts 2`.
"""

import os
import runpy
import sys
from pathlib import Path

STRATEGIES = {2: "dp2:64@128,tp2:256", 4: "dp4:64@128,dp2tp2:256"}

if __name__ == "__main__":
    output = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    sys.argv += ["--hotspa_strategies", STRATEGIES[int(os.environ["WORLD_SIZE"])]]
    if any(output.glob("checkpoint-*")):
        sys.argv += ["--resume_from_checkpoint", "True"]
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "finetune.py"), run_name="__main__")
