"""The time model: seconds of packs, of replicas and of phases under a strategy.

One layer costs `a * sum(l_i^2) + b * sum(l_i) + c` seconds a pack for each tensor-parallel degree, its collectives
included; embedding and head have costs of their own; a pipeline is simulated operation by operation (`pipelines`); the busiest
replica decides. Where ranks share cores (CPU) the fluid model there says how long a phase takes. Coefficients
come from measurements (`fit`), from data sheets (`analytic`), or from published tables of whole stages (`of_stages`). The model is plain data with a JSON form that people can read. No torch.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hf_hotspa.cost import analytic
from hf_hotspa.cost.coefficients import Cost, Hop
from hf_hotspa.cost.fitting import Sample, fit_costs
from hf_hotspa.cost.hardware import Hardware
from hf_hotspa.cost.json_file import number, read_json, write_json
from hf_hotspa.cost.pipelines import Pipeline, pipeline_seconds, shared_pipelines, shared_seconds
from hf_hotspa.cost.sizes import ModelSizes
from hf_hotspa.data.pipeline_order import SCHEDULES, choose_passes
from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.layout.stages import cut_stages
from hf_hotspa.strategy import Strategy

KIND = "hf_hotspa time model"
SCHEMA_VERSION = 1

Packs = Sequence[Sequence[int]]
"""The packs of a replica, each the lengths of its sequences."""

_NO_HOP = Hop()


@dataclass(frozen=True)
class TimeModel:
    """Seconds of computation. Made by one of the constructors below.

    Args:
        source: Where the coefficients come from, in words.
        layer_costs: Relative cost of each layer; stages are cut and layers weighed with it.
        head_cost: Relative cost of the head; stages are cut with it.
        layers: One layer (of mean cost), forward and backward, by tp.
        heads: Final norm, vocabulary projection and loss, by tp.
        embeddings: The embedding, by tp.
        stages: Whole stages by (tp, pp), each stage alike; where there is one it replaces the three above.
        hop_intra: Passing a hidden state inside a node.
        hop_inter: The same between nodes.
        devices_per_node: Decides which of the two a pipeline has.
        forward_share: The forward pass's share of the seconds of a pack.
        fixed_s: Seconds of a phase beside its packs and its switch.
        slots: How many ranks compute at the same time where ranks share cores; all other seconds are then those of a
            rank that has a core to itself. Infinite where every rank has a device of its own.
        pipeline_factor: By how much a pack costs more when it runs in stages, beside passing hidden states.
        phase_factors: By how much whole phases cost more (or less) than their packs, by (tp, pp), see
            `cost.phase_factors`; of a deeper pipeline than was measured, as much as with the nearest depth.
        recompute: Every n-th layer is recomputed under strategies that do not say it themselves; 0 for none.
        schedule: The schedule of pipelines, one of `pipeline_order.SCHEDULES`.
    """

    source: str
    layer_costs: tuple[int, ...]
    head_cost: int
    layers: Mapping[int, Cost] = field(default_factory=dict)
    heads: Mapping[int, Cost] = field(default_factory=dict)
    embeddings: Mapping[int, Cost] = field(default_factory=dict)
    stages: Mapping[tuple[int, int], Cost] = field(default_factory=dict)
    hop_intra: Hop = _NO_HOP
    hop_inter: Hop = _NO_HOP
    devices_per_node: int = 1 << 20
    forward_share: float = 1 / 3
    fixed_s: float = 0.0
    slots: float = math.inf
    pipeline_factor: float = 1.0
    phase_factors: Mapping[tuple[int, int], float] = field(default_factory=dict)
    recompute: int = 0
    schedule: str = "auto"

    @classmethod
    def analytic(
        cls, sizes: ModelSizes, hardware: Hardware, dtype: str = "bfloat16", degrees: Iterable[int] = ()
    ) -> "TimeModel":
        """From data sheets, see `cost.analytic`.

        Args:
            sizes: The model.
            hardware: The machine.
            dtype: The dtype of computation.
            degrees: Tensor-parallel degrees; every one up to the attention heads when empty.

        Raises:
            HotspaConfigError: the hardware has no speed for the dtype.
        """
        shape = sizes.shape
        tps = list(degrees) or range(1, shape.num_attention_heads + 1)
        adapters = {tp: sizes.adapter_parameters(tp) if sizes.adapter is not None else None for tp in sorted(set(tps))}
        layers, heads, embeddings = analytic.costs(shape, hardware, dtype, adapters)
        intra, inter = analytic.hops(shape, hardware, dtype)
        return cls(
            f"data sheet of {hardware.name}, {dtype}",
            sizes.layer_costs,
            sizes.head_cost,
            layers,
            heads,
            embeddings,
            hop_intra=intra,
            hop_inter=inter,
            devices_per_node=hardware.devices_per_node,
            forward_share=1 / 3 if sizes.adapter is None else 1 / 2,
        )

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        sizes: ModelSizes,
        *,
        source: str = "measured",
        heads: Mapping[int, Cost] | None = None,
        hops: tuple[Hop, Hop] = (_NO_HOP, _NO_HOP),
        devices_per_node: int = 1 << 20,
        forward_share: float = 1 / 3,
    ) -> "TimeModel":
        """From measurements.

        Args:
            samples: At least three different packs for each tp. Samples with embedding and head tell these apart
                from the layers when they were taken with different numbers of layers (or without the ends, too).
            sizes: The model, whose stages are cut.
            source: What was measured, in words.
            heads: Measured costs of the ends, where samples do not hold them.
            hops: Passing a hidden state inside a node, and between nodes.
            devices_per_node: Devices of a node.
            forward_share: The forward pass's share of a pack's seconds.

        Raises:
            HotspaConfigError: too few or impossible samples.
        """
        layers, ends = fit_costs(samples)
        return cls(
            source,
            sizes.layer_costs,
            sizes.head_cost,
            layers,
            {**ends, **(heads or {})},
            hop_intra=hops[0],
            hop_inter=hops[1],
            devices_per_node=devices_per_node,
            forward_share=forward_share,
        )

    @classmethod
    def of_stages(cls, stages: Mapping[tuple[int, int], Cost], num_layers: int, source: str) -> "TimeModel":
        """From published seconds of a whole stage by (tp, pp)."""
        return cls(source, (1,) * num_layers, 0, stages=dict(stages))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that have coefficients."""
        return tuple(sorted({*self.layers, *(tp for tp, _ in self.stages)}))

    def knows(self, strategy: Strategy) -> bool:
        """Whether there are coefficients for a strategy."""
        return strategy.tp in self.layers or (strategy.tp, strategy.pp) in self.stages

    def kind(self, strategy: Strategy) -> Strategy:
        """A strategy that takes as long as the given one, the same for all of which that is known.

        Sequence parallelism sends the bytes of an all-reduce in two halves, so `+sp` changes what is held only.
        """
        return replace(strategy, sp=False) if strategy.sp else strategy

    def stage_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        """The cost of each stage of a replica.

        Raises:
            HotspaConfigError: there are no coefficients for the strategy.
            StrategyError: more stages than layers.
        """
        key = strategy.tp, strategy.pp, strategy.rc or self.recompute
        if key not in self._stage_costs:
            self._stage_costs[key] = self._sum_stages(*key)
        return self._stage_costs[key]

    @cached_property
    def _stage_costs(self) -> dict[tuple[int, int, int], tuple[Cost, ...]]:
        return {}

    def _sum_stages(self, tp: int, pp: int, rc: int) -> tuple[Cost, ...]:
        if (tp, pp) in self.stages:
            return (self.stages[tp, pp],) * pp
        if tp not in self.layers:
            known = [f"tp{known}" for known in sorted(self.layers)] + [f"tp{t}pp{p}" for t, p in sorted(self.stages)]
            raise HotspaConfigError(
                f"the time model ({self.source}) has no coefficients for tp{tp}pp{pp}",
                fix=f"measure it, or use one of {', '.join(known)}",
            )
        mean = sum(self.layer_costs) / len(self.layer_costs)
        found, factor = [], self._phase_factor(tp, pp) * (self.pipeline_factor if pp > 1 else 1.0)
        for stage, layers in enumerate(cut_stages(self.layer_costs, self.head_cost, pp)):
            cost = self.layers[tp] * (sum(self.layer_costs[layer] for layer in layers) / mean if mean else len(layers))
            if rc:  # one more forward pass of every rc-th layer
                cost *= 1 + self.forward_share / rc
            if stage == 0:
                cost += self.embeddings.get(tp, Cost())
            if stage == pp - 1:
                cost += self.heads.get(tp, Cost())
            found.append(cost * factor)
        return tuple(found)

    def _phase_factor(self, tp: int, pp: int) -> float:
        """A copy has few layers, and so few stages: of a deeper pipeline, the factor of the nearest depth."""
        factors = self.phase_factors
        if pp == 1 or (tp, pp) in factors:
            return factors.get((tp, pp), 1.0)
        depths = [depth for degree, depth in factors if degree == tp and depth > 1]
        return factors[tp, min(depths, key=lambda depth: abs(depth - pp))] if depths else 1.0

    def hop(self, strategy: Strategy) -> Hop:
        """What passing a hidden state to the next stage costs: neighbours are dp * tp ranks apart."""
        apart = strategy.dp * strategy.tp
        return self.hop_intra if apart < self.devices_per_node else self.hop_inter

    def replica_seconds(self, strategy: Strategy, packs: Packs) -> float:
        """Seconds of one replica while the others wait: its packs in the given order through its stages."""
        if strategy.tp * strategy.pp > self.slots:
            return self._shared(strategy, [packs], None)
        return self._alone(strategy, packs, None)

    def phase_seconds(self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None = None) -> float:
        """Seconds of a phase without its switch: those of the busiest replica, or of all where they share cores.

        Args:
            strategy: The strategy.
            replicas: The packs of each replica, in order.
            most_tokens: The most tokens in flight in a pipeline; None for no limit.
        """
        busy = [packs for packs in replicas if packs]
        if not busy:
            return 0.0
        if strategy.tp * strategy.pp * len(busy) > self.slots:
            return self.fixed_s + self._shared(strategy, busy, most_tokens)
        return self.fixed_s + max(self._alone(strategy, packs, most_tokens) for packs in busy)

    def _shared(self, strategy: Strategy, replicas: Sequence[Packs], most_tokens: int | None) -> float:
        if strategy.pp == 1:
            alone = [self._alone(strategy, packs, None) for packs in replicas]
            return shared_seconds(alone, strategy.tp, self.slots)
        piped = [self._pipeline(strategy, packs, most_tokens) for packs in replicas]
        return shared_pipelines(piped, strategy.tp, self.slots)

    def _alone(self, strategy: Strategy, packs: Packs, most_tokens: int | None) -> float:
        """Seconds of a replica whose ranks have a core each."""
        if strategy.pp > 1:
            return pipeline_seconds(self._pipeline(strategy, packs, most_tokens))
        (cost,) = self.stage_costs(strategy)
        squares = sum(length * length for pack in packs for length in pack)
        return cost.a * squares + cost.b * sum(map(sum, packs)) + cost.c * len(packs)

    def _pipeline(self, strategy: Strategy, packs: Packs, most_tokens: int | None) -> Pipeline:
        passes = choose_passes(self.schedule, [sum(pack) for pack in packs], strategy.pp, most_tokens)
        tokens = passes.tokens
        # what pads a pack is a sequence of its own
        squares = [
            sum([length * length for length in pack]) + (padded - sum(pack)) ** 2
            for pack, padded in zip(packs, tokens, strict=True)
        ]
        costs = self.stage_costs(strategy)
        share, hop = self.forward_share, self.hop(strategy)
        forward, backward = {}, {}
        for cost in set(costs):
            seconds = [cost.a * q + cost.b * s + cost.c for q, s in zip(squares, tokens, strict=True)]
            forward[cost], backward[cost] = [share * t for t in seconds], [(1 - share) * t for t in seconds]
        return Pipeline(
            [forward[cost] for cost in costs],
            [backward[cost] for cost in costs],
            [hop.seconds(s) for s in tokens],
            passes.reach,
            passes.depth,
        )

    # ------------------------------------------------------------------------------------------------- as a JSON file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as JSON."""
        write_json(path, KIND, SCHEMA_VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TimeModel":
        """Reads what `save` wrote.

        Raises:
            HotspaConfigError: the file is missing, torn, of another kind or version, or holds impossible numbers.
        """
        return cls.from_dict(read_json(path, KIND, SCHEMA_VERSION, _REMEDY), str(path))

    def to_dict(self) -> dict[str, object]:
        """Plain data: keys are written as tp4 or tp4pp2, costs as [a, b, c]."""
        return {
            "source": self.source,
            "units": "t = a * sum(l^2) + b * sum(l) + c seconds for one pack of sequences of l tokens",
            "layer_costs": list(self.layer_costs),
            "head_cost": self.head_cost,
            **{name: {f"tp{tp}": _row(c) for tp, c in sorted(getattr(self, name).items())} for name in _BY_TP},
            "stages": {f"tp{tp}pp{pp}": _row(c) for (tp, pp), c in sorted(self.stages.items())},
            "hop_intra": [self.hop_intra.latency_s, self.hop_intra.token_s],
            "hop_inter": [self.hop_inter.latency_s, self.hop_inter.token_s],
            "devices_per_node": self.devices_per_node,
            "forward_share": self.forward_share,
            "fixed_s": self.fixed_s,
            "slots": None if math.isinf(self.slots) else self.slots,
            "pipeline_factor": self.pipeline_factor,
            "phase_factors": {f"tp{tp}pp{pp}": factor for (tp, pp), factor in sorted(self.phase_factors.items())},
            "recompute": self.recompute,
            "schedule": self.schedule,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object], where: str = "time model") -> "TimeModel":
        """The inverse of `to_dict`.

        Raises:
            HotspaConfigError: a field is missing or impossible.
        """
        try:
            layer_costs = data["layer_costs"]
            if not isinstance(layer_costs, list) or not layer_costs:
                raise HotspaConfigError(f"layer_costs is {layer_costs!r} instead of a list", where=where, fix=_REMEDY)
            layers, heads, embeddings = (
                {key.tp: cost for key, cost in _costs(data[name], name, where).items()} for name in _BY_TP
            )
            model = cls(
                source=str(data["source"]),
                layer_costs=tuple(int(number(cost, "layer_costs", where, _REMEDY)) for cost in layer_costs),
                head_cost=int(number(data["head_cost"], "head_cost", where, _REMEDY)),
                layers=layers,
                heads=heads,
                embeddings=embeddings,
                stages={(key.tp, key.pp): cost for key, cost in _costs(data["stages"], "stages", where).items()},
                hop_intra=Hop(*_numbers(data["hop_intra"], 2, "hop_intra", where)),
                hop_inter=Hop(*_numbers(data["hop_inter"], 2, "hop_inter", where)),
                devices_per_node=int(
                    number(data["devices_per_node"], "devices_per_node", where, _REMEDY, positive=True)
                ),
                forward_share=number(data["forward_share"], "forward_share", where, _REMEDY),
                fixed_s=number(data["fixed_s"], "fixed_s", where, _REMEDY),
                slots=math.inf
                if data.get("slots") is None
                else number(data["slots"], "slots", where, _REMEDY, positive=True),
                pipeline_factor=number(
                    data.get("pipeline_factor", 1.0), "pipeline_factor", where, _REMEDY, positive=True
                ),
                phase_factors={
                    (key.tp, key.pp): number(factor, called, where, _REMEDY, positive=True)
                    for key, (called, factor) in _by_degrees(
                        data.get("phase_factors", {}), "phase_factors", where
                    ).items()
                },
                recompute=int(number(data.get("recompute", 0), "recompute", where, _REMEDY)),
                schedule=str(data.get("schedule", "auto")),
            )
        except KeyError as error:
            raise HotspaConfigError(f"the field {error} is missing", where=where, fix=_REMEDY) from None
        if model.forward_share > 1 or not (model.layers or model.stages) or model.schedule not in SCHEDULES:
            raise HotspaConfigError(
                "there are no coefficients, the forward share is above 1, or the schedule unknown",
                where=where,
                fix=_REMEDY,
            )
        return model


