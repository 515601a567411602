"""The partition of PipeDream's planner: stages with unequal numbers of replicas (Narayanan et al., SOSP'19, section 3.1).

`hf-hotspa formulas --partition` shows it beside the best partition that layouts can run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hf_hotspa.costs import formulas
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy


@dataclass(frozen=True)
class Partition:
    """Stages as (layers, replicas), and the steady-state seconds of a micro-batch (of the slowest stage or send)."""

    seconds: float
    stages: tuple[tuple[range, int], ...]


_Candidate = tuple[float, int, tuple[tuple[int, int], ...]]
"""Seconds, number of stages, and (last layer + 1, replicas) of each."""


def partition(
    layers: Sequence[float], machines: int, sends: Sequence[float] = (), syncs: Sequence[Sequence[float]] = ()
) -> Partition:
    """Finds the best partition over all cuts and replications: the programme of the paper.

        T(i -> j, m) = max(sum of layers i..j, sum of their syncs) / m
        A(j, m) = min of T(1 -> j, m) and min over i, m' of max(A(i, m - m'), 2 C_i, T(i + 1 -> j, m'))

    Uses every machine. Ties: the fewest stages, then the earliest cuts. Raises `HotspaConfigError`: there is no layer
    or no machine.

    Args:
        layers: Seconds of each layer, T_l.
        sends: C_l, seconds of sending the hidden state after each layer; free if empty.
        syncs: `syncs[l][m - 1]`: W_l^m, seconds of summing the gradients of a layer over m replicas; free if empty.
    """
    count = len(layers)
    if not count or machines < 1:
        raise HotspaConfigError(f"{count} layers on {machines} machines do not form a pipeline")
    prefix = [0.0, *accumulate(layers)]
    synced = [[0.0, *accumulate(sync[m] for sync in syncs)] if syncs else [0.0] * (count + 1) for m in range(machines)]

    def stage(start: int, stop: int, m: int) -> float:
        return max(prefix[stop] - prefix[start], synced[m - 1][stop] - synced[m - 1][start]) / m

    best: dict[tuple[int, int], _Candidate] = {}
    for j in range(1, count + 1):
        for m in range(1, machines + 1):
            candidate: _Candidate = (stage(0, j, m), 1, ((j, m),))
            for i in range(1, j):
                passing = 2 * sends[i - 1] if sends else 0.0
                for own in range(1, m):
                    before = best[i, m - own]
                    slowest = max(before[0], passing, stage(i, j, own))
                    if slowest <= candidate[0]:
                        candidate = min(candidate, (slowest, before[1] + 1, (*before[2], (j, own))))
            best[j, m] = candidate
    seconds, _, ends = best[count, machines]
    starts = [0, *(stop for stop, _ in ends[:-1])]
    return Partition(seconds, tuple((range(start, stop), m) for start, (stop, m) in zip(starts, ends, strict=True)))


@dataclass(frozen=True)
class UnequalReplication:
    """What unequal replication of stages would give, beside what layouts can run."""

    best: Partition  # the best partition of the layers on all devices, each stage with its own replication
    equal_seconds: float  # of a micro-batch, with the best single dp for all stages
    equal: tuple[int, int]  # `(p, d)` of that

    def to_dict(self) -> dict[str, Any]:
        stages = [{"layers": [s.start, s.stop - 1], "replicas": m} for s, m in self.best.stages]
        made = {
            "seconds": self.best.seconds,
            "stages": stages,
            "equal_seconds": self.equal_seconds,
            "equal": self.equal,
        }
        return {"pipedream": made}

    def __str__(self) -> str:
        stages = ", ".join(f"layers {s.start}-{s.stop - 1} on {m}" for s, m in self.best.stages)
        pp, dp = self.equal
        return (
            f"PipeDream's partition, t = 1: {self.best.seconds * 1e3:,.3g} ms a micro-batch in the steady state ({stages}); "
            f"with one d for all stages, which is what layouts can run, {self.equal_seconds * 1e3:,.3g} ms (p {pp}, d {dp})"
        )


def of_formulas(setup: Setup, micro: int, tokens: int) -> UnequalReplication:
    """Runs PipeDream's dynamic programme for a model on a cluster, without tensor parallelism, by our time model.

    Layer seconds are forward and backward; the first layer includes the embedding, the last one the head. A pass
    between stages uses the links between nodes if there are several; a stage of m replicas sums the gradients of its
    layers by a ring.
    """
    shape, time, hardware = setup.model.shape, setup.cost.time, setup.hardware
    assert hardware is not None
    whole = Strategy(pp=shape.num_layers)
    pack = (tokens,) * micro
    seconds = [cost.of(pack) for cost in time.stage_costs(whole)]
    hop = time.hop_inter if setup.nodes > 1 else time.hop_intra
    sends = [hop.seconds(micro * tokens)] * shape.num_layers
    link = hardware.inter_bandwidth if setup.nodes > 1 else hardware.intra_bandwidth
    sync = [
        formulas.data_seconds(formulas.ELEMENT_BYTES * shape.layer_parameters, link, m)
        for m in range(1, setup.world_size + 1)
    ]
    best = partition(seconds, setup.world_size, sends, [sync] * shape.num_layers)
    costs = StageCosts(tuple(round(s * 1e9) for s in seconds), sends=tuple(round(s * 1e9) for s in sends))
    equal = []
    for pp in range(1, shape.num_layers + 1):
        if setup.world_size % pp:
            continue
        dp = setup.world_size // pp
        stages = costs.stages(pp)
        sums = max(len(stage) for stage in stages) * sync[dp - 1] / dp
        passing = 2 * sends[0] if pp > 1 else 0.0
        equal.append((max(max(costs.partition_costs(stages)) * 1e-9 / dp, sums, passing), (pp, dp)))
    return UnequalReplication(best, *min(equal))
