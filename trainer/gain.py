"""Whether switching paid, measured: the same mini-batches with switching and under single strategies, in turn.

`measure_gain` runs after training, on a separate engine with the strategies of all sides. It runs forward and backward
passes without updates, so nothing of the trainer changes: weights, optimizer, choice of strategies or random
generators. The order of sides differs for each mini-batch; the first is not timed. All single strategies run the first
mini-batches; clearly slower ones are left out afterwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator, is_stream, without_padded_from
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaConfigError, UnsupportedError, printable
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.reporting.measured import MeasuredGain, known_as
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.search.single import Singles
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched.model_object import as_built
from hf_hotspa.switched.passes import FLAT_COLUMNS, ROW_COLUMNS, Document, Documents, Exchange, facts_of, read_batch
from hf_hotspa.trainer.arguments import given_buckets
from hf_hotspa.trainer.run_plan import engine_options

if TYPE_CHECKING:
    from hf_hotspa.trainer.trainer import SwitchedMixin

SWITCHING = "switching"
_ALL_SIDES, _SLOWER = 2, 1.2
"""After `_ALL_SIDES` mini-batches, single strategies are left out that took `_SLOWER` times as long as the fastest of
them."""


@dataclass(frozen=True)
class Side:
    """One way to run a mini-batch."""

    name: str
    buckets: tuple[Bucket, ...]  # the buckets that it runs under
    choose: Callable[[Sequence[int]], tuple[Bucket, ...]] | None = None  # among them, for the lengths of a mini-batch

    def of(self, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        return self.buckets if self.choose is None else self.choose(lengths)


def measure_gain(trainer: "SwitchedMixin", steps: int = 5) -> MeasuredGain | None:
    """Measures how much faster switching is than single strategies: the best one that fits as predicted, and the common
    ones (DDP, FSDP, tensor parallelism, a pipeline) that fit. Collective.

    The trainer's engine may be closed, and should be if memory is short: this makes a second one.

    Args:
        trainer: It must have trained.
        steps: Timed mini-batches, the first of the run. Without a time model, the single strategies are the buckets of
            the run that hold every row.

    Returns:
        The measurement, which is also printed and passed to callbacks (`on_gain_measured`); None if the run has one
        strategy.

    Raises:
        HotspaError: on every rank: `auto` has not chosen strategies, the data set is a stream, or no single strategy
            fits.
    """
    if steps < 1:
        what = f"the gain of switching is to be measured on {steps} mini-batches"
        raise HotspaConfigError(what, fix="use at least 1")
    if is_stream(trainer.train_dataset):
        raise UnsupportedError(
            "the gain of switching cannot be measured on a stream",
            why="every side needs the same rows, and a stream gives them once",
            fix="use a data set with random access",
        )
    hot = _switching(trainer)
    if len(hot.buckets) < 2:
        return None
    rivals, left_out = _singles(trainer, hot).rivals(trainer.args.world_size)
    sides = [hot, *(Side(str(bucket.strategy), (bucket,)) for bucket in rivals)]
    if len(sides) < 2:
        raise HotspaConfigError(
            "no single strategy is known to hold every row, so there is nothing to compare with",
            fix="hotspa_calibration=measure finds out which of them fit",
        )
    if trainer._hotspa.model is not None:
        trainer._hotspa.model.refresh()
    with as_built(bare_model(trainer.model)[0]):
        engine = _engine(trainer, sides)
    seconds, differences = _take_turns(engine, sides, _first_mini_batches(trainer, engine, hot, steps), steps, trainer)
    engine.close()
    singles = {side.name: tuple(seconds[side.name]) for side in sides[1:]}
    measured = MeasuredGain(tuple(seconds[hot.name]), singles, max(differences), left_out)
    if trainer.is_world_process_zero():
        tqdm.write(str(measured))
    trainer.callback_handler.dispatch("on_gain_measured", trainer.args, trainer.state, trainer.control, gain=measured)
    return measured


def _first_mini_batches(trainer: "SwitchedMixin", engine: HotSPaEngine, hot: Side, steps: int) -> list[Documents]:
    """The rows of the first mini-batches of the run; fewer than `steps` if an epoch has fewer. Collective."""
    longest, shape = max(bucket.longest for bucket in hot.buckets), engine.description.shape
    loader, rules = trainer.get_train_dataloader(), _rules(trainer)
    trainer._hotspa.rows.take_longest(longest)
    accumulation: int = vars(trainer.args)["gradient_accumulation_steps"]
    exchange, mini_batches, state = Exchange(engine.agreement, engine.world_size), list[Documents](), random_state()

    names = (*ROW_COLUMNS, *FLAT_COLUMNS, *rules.columns)

    def read() -> list[list[Document]]:
        batches = map(without_padded_from, islice(loader, steps * accumulation))
        known = ({name: batch[name] for name in names if name in batch} for batch in batches)
        return [read_batch(batch, shape.vocab_size, longest, engine.rank, rules) for batch in known]

    try:  # a loader draws a seed for its workers
        parts = engine.agreement.run("gain", read, lambda parts: {"number of batches": str(len(parts))})
    finally:
        set_random_state(state, "the first mini-batches")
    for first in range(0, len(parts), accumulation):
        documents = Documents()
        for mine in parts[first : first + accumulation]:
            documents.add(exchange.facts(facts_of(mine, None)), mine, engine.rank)
        mini_batches.append(documents)
    return mini_batches


def _rules(trainer: "SwitchedMixin") -> RowRules:
    loss = trainer._hotspa.loss
    return RowRules(columns=loss.columns if loss is not None else ())


def _take_turns(
    engine: HotSPaEngine, sides: Sequence[Side], batches: Sequence[Documents], steps: int, trainer: "SwitchedMixin"
) -> tuple[dict[str, list[float]], list[float]]:
    """The seconds of each side by name, switching first, and the relative difference of losses, over mini-batches
    (repeated if fewer than `steps`) after an untimed one. Collective."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    differences, verbose = [], trainer.is_world_process_zero()
    shape, rules = engine.description.shape, _rules(trainer)
    of_model: dict[str, Any] = {"vocab_size": shape.vocab_size, "quadratic_cost": shape.quadratic_cost}
    collator = PackedBucketCollator(engine.buckets, rank=engine.rank, rules=rules, **of_model)
    exchange = Exchange(engine.agreement, engine.world_size)

    def made(documents: Documents, side: Side) -> MiniBatch:
        return documents.plan(range(len(documents)), side.of(documents.lengths), None, collator, exchange)[1]

    for number in range(-1, steps):
        documents = batches[max(number, 0) % len(batches)]
        if number == _ALL_SIDES:
            least = min(sum(seconds[side.name]) for side in sides[1:])
            sides = [side for side in sides if side is sides[0] or sum(seconds[side.name]) <= _SLOWER * least]
        if verbose:
            shown = f"mini-batch {number + 1} of {steps}" if number >= 0 else "a first mini-batch, not timed,"
            under = ", ".join(known_as(side.name) for side in sides)
            tqdm.write(printable(f"measuring {shown} under {under}"))
        losses = []
        for turn in range(len(sides)):
            side = sides[(number + turn) % len(sides)]
            mini_batch = made(documents, side)
            engine.agreement.barrier()
            begin = time.perf_counter()
            losses.append(engine.forward_backward(mini_batch).loss)
            took = float(engine.agreement.gather([time.perf_counter() - begin]).max())
            if number >= 0:
                seconds[side.name].append(took)
        differences.append((max(losses) - min(losses)) / max(map(abs, losses)) if any(losses) else 0.0)
    return seconds, differences


