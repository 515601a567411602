"""Whether switching paid, measured: the same mini-batches with switching and under single strategies, in turn.

`measure_gain` runs after training, on an engine of its own that knows the strategies of all sides. It runs forward and
backward passes and makes no update, so nothing of the trainer changes: not its weights, its optimizer, its choice of
strategies or any random generator. Sides take turns in another order for each mini-batch, after one that is not timed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from tqdm import tqdm

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.dataloader import ChosenRows, MiniBatchSampler, RankRows
from hf_hotspa.trainer.engine_options import engine_options, given_buckets
from hf_hotspa.trainer.row_order import order_seed
from hf_hotspa.trainer.rows import is_stream

if TYPE_CHECKING:
    from hf_hotspa.trainer.trainer import HotSPaTrainer

SWITCHING = "switching"


@dataclass(frozen=True)
class Side:
    """One way to run a mini-batch.

    Args:
        buckets: What it runs under.
        choose: Chooses among them for the rows of a mini-batch; None where they stay the same.
    """

    name: str
    buckets: tuple[Bucket, ...]
    choose: Callable[[Sequence[int]], tuple[Bucket, ...]] | None = None

    def rows(self, rows: Sequence[int]) -> list[int]:
        """The rows of a mini-batch, with the buckets that were chosen for them."""
        return list(rows) if self.choose is None else ChosenRows(rows, self.choose(rows))


def measure_gain(trainer: "HotSPaTrainer", steps: int = 3, most: int = 2) -> MeasuredGain | None:
    """Measures how much faster switching is than the best single strategy that fits. Collective.

    The engine of the trainer may be closed, and should be where memory is short: this makes one beside it.

    Args:
        trainer: One that has trained.
        steps: Mini-batches that are timed, the first of the run.
        most: Single strategies that are measured: those that fit and are fastest as predicted. Without a time model the
            strategies of the list that hold every row.

    Returns:
        What was measured, which is printed, and told to callbacks (`on_gain_measured`); None where the run has one strategy.

    Raises:
        HotspaError: on every rank: `auto` has not chosen strategies, the data set is a stream, or no single strategy fits.
    """
    if steps < 1 or most < 1:
        raise HotspaConfigError(f"{steps} mini-batches under {most} single strategies", fix="use at least 1 of each")
    if is_stream(trainer.train_dataset):
        raise UnsupportedError(
            "the gain of switching cannot be measured on a stream",
            why="every side needs the same rows, and a stream gives them once",
            fix="use a data set with random access",
        )
    hot = _switching(trainer)
    if len(hot.buckets) < 2:
        return None
    dataset, table = trainer._data.train(trainer.train_dataset)
    sides = [hot, *(Side(str(bucket.strategy), (bucket,)) for bucket in _singles(trainer, hot, table)[:most])]
    if len(sides) < 2:
        raise HotspaConfigError(
            "no single strategy is known to hold every row, so there is nothing to compare with",
            fix="hotspa_calibration=measure finds out which of them fit",
        )
    batches = _first_mini_batches(trainer, len(table), steps)
    trainer._update_model()
    engine = _engine(trainer, sides)
    readers = [RankRows(dataset, trainer._data.collator(engine, side.buckets, table)) for side in sides]
    seconds, differences = _take_turns(engine, sides, readers, batches, steps, trainer.is_world_process_zero())
    engine.close()
    singles = {side.name: tuple(seconds[side.name]) for side in sides[1:]}
    measured = MeasuredGain(tuple(seconds[hot.name]), singles, max(differences))
    if trainer.is_world_process_zero():
        tqdm.write(str(measured))
    trainer.callback_handler.dispatch("on_gain_measured", trainer.args, trainer.state, trainer.control, gain=measured)
    return measured


def _first_mini_batches(trainer: "HotSPaTrainer", num_rows: int, steps: int) -> list[list[int]]:
    """The rows of the first mini-batches of the run; fewer than `steps` where an epoch has fewer."""
    args = trainer.args
    seed = order_seed(args) if args.train_sampling_strategy != "sequential" else None
    return list(islice(MiniBatchSampler(num_rows, trainer.get_total_train_batch_size(args), seed=seed), steps))


def _take_turns(
    engine: HotSPaEngine,
    sides: Sequence[Side],
    readers: Sequence[RankRows],
    batches: Sequence[Sequence[int]],
    steps: int,
    verbose: bool,
) -> tuple[dict[str, list[float]], list[float]]:
    """Runs the mini-batches under each side, after one that is not timed. Collective.

    Args:
        batches: The rows of the mini-batches; they come again where there are fewer than `steps`.
        verbose: Whether this process prints which mini-batch is next.

    Returns:
        The seconds of each side by its name, and how far the losses of the sides of each mini-batch differ.
    """
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    differences = []
    for number in range(-1, steps):
        rows = batches[max(number, 0) % len(batches)]
        if verbose:
            shown = f"mini-batch {number + 1} of {steps}" if number >= 0 else "a first mini-batch, not timed,"
            tqdm.write(f"measuring {shown} under {', '.join(side.name for side in sides)}")
        losses = []
        for turn in range(len(sides)):
            at = (number + turn) % len(sides)
            mini_batch = readers[at].__getitems__(sides[at].rows(rows))["mini_batch"]
            engine.agreement.barrier()
            begin = time.perf_counter()
            losses.append(engine.forward_backward(mini_batch).loss)
            took = float(engine.agreement.gather([time.perf_counter() - begin]).max())
            if number >= 0:
                seconds[sides[at].name].append(took)
        differences.append((max(losses) - min(losses)) / max(map(abs, losses)) if any(losses) else 0.0)
    return seconds, differences


def _switching(trainer: "HotSPaTrainer") -> Side:
    """The strategies of the run; under `auto` each mini-batch chooses as the next one of the run would."""
    auto = trainer._auto
    if not trainer.args.hotspa_auto:
        return Side(SWITCHING, given_buckets(trainer.args))
    if auto is None or auto.chooser is None:
        raise HotspaConfigError("nothing was trained, so no strategies were chosen", fix="call train() first")
    chooser = auto.chooser
    return Side(
        SWITCHING, auto.plan.pool, lambda rows: chooser.choose(chooser.num_trained, rows, chooser.previous).buckets
    )


def _singles(trainer: "HotSPaTrainer", hot: Side, table: SequenceTable) -> list[Bucket]:
    """The single strategies that fit: as a time model and a memory model have it, or those of the list."""
    predictions = trainer._auto or trainer._predictions
    singles = predictions.singles() if predictions is not None else []
    longest = max(bucket.longest for bucket in hot.buckets)
    return singles or [replace(bucket, low=0, longest=longest) for bucket in hot.buckets if bucket.capacity >= longest]


def _engine(trainer: "HotSPaTrainer", sides: Sequence[Side]) -> HotSPaEngine:
    """An engine that knows the strategies of all sides; they share its weights and its memory."""
    strategies = dict.fromkeys(bucket.strategy for side in sides for bucket in side.buckets)
    buckets = [
        Bucket(s, s.cp, s.cp) for s in strategies
    ]  # mini-batches come with buckets of their own; cp needs a token a rank
    weights = None if has_weights(trainer.model) else trainer._source.folder
    measured = trainer.engine.description.vector.measured if trainer.engine is not None else None
    time = trainer._auto.time if trainer._auto is not None else None
    options = engine_options(trainer.args, trainer._own_loss(), measured, time)
    return HotSPaEngine(trainer.model, buckets, options, weights=weights, device=trainer.args.device)
