"""The last part of a calibration: whole phases under every strategy, to compare with what single packs predict.

Two mini-batches of as many tokens: one with a sequence as long as the longest pack among short ones, which is what layouts
differ in most, and one of equal sequences. `costs.phase_factors` says what becomes of the seconds.
"""

from collections.abc import Sequence

import torch

from hf_hotspa.calibrate.measuring import Measuring
from hf_hotspa.calibrate.probe import Probe
from hf_hotspa.costs.measurements import PhaseSample
from hf_hotspa.packing.bucketing import pack_sequences
from hf_hotspa.strategy import Strategy


def mixed_lengths(longest: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of both mini-batches; half a longest pack for every rank, and at least one."""
    short, middle = max(1, longest // 16), max(1, longest // 8)
    total = max(2, world_size // 2) * longest
    return (longest, *[short] * ((total - longest) // short)), (middle,) * (total // middle)


def time_phases(
    probe: Probe, strategies: Sequence[Strategy], longest: int, measuring: Measuring
) -> tuple[PhaseSample, ...]:
    """Measures the phases; the fastest counts. Collective.

    Args:
        probe: Has all these strategies.
    """
    if len(strategies) < 2:  # nothing to choose between
        return ()
    measuring.say(f"whole phases under {len(strategies)} strategies")
    world_size, quadratic = strategies[0].world_size, probe.engine.description.shape.quadratic_cost
    works: dict[Strategy, list[tuple[tuple[tuple[int, ...], ...], ...]]] = {s: [] for s in strategies}
    for lengths in mixed_lengths(longest, world_size):
        for s, mine in works.items():
            replicas = pack_sequences(lengths, capacity=longest, dp=s.dp, pp=s.pp, quadratic_cost=quadratic)
            if all(replicas):
                mine.append(tuple(tuple(tuple(lengths[i] for i in pack) for pack in packs) for packs in replicas))
    measured = []
    for _ in range(measuring.rounds + 1):
        values = []
        for strategy, mine in works.items():
            probe.load(strategy)
            values += [probe.run_phase(strategy, packs) for packs in mine]
            probe.return_gradients(strategy)
        measured.append(values)
    slowest = torch.stack([measuring.agreement.gather(values) for values in measured[1:]]).amax(
        1
    )  # [round, measurement]
    seconds = iter(slowest.amin(0).tolist())
    return tuple(
        PhaseSample(str(s), probe.num_layers, packs, next(seconds)) for s, mine in works.items() for packs in mine
    )
