"""How much of our code one steady step of a run enters: files, and functions called, of `hf_hotspa`, `trainer` and `callbacks`.

    python benchmarks/functions_a_step.py [--list]

One process trains a tiny model with the default flags of `HotSPaTrainer`; the fourth step is looked at, in all threads. A function
counts once, however often it is called; so does a lambda or a comprehension that has its own frame.
"""

import argparse
import random
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(str(ROOT / name) + "/" for name in ("hf_hotspa", "trainer", "callbacks"))
STEP = 3
MOST_FILES, MOST_FUNCTIONS = 22, 150


class Entered(TrainerCallback):
    """Notes what is entered from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note = self._note if state.global_step == STEP else None
        threading.setprofile_all_threads(note) if hasattr(threading, "setprofile_all_threads") else sys.setprofile(note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            self.codes.add(frame.f_code)


def entered() -> dict[str, list[str]]:
    """The functions that a steady step of a small run calls, by file."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=163, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    generator = random.Random(0)
    rows = [{"input_ids": [generator.randrange(163) for _ in range(generator.randint(5, 60))]} for _ in range(48)]
    watch = Entered()
    with tempfile.TemporaryDirectory() as folder:
        args = HotSPaTrainingArguments(
            folder, hotspa_strategies="dp1:16@64,dp1+rc:64@128", per_device_train_batch_size=6, max_steps=STEP + 2,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=100,
        )  # fmt: skip
        trainer = HotSPaTrainer(model=LlamaForCausalLM(config), args=args, train_dataset=rows, callbacks=[watch])
        trainer.train()
        trainer.close_engine()
    found = defaultdict(list)
    for code in watch.codes:
        found[str(Path(code.co_filename).relative_to(ROOT))].append(code.co_qualname)
    return {name: sorted(found[name]) for name in sorted(found)}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the functions")
    options = parser.parse_args()
    found = entered()
    for name, functions in found.items():
        print(f"{len(functions):4d}  {name}" + ("  " + ", ".join(functions) if options.list else ""))
    total = sum(map(len, found.values()))
    print(f"{len(found)} files (at most {MOST_FILES}), {total} functions (at most {MOST_FUNCTIONS})")
    return int(len(found) > MOST_FILES or total > MOST_FUNCTIONS)


if __name__ == "__main__":
    sys.exit(main())
