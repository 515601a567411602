"""The time model: seconds of packs, of replicas and of phases under a strategy.

One layer costs `a * sum(l_i^2) + b * sum(l_i) + c` seconds a pack for each tensor-parallel degree, its collectives
included; embedding and head have costs of their own; a pipeline is simulated operation by operation (`pipelines`); the busiest
replica decides. Where ranks share cores (CPU) the fluid model there says how long a phase takes. Coefficients
come from measurements (`fit`) or from data sheets (`analytic`). Plain data, no torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hf_hotspa.costs import analytic, experts
from hf_hotspa.costs.chunks import chunked_seconds
from hf_hotspa.costs.coefficients import Cost, Exchanges, Hop, Sample, fit_costs
from hf_hotspa.costs.context import exchange_seconds
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.pipelines import Pipeline, pipeline_seconds, shared_pipelines, shared_seconds
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import Streams, Turn
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.shares import fastest_stages, paces_of_groups
from hf_hotspa.layout.stages import USUAL_PACE, StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.chunk_cuts import cut_for, cut_into_chains, squared_lengths
from hf_hotspa.packing.passes import joint_passes
from hf_hotspa.packing.pipeline_order import choose_interleaved, choose_passes
from hf_hotspa.strategy import Strategy

Packs = Sequence[Sequence[int]]
"""The packs of a replica, each the lengths of its sequences."""

_NO_HOP = Hop()


def _shared(cost: Cost, cp: int) -> Cost:
    """What works token by token, on a rank of cp."""
    return Cost(cost.a / cp, cost.b / cp, cost.c)


@dataclass(frozen=True)
class TimeModel:
    """Seconds of computation. Made by one of the constructors below.

    Args:
        source: Where the coefficients come from, in words.
        cut: What stages are cut and layers weighed by; stages of slow devices (its `paces`) take so much longer.
        layers: One layer (of mean cost), forward and backward, by tp.
        heads: Final norm, vocabulary projection and loss, by tp.
        embeddings: The embedding, by tp.
        hop_intra: Passing a hidden state inside a node.
        hop_inter: The same between nodes.
        devices_per_node: Decides which of the two a pipeline has.
        forward_share: The forward pass's share of the seconds of a pack.
        fixed_s: Seconds of a phase beside its packs and its switch.
        slots: How many ranks compute at the same time where ranks share cores; all other seconds are then those of a
            rank that has a core to itself. Infinite where every rank has a device of its own.
        pipeline_factor: By how much a pack costs more when it runs in stages, beside passing hidden states.
        phase_factors: By how much whole phases cost more (or less) than their packs, by (tp, pp), see
            `Calibration`; of a deeper pipeline than was measured, as much as with the nearest depth.
        schedule: The schedule of pipelines, one of `pipeline_order.SCHEDULES`.
        paced: The parameters, whose MLPs are divided by the paces of ranks: tensor-parallel groups with slow ones take so much
            longer. None, or without paces, where no device is slow.
        cut_by: What chunks of equal time are cut by, see `pair_cost`; what was measured when None.
        streams: What moves the units of fully sharded strategies; None where there are none.
        shape: The model's, for what ranks of cp exchange; None where that is not known and costs nothing.
        context_parallel: How they attend, one of `costs.context.WAYS`.
        context_exchanges: What that costs, by (cp, tp), where it was measured; hops else.
        forwards: Forwards of all tokens, without gradients, that a step has beside its training pass.
    """

    source: str
    cut: StageCosts
    layers: Mapping[int, Cost] = field(default_factory=dict)
    heads: Mapping[int, Cost] = field(default_factory=dict)
    embeddings: Mapping[int, Cost] = field(default_factory=dict)
    hop_intra: Hop = _NO_HOP
    hop_inter: Hop = _NO_HOP
    devices_per_node: int = 1 << 20
    forward_share: float = 1 / 3
    fixed_s: float = 0.0
    slots: float = math.inf
    pipeline_factor: float = 1.0
    phase_factors: Mapping[tuple[int, int], float] = field(default_factory=dict)
    schedule: str = "auto"
    paced: ParameterVector | None = None
    cut_by: float | None = None
    streams: Streams | None = None
    shape: ModelShape | None = None
    context_parallel: str = "auto"
    context_exchanges: Mapping[tuple[int, int], Exchanges] = field(default_factory=dict)
    forwards: int = 0

    @classmethod
    def analytic(cls, sizes: ModelSizes, hardware: Hardware, dtype: str = "bfloat16") -> "TimeModel":
        """From data sheets, see `costs.analytic`.

        Raises:
            HotspaConfigError: the hardware has no speed for the dtype.
        """
        shape = sizes.shape
        degrees = range(1, shape.num_attention_heads + 1)
        adapters = {
            tp: (sizes.adapter_parameters(tp) if sizes.adapter is not None else None, sizes.made_of_codes(tp))
            for tp in degrees
        }
        layers, heads, embeddings = analytic.costs(shape, hardware, dtype, adapters)
        intra, inter = analytic.hops(shape, hardware, dtype)
        return cls(
            f"data sheet of {hardware.name}, {dtype}",
            sizes.stage_costs,
            layers,
            heads,
            embeddings,
            hop_intra=intra,
            hop_inter=inter,
            devices_per_node=hardware.devices_per_node,
            paced=sizes.vector,
            forward_share=1 / 3 if sizes.adapter is None else 1 / 2,
            shape=shape,
        )

    @classmethod
    def fit(
        cls, samples: Iterable[Sample], sizes: ModelSizes, depth: Callable[[int], float] = float, **fields: Any
    ) -> "TimeModel":
        """From measurements.

        Args:
            samples: At least three different packs for each tp. Samples with embedding and head tell these apart
                from the layers when they were taken with different numbers of layers (or without the ends, too).
            depth: See `fit_costs`.
            fields: The others of the model.

        Raises:
            HotspaConfigError: too few or impossible samples.
        """
        layers, ends = fit_costs(samples, depth)
        fields = {"source": "measured", "paced": sizes.vector, "shape": sizes.shape} | fields
        return cls(cut=sizes.stage_costs, layers=layers, heads=ends, **fields)

    def knows(self, strategy: Strategy) -> bool:
        """Whether there are coefficients for a strategy."""
        return strategy.tp in self.layers

    def kind(self, strategy: Strategy) -> Strategy:
        """A strategy that takes as long as the given one, the same for all of which that is known.

        Sequence parallelism sends the bytes of an all-reduce in two halves, so `+sp` changes what is held only; and so does
        `+kh`, whose copies are not counted.
        """
        if not (strategy.sp or strategy.kh):
            return strategy
        if strategy not in self._kinds:
            self._kinds[strategy] = replace(strategy, sp=False, kh=False)
        return self._kinds[strategy]

    @cached_property
    def _kinds(self) -> dict[Strategy, Strategy]:
        return {}

    def stage_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        """The cost of each stage of a replica: v for each of its pp ranks, in the order of the pipeline.

        Raises:
            HotspaConfigError: there are no coefficients for the strategy.
            StrategyError: more stages than layers.
        """
        key = strategy.tp, strategy.pp, strategy.rc, strategy.cp, strategy.ep, strategy.v, strategy.dp
        if key not in self._stage_costs:
            self._stage_costs[key] = self._sum_stages(strategy)
        return self._stage_costs[key]

    def rank_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        """The cost of all stages of each rank of a pipeline, see `stage_costs`."""
        costs = self.stage_costs(strategy)
        if strategy.v == 1:
            return costs
        return tuple(sum(costs[rank :: strategy.pp], Cost()) for rank in range(strategy.pp))

    def different_costs(self, strategy: Strategy) -> tuple[Mapping[Cost, int], Cost]:
        """Of how many ranks of a pipeline each is the cost, see `rank_costs`; and the sum of all."""
        if strategy not in self._different_costs:
            times = Counter(self.rank_costs(strategy))
            self._different_costs[strategy] = times, sum([cost * number for cost, number in times.items()], Cost())
        return self._different_costs[strategy]

    @cached_property
    def _different_costs(self) -> dict[Strategy, tuple[Mapping[Cost, int], Cost]]:
        return {}

    @cached_property
    def _stage_costs(self) -> dict[tuple[int, ...], tuple[Cost, ...]]:
        return {}

    def _shared_layer(self, strategy: Strategy) -> Cost:
        """One layer on a rank: its share of the tokens of a pack, and of the pairs that attend, and the exchanges."""
        cost, cp = self.layers[strategy.tp], strategy.cp
        if strategy.ep > 1 and self.shape is not None:
            near = strategy.ep <= self.devices_per_node
            link = self.hop_intra if near else self.hop_inter
            of_tokens = experts.exchange_seconds(strategy, self.shape, link.token_s, link.latency_s)
            cost = Cost(cost.a, cost.b + cp * of_tokens[0], cost.c + of_tokens[1])
        if cp == 1 or self.shape is None:
            return _shared(cost, cp)
        hop = self.hop_intra if cp * strategy.tp <= self.devices_per_node else self.hop_inter
        measured = self.context_exchanges.get((cp, strategy.tp))
        exchanges = exchange_seconds(strategy, self.shape, self.context_parallel, hop, measured)
        return Cost(cost.a / cp, cost.b / cp + exchanges[0], cost.c + exchanges[1])

    def _sum_stages(self, strategy: Strategy) -> tuple[Cost, ...]:
        tp, pp, rc, cp = strategy.tp, strategy.pp, strategy.rc, strategy.cp
        if tp not in self.layers:
            known = [f"tp{known}" for known in sorted(self.layers)]
            raise HotspaConfigError(
                f"the time model ({self.source}) has no coefficients for tp{tp}pp{pp}",
                fix=f"measure it, or use one of {', '.join(known)}",
            )
        weights = self.cut.layers
        mean = sum(weights) / len(weights)
        costs, factor = [], self._phase_factor(tp, pp) * (self.pipeline_factor if pp > 1 else 1.0)
        paces = self.cut.paces_of(strategy.num_stages) or self._paces(strategy)
        for stage, layers in enumerate(self.cut.stages(strategy.num_stages)):
            cost = self._shared_layer(strategy) * (
                sum(weights[layer] for layer in layers) / mean if mean else len(layers)
            )
            scored = 1 + self.forward_share * self.forwards
            cost *= scored + (self.forward_share / rc if rc else 0.0)  # one more forward pass of every rc-th layer
            if stage == 0:
                cost += _shared(self.embeddings.get(tp, Cost()), cp) * scored
            if stage == strategy.num_stages - 1:
                cost += _shared(self.heads.get(tp, Cost()), cp) * scored
            costs.append(cost * (factor * (paces[stage] / USUAL_PACE)))
        return tuple(costs)

    def _paces(self, strategy: Strategy) -> tuple[int, ...]:
        """Of each stage, where MLPs are divided by the paces of ranks: of the fastest replica, since slower ones get fewer packs."""
        if self.paced is None or not self.paced.paces:
            return (USUAL_PACE,) * strategy.num_stages
        return fastest_stages(strategy, paces_of_groups(self.paced, strategy, self.paced.paces)) * strategy.v

    def _phase_factor(self, tp: int, pp: int) -> float:
        """A copy has few layers, and so few stages: of a deeper pipeline, the factor of the nearest depth."""
        factors = self.phase_factors
        if pp == 1 or (tp, pp) in factors:
            return factors.get((tp, pp), 1.0)
        depths = [depth for degree, depth in factors if degree == tp and depth > 1]
        return factors[tp, min(depths, key=lambda depth: abs(depth - pp))] if depths else 1.0

    def hop(self, strategy: Strategy) -> Hop:
        """What passing a hidden state to the next stage costs: neighbours are dp * cp * tp ranks apart, and where packs go
        round, the last rank and the first one are pp - 1 times as far."""
        apart = strategy.stage_size * (strategy.pp - 1 if strategy.v > 1 else 1)
        return self.hop_intra if apart < self.devices_per_node else self.hop_inter

    def phase_seconds(
        self,
        strategy: Strategy,
        replicas: Sequence[Packs],
        most_tokens: int | None = None,
        *,
        enough: float = math.inf,
    ) -> float:
        """Seconds of a phase without its switch: those of the busiest replica, or of all where they share cores.

        Args:
            replicas: The packs of each replica, in order.
            most_tokens: The most tokens in flight in a pipeline; None for no limit.
            enough: Seconds above which nobody asks for more: where a replica takes longer, others are not simulated.
        """
        busy = [packs for packs in replicas if packs]
        if not busy:
            return 0.0
        seconds = self._sharded if strategy.z else self._whole
        return self.fixed_s + seconds(strategy, busy, most_tokens, enough - self.fixed_s)

    def _whole(
        self, strategy: Strategy, busy: Sequence[Packs], most_tokens: int | None, enough: float = math.inf
    ) -> float:
        """Seconds of packs under a strategy whose units stay where they are."""
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
        """Seconds where replicas exchange tokens in every layer: pack by pack, those of the longest."""
        total = 0.0
        for index in range(max(map(len, replicas))):
            alone = [self._alone(strategy, [packs[index]], None) for packs in replicas if index < len(packs)]
            total += max(max(alone), shared_seconds(alone, strategy.tp * strategy.cp, self.slots))
        return total

    def _sharded(
        self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None, enough: float = math.inf
    ) -> float:
        """Seconds where units come and go: replicas keep step, pack by pack; in a pipeline chunk by chunk.

        Raises:
            HotspaConfigError: nothing is known of the links.
        """
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
            turns.append(Turn(share * seconds, (1 - share) * seconds, backwards + again, backwards))
        return self.streams.seconds(strategy, turns, self.slots)

    def _shared(self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None) -> float:
        if strategy.pp == 1:
            alone = [self._alone(strategy, packs, None) for packs in replicas]
            return shared_seconds(alone, strategy.tp * strategy.cp, self.slots)
        piped = [self._pipeline(strategy, packs, most_tokens) for packs in replicas]
        return shared_pipelines(piped, strategy.tp * strategy.cp, self.slots)

    def _alone(self, strategy: Strategy, packs: Packs, most_tokens: int | None) -> float:
        """Seconds of a replica whose ranks have a core each."""
        if strategy.pp > 1:
            return pipeline_seconds(self._pipeline(strategy, packs, most_tokens))
        (cost,) = self.stage_costs(strategy)
        if strategy.ck:
            return chunked_seconds(cost, packs, strategy, self.forward_share)
        squares = sum(length * length for pack in packs for length in pack)
        return cost.a * squares + cost.b * sum(map(sum, packs)) + cost.c * len(packs)

    def pair_cost(self, tp: int) -> float:
        """Cost of a pair of tokens relative to that of a token, in the layers: what chunks of equal time are cut by."""
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
        # what pads a pack is a sequence of its own
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
