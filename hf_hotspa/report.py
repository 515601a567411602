"""What a step reports: plain numbers for callbacks, logs and benchmarks. Callbacks see reports only, never the engine.

Beside the reports at the end of a mini-batch (`StepReport`) these are the facts of a run (`RunFacts`, once at its
begin) and the events inside a mini-batch (`PhaseEvent`, `SwitchEvent`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from hf_hotspa.typed import Count


class PhaseMeasure(NamedTuple):
    """One rank's measures of one phase: seconds, and bytes it sent. The one list of them: all others follow from its fields.

    Attributes:
        load_s: Waiting for the weights.
        compute_s: Forward and backward.
        wait_s: Waiting for the busiest rank.
        return_s: Waiting for the gradients to leave.
        load_busy_s: The load, where it ran beside the computation.
        return_busy_s: The return, where it ran beside the computation.
        load_bytes: Bytes sent by the load.
        return_bytes: Bytes sent by the return.
        start_s: When the phase began, counted from the agreement of all ranks on the mini-batch.
        others_s: The part of `compute_s` in collectives and messages of the strategy: waiting for other ranks.
        unit_load_s: The part of `compute_s` in which it waited for the weights of a unit.
        unit_return_s: The part in which it waited for a unit's gradient buffer to be free again, and for the last return.
        unit_load_busy_s: Loads of units under way, waiting for peers included.
        unit_return_busy_s: Returns of units under way.
        unit_load_bytes: Bytes sent by loads of units.
        unit_return_bytes: Bytes sent by returns of units.
        products_s: The part in matrix products, where these can migrate; else 0.
        left_out: The share of its columns that it left out, computed by nobody; 0 in an exact run.
        expert_tokens: Tokens that its experts have computed under ep, each once for every expert and layer; else 0.
        dropped_tokens: Tokens that experts have not computed, with a capacity, counted alike; once for a replica's stage.
        context_bytes: Bytes that it sent to the other ranks of cp, forward and backward.
    """

    load_s: float
    compute_s: float
    wait_s: float
    return_s: float
    load_busy_s: float
    return_busy_s: float
    load_bytes: float
    return_bytes: float
    start_s: float = 0.0
    others_s: float = 0.0
    unit_load_s: float = 0.0
    unit_return_s: float = 0.0
    unit_load_busy_s: float = 0.0
    unit_return_busy_s: float = 0.0
    unit_load_bytes: float = 0.0
    unit_return_bytes: float = 0.0
    products_s: float = 0.0
    left_out: float = 0.0
    expert_tokens: float = 0.0
    dropped_tokens: float = 0.0
    context_bytes: float = 0.0


MEASURES = PhaseMeasure._fields
"""The columns of `RankMeasures.phases`."""


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a mini-batch. Seconds and bytes of the slowest (busiest) rank, counts over all ranks.

    Args:
        strategy: The strategy that ran, `dp4`.
        num_packs: Micro-batches, over all replicas.
        num_sequences: Sequences trained.
        num_tokens: Tokens trained.
        load_s: Exposed seconds of moving the weights into the strategy's layout: those in which a rank did nothing but
            prepare or wait for it.
        compute_s: Forward and backward of the busiest replica.
        wait_s: The longest that a rank waited for the busiest one.
        return_s: Exposed seconds of moving the gradients to the master store.
        load_bytes: Bytes that weights moved between ranks, summed over ranks.
        return_bytes: The same for gradients.
        hidden_load_s: Seconds in which the load and the computation ran at the same time. Counted on the rank that was
            busy with the load for the shortest time, as the others also waited for it; 0 without overlap.
        hidden_return_s: The same for the return.
        predicted_s: What the time model said of load, computation and return before it ran; None without a model.
        capacity_tokens: Tokens that its packs could have held.
        busiest_tokens: Tokens of the busiest replica.
        longest_tokens: The longest sequence.
        frozen_bytes: The part of `load_bytes` that was frozen weights; none where a strategy still holds them.
        unit_load_s: The part of `compute_s` in which a rank waited for the weights of a unit (`+z3`).
        unit_return_s: The part in which it waited for gradients of units to leave (`+z2`, `+z3`).
        hidden_unit_load_s: Seconds in which units were loaded beside the computation, as `hidden_load_s`.
        hidden_unit_return_s: The same for their gradients.
        unit_load_bytes: Bytes that weights of units moved between ranks, summed over ranks; not in `load_bytes`.
        unit_return_bytes: The same for their gradients.
        context: How ranks of cp attended to each other's tokens: `ulysses`, `allgather` or `ring`; empty without cp. What
            that took is in `others_s` of `RankMeasures`.
        context_bytes: Bytes that ranks of cp sent each other for it, summed over ranks; not in `load_bytes`.
        expert_tokens: Tokens that experts computed under ep, counted once for each expert of a token and each layer.
        busiest_expert_tokens: Those of them on the busiest rank; `RankMeasures.phases` has each rank's.
        dropped_expert_tokens: Tokens that experts did not compute because of their capacity, counted alike.
        squared_tokens: The sum over its sequences of their tokens squared: what attention takes.
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
    expert_tokens: Count = 0
    busiest_expert_tokens: Count = 0
    dropped_expert_tokens: Count = 0
    squared_tokens: Count = 0

    @property
    def seconds(self) -> float:
        """Load, computation and return: what `predicted_s` predicts."""
        return self.load_s + self.compute_s + self.return_s

    @property
    def moved_s(self) -> float:
        """The exposed seconds of loading weights and returning gradients."""
        return self.load_s + self.return_s

    @property
    def hidden_s(self) -> float:
        """What the phase would have taken longer without overlap, about."""
        return self.hidden_load_s + self.hidden_return_s

    @property
    def moved_bytes(self) -> int:
        return self.load_bytes + self.return_bytes

    @property
    def unit_s(self) -> float:
        """The part of `compute_s` that waited for units: fully sharded strategies move them while they compute."""
        return self.unit_load_s + self.unit_return_s

    @property
    def hidden_unit_s(self) -> float:
        """Seconds in which units moved beside the computation."""
        return self.hidden_unit_load_s + self.hidden_unit_return_s

    @property
    def unit_bytes(self) -> int:
        """Bytes of units that moved between ranks; not in `moved_bytes`."""
        return self.unit_load_bytes + self.unit_return_bytes


@dataclass(frozen=True)
class RankMeasures:
    """What every rank measured of a mini-batch.

    Args:
        agree_s: Seconds from the begin of the mini-batch on the rank to the agreement of all ranks, one a rank.
        memory_bytes: Peak memory of each rank so far: allocated on an accelerator, resident on CPU.
        phases: For each rank, for each phase in the order in which they ran, the columns of `MEASURES`.
    """

    agree_s: list[float]
    memory_bytes: list[int]
    phases: list[list[list[float]]]


@dataclass(frozen=True)
class RaceReport:
    """How a race of plans has ended (`search/race.py`).

    Args:
        kept: The plan that stays, and `second` the nearest other one, in words.
        tried: How many plans there were.
        mini_batches: How many were raced.
        factor: How many times as long the second takes; `low` to `high`: 90 % from 5 rounds on, else least and most.
        cost: What the race has cost, in mini-batches.
        why: Why it was held; empty for the first one.
    """

    kept: str
    second: str
    tried: Count
    mini_batches: Count
    factor: float
    low: float
    high: float
    cost: float
    why: str = ""

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
        step: Mini-batches that the engine has run, this one included.
        loss: Token mean of the cross entropy over the whole mini-batch.
        grad_norm: Global 2-norm of its gradient, before clipping.
        num_labels: Label tokens, the N of the mean.
        num_rows: Dataset rows.
        num_truncated: Rows of which only the beginning was trained.
        num_split: Rows that were cut in several sequences.
        num_dropped: Over-long rows left out.
        num_empty: Rows without tokens.
        phases: The phases in the order in which they ran.
        total_s: Wall seconds of forward and backward on this rank, agreement included, optimizer step excluded.
        ranks: What every rank measured, for traces.
        single_s: What the best single strategy that fits (`RunFacts.single`) was predicted to take for the same rows, to
            be compared with the `predicted_s` of the phases; None without a time model.
        paces: For each rank how long it computed, without waiting for others, as a multiple of ranks that are not slow, lengths taken
            into account (`stragglers/giving.py`); None for a rank that ran nothing that says it, and altogether where
            nobody watches.
        slow: The ranks that are called slow after this mini-batch.
        race: How a race of plans has ended with this mini-batch; None where none has.
        rows_bytes: Bytes of rows (lengths, tokens, labels) that ranks sent each other, summed over ranks: under a
            `SwitchedModel`, where each rank reads its own batch.
        numbers_bytes: Bytes of losses, log-probabilities and the like that went back to the ranks of the rows.
        seeds_bytes: Bytes of gradients by these numbers that went to the ranks that train the rows.
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
        """Seconds from the agreement on the mini-batch until the last rank is through with its last phase: the same on all ranks."""
        laps = [MEASURES.index(name) for name in ("start_s", "load_s", "compute_s", "wait_s", "return_s")]
        rows = [phases[-1] for phases in self.ranks.phases if phases] if self.ranks is not None else []
        ends = [sum(phase[lap] for lap in laps) for phase in rows]
        return max(ends, default=sum(phase.seconds for phase in self.phases))

    @property
    def own_s(self) -> tuple[float, ...]:
        """For each rank the seconds of its computation without waiting for others; empty without `ranks`."""
        compute, others = MEASURES.index("compute_s"), MEASURES.index("others_s")
        rows = self.ranks.phases if self.ranks is not None else []
        return tuple(sum(max(phase[compute] - phase[others], 0.0) for phase in phases) for phases in rows)

    @property
    def longest_phase(self) -> PhaseReport | None:
        """The phase of the longest sequences: its strategy could have trained the whole mini-batch; None without phases.

        What it moved is `load_return_s`: a run under one strategy also loads weights and returns gradients once a
        mini-batch. What the other phases moved is switching.
        """
        return max(self.phases, key=lambda phase: phase.longest_tokens, default=None)

    @property
    def moved_s(self) -> float:
        """Exposed seconds in which weights and gradients were moved: `load_return_s` and `switch_s`."""
        return sum(phase.moved_s for phase in self.phases)

    @property
    def load_return_s(self) -> float:
        """The part of `moved_s` that a single strategy would have needed, too: one load and one return."""
        return self.longest_phase.moved_s if self.longest_phase is not None else 0.0

    @property
    def switch_s(self) -> float:
        """The part of `moved_s` that is there because strategies were switched; 0 for one phase."""
        return sum(phase.moved_s for phase in self.phases if phase is not self.longest_phase)

    @property
    def hidden_s(self) -> float:
        """Seconds in which weights and gradients were moved beside computation."""
        return sum(phase.hidden_s for phase in self.phases)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and gradients that moved between ranks."""
        return sum(phase.moved_bytes for phase in self.phases)

    @property
    def switch_bytes(self) -> int:
        """The part of `moved_bytes` that is there because strategies were switched."""
        return sum(phase.moved_bytes for phase in self.phases if phase is not self.longest_phase)

    @property
    def frozen_bytes(self) -> int:
        """The part of `moved_bytes` that was frozen weights."""
        return sum(phase.frozen_bytes for phase in self.phases)

    @property
    def predicted_s(self) -> float | None:
        """What the time model said of all phases together; None without one."""
        known = [phase.predicted_s for phase in self.phases if phase.predicted_s is not None]
        return sum(known) if known and len(known) == len(self.phases) else None

    @property
    def switch_share(self) -> float:
        """The part of the step that switching took (exposed seconds), 0 to 1."""
        return self.switch_s / self.total_s if self.total_s > 0 else 0.0

    @property
    def load_return_share(self) -> float:
        """The same for the load and the return that a single strategy needs, too."""
        return self.load_return_s / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready plain data, without `ranks` (their number has no bound; of relative step times two digits stay)."""
        data = asdict(replace(self, ranks=None))
        del data["ranks"]
        data["slow"] = list(self.slow)
        if self.paces is not None:
            data["paces"] = [None if step_time is None else round(step_time, 2) for step_time in self.paces]
        return data


@dataclass(frozen=True)
class PhaseEvent:
    """A phase that begins or has ended, as this rank sees it.

    Args:
        step: The mini-batch, counted from 1.
        index: The phase among those of the mini-batch, counted from 0 in the order in which they run.
        num_phases: How many the mini-batch has.
        strategy: The strategy that runs, `dp4`.
        num_packs: Micro-batches, over all replicas.
        num_sequences: Sequences, over all replicas.
        seconds: What this rank measured of it, by the names of `MEASURES`; None at its begin.
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
    """A switch that has ended, as this rank sees it.

    Args:
        step: The mini-batch, counted from 1.
        kind: `load`: the weights went into the layout of the strategy; `return`: its gradients to the master store.
        strategy: The strategy, `dp4`.
        seconds: Exposed seconds on this rank.
        busy_s: Seconds in which it ran beside the computation; 0 without overlap.
        sent_bytes: What this rank sent.
    """

    step: int
    kind: str
    strategy: str
    seconds: float
    busy_s: float
    sent_bytes: int


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations that a model asks for, forward and backward, and what its devices could do at most.

    Args:
        token: Of a token, in matrix products.
        square: Of a sequence, in attention: times its tokens squared.
        peak: Per second, of all devices together, by their data sheet.
    """

    token: float
    square: float
    peak: float

    def utilization(self, num_tokens: int, squared_tokens: int, seconds: float) -> float:
        """MFU: the operations of so many tokens by what the devices could have done in the time, 0 to 1."""
        return (self.token * num_tokens + self.square * squared_tokens) / (self.peak * seconds) if seconds > 0 else 0.0


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its first mini-batch; plain data, JSON-ready.

    Args:
        world_size: Ranks.
        versions: Library name -> version.
        machine: What it runs on, by name (no host names).
        model: Family, parameters, dtypes, by name.
        settings: The flags that matter to speed and order, by name.
        buckets: `strategy`, `low`, `longest` and `pack_tokens` of each bucket.
        plan: What the time model predicted when it chose the buckets; None where they were given. `seconds` and
            `switch_s` of a mini-batch, `static` (the best single strategy), `static_s`, and `rows` (one a bucket).
        lengths: The sequence lengths of the data set (`reporting/run_log.py`); None for a stream.
        single: The best single strategy that fits, by the time model; None without one, and where nothing fits.
        run: What a person knows it by: `name`, `model`, `data set`, `command`, `output folder`.
        flops: None where the speed of the devices is not known.
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
        """The facts as JSON-ready plain data."""
        return asdict(self)
