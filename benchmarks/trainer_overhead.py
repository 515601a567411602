"""How much of a step `HotSPaTrainer` spends outside of the engine: data loading, callbacks, logging at every step; what
comparing the order and a row of each step between ranks costs; and what watching for slow devices (`hotspa_stragglers=watch`, the
default) adds to a step, against `off`.

A part of `step.py`, which prints it after the table.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

from contest import MODELS, make_model
from result_file import timed_calls

from hf_hotspa.commands.bench.workload import make_rows
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.strategy import Strategy

OVERHEAD_TARGET, COMPARISON_TARGET = 0.05, 0.01


def measure_trainer(
    rank: int, world_size: int, options: argparse.Namespace, lengths: list[int], folder: str, watch: str
) -> Any:
    """`(wall seconds, engine seconds, comparing seconds, steps)` of HotSPaTrainer's loop without its first step, on rank 0."""
    from transformers import TrainerCallback

    from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

    class Clock(TrainerCallback):
        """The wall time from the beginning of step 2 to the end of the last one, and what of it was the engine's."""

        begin = end = inside = compared = step_begin = 0.0
        steps = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for name in ("forward_backward", "clip_grad_norm_"):
                setattr(trainer.engine, name, self.counted(getattr(trainer.engine, name), "inside"))
            order = trainer._hotspa.rows.order
            order.words = self.counted(order.words, "compared")

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.begin, self.inside, self.compared = time.perf_counter(), 0.0, 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step_begin = time.perf_counter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.inside += time.perf_counter() - self.step_begin

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end, self.steps = time.perf_counter(), state.global_step - 1

        def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
            """The function; its time is added to an attribute."""
            return timed_calls(function, lambda begin, end, *_: setattr(self, name, getattr(self, name) + end - begin))

    clock = Clock()
    longest, shortest = max(lengths), options.budget
    hot = f"{Strategy(dp=world_size)}:{shortest},{Strategy(tp=world_size)}:{longest}@{max(longest, shortest * world_size)}"
    strategies = hot if longest > shortest else f"{Strategy(dp=world_size)}:{shortest}"
    num_rows = -(-len(lengths) // world_size) * world_size
    padded = [*lengths, *[min(lengths)] * (num_rows - len(lengths))]
    vocabulary = MODELS[options.model][3]
    rows = [row for seed in range(2) for row in make_rows(padded, vocabulary, seed)]
    args = HotSPaTrainingArguments(
        output_dir=folder,
        hotspa_strategies=strategies,
        use_cpu=True,
        bf16=options.dtype == "bf16",
        max_steps=options.trainer_steps,
        per_device_train_batch_size=num_rows // world_size,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        hotspa_stragglers=watch,
    )
    trainer = HotSPaTrainer(model=make_model(options.model), args=args, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return clock.end - clock.begin, clock.inside, clock.compared, clock.steps


def trainer_overhead(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """Runs HotSPaTrainer and prints the time that it spends outside of engine and optimizer."""
    runs: dict[str, list[tuple[float, float, float, int]]] = {"watch": [], "off": []}
    for mode in ("watch", "off") if options.quick else ("watch", "off", "off", "watch"):
        with tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder:
            runs[mode].append(run_world(options.ranks, measure_trainer, options, lengths, folder, mode))
    wall, inside, compared, steps = runs["watch"][0]
    share = (wall - inside) / wall
    watched, off = (sum(of[0] for of in runs[mode]) for mode in ("watch", "off"))
    noise = max(of[0] for of in runs["off"]) / min(of[0] for of in runs["off"])
    print(
        f"\nHotSPaTrainer, {steps} steps after the first: {wall / steps:.3f} s/step, of which"
        f" {(wall - inside) / steps * 1e3:.1f} ms outside of engine and optimizer = {share:.1%}"
        f" (target: at most {OVERHEAD_TARGET:.0%})"
    )
    print(
        f"comparing rows between ranks: {compared / steps * 1e3:.2f} ms/step = {compared / wall:.2%}"
        f" (target: at most {COMPARISON_TARGET:.0%})"
    )
    print(f"hotspa_stragglers=watch by off: {watched / off:.3f} (two runs of off differ by {noise:.3f})")
    measured = {"steps": steps, "seconds_per_step": wall / steps, "share_outside": share, "target": OVERHEAD_TARGET}
    measured |= {"share_of_comparisons": compared / wall, "comparisons_target": COMPARISON_TARGET}
    return {**measured, "watch_by_off": watched / off, "off_by_off": noise}
