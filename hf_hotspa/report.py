"""Reports of a run as plain numbers, for callbacks, logs and benchmarks. Callbacks see reports only, never the engine.

`RunFacts` comes once, at the start of a run; `PhaseEvent` and `SwitchEvent` come inside a mini-batch, `StepReport` at
its end.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from hf_hotspa.seam import Measure, hooks
from hf_hotspa.typed import Count

COUNTED: tuple[Measure, ...] = tuple(chain.from_iterable(hooks("measures")))  # the numbers that features count
FIELDS = tuple(measure.name for measure in COUNTED if measure.name)  # those that reports have

MEASURES = (
    "load_s",  # waiting for the weights
    "compute_s",  # forward and backward
    "wait_s",  # waiting for the busiest rank
    "return_s",  # waiting for the gradients to leave
    "load_busy_s",  # the load, while it overlapped with computation
    "return_busy_s",  # the return, while it overlapped with computation
    "load_bytes",  # sent by the load
    "return_bytes",  # sent by the return
    "start_s",  # start of the phase, from the agreement of all ranks on the mini-batch
    "others_s",  # part of `compute_s`: waiting for other ranks in the strategy's collectives and messages
    "unit_load_s",  # part of `compute_s`: waiting for a unit's weights
    "unit_return_s",  # part of `compute_s`: waiting for a unit's gradient buffer to be free, and for the last return
    "unit_load_busy_s",  # unit loads in flight, waiting for peers included
    "unit_return_busy_s",  # unit returns in flight
    "unit_load_bytes",  # sent by unit loads
    "unit_return_bytes",  # sent by unit returns
    "context_bytes",  # sent to the other ranks of cp, forward and backward
    *dict.fromkeys(measure.counted for measure in COUNTED),
)
"""What a rank measures in a phase: seconds, bytes sent, and what features count. The columns of `RankMeasures.phases`."""

PhaseMeasure = dict[str, float]  # one rank's measures of one phase: all `MEASURES`, in their order


class WithCounted:
    """Has the numbers of features as attributes; 0 if they were not counted."""

    counted: Mapping[str, Count]

    def __getattr__(self, name: str) -> int:
        if name in FIELDS:
            return self.counted.get(name, 0)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class PhaseReport(WithCounted):
    """One phase of a mini-batch: seconds and bytes of the slowest (busiest) rank, counts over all ranks.

    Args:
        num_packs: Micro-batches, over all replicas.
        load_s: Exposed seconds of moving weights to the strategy's layout: a rank only prepared or waited.
        compute_s: Forward and backward of the busiest replica.
        wait_s: The longest wait of a rank for the busiest one.
        return_s: Exposed seconds of moving gradients to the master store.
        load_bytes: Weights moved between ranks, summed over ranks.
        return_bytes: The same for gradients.
        hidden_load_s: Overlap of load and computation, on the rank that was busy with the load for the shortest time,
            as the others also waited for it.
        hidden_return_s: The same for the return.
        predicted_s: The time model's prediction of load, computation and return; None without a model.
        capacity_tokens: What its packs could have held.
        busiest_tokens: Of the busiest replica.
        longest_tokens: Of the longest sequence.
        frozen_bytes: Part of `load_bytes`: frozen weights; 0 if a strategy still holds them.
        unit_load_s: Part of `compute_s`: waiting for a unit's weights (`+z3`).
        unit_return_s: Part of `compute_s`: waiting for unit gradients to leave (`+z2`, `+z3`).
        hidden_unit_load_s: Overlap of unit loads and computation, as `hidden_load_s`.
        hidden_unit_return_s: The same for unit gradients.
        unit_load_bytes: Unit weights moved between ranks, summed over ranks; not in `load_bytes`.
        unit_return_bytes: The same for unit gradients.
        context: The cp method: `ulysses`, `allgather` or `ring`; empty without cp. Its seconds are in `others_s` of
            `RankMeasures`.
        context_bytes: Sent between ranks by the cp method, summed over ranks; not in `load_bytes`.
        squared_tokens: The sum of squared sequence lengths, proportional to attention's cost.
        counted: What features counted, by the names of `FIELDS`; also attributes, and fields of records.
    """

    strategy: str
    num_packs: Count
    num_sequences: Count
    num_tokens: Count
    load_s: float
    compute_s: float
    wait_s: float
    return_s: float
    load_bytes: Count
    return_bytes: Count
    hidden_load_s: float = 0.0
    hidden_return_s: float = 0.0
    predicted_s: float | None = None
    capacity_tokens: Count = 0
    busiest_tokens: Count = 0
    longest_tokens: Count = 0
    frozen_bytes: Count = 0
    unit_load_s: float = 0.0
    unit_return_s: float = 0.0
    hidden_unit_load_s: float = 0.0
    hidden_unit_return_s: float = 0.0
    unit_load_bytes: Count = 0
    unit_return_bytes: Count = 0
    context: str = ""
    context_bytes: Count = 0
    squared_tokens: Count = 0
    counted: Mapping[str, Count] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Load, computation and return, as `predicted_s`."""
        return self.load_s + self.compute_s + self.return_s

    @property
    def moved_s(self) -> float:
        """Exposed seconds of loading weights and returning gradients."""
        return self.load_s + self.return_s

    @property
    def hidden_s(self) -> float:
        """About the time that overlap saved."""
        return self.hidden_load_s + self.hidden_return_s

    @property
    def moved_bytes(self) -> int:
        return self.load_bytes + self.return_bytes

    @property
    def unit_s(self) -> float:
        """Part of `compute_s`: waiting for units, which fully sharded strategies move during computation."""
        return self.unit_load_s + self.unit_return_s

    @property
    def hidden_unit_s(self) -> float:
        """Overlap of unit transfers and computation."""
        return self.hidden_unit_load_s + self.hidden_unit_return_s

    @property
    def unit_bytes(self) -> int:
        """Units moved between ranks; not in `moved_bytes`."""
        return self.unit_load_bytes + self.unit_return_bytes


