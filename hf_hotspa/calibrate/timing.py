"""The timing of a calibration: seconds of packs, of switches and of pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_hotspa.calibrate.measuring import Measuring
from hf_hotspa.calibrate.probe import Probe, repetitions
from hf_hotspa.costs.fitting import Sample
from hf_hotspa.costs.measurements import SwitchSample
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.model.specs import ModelDescription, dtype_name

_PIPELINED = 2
"""Packs that a replica without stages runs to compare pipelines with, which run twice as many."""

_WARM_UP_PACKS = 2
"""Of each copy, in the round before the first: short ones do, and long ones take long."""

_GRADIENT_BYTES = 4

_MOST_IDLE = 1.5
"""By how much waiting for one another may raise the cost of packs on shared cores; beyond, others held the cores."""


@dataclass(frozen=True)
class Timing:
    """What was measured, the same on every rank.

    Args:
        pipeline_factor: By how much packs cost more in stages, where ranks share cores; else 1.
    """

    samples: tuple[Sample, ...]
    switches: tuple[SwitchSample, ...]
    pipeline_factor: float


def time_packs(
    probes: Sequence[Probe], degrees: Sequence[int], packs: Sequence[Sequence[tuple[int, ...]]], measuring: Measuring
) -> Timing:
    """Measures packs and switches. Collective.

    The seconds of a pack are those of the slowest rank's clock; where ranks share cores what it costs on a core
    (`_on_shared_cores`).

    Args:
        probes: One for each copy of the model; the last has most layers.
        degrees: Tensor-parallel degrees.
        packs: The packs of each copy.
    """
    share, rounds = measuring.share, measuring.rounds
    longest = max(map(max, packs[-1]))
    pipeline = probes[-1].pipeline if share < 1 else None
    measured: list[list[tuple[float, float]]] = []
    for index in range(-1, rounds):
        measuring.say(f"round {index + 1} of {rounds}, packs of up to {max(map(max, packs[0]))} tokens")
        values: list[tuple[float, float]] = []
        for probe, mine in zip(probes, packs, strict=True):
            for strategy in map(probe.strategies.__getitem__, degrees):
                values.append((probe.load(strategy), 0.0))
                run = mine if index >= 0 else mine[:_WARM_UP_PACKS]
                values += [probe.run(strategy, pack, repetitions(pack, longest)) for pack in run]
                values.append((probe.return_gradients(strategy), 0.0))
        if pipeline:
            values += _both_ways(probes[-1], (longest // 4,) * 4)
        if index >= 0:  # the first round warms caches up
            measured.append(values)
        if measured and measuring.is_late():
            break
    gathered = torch.stack([measuring.agreement.gather([n for pair in values for n in pair]) for values in measured])
    table = gathered.unflatten(2, (-1, 2))  # [round, rank, measurement, by the clock or on a core]
    clock, on_core = table[..., 0].amax(1), table[..., 1].mean(1)
    slowest = _lower_quartile(clock)
    factor = 1.0
    if pipeline:
        flat, staged = _lower_quartile(on_core[:, -2:]).tolist()
        factor = min(max(1.0, staged / flat), _MOST_IDLE)
    costs = iter((slowest if share >= 1 else _on_shared_cores(clock, on_core, share)).tolist())
    by_clock = iter(slowest.tolist())
    samples, switches = [], []
    for probe, mine in zip(probes, packs, strict=True):
        for tp in degrees:
            load_s, *_, return_s = [next(by_clock) for _ in range(len(mine) + 2)]
            _, *pack_s, _ = [next(costs) for _ in range(len(mine) + 2)]
            samples += [Sample(tp, probe.num_layers, p, s, with_ends=True) for p, s in zip(mine, pack_s, strict=True)]
            numel = _moved(probe.engine.description)
            switches.append(SwitchSample(str(probe.strategies[tp]), numel, load_s, return_s))
    return Timing(tuple(samples), tuple(switches), factor)


def _moved(description: ModelDescription) -> int:
    """Parameters that take as many bytes in a switch as a model of which all are trained: codes and scales take fewer."""
    weights, segments = dtype_bytes(dtype_name(description.compute_dtype)), description.vector.segments
    gradients = sum(segment.numel for segment in segments if segment.trainable)
    loaded = sum(segment.numel * dtype_bytes(segment.dtype) for segment in segments)
    return round((loaded + _GRADIENT_BYTES * gradients) / (weights + _GRADIENT_BYTES))


def _both_ways(probe: Probe, pack: tuple[int, ...]) -> list[tuple[float, float]]:
    """The same packs without stages, and in two stages; the cost of all of them on this rank."""
    assert probe.pipeline is not None
    pairs = []
    for strategy in (probe.strategies[1], probe.pipeline):
        times = _PIPELINED * strategy.pp  # half the replicas, so each has twice the packs
        probe.load(strategy)
        clock, on_core = probe.run(strategy, pack, times)
        probe.return_gradients(strategy)
        pairs.append((clock * times, on_core * times))
    return pairs


def _lower_quartile(rounds: Tensor) -> Tensor:
    """Of every measurement, over the rounds: other programs only ever make things slower."""
    return rounds.quantile(0.25, 0, interpolation="lower")


def _on_shared_cores(clock: Tensor, on_core: Tensor, share: float) -> Tensor:
    """What packs cost where ranks share cores.

    That is what a rank's threads spend on a core: the cost is then told apart from how long the rank waited for a core.
    But ranks of one tensor-parallel group also leave cores idle, while they wait for one another; this shows in the
    fastest round by the clock, and is counted up to a limit.

    Args:
        clock: Seconds by the clock of the slowest rank, [rounds, measurements].
        on_core: Seconds on a core, the mean over ranks, [rounds, measurements].
    """
    cost = _lower_quartile(on_core)
    return torch.maximum(cost, torch.minimum(clock.amin(0) * share, _MOST_IDLE * cost))
