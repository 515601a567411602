"""Whole phases against the sum of their parts: by what the seconds of each kind of strategy are to be multiplied.

The time model puts a phase together from packs that were measured one by one, all ranks alike. How ranks wait for one
another, share cores and caches when packs are of different lengths is not in them, and is not the same for replicas,
stages and tensor parallelism. A calibration therefore runs some whole phases under every strategy; here they are
compared with what the model says of them. Plain data, no torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import geometric_mean

from hf_hotspa.costs.measurements import ModelFacts, PhaseSample
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.strategy import Strategy

_LARGEST = 2.0
"""The most that a factor multiplies or divides by: beyond, something else went on while it was measured."""


def phase_factors(
    time: TimeModel, samples: Iterable[PhaseSample], model: ModelFacts, depth: Callable[[int], float] = float
) -> dict[tuple[int, int], float]:
    """Measured over predicted seconds by (tp, pp), the geometric mean of the samples of each.

    Args:
        time: Made of packs alone, for any number of layers.
        samples: Measured phases of copies with few layers; those that the time model has no coefficients for are left
            out.
        model: What is known of the model, whose copies are cut into stages as the whole is.
        depth: How many mean layers of the model a copy's are.
    """
    ratios: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        strategy = Strategy.parse(sample.strategy)
        if time.knows(strategy):
            layers, head = (model.layer_parameters,) * sample.num_layers, model.vocab_size * model.hidden_size
            share = depth(sample.num_layers) / sample.num_layers
            costs = {tp: cost * share for tp, cost in time.layers.items()}
            copy = replace(time, cut=StageCosts(layers, head), layers=costs)
            predicted = copy.phase_seconds(strategy, sample.replicas)
            ratios.setdefault((strategy.tp, strategy.pp), []).append(sample.seconds / predicted)
    means = {key: geometric_mean(of_key) for key, of_key in ratios.items()}
    return {key: min(max(mean, 1 / _LARGEST), _LARGEST) for key, mean in means.items()}