@dataclass(frozen=True)
class RankMeasures:
    """Every rank's measures of a mini-batch.

    Args:
        agree_s: For each rank, seconds from the start of its mini-batch to the agreement of all ranks.
        memory_bytes: Peak memory of each rank so far: allocated on an accelerator, resident on CPU.
        phases: For each rank and phase, in execution order, the columns of `MEASURES`.
    """

    agree_s: list[float]
    memory_bytes: list[int]
    phases: list[list[list[float]]]


@dataclass(frozen=True)
class RaceReport:
    """The result of a race of plans (`search/race.py`)."""

    kept: str  # the plan that is kept, in words; `second` is the nearest other one
    second: str
    tried: Count  # number of plans
    mini_batches: Count
    # the second plan's time over the kept plan's. `low` to `high` is its 90 % interval from 5 rounds on, else its least
    # and greatest value.
    factor: float
    low: float
    high: float
    cost: float  # in mini-batches
    why: str = ""  # why the race was run; empty for the first race

    def __str__(self) -> str:
        again = f"raced again, {self.why}: " if self.why else ""
        return (
            f"{again}tried {self.tried} plans for {self.mini_batches} mini-batches; kept {self.kept}, {self.factor:.2f}x of the "
            f"second, {self.second}, interval {self.low:.2f} to {self.high:.2f}; cost {self.cost:.1f} mini-batches"
        )


