"""SFT, DPO, GRPO and distillation of TRL over a switched model beside TRL under DDP: the same configs, data and micro-batches.

    python benchmarks/trl_trainers.py
    python benchmarks/trl_trainers.py --rounds 5 --json out/trl_trainers.json
    python benchmarks/trl_trainers.py --recompute --tasks dpo

Sides take turns, each round another one first; a turn is a new trainer, one step that does not count, and `--steps` that do.
A step counts everything. Rows have long-tailed lengths. SFT runs with `bfd` packing, and without (padded by TRL); DPO with
a live reference. GRPO and distillation have recorded completions on both sides, the longest of them 20 times the shortest; the
teacher is another model of the same size. Tokens are those that go through all layers in a forward of the student or a
reference: TRL's with its padding. Losses of both sides
must agree. Memory is the peak of a process over what it held before the turn, mean over ranks.

TRL with FSDP2 does not run here: accelerate sets FSDP aside on CPU processes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from contest import MODELS, make_model
from result_file import command_line, given_options, machine_facts, write_json

from hf_hotspa.commands.rank_world import run_world

TASKS = ("sft", "sft bfd", "dpo", "grpo", "distill")
GENERATED = ("grpo", "distill")
WANTED = {"sft bfd": 1.0, "dpo": 1.5, "grpo": 2.0}
SIDES = ("trl", "ours")
TOLERANCE = 1e-4


def lengths_of(number: int, longest: int, seed: int) -> list[int]:
    """Tokens of rows: most are short, and a few as long as the longest."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(torch.randn(number, generator=generator) * 1.0 + 3.6)
    return [int(min(max(length, 8), longest)) for length in drawn.tolist()]


def data_of(task: str, options: argparse.Namespace) -> Any:
    """Rows of tokens, or pairs of texts of as many."""
    import torch
    from datasets import Dataset

    generator, vocabulary = torch.Generator().manual_seed(1), MODELS[options.model][-1]

    def ids(length: int) -> list[int]:
        a, b = (torch.randint(4, vocabulary, (length,), generator=generator) for _ in range(2))
        return torch.minimum(a, b).tolist()

    number = options.rows * options.ranks * (options.steps + 1) * (4 if task == "sft bfd" else 1)
    if task in GENERATED:
        return Dataset.from_list([{"prompt": f"w{4 + index % 50} w5 w6"} for index in range(number)])
    lengths = lengths_of(number, options.longest, 2)
    if task != "dpo":
        return Dataset.from_list([{"input_ids": row, "labels": row} for row in map(ids, lengths)])
    others = lengths_of(number, options.longest, 3)

    def text(length: int) -> str:
        return "".join(f" w{token}" for token in ids(max(length, 4)))

    pairs = zip(lengths, others, strict=True)
    rows = [{"prompt": text(4), "chosen": text(a - 5), "rejected": text(b - 5)} for a, b in pairs]
    return Dataset.from_list(rows)


