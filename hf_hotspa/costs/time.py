"""The time model: seconds of packs, of replicas and of phases under a strategy.

One layer costs `a * sum(l_i^2) + b * sum(l_i) + c` seconds per pack for each tensor-parallel degree, collectives
included. Embedding and head have separate costs. The busiest replica decides. Coefficients come from measurements
(`fit`) or data sheets (`data_sheet`). A stage's seconds are a sum of named terms: what its layers cost (`TERMS`, and
terms of features), its ends and repeated passes.

A pipeline is simulated operation by operation in the order of `packing.pipeline_order`: sends do not block, and a stage
waits for its next input. The usual `sum(t) + (p - 1) * max(t)` ignores that packs differ and that the last stage also
runs the head. If every rank has its own processor, such as an accelerator, one walk through the operations is enough
(`pipeline_seconds`). Ranks that share cores follow the fluid model of a fair scheduler: with `slots` processors, each
of n computing ranks gets `min(1, slots / n)` (`shared_pipelines`, `shared_seconds`). Four CPU ranks on two cores run at
half speed while all are busy, and at full speed while two of them wait.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_hotspa.costs import data_sheet
from hf_hotspa.costs.divided import chunked_seconds, exchange_seconds
from hf_hotspa.costs.fit import Sample, fit_costs
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import StreamedPack, Streams
from hf_hotspa.costs.terms import Cost, Exchanges, Hop, TimeTerm
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.shares import step_times_of_groups
from hf_hotspa.layout.stages import USUAL_STEP_TIME, StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import Chain, cut_for, cut_into_chains
from hf_hotspa.packing.pipeline_order import (
    Turn,
    backward_order,
    choose_interleaved,
    choose_passes,
    joint_passes,
    most_ahead,
    operations,
)
from hf_hotspa.seam import hooks
from hf_hotspa.strategy import Strategy

# -- pipelines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pipeline:
    """The packs (or chunks) of one replica and their order through its stages."""

    forward: Sequence[Sequence[float]]  # `forward[stage][pack]` seconds on a rank with its own processor
    backward: Sequence[Sequence[float]]  # the same for the backward pass
    hops: Sequence[float]  # seconds to send the hidden state of each pack, or its gradient, between two stages
    reach: Sequence[int]  # how far forward passes may be ahead, see `pipeline_order.reaches`
    depth: int | None = None  # number of stages for the schedule, see `Passes.depth`; the actual number if None
    chains: Sequence[int] = ()  # chunks of each chain, see `pipeline_order`; empty for complete packs
    rounds: int = 1  # stages on each rank
    # the order of all ranks if they have several stages each; otherwise it follows from the other fields
    order: Sequence[Turn] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.forward) // self.rounds

    def turns(self, rank: int) -> list[Turn]:
        if self.rounds > 1:
            return [turn for turn in self.order if turn.stage % self.num_ranks == rank]
        depth = self.depth or len(self.forward)
        return [Turn(rank, *operation) for operation in operations(self.reach, depth, rank, self.chains)]

    def seconds(self, turn: Turn) -> float:
        return (self.backward if turn.is_backward else self.forward)[turn.stage][turn.unit]


def pipeline_seconds(pipeline: Pipeline) -> float:
    """Returns the seconds until the last operation of a replica ends, with one processor per rank.

    Visits operations in an order in which all inputs are known: for each backward pass, first the forward passes that
    may begin before it, from the first stage to the last, then that backward pass, from the last stage to the first.
    """
    if len(pipeline.forward) == 1:
        return sum(pipeline.forward[0]) + sum(pipeline.backward[0])
    if pipeline.rounds > 1:
        return _interleaved_seconds(pipeline)
    return _walked_seconds(pipeline)


def _walked_seconds(pipeline: Pipeline) -> float:
    forward, backward, hops, reach = pipeline.forward, pipeline.backward, pipeline.hops, pipeline.reach
    num_stages, total = len(forward), len(forward[0])
    depth = pipeline.depth or num_stages
    clock, begun = [0.0] * num_stages, [0] * num_stages
    ready = [0.0] * total  # when the next stage of a pack has its hidden state
    rising, falling = range(num_stages), range(num_stages - 1, -1, -1)
    backwards: Sequence[int] = backward_order(pipeline.chains) if pipeline.chains else range(total)
    aheads: Sequence[int] = most_ahead(pipeline.chains, depth) if pipeline.chains else range(depth, depth + total)
    for pack, most, ahead in zip(backwards, reach, aheads, strict=True):
        for stage in rising:
            end = ahead - stage
            if end > most:
                end = most
            at = begun[stage]
            if at < end:
                now, seconds = clock[stage], forward[stage]
                while at < end:
                    if ready[at] > now:
                        now = ready[at]
                    now += seconds[at]
                    ready[at] = now + hops[at]
                    at += 1
                begun[stage], clock[stage] = end, now
        gradient, hop = 0.0, hops[pack]
        for stage in falling:
            now = clock[stage]
            if gradient > now:
                now = gradient
            now += backward[stage][pack]
            clock[stage] = now
            gradient = now + hop
    return max(clock)


def _interleaved_seconds(pipeline: Pipeline) -> float:
    """Of a replica with several stages per rank."""
    num_ranks, last = pipeline.num_ranks, len(pipeline.forward) - 1
    clock, ready = [0.0] * num_ranks, dict[Turn, float]()
    for turn in pipeline.order:
        rank, start = turn.stage % num_ranks, clock[turn.stage % num_ranks]
        if not turn.is_backward and turn.stage:
            start = max(start, ready[Turn(turn.stage - 1, turn.unit, False)])
        if turn.is_backward and turn.stage < last:
            start = max(start, ready[Turn(turn.stage + 1, turn.unit, True)])
        clock[rank] = end = start + pipeline.seconds(turn)
        ready[turn] = end + pipeline.hops[turn.unit]
    return max(clock)


def shared_seconds(loads: Sequence[float], ranks_per_load: int, slots: float) -> float:
    """Returns the seconds until all independent loads are done, if started together. `loads`: processor seconds on each
    rank of a load. `ranks_per_load`: ranks that work on a load together. `slots`: ranks that compute at a time."""
    seconds = done = 0.0
    for left, load in zip(range(len(loads), 0, -1), sorted(loads), strict=True):
        seconds += (load - done) * max(1.0, left * ranks_per_load / slots)
        done = load
    return seconds


def shared_pipelines(pipelines: Sequence[Pipeline], ranks_per_stage: int, slots: float) -> float:
    """Returns the seconds until several pipelines are done: `pipeline_seconds` on shared processors.

    At any moment all computing stages run at one speed. So work done is one integral of the speed for all, and an
    operation ends when the integral has grown by its seconds. Two queues order the events: ends of operations by the
    integral, arrivals of messages by time. `ranks_per_stage`: ranks that work on a stage together. `slots`: ranks that
    compute at a time.
    """
    ranks = [(replica, rank) for replica, pipeline in enumerate(pipelines) for rank in range(pipeline.num_ranks)]
    index = {key: at for at, key in enumerate(ranks)}
    left = [deque(pipelines[replica].turns(rank)) for replica, rank in ranks]
    busy = [False] * len(ranks)
    ready: list[set[Turn]] = [set() for _ in ranks]  # passes whose input from another stage has arrived
    ends: list[tuple[float, int]] = []  # (integral at which the rank's operation ends, rank)
    arrivals: list[tuple[float, int, Turn]] = []  # (time, rank, the pass that needs it)
    now = work = 0.0

    def start(at: int) -> None:
        """Starts the next pass of a rank that is not busy, if its input is there."""
        if not busy[at] and left[at]:
            turn, pipeline = left[at][0], pipelines[ranks[at][0]]
            is_end = turn.stage == (len(pipeline.forward) - 1 if turn.is_backward else 0)
            if is_end or turn in ready[at]:
                busy[at] = True
                heapq.heappush(ends, (work + pipeline.seconds(turn), at))

    for at in range(len(ranks)):
        start(at)
    while ends or arrivals:
        speed = min(1.0, slots / (len(ends) * ranks_per_stage)) if ends else 1.0
        end = now + (ends[0][0] - work) / speed if ends else math.inf
        if arrivals and arrivals[0][0] <= end:
            time, at, turn = heapq.heappop(arrivals)
            work += (time - now) * speed
            now = time
            ready[at].add(turn)
        else:
            work, at = heapq.heappop(ends)
            now, busy[at], turn, (replica, _) = end, False, left[at].popleft(), ranks[at]
            target, pipeline = turn.stage + (-1 if turn.is_backward else 1), pipelines[replica]
            if 0 <= target < len(pipeline.forward):
                to = index[replica, target % pipeline.num_ranks]
                heapq.heappush(arrivals, (now + pipeline.hops[turn.unit], to, turn._replace(stage=target)))
        start(at)
    return now


# -- the model ---------------------------------------------------------------------------------------------------------

Packs = Sequence[Sequence[int]]  # the packs of a replica, as sequence lengths

_NO_HOP = Hop()


def _shared(cost: Cost, cp: int) -> Cost:
    return Cost(cost.a / cp, cost.b / cp, cost.c)


def _exchanges(time: "TimeModel", strategy: Strategy) -> Cost:
    if time.shape is None or strategy.cp == 1:
        return Cost()
    measured = time.context_exchanges.get((strategy.cp, strategy.tp))
    hop = time.hop_within(strategy.cp * strategy.tp)
    return Cost(0.0, *exchange_seconds(strategy, time.shape, time.context_parallel, hop, measured))


TERMS = (
    TimeTerm("layers", lambda time, s: _shared(time.layers[s.tp], s.cp)),
    TimeTerm("exchanges of cp ranks", _exchanges),
)
"""What a layer costs a rank; features add theirs."""


@dataclass(frozen=True)
class TimeModel:
    """Seconds of computation. Use the constructors below."""

    source: str  # source of the coefficients, in words
    cut: StageCosts  # costs of the stage partition and relative costs of layers; its `step_times` slow down stages
    layers: Mapping[int, Cost] = field(default_factory=dict)  # one layer (of mean cost), forward and backward, by tp
    heads: Mapping[int, Cost] = field(default_factory=dict)  # final norm, vocabulary projection and loss, by tp
    embeddings: Mapping[int, Cost] = field(default_factory=dict)  # by tp
    hop_intra: Hop = _NO_HOP  # sending a hidden state inside a node
    hop_inter: Hop = _NO_HOP  # the same between nodes
    devices_per_node: int = 1 << 20  # decides which hop a pipeline uses
    forward_share: float = 1 / 3  # the forward pass's share of the seconds of a pack
    fixed_s: float = 0.0  # seconds of a phase besides its packs and its switch
    # how many ranks compute at the same time if ranks share cores; all other seconds then assume one core per rank.
    # Infinite if every rank has its own device.
    slots: float = math.inf
    pipeline_factor: float = 1.0  # relative cost of a pack in stages, without sends of hidden states
    # relative cost of complete phases compared with their packs, by (tp, cp, pp), see `Calibration`; deeper pipelines
    # than measured use the nearest depth, and a cp that was not measured is as none
    phase_factors: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    schedule: str = "auto"  # one of `pipeline_order.SCHEDULES`
    # the parameters, with the relative step times of ranks, if some are slow, by which MLPs are divided
    paced: ParameterVector | None = None
    # ratio by which sequences are cut into chunks of equal time, see `pair_cost`; the measured one if None
    cut_by: float | None = None
    streams: Streams | None = None  # transfers of the units of fully sharded strategies, if any
    shape: ModelShape | None = None  # the model's shape, for the exchanges of cp and ep; without it they are free
    context_parallel: str = "auto"  # the cp method, one of `costs.divided.WAYS`
    # measured costs of cp exchanges by (cp, tp); hops otherwise
    context_exchanges: Mapping[tuple[int, int], Exchanges] = field(default_factory=dict)
    forwards: float = 0  # forward passes of all tokens, without gradients, in a step besides training
    _kinds: dict[Strategy, Strategy] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stage_costs: dict[tuple[Any, ...], tuple[Cost, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _different_costs: dict[Strategy, tuple[Mapping[Cost, int], Cost]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def analytic(
        cls,
        sizes: ModelSizes,
        hardware: Hardware,
        dtype: str = "bfloat16",
        kernels: data_sheet.Kernels = data_sheet.SEPARATE,
    ) -> "TimeModel":
        """Builds the model from data sheets, see `costs.data_sheet`. Raises `HotspaConfigError`: the hardware has no
        speed for the dtype."""
        return cls(
            f"data sheet of {hardware.name}, {dtype}", sizes.stage_costs,
            *data_sheet.costs(sizes, hardware, dtype, kernels),
            *data_sheet.hops(sizes.shape, hardware, dtype), hardware.devices_per_node,
            forward_share=1 / 3 if sizes.added is None else 1 / 2, paced=sizes.vector, shape=sizes.shape,
        )  # fmt: skip

    @classmethod
    def fit(
        cls, samples: Iterable[Sample], sizes: ModelSizes, depth: Callable[[int], float] = float, **fields: Any
    ) -> "TimeModel":
        """Builds the model from measurements. Raises `HotspaConfigError`: too few or impossible samples. `samples`: at
        least three different packs for each tp. Embedding and head are distinguished from layers by samples with
        different numbers of layers, or without embedding and head."""
        layers, ends = fit_costs(samples, depth)
        fields = {"source": "measured", "paced": sizes.vector, "shape": sizes.shape} | fields
        return cls(cut=sizes.stage_costs, layers=layers, heads=ends, **fields)

    def knows(self, strategy: Strategy) -> bool:
        return strategy.tp in self.layers

    def kind(self, strategy: Strategy) -> Strategy:
        """Returns the representative of all strategies that are known to take equally long.

        `+sp` changes only memory: it sends an all-reduce in two halves. So does `+kh`, whose copies are not counted.
        """
        if not (strategy.sp or strategy.kh):
            return strategy
        if strategy not in self._kinds:
            self._kinds[strategy] = replace(strategy, sp=False, kh=False)
        return self._kinds[strategy]

    def stage_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        """Returns the cost of each stage of a replica in pipeline order, v for each of its pp ranks. Raises
        `HotspaConfigError`: there are no coefficients for the strategy; `StrategyError`: more stages than layers."""
        key = *strategy.degrees, strategy.rc, strategy.v, *strategy.added
        if key not in self._stage_costs:
            self._stage_costs[key] = self._sum_stages(strategy)
        return self._stage_costs[key]

    def rank_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        """Returns the total cost of each pipeline rank's stages, see `stage_costs`."""
        costs = self.stage_costs(strategy)
        if strategy.v == 1:
            return costs
        return tuple(sum(costs[rank :: strategy.pp], Cost()) for rank in range(strategy.pp))

    def different_costs(self, strategy: Strategy) -> tuple[Mapping[Cost, int], Cost]:
        """Returns how many pipeline ranks have each distinct cost (see `rank_costs`); and the sum over all ranks."""
        if strategy not in self._different_costs:
            times = Counter(self.rank_costs(strategy))
            self._different_costs[strategy] = times, sum([cost * number for cost, number in times.items()], Cost())
        return self._different_costs[strategy]

    def hop_within(self, ranks: int) -> Hop:
        """Returns the hop inside a group of neighbouring ranks."""
        return self.hop_intra if ranks <= self.devices_per_node else self.hop_inter

    def stage_terms(self, strategy: Strategy) -> list[dict[str, Cost]]:
        """Returns the cost of each stage by the names of terms, on ranks of the usual speed."""
        weights, share, cp = self.cut.layers, self.forward_share, strategy.cp
        mean, last = sum(weights) / len(weights), strategy.num_stages - 1
        terms = [*TERMS, *(term for of_feature in hooks("terms") for term in of_feature.time)]
        of_layer = {term.name: term.of(self, strategy) for term in terms}
        stages = []
        for stage, layers in enumerate(self.cut.stages(strategy.num_stages)):
            num_layers = sum(weights[layer] for layer in layers) / mean if mean else len(layers)
            costs = {name: cost * num_layers for name, cost in of_layer.items()}
            again = sum(costs.values(), Cost())
            if stage == 0:
                costs["embedding"] = _shared(self.embeddings.get(strategy.tp, Cost()), cp)
            if stage == last:
                costs["head"] = _shared(self.heads.get(strategy.tp, Cost()), cp)
            scored = sum(costs.values(), Cost())
            if strategy.rc:  # the forward pass of every rc-th layer
                costs["recomputation"] = again * (share / strategy.rc)
            if self.forwards:
                costs["passes without gradients"] = scored * (share * self.forwards)
            stages.append(costs)
        return stages

    def _sum_stages(self, strategy: Strategy) -> tuple[Cost, ...]:
        tp, pp = strategy.tp, strategy.pp
        if tp not in self.layers:
            known = [f"tp{known}" for known in sorted(self.layers)]
            raise HotspaConfigError(
                f"the time model ({self.source}) has no coefficients for tp{tp}pp{pp}",
                fix=f"measure it, or use one of {', '.join(known)}",
            )
        factor = self._phase_factor(strategy) * (self.pipeline_factor if pp > 1 else 1.0) / USUAL_STEP_TIME
        step_times = self.cut.step_times_of(strategy.num_stages) or self._step_times(strategy)
        stages = zip(self.stage_terms(strategy), step_times, strict=True)
        return tuple(sum(costs.values(), Cost()) * (factor * step_time) for costs, step_time in stages)

    def _step_times(self, strategy: Strategy) -> tuple[int, ...]:
        """Uses the fastest replica, as slower ones get fewer packs."""
        if self.paced is None or not self.paced.step_times:
            return (USUAL_STEP_TIME,) * strategy.num_stages
        return fastest_stages(strategy, step_times_of_groups(self.paced, strategy, self.paced.step_times)) * strategy.v

    def _phase_factor(self, strategy: Strategy) -> float:
        """Uses the nearest depth for deeper pipelines, as measured copies have few stages."""
        factors, (tp, cp, pp) = self.phase_factors, (strategy.tp, strategy.cp, strategy.pp)
        cp = cp if (tp, cp, pp) in factors else 1
        if pp == 1 or (tp, cp, pp) in factors:
            return factors.get((tp, cp, pp), 1.0)
        depths = [depth for *degrees, depth in factors if degrees == [tp, 1] and depth > 1]
        return factors[tp, 1, min(depths, key=lambda depth: abs(depth - pp))] if depths else 1.0

    def hop(self, strategy: Strategy) -> Hop:
        """Returns the cost of sending a hidden state to the next stage, dp * cp * tp ranks away; with several stages
        per rank also from the last rank to the first, pp - 1 times as far."""
        apart = strategy.stage_size * (strategy.pp - 1 if strategy.v > 1 else 1)
        return self.hop_intra if apart < self.devices_per_node else self.hop_inter

    def phase_seconds(
        self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None = None, *, enough: float = math.inf
    ) -> float:
        """Returns the seconds of a phase without its switch: of the busiest replica, or of all if they share cores.
        `replicas`: the packs of each replica, in order. `most_tokens`: the most tokens in flight in a pipeline; None
        for no limit. `enough`: stop once a replica takes longer than this, without simulating the others."""
        busy = [packs for packs in replicas if packs]
        if not busy:
            return 0.0
        seconds = self._sharded if strategy.z else self._whole
        return self.fixed_s + seconds(strategy, busy, most_tokens, enough - self.fixed_s)

    def _whole(
        self, strategy: Strategy, busy: Sequence[Packs], most_tokens: int | None, enough: float = math.inf
    ) -> float:
        """Seconds of packs under a strategy that is not fully sharded."""
        if strategy.keeps_step and strategy.pp == 1:
            return self._in_step(strategy, busy)
        if strategy.tp * strategy.cp * strategy.pp * len(busy) > self.slots:
            return self._shared(strategy, busy, most_tokens)
        longest = 0.0
        for packs in busy:
            longest = max(longest, self._alone(strategy, packs, most_tokens))
            if longest > enough:
                break
        return longest

    def _in_step(self, strategy: Strategy, replicas: Sequence[Packs]) -> float:
        """Seconds if replicas exchange tokens in every layer: the sum of the longest packs."""
        total = 0.0
        for index in range(max(map(len, replicas))):
            alone = [self._alone(strategy, [packs[index]], None) for packs in replicas if index < len(packs)]
            total += max(max(alone), shared_seconds(alone, strategy.tp * strategy.cp, self.slots))
        return total

    def _sharded(
        self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None, enough: float = math.inf
    ) -> float:
        """Fully sharded strategies: replicas run in lockstep, pack by pack; in a pipeline chunk by chunk."""
        if self.streams is None:
            raise HotspaConfigError(
                f"the time model ({self.source}) knows no links, and {strategy} moves its units over them",
                fix=f"leave +z{strategy.z} out, or make a cost model with a cluster",
            )
        plain = replace(strategy, z=0)
        if strategy.pp > 1:
            chains: Sequence[int] = (1,) * max(map(len, replicas))
            if strategy.ck:
                chains = joint_passes(strategy, replicas, most_tokens, self.pair_cost(strategy.tp)).passes.chains
            alone = self._whole(plain, replicas, most_tokens, enough)
            moving = sum(self.streams.pack_s(strategy, num, num) for num in chains)
            if math.isfinite(self.slots):
                return alone + max(moving, self.streams.once_s(strategy))
            return max(alone + self.streams.once_s(strategy), moving)
        turns = []
        for index in range(max(map(len, replicas))):
            packs = [[packs[index]] for packs in replicas if index < len(packs)]
            seconds = self._whole(plain, packs, None)
            cuts = [cut_into_chains(pack, strategy.ck) for (pack,) in packs] if strategy.ck else []
            backwards = max((sum(map(len, chunks)) for chunks in cuts), default=1)
            again = max((sum(max(len(c) - 1 - strategy.kg, 0) for c in chunks) for chunks in cuts), default=0)
            forward = self.forward_share * (backwards + again) / backwards
            backward = 1 - self.forward_share + (self.forward_share / strategy.rc if strategy.rc else 0.0)
            share = forward / (forward + backward)
            turns.append(StreamedPack(share * seconds, (1 - share) * seconds, backwards + again, backwards))
        return self.streams.seconds(strategy, turns, self.slots)

    def _shared(self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None) -> float:
        if strategy.pp == 1:
            alone = [self._alone(strategy, packs, None) for packs in replicas]
            return shared_seconds(alone, strategy.tp * strategy.cp, self.slots)
        piped = [self._pipeline(strategy, packs, most_tokens) for packs in replicas]
        return shared_pipelines(piped, strategy.tp * strategy.cp, self.slots)

    def _alone(self, strategy: Strategy, packs: Packs, most_tokens: int | None) -> float:
        if strategy.pp > 1:
            return pipeline_seconds(self._pipeline(strategy, packs, most_tokens))
        (cost,) = self.stage_costs(strategy)
        if strategy.ck:
            return chunked_seconds(cost, packs, strategy, self.forward_share)
        squares = sum(length * length for pack in packs for length in pack)
        return cost.a * squares + cost.b * sum(map(sum, packs)) + cost.c * len(packs)

    def pair_cost(self, tp: int) -> float:
        """Returns the cost of a pair of tokens in the layers relative to a token, for chunks of equal time."""
        if self.cut_by is not None:
            return self.cut_by
        cost = self.layers[tp]
        return cost.a / cost.b if cost.b > 0 else 0.0

    def _pipeline(self, strategy: Strategy, packs: Packs, most_tokens: int | None) -> Pipeline:
        chains: list[int] = []
        if strategy.ck:
            cuts = [cut_for(strategy, pack, self.pair_cost(strategy.tp)) for pack in packs]
            lengths = [stop - first for cut in cuts for chain in cut for first, stop in chain]
            squares = [q for pack, cut in zip(packs, cuts, strict=True) for c in squared_lengths(pack, cut) for q in c]
            chains = [len(chain) for cut in cuts for chain in cut]
        else:
            lengths, squares = [sum(pack) for pack in packs], [sum([n * n for n in pack]) for pack in packs]
        rounds = strategy.v
        passes = choose_passes("own" if rounds > 1 else self.schedule, lengths, strategy.pp, most_tokens, chains)
        interleaved = None
        if rounds > 1:
            interleaved = choose_interleaved(self.schedule, lengths, strategy.pp, rounds, most_tokens, chains)
        tokens = interleaved.tokens if interleaved else passes.tokens
        # padding of a pack is a separate sequence
        squares = [q + (padded - own) ** 2 for q, own, padded in zip(squares, lengths, tokens, strict=True)]
        costs = self.stage_costs(strategy)
        share, hop = self.forward_share, self.hop(strategy)
        forward, backward = {}, {}
        for cost in set(costs):
            seconds = [cost.a * q + cost.b * s + cost.c for q, s in zip(squares, tokens, strict=True)]
            forward[cost], backward[cost] = [share * t for t in seconds], [(1 - share) * t for t in seconds]
        return Pipeline(
            [forward[cost] for cost in costs],
            [backward[cost] for cost in costs],
            [hop.seconds(s / strategy.cp) for s in tokens],
            passes.reach,
            passes.depth,
            passes.chains,
            rounds,
            interleaved.order if interleaved else (),
        )


def squared_lengths(lengths: Sequence[int], chains: Sequence[Chain]) -> list[list[int]]:
    """Returns, by chunk of each chain, its part of the sum of squared lengths: its attention, in pairs of tokens."""
    begins, total = [0], 0
    for length in lengths:
        total += length
        begins.append(total)
    squares, at = [], 0
    for chain in chains:
        parts = []
        for first, stop in chain:
            pairs, here = 0, first
            while here < stop:
                while begins[at + 1] <= here:
                    at += 1
                until = min(stop, begins[at + 1])
                pairs += (until - begins[at]) ** 2 - (here - begins[at]) ** 2
                here = until
            parts.append(pairs)
        squares.append(parts)
    return squares


def fastest_stages(strategy: Strategy, step_times: Sequence[int]) -> tuple[int, ...]:
    """Returns the relative step time of each pipeline position: of a replica's slowest rank, in the fastest replica."""
    slowest = [[0] * strategy.dp for _ in range(strategy.pp)]
    for rank, step_time in enumerate(step_times):
        coord = strategy.coord(rank)
        slowest[coord.pp][coord.dp] = max(slowest[coord.pp][coord.dp], step_time)
    return tuple(map(min, slowest))