@dataclass(frozen=True)
class StepReport:
    """One mini-batch.

    Args:
        step: Mini-batches run by the engine, this one included.
        loss: Token mean of the cross entropy over the whole mini-batch.
        grad_norm: Global 2-norm of the gradient, before clipping.
        num_labels: Label tokens, the N of the mean.
        num_rows: Dataset rows.
        num_split: Rows that were split into several sequences.
        num_dropped: Over-long rows left out.
        phases: In execution order.
        total_s: Wall seconds of forward and backward on this rank, agreement included, optimizer step excluded.
        ranks: For traces.
        single_s: Predicted seconds of the best single strategy that fits (`RunFacts.single`) for the same rows, to
            compare with the phases' `predicted_s`; None without a time model.
        paces: Relative step time of each rank: its computation, without waiting, as a multiple of the ranks that are
            not slow, adjusted for lengths. None for a rank without a measure; None altogether if devices are not watched.
        slow: The ranks that count as slow after this mini-batch.
        race: The result of a race that ended with this mini-batch.
        rows_bytes: Rows (lengths, tokens, labels) that ranks sent each other, summed over ranks, under a
            `SwitchedModel`, where each rank reads its own batch.
        numbers_bytes: Losses, log-probabilities and similar results that went back to the ranks of the rows.
        seeds_bytes: Gradients by these results that went to the ranks that train the rows.
    """

    step: Count
    loss: float
    grad_norm: float
    num_labels: Count
    num_rows: Count
    num_truncated: Count
    num_split: Count
    num_dropped: Count
    num_empty: Count
    phases: tuple[PhaseReport, ...]
    total_s: float
    ranks: RankMeasures | None = None
    single_s: float | None = None
    paces: tuple[float | None, ...] | None = None
    slow: tuple[Count, ...] = ()
    race: RaceReport | None = None
    rows_bytes: Count = 0
    numbers_bytes: Count = 0
    seeds_bytes: Count = 0

    @property
    def num_tokens(self) -> int:
        return sum(phase.num_tokens for phase in self.phases)

    @property
    def all_ranks_s(self) -> float:
        """Seconds from the agreement on the mini-batch to the last rank's end of its last phase; equal on all ranks."""
        laps = [MEASURES.index(name) for name in ("start_s", "load_s", "compute_s", "wait_s", "return_s")]
        rows = [phases[-1] for phases in self.ranks.phases if phases] if self.ranks is not None else []
        ends = [sum(phase[lap] for lap in laps) for phase in rows]
        return max(ends, default=sum(phase.seconds for phase in self.phases))

    @property
    def own_s(self) -> tuple[float, ...]:
        """Seconds of each rank's computation without waiting; empty without `ranks`."""
        compute, others = MEASURES.index("compute_s"), MEASURES.index("others_s")
        rows = self.ranks.phases if self.ranks is not None else []
        return tuple(sum(max(phase[compute] - phase[others], 0.0) for phase in phases) for phases in rows)

    @property
    def longest_phase(self) -> PhaseReport | None:
        """The phase of the longest sequences, whose strategy could have trained the whole mini-batch; None without
        phases.

        Its transfers count as `load_return_s`, as a run under one strategy also loads weights and returns gradients
        once a mini-batch. Other phases' transfers count as switching.
        """
        return max(self.phases, key=lambda phase: phase.longest_tokens, default=None)

    @property
    def moved_s(self) -> float:
        """Exposed seconds of moving weights and gradients: `load_return_s` plus `switch_s`."""
        return sum(phase.moved_s for phase in self.phases)

    @property
    def load_return_s(self) -> float:
        """The part of `moved_s` that a single strategy also needs: one load and one return."""
        return self.longest_phase.moved_s if self.longest_phase is not None else 0.0

    @property
    def switch_s(self) -> float:
        """The part of `moved_s` caused by switching strategies; 0 for one phase."""
        return sum(phase.moved_s for phase in self.phases if phase is not self.longest_phase)

    @property
    def hidden_s(self) -> float:
        return sum(phase.hidden_s for phase in self.phases)

    @property
    def moved_bytes(self) -> int:
        """Weights and gradients moved between ranks."""
        return sum(phase.moved_bytes for phase in self.phases)

    @property
    def switch_bytes(self) -> int:
        """The part of `moved_bytes` caused by switching."""
        return sum(phase.moved_bytes for phase in self.phases if phase is not self.longest_phase)

    @property
    def frozen_bytes(self) -> int:
        """The part of `moved_bytes` for frozen weights."""
        return sum(phase.frozen_bytes for phase in self.phases)

    @property
    def predicted_s(self) -> float | None:
        """The time model's prediction of all phases; None without a model."""
        known = [phase.predicted_s for phase in self.phases if phase.predicted_s is not None]
        return sum(known) if known and len(known) == len(self.phases) else None

    @property
    def switch_share(self) -> float:
        """`switch_s` as a fraction of the step, 0 to 1."""
        return self.switch_s / self.total_s if self.total_s > 0 else 0.0

    @property
    def load_return_share(self) -> float:
        """`load_return_s` as a fraction of the step, 0 to 1."""
        return self.load_return_s / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready plain data, without the unbounded `ranks`; relative step times to two digits."""
        data = asdict(replace(self, ranks=None))
        del data["ranks"]
        for phase in data["phases"]:
            phase |= dict.fromkeys(FIELDS, 0) | phase.pop("counted")
        data["slow"] = list(self.slow)
        if self.paces is not None:
            data["paces"] = [None if step_time is None else round(step_time, 2) for step_time in self.paces]
        return data


@dataclass(frozen=True)
class PhaseEvent:
    """The start or end of a phase on this rank.

    Args:
        step: The mini-batch, counted from 1.
        index: The phase's position in the mini-batch, counted from 0 in execution order.
        num_phases: Phases of the mini-batch.
        num_packs: Micro-batches, over all replicas.
        num_sequences: Over all replicas.
        seconds: This rank's measures by the names of `MEASURES`; None at the start.
    """

    step: int
    index: int
    num_phases: int
    strategy: str
    num_packs: int
    num_sequences: int
    num_tokens: int
    seconds: Mapping[str, float] | None = None


@dataclass(frozen=True)
class SwitchEvent:
    """The end of a switch on this rank.

    Args:
        step: The mini-batch, counted from 1.
        kind: `load` (weights to the strategy's layout) or `return` (gradients to the master store).
        seconds: Exposed seconds.
        busy_s: Overlap with the computation.
    """

    step: int
    kind: str
    strategy: str
    seconds: float
    busy_s: float
    sent_bytes: int


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model, forward and backward, and the peak rate of its devices."""

    token: float  # of a token, in matrix products
    square: float  # of a sequence, in attention, per squared token count
    peak: float  # per second, of all devices together, by data sheet

    def utilization(self, num_tokens: int, squared_tokens: int, seconds: float) -> float:
        """MFU, 0 to 1: the operations over the devices' peak operations in the time."""
        return (self.token * num_tokens + self.square * squared_tokens) / (self.peak * seconds) if seconds > 0 else 0.0


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run before its first mini-batch; plain data, JSON-ready.

    Args:
        versions: Library name -> version.
        machine: The hardware, by name (no host names).
        model: Family, parameters, dtypes, by name.
        settings: The flags that affect speed and order, by name.
        buckets: `strategy`, `low`, `longest` and `pack_tokens` of each bucket.
        plan: The time model's predictions when it chose the buckets: `seconds` and `switch_s` of a mini-batch, `static`
            (the best single strategy), `static_s`, and `rows` (one a bucket); None if buckets were given.
        lengths: The data set's sequence lengths (`reporting/run_log.py`); None for a stream.
        single: The best single strategy that fits, by the time model; None without a model or if nothing fits.
        run: `name`, `model`, `data set`, `command`, `output folder`.
        flops: None if the speed of the devices is unknown.
    """

    world_size: Count
    versions: dict[str, str]
    machine: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    buckets: list[dict[str, Any]]
    plan: dict[str, Any] | None = None
    lengths: dict[str, list[int]] | None = None
    single: str | None = None
    run: dict[str, str] = field(default_factory=dict)
    flops: ModelFlops | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