def recorded(cls: Any, options: argparse.Namespace) -> Any:
    """A trainer whose completions come from a record in the place of generation: most are short, of 1 to 20 lengths."""
    import torch

    class Recorded(cls):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            seed = 1000 * self.state.global_step + self.accelerator.process_index
            longest = options.longest - 4
            generator = torch.Generator().manual_seed(seed)
            lengths = lengths_of(len(prompt_ids), longest, seed)
            shortest = max(longest // 20, 1)
            lengths = [longest, *(max(length, shortest) for length in lengths[1:])]
            draw = lambda n: torch.randint(4, MODELS[options.model][-1], (n,), generator=generator).tolist()  # noqa: E731
            completions = [[*draw(length - 1), 1] for length in lengths]
            return completions if "Distillation" in cls.__name__ else (completions, None)

    Recorded.__name__ = cls.__name__
    return Recorded


def evenness(completion_ids: Any = None, **_: Any) -> list[float]:
    """A reward."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(task: str, side: str, options: argparse.Namespace, folder: str) -> Any:
    """A trainer of one side."""
    import trl
    from peers.sides.common import tokenizer
    from transformers.trainer_callback import PrinterCallback

    import hf_hotspa.trl

    home = trl if side == "trl" else hf_hotspa.trl
    kind = "Distillation" if task == "distill" else task.split()[0].upper()
    given: dict[str, Any] = {
        "output_dir": f"{folder}/{task}-{side}", "max_steps": options.steps + 1, "per_device_train_batch_size": options.rows,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant", "bf16": False, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 0, "gradient_checkpointing": options.recompute,
        "max_length": options.longest,
    }  # fmt: skip
    if task == "sft bfd":
        given |= {"packing": True, "packing_strategy": "bfd", "per_device_train_batch_size": 1}
    if side == "ours":
        given |= {"hotspa_strategies": options.strategies, "hotspa_report": False, "hotspa_stragglers": "off"}
    extra: dict[str, Any] = {"ref_model": make_model(options.model)} if task == "dpo" else {}
    cls = getattr(home, f"{kind}Trainer")
    if task in GENERATED:
        del given["max_length"]
        given["max_completion_length"] = options.longest
        cls = recorded(cls, options)
    if task == "grpo":
        given["num_generations"], extra = options.rows, {"reward_funcs": evenness}
    elif task == "distill":
        extra = {"teacher_model": make_model(options.model, seed=1)}
    made = cls(
        model=make_model(options.model), args=getattr(home, f"{kind}Config")(**given), train_dataset=data_of(task, options),
        processing_class=tokenizer(MODELS[options.model][-1]), **extra,
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def counted(trainer: Any, side: str) -> Callable[[], int]:
    """Counts tokens that this rank's share of forwards has; gives their number so far."""
    total = [0]
    if side == "trl":
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                embedding = model.get_input_embeddings()
                embedding.register_forward_hook(lambda _, given, __: total.__setitem__(0, total[0] + given[0].numel()))
        return lambda: total[0]
    passes, world = trainer.switched._passes, trainer.args.world_size

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(given: Any, numbers: Sequence[int], *rest: Any, **kwargs: Any) -> Any:
            lengths = getattr(given, "documents", given).lengths  # of a step, or documents themselves
            total[0] += sum(lengths[number] for number in numbers)
            return method(given, numbers, *rest, **kwargs)

        return run

    passes.score, passes.train = counting(passes.score), counting(passes.train)
    return lambda: total[0] // world


def turn(trainer: Any, side: str) -> dict[str, float]:
    """A trainer of a side, until it has trained: of a step seconds, processor seconds and tokens, the last two of all ranks;
    and the peak of memory."""
    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from hf_hotspa.calibrate.probe import PeakMemory, freeing_at_once

    marks, tokens = list[tuple[float, float, int]](), counted(trainer, side)

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            marks.append((time.perf_counter(), time.process_time(), tokens()))

    trainer.add_callback(Clock())
    memory = PeakMemory(torch.device("cpu"))
    with freeing_at_once():
        memory.start()
        trainer.train()
        peak = memory.stop()
    if side == "ours":
        trainer.close_engine()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    numbers = torch.tensor([peak, *(marks[-1][at] - marks[0][at] for at in (1, 2))], dtype=torch.float64)
    dist.all_reduce(numbers)
    steps = len(marks) - 1
    return {
        "seconds": (marks[-1][0] - marks[0][0]) / steps,
        "cpu": float(numbers[1]) / steps,
        "tokens": float(numbers[2]) / steps,
        "memory": float(numbers[0]) / dist.get_world_size(),
        "loss": losses[-1],
    }


def be_quiet() -> None:
    """Libraries print nothing."""
    import logging
    import os
    import warnings

    import transformers

    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1"}
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    import datasets

    datasets.disable_progress_bars()


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """All turns of all tasks, on every rank; returns rank 0's."""
    be_quiet()
    found: dict[str, Any] = {task: {side: [] for side in SIDES} for task in options.tasks}
    for task in options.tasks:
        for number in range(options.rounds):
            for at in range(len(SIDES)):
                side = SIDES[(number + at) % len(SIDES)]
                found[task][side].append(turn(trainer_of(task, side, options, options.folder), side))
    return found


# -- the command line -------------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=MODELS, default="7M")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--rows", type=int, default=8, help="of a rank in a step: rows or pairs; one packed row with bfd"
    )
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row")
    parser.add_argument("--steps", type=int, default=4, help="that count, of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", default="dp4:512@1024", help="of ours")
    parser.add_argument(
        "--recompute", action="store_true", help="both sides recompute activations, which is TRL's default"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.ranks, options.steps, options.rounds, options.rows = "0.9M", 2, 2, 1, 2
        options.longest, options.strategies = 64, "dp2:32@64,tp2:64"
    return options


def summary(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each task medians over rounds, TRL's over ours; of memory and tokens likewise."""
    rows = {}
    for task, sides in found.items():
        median = {
            side: {name: statistics.median(t[name] for t in turns) for name in turns[0]}
            for side, turns in sides.items()
        }
        trl, ours = median["trl"], median["ours"]
        rows[task] = {f"{name} trl / ours": trl[name] / ours[name] for name in ("seconds", "tokens", "memory")}
        rows[task] |= {f"{side} {name}": value for side, of in median.items() for name, value in of.items()}
        if abs(trl["loss"] - ours["loss"]) > TOLERANCE * max(abs(trl["loss"]), 0.1):
            raise SystemExit(f"{task}: the losses differ: {trl['loss']} and {ours['loss']}")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as options.folder:
        found = run_world(options.ranks, measure, options)
    rows = summary(found)
    print(f"{options.ranks} ranks, {options.model}, {options.rows} rows of a rank in a step, {options.strategies}")
    print(
        f"{'':10} {'seconds trl':>12} {'ours':>8} {'ratio':>6}  {'tokens trl':>10} {'ours':>8} {'ratio':>6}  {'memory':>6}  wanted"
    )
    for task, row in rows.items():
        print(
            f"{task:10} {row['trl seconds']:12.3f} {row['ours seconds']:8.3f} {row['seconds trl / ours']:6.2f}  "
            f"{row['trl tokens']:10.0f} {row['ours tokens']:8.0f} {row['tokens trl / ours']:6.2f}  "
            f"{row['memory trl / ours']:6.2f}  {WANTED.get(task, '')}"
        )
    result = {
        "machine": machine_facts(options.ranks),
        "options": given_options(options),
        "summary": rows,
        "turns": found,
    }
    write_json(options.json, result)


if __name__ == "__main__":
    main(sys.argv[1:])
