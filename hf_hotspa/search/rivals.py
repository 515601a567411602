"""What people run beside data parallelism, and what a user writes, priced like a plan: packed as well as it can be.

Owns `people_run` (tensor parallelism in a node with replicas, Megatron-like degrees that never change, and dynamic context parallelism:
one layout, whose replicas share packs where rows are long) and `priced` (strategies, or buckets, in the words of
`hotspa_strategies`). Times and memory are those of the plan beside them. Plain data, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_hotspa.costs.breakdown import size
from hf_hotspa.costs.model import CostModel
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError, OverlongError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.search.offers import make_evaluator, sharing_layouts
from hf_hotspa.search.search import mini_batches, search
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, parse_buckets

MEGATRON, IN_NODE, DYNAMIC = "Megatron-like dp x tp x pp", "tp in a node + dp", "dynamic context parallelism"


@dataclass(frozen=True)
class Rival:
    """Something to compare a plan with.

    Args:
        buckets: How it runs; of what does not fit what was asked for, if anything.
        seconds: Predicted mean seconds of a mini-batch, switches included; None where it does not fit.
        why: Why not.
    """

    name: str
    buckets: tuple[Bucket, ...]
    seconds: float | None
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        text = ",".join(map(str, self.buckets))
        return {"name": self.name, "hotspa_strategies": text, "seconds": self.seconds, "why": self.why}


@dataclass(frozen=True)
class Pricing:
    """Prices strategies for some lengths.

    Args:
        lengths: In random order.
        longest: The longest sequence that must fit.
    """

    cost: CostModel
    capacities: Capacities
    lengths: Sequence[int]
    mini_batch_size: int
    longest: int

    @cached_property
    def evaluator(self) -> Evaluator:
        """Of these lengths."""
        return make_evaluator(self.lengths, self.cost, self.mini_batch_size, self.longest)

    def best(self, name: str, strategies: Sequence[Strategy], max_phases: int = 1) -> Rival:
        """The fastest that can be made of some strategies."""
        time, switch = self.cost.time, self.cost.switch_seconds(strategies)
        try:
            choice = search(
                self.lengths, strategies, time, self.capacities, switch, mini_batch_size=self.mini_batch_size,
                longest=self.longest, quadratic_cost=self.cost.sizes.shape.quadratic_cost, max_phases=max_phases,
                evaluator=self.evaluator,
            )  # fmt: skip
        except DeviceMemoryError as error:
            return Rival(name, (), None, error.what)
        return Rival(name, choice.buckets, choice.seconds)

    def buckets(self, name: str, buckets: tuple[Bucket, ...]) -> Rival:
        """These buckets as they are: every sequence goes to the first one that is long enough.

        Raises:
            OverlongError: sequences are longer than the last one.
        """
        if buckets[-1].longest < max(self.lengths):
            raise OverlongError(
                f"--strategies {name!r} takes sequences of {buckets[-1].longest} tokens, and there are some of {max(self.lengths)}",
                fix="let the last bucket take them, or give --longest and --overlong",
            )
        limit, strategies = self.capacities.limit_bytes, [bucket.strategy for bucket in buckets]
        for bucket, need in zip(buckets, self.cost.rank_bytes(buckets), strict=True):
            if limit is not None and need.total > limit:
                why = f"{bucket} takes {size(need.total)} of a device, and may {size(limit)}"
                return Rival(name, buckets, None, why)
        batches, weights = mini_batches(self.lengths, self.mini_batch_size, max(self.lengths))
        switch, quadratic = self.cost.switch_seconds(strategies), self.cost.sizes.shape.quadratic_cost
        evaluator = Evaluator(batches, self.cost.time, switch, quadratic, weights)
        return Rival(
            name, buckets, sum(evaluator.phase(b.strategy, b.low, b.longest, b.pack_tokens).seconds for b in buckets)
        )

    def written(self, text: str, world_size: int, schedule: str = "auto") -> Rival:
        """Strategies in the words of `hotspa_strategies`: buckets as they are, or names alone, of which the best edges and packs are
        found.

        Raises:
            HotspaError: they are none, or cannot run this model on so many devices.
        """
        shape: ModelShape = self.cost.sizes.shape
        as_given = ":" in text
        named = [Strategy.parse(part.strip()) for part in text.split(",")] if not as_given else []
        known = parse_buckets(text) if as_given else tuple(Bucket(s, 1 + i, 1 + i, i) for i, s in enumerate(named))
        check_buckets(known, world_size, shape)
        RunOptions(schedule).check(known, shape)
        for bucket in known:
            if not self.cost.time.knows(bucket.strategy):
                raise HotspaConfigError(
                    f"{bucket.strategy} was not measured",
                    fix="calibrate it, or use --hardware in the place of --calibration",
                )
        return self.buckets(text, known) if as_given else self.best(text, named, len(named))


def people_run(pricing: Pricing, strategies: Sequence[Strategy], devices_per_node: int) -> tuple[Rival, ...]:
    """What a user would run in the place of a plan, beside data parallelism (`baselines`).

    Args:
        strategies: All that may run.
    """
    # they have sequence parallelism and recomputation; what is sharded or in chunks is no part of them
    plain = [s for s in strategies if s.is_common]
    whole = [s for s in plain if s.cp == 1]
    in_node = [s for s in whole if s.pp == 1 and 1 < s.tp <= devices_per_node]
    rivals = [pricing.best(IN_NODE, in_node)] if in_node else []
    rivals += [pricing.best(MEGATRON, megatron)] if (megatron := [s for s in whole if s.tp * s.pp > 1]) else []
    if any(s.cp > 1 for s in plain):
        rivals.append(_dynamic(pricing, plain))
    return tuple(rivals)


def _dynamic(pricing: Pricing, plain: Sequence[Strategy]) -> Rival:
    """One layout, whose replicas share the packs of long rows: the way of Megatron and verl."""
    layouts = sharing_layouts(plain, pricing.cost, pricing.longest, pricing.capacities.tokens, pricing.evaluator)
    priced = [pricing.best(DYNAMIC, own, max_phases=3) for own in layouts]
    known = [rival for rival in priced if rival.seconds is not None]
    none = Rival(DYNAMIC, (), None, f"no layout holds a sequence of {pricing.longest} tokens")
    return min(known, key=lambda rival: rival.seconds or 0.0, default=none)
