"""Seconds of a switch: loading a strategy's weights from the master store, and returning its gradients.

Estimated from sizes alone, for the many strategies of a search. The fluid port model (`plan/switch_plan.py`) is a lower
bound: real transfers reach `efficiency` of its speed, and every switch has a fixed cost.

Fully sharded strategies (`+z2`, `+z3`) move their units during computation instead (`Streams`). For every pack they
load all units for the forward and the backward pass (`+z3`), and return their gradients (`+z2`, `+z3`), except for
units that are already present (`plan.units`). Transfers of all stages run one after the other. They overlap with their
pass, unless ranks share cores. Replicas run in lockstep with the slowest, pack by pack.

`+z2` and `+z3` are never predicted to be faster than the same strategy without, load and return included: the only
reason to choose them is memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.plan.switch_plan import nic_bandwidth
from hf_hotspa.strategy import Strategy

EFFICIENCY = 0.6  # default share of the port model's speed without measurements; published systems reach 0.25 to 0.6
_MORE = 1.01  # units need more messages than complete layouts


def estimate(
    strategies: Iterable[Strategy],
    sizes: ModelSizes,
    cluster: Cluster,
    *,
    efficiency: float = EFFICIENCY,  # measured speed relative to the port model
    fixed_s: float = 0.0,  # fixed seconds of a load and a return
) -> dict[Strategy, float]:
    """Estimates the load and return seconds of each strategy from the size of the model.

    A rank receives 1 / (tp pp) of the model, less the share that it owns. Between nodes, a relayed load sends what a
    node lacks across its NICs once: the tp shards and stages in the node, less what its devices own. Returning
    gradients is the reverse flow, with a node's replicas summed before the NIC. Within about a factor of two of the
    plans. `+z2` returns nothing and `+z3` also loads nothing, as units move during the phase (`Streams`). Raises
    `HotspaConfigError`: the efficiency is not between 0 and 1.
    """
    if not 0 < efficiency <= 1:
        raise HotspaConfigError(f"an efficiency of {efficiency} is impossible", fix="use a share between 0 and 1")
    moved = moved_bytes(sizes)
    return {s: port_seconds(s, moved[s.z], cluster) / efficiency + fixed_s for s in strategies}


def moved_bytes(sizes: ModelSizes) -> dict[int, float]:
    """Returns the bytes of the complete model that a load and a return move, by the strategy's `z`."""
    gradient_bytes = dtype_bytes(sizes.gradients.moved(sizes.compute_dtype))
    loaded, returned = sizes.weight_bytes, sizes.num_trained * gradient_bytes
    return {0: loaded + returned, 2: loaded, 3: 0}


def port_seconds(strategy: Strategy, num_bytes: float, cluster: Cluster) -> float:
    """Returns the seconds of a switch at full link speed, for `num_bytes` of the complete model on the wire. Links
    inside and between nodes work at the same time; see `estimate`."""
    return max(seconds_of_links(strategy, num_bytes, cluster))


def seconds_of_links(strategy: Strategy, num_bytes: float, cluster: Cluster) -> tuple[float, float]:
    """Returns the seconds at full speed of links inside nodes, and of links between nodes. Args: as for
    `port_seconds`."""
    own = 1 / cluster.world_size
    inside = num_bytes / (strategy.tp * strategy.pp) * (1 - own) / cluster.intra_bandwidth
    if cluster.num_nodes == 1:
        return inside, 0.0
    per_node = cluster.devices_per_node
    shards = min(1.0, per_node / strategy.tp) / strategy.pp
    stages = max(1.0, per_node / (strategy.dp * strategy.cp * strategy.tp))
    missed = num_bytes * min(1.0, shards * stages) * (1 - per_node * own)
    return inside, missed / per_node / nic_bandwidth(cluster)


@dataclass(frozen=True)
class StreamedPack:
    """A pack of the slowest replica, or its chunks: seconds of all forward and of all backward passes, and the number
    of each that load units."""

    forward_s: float
    backward_s: float
    forwards: int = 1
    backwards: int = 1


@dataclass(frozen=True)
class Streams:
    """The transfers of units, at `efficiency` times the speed of the port model, as for switches."""

    sizes: ModelSizes
    cluster: Cluster
    efficiency: float = EFFICIENCY

    def load_s(self, strategy: Strategy) -> float:
        """Returns the seconds of loading all units of all stages once; 0 if weights are not sharded."""
        if strategy.z != 3:
            return 0.0
        seconds = port_seconds(strategy, self.sizes.weight_bytes, self.cluster)
        return strategy.pp * _MORE * seconds / self.efficiency

    def return_s(self, strategy: Strategy) -> float:
        """Returns the seconds of returning the gradients of all units of all stages once."""
        num_bytes = self.sizes.num_trained * dtype_bytes(self.sizes.gradients.moved(self.sizes.compute_dtype))
        return strategy.pp * _MORE * port_seconds(strategy, num_bytes, self.cluster) / self.efficiency

    def pack_s(self, strategy: Strategy, forwards: int = 1, backwards: int = 1) -> float:
        """Returns the seconds of a pack's transfers, less two units that are present when passes change direction."""
        loads = self.load_s(strategy)
        kept = min(1.0, 4 / (self.sizes.shape.num_layers + 2)) * loads
        return max(0.0, (forwards + backwards) * loads - kept) + backwards * self.return_s(strategy)

    def once_s(self, strategy: Strategy) -> float:
        """Returns the switch seconds that this strategy saves compared with the same one without `+z2` or `+z3`."""
        return self.load_s(strategy) + self.return_s(strategy)

    def seconds(self, strategy: Strategy, turns: Iterable[StreamedPack], slots: float) -> float:
        """Returns the seconds of the packs of a phase, transfers included. `turns`: each pack, of the slowest replica.
        `slots`: how many ranks compute at a time if ranks share cores, otherwise infinite."""
        turns = list(turns)
        load, back = self.load_s(strategy), self.return_s(strategy)
        alone = sum(turn.forward_s + turn.backward_s for turn in turns)
        if math.isfinite(slots):
            return alone + max(
                self.once_s(strategy), sum(self.pack_s(strategy, t.forwards, t.backwards) for t in turns)
            )
        streamed = 0.0
        for turn in turns:
            streamed += max(turn.forward_s, turn.forwards * load)
            streamed += max(turn.backward_s, turn.backwards * (load + back))
        units = self.sizes.shape.num_layers + 2  # the first load and the last return overlap with nothing
        return max(streamed + (load + back) / units, alone + self.once_s(strategy))
