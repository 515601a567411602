"""Two stages on each rank of a pipeline (`+v2`) in a plan that is found: tried last, for its pipelines and the best
single one alone.

They change neither what is moved nor, by much, what is held, so the strategies and edges that are best without are taken to
be the best with them; looking at every pipeline both ways would take a search twice as long.
"""

from collections.abc import Callable
from dataclasses import replace

from hf_hotspa.search.capacities import Capacities
from hf_hotspa.strategy import Strategy

Phases = tuple[tuple[Strategy, int, int, int], ...]
"""`(strategy, low, high, pack tokens)` of each phase, by length."""


def can_go_round(strategy: Strategy, num_layers: int) -> bool:
    """Whether the ranks of its pipeline can have two stages each."""
    return strategy.can_go_round and 2 * strategy.pp <= num_layers


def going_round(
    phases: Phases,
    margin: float,
    num_layers: int,
    capacities: Capacities,
    switch: dict[Strategy, float],
    seconds: Callable[[Phases], float],
) -> Phases:
    """The same phases, with two stages on each rank of the pipelines that are faster so and fit.

    Args:
        margin: How much faster a phase must be, as a share.
        switch: Load and return seconds of each strategy; those that are tried are added, like their own with one stage.
        seconds: Of phases, together.
    """
    for index, (strategy, low, high, tokens) in enumerate(phases):
        if not can_go_round(strategy, num_layers):
            continue
        twin = replace(strategy, v=2)
        switch[twin] = switch[strategy]
        arena = max(capacities.arena(other) for other in (twin, *(phase[0] for phase in phases)))
        tokens = min(tokens, capacities.pack_tokens(twin, arena, high))
        trial = (*phases[:index], (twin, low, high, tokens), *phases[index + 1 :])
        fits = all(
            end <= capacities.tokens(own, arena) and 0 < packs <= capacities.pack_tokens(own, arena, end)
            for own, _, end, packs in trial
        )
        if fits and seconds(trial) < seconds(phases) - margin * seconds((phases[index],)):
            phases = trial
    return phases