def _switching(trainer: "SwitchedMixin") -> Side:
    """The strategies of the run; under `auto` each mini-batch chooses as the run's next one would."""
    plan = trainer._hotspa.watchers.plan
    if not trainer.args.hotspa_auto:
        return Side(SWITCHING, given_buckets(trainer.args, trainer.model))
    if plan.choices is None or (chooser := plan.choices.chooser) is None:
        raise HotspaConfigError("nothing was trained, so no strategies were chosen", fix="call train() first")
    choose = lambda lengths: chooser.choose(chooser.num_trained, lengths, chooser.previous).buckets  # noqa: E731
    return Side(SWITCHING, plan.pool, choose)


def _singles(trainer: "SwitchedMixin", hot: Side) -> Singles:
    """The single strategies that fit by a time model and a memory model, or the run's buckets that hold every row."""
    singles = trainer._hotspa.watchers.plan.singles()
    if singles.fitting:
        return singles
    longest = max(bucket.longest for bucket in hot.buckets)
    own = (replace(bucket, low=0, longest=longest) for bucket in hot.buckets if bucket.capacity >= longest)
    return Singles(tuple(own), singles.rejected, "without a calibration nobody knows whether it fits")


def _engine(trainer: "SwitchedMixin", sides: Sequence[Side]) -> HotSPaEngine:
    strategies = dict.fromkeys(bucket.strategy for side in sides for bucket in side.buckets)
    buckets = [Bucket(s, s.cp, s.cp) for s in strategies]  # mini-batches bring their buckets; cp needs a token per rank
    weights = None if has_weights(trainer.model) else trainer._hotspa.source.folder
    measured = trainer.engine.description.vector.measured if trainer.engine is not None else None
    options = engine_options(trainer.args, trainer._hotspa.loss, measured, trainer._hotspa.watchers.plan.time)
    return HotSPaEngine(trainer.model, buckets, options, weights=weights, device=trainer.args.device)
