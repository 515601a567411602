"""What a search is asked: lengths, how many of them a mini-batch has, and the models that price and limit plans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.strategy import Strategy

_SEQUENCES_EVALUATED = 2048
_RARE = 0.01  # the weight of a mini-batch with a longest sequence that the histogram does not show


@dataclass(frozen=True)
class Question:
    """Lengths in tokens to plan for, and what decides."""

    cost: CostModel
    capacities: Capacities
    lengths: Sequence[int]  # in random order, each at least 1: a sample of the data set
    mini_batch_size: int | None = None  # sequences of a mini-batch; None for all lengths
    longest: int = 0  # the longest sequence that must fit, if longer than the given ones

    @property
    def shape(self) -> ModelShape:
        return self.cost.sizes.shape

    @property
    def schedule(self) -> str:
        return self.cost.memory.options.schedule

    def holds(self, strategy: Strategy) -> bool:
        """Whether a strategy holds the longest sequence, alone in its pool."""
        return self.capacities.tokens(strategy) >= self.longest

    @cached_property
    def batches(self) -> tuple[list[list[int]], list[float]]:
        """Mini-batches of these lengths, and their weights: see `mini_batches`."""
        return mini_batches(self.lengths, self.mini_batch_size, max(self.longest, *self.lengths))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Prices phases for the search and all alternatives, so that nothing is simulated twice."""
        batches, weights = self.batches
        return Evaluator(batches, self.cost.time, {}, self.shape.quadratic_cost, weights)

    def price(self, strategies: Iterable[Strategy]) -> Evaluator:
        """Returns the evaluator, which knows the switches of these strategies."""
        self.evaluator.switch.update(self.cost.switch_seconds(strategies))
        return self.evaluator


def mini_batches(sample: Sequence[int], size: int | None, longest: int) -> tuple[list[list[int]], list[float]]:
    """Returns mini-batches of `size` lengths (None: all) of a random sample, and their weights: equal, plus a rare one
    with only a longest sequence, if all others are shorter."""
    size = size or len(sample)
    count = max(1, min(len(sample) // size, _SEQUENCES_EVALUATED // size))
    stream = cycle(sample)  # repeats a histogram that is smaller than a mini-batch
    batches, weights = [list(islice(stream, size)) for _ in range(count)], [1 / count] * count
    if longest > max(map(max, batches)):
        batches.append([longest])
        weights.append(_RARE)
    return batches, weights