_BY_TP = ("layers", "heads", "embeddings")
_REMEDY = "delete the file and calibrate again"


def _row(cost: Cost) -> list[float]:
    return [cost.a, cost.b, cost.c]


def _numbers(value: object, count: int, name: str, where: str) -> list[float]:
    if not isinstance(value, list) or len(value) != count:
        raise HotspaConfigError(f"{name} is {value!r} instead of {count} numbers", where=where, fix=_REMEDY)
    return [number(entry, name, where, _REMEDY) for entry in value]


def _by_degrees(value: object, name: str, where: str) -> dict[Strategy, tuple[str, object]]:
    """What stands for each kind of strategy: its name in messages, and the value."""
    if not isinstance(value, dict):
        raise HotspaConfigError(f"{name} is {value!r} instead of numbers by degree", where=where, fix=_REMEDY)
    found = {}
    for key, entry in value.items():
        try:
            found[Strategy.parse(str(key))] = f"{name} of {key}", entry
        except StrategyError as error:
            raise HotspaConfigError(f"{name} holds {key!r}: {error.what}", where=where, fix=_REMEDY) from None
    return found


def _costs(value: object, name: str, where: str) -> dict[Strategy, Cost]:
    rows = _by_degrees(value, name, where)
    return {key: Cost(*_numbers(row, 3, called, where)) for key, (called, row) in rows.items()}
