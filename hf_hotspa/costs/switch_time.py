"""Seconds of a switch: loading a strategy's weights from the master store, and returning its gradients.

Estimated from sizes alone, for the many strategies that a search looks at. The fluid port model (`plan/ports.py`) is a
lower bound: real transfers reach a part of it, given as `efficiency`, and every switch has a fixed cost.

Fully sharded strategies (`+z2`, `+z3`) move their units while they compute instead (`Streams`). Every pack loads all units for
its forward pass and for its backward pass (`+z3`), and returns their gradients (`+z2`, `+z3`), but for the units that are
there already (`plan.units`). Transfers of all stages go one after the other. They hide behind the pass they belong to, as
far as that is long enough; where ranks share cores nothing hides. Replicas keep step with the slowest, pack by pack.

Promises: a strategy with `+z2` or `+z3` is never said to be faster than the same one without, load and return included,
so that nothing is chosen for it but the memory. Plain data, no torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.plan.ports import nic_bandwidth
from hf_hotspa.strategy import Strategy

EFFICIENCY = 0.6
"""Share of the port model's speed where nothing was measured; published systems reach 0.25 to 0.6."""
_MORE = 1.01
"""Units travel in more messages than whole layouts."""


def estimate(
    strategies: Iterable[Strategy],
    sizes: ModelSizes,
    cluster: Cluster,
    *,
    efficiency: float = EFFICIENCY,
    fixed_s: float = 0.0,
) -> dict[Strategy, float]:
    """Load and return seconds of each strategy, from the size of the model alone.

    A rank receives its 1 / (tp pp) of the model but for the share that it owns itself. Between nodes a relayed load
    brings what a node lacks across its NICs once: the tp shards and stages that meet in the node, but for what its
    devices own. Returning gradients is the same flow backwards, the sums of a node's replicas made before the NIC.
    Within about a factor of two of the plans. With `+z2` nothing is returned, and with `+z3` nothing loaded either: units are
    moved while the phase computes (`Streams`).

    Args:
        efficiency: Measured speed over that of the port model.
        fixed_s: Seconds of a load and a return beside their bytes.

    Raises:
        HotspaConfigError: the efficiency is not between 0 and 1.
    """
    if not 0 < efficiency <= 1:
        raise HotspaConfigError(f"an efficiency of {efficiency} is impossible", fix="use a share between 0 and 1")
    moved = moved_bytes(sizes)
    return {s: port_seconds(s, moved[s.z], cluster) / efficiency + fixed_s for s in strategies}


def moved_bytes(sizes: ModelSizes) -> dict[int, float]:
    """Bytes of the whole model that a load and a return of a strategy move, by its `z`."""
    gradient_bytes = dtype_bytes(sizes.gradients.moved(sizes.compute_dtype))
    loaded, returned = sizes.weight_bytes, sizes.num_trained * gradient_bytes
    return {0: loaded + returned, 2: loaded, 3: 0}


def port_seconds(strategy: Strategy, num_bytes: float, cluster: Cluster) -> float:
    """Seconds of a switch at full speed of the links, of the whole model's weights and gradients on the wire, as
    `estimate` counts them: links inside nodes and between them work at the same time."""
    return max(seconds_of_links(strategy, num_bytes, cluster))


def seconds_of_links(strategy: Strategy, num_bytes: float, cluster: Cluster) -> tuple[float, float]:
    """Seconds that the links inside nodes take at full speed, and those between nodes. Args: as for `port_seconds`."""
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
    """A pack, or what chunks make of it, of the slowest replica: seconds of its forward and of its backward passes, and
    how many of each load units."""

    forward_s: float
    backward_s: float
    forwards: int = 1
    backwards: int = 1


@dataclass(frozen=True)
class Streams:
    """What moves units, at `efficiency` times the speed of the port model, as for switches."""

    sizes: ModelSizes
    cluster: Cluster
    efficiency: float = EFFICIENCY

    def load_s(self, strategy: Strategy) -> float:
        """Loading all units of all stages once."""
        seconds = port_seconds(strategy, self.sizes.weight_bytes, self.cluster)
        return strategy.pp * _MORE * seconds / self.efficiency

    def return_s(self, strategy: Strategy) -> float:
        """Returning the gradients of all units of all stages once."""
        num_bytes = self.sizes.num_trained * dtype_bytes(self.sizes.gradients.moved(self.sizes.compute_dtype))
        return strategy.pp * _MORE * port_seconds(strategy, num_bytes, self.cluster) / self.efficiency

    def pack_s(self, strategy: Strategy, forwards: int = 1, backwards: int = 1) -> float:
        """All transfers of a pack, less the two units that are there already whenever passes turn round."""
        loads = self.load_s(strategy) if strategy.z == 3 else 0.0
        kept = min(1.0, 4 / (self.sizes.shape.num_layers + 2)) * loads
        return max(0.0, (forwards + backwards) * loads - kept) + backwards * self.return_s(strategy)

    def once_s(self, strategy: Strategy) -> float:
        """What the same strategy without `+z2` or `+z3` would have moved in its switch, and this one does not."""
        return (self.load_s(strategy) if strategy.z == 3 else 0.0) + self.return_s(strategy)

    def seconds(self, strategy: Strategy, turns: Iterable[StreamedPack], slots: float) -> float:
        """Seconds of the packs of a phase, each with the slowest replica's, transfers included; `slots` ranks compute
        at a time where ranks share cores, else infinite."""
        turns = list(turns)
        load = self.load_s(strategy) if strategy.z == 3 else 0.0
        back = self.return_s(strategy)
        alone = sum(turn.forward_s + turn.backward_s for turn in turns)
        if math.isfinite(slots):
            return alone + max(
                self.once_s(strategy), sum(self.pack_s(strategy, t.forwards, t.backwards) for t in turns)
            )
        streamed = 0.0
        for turn in turns:
            streamed += max(turn.forward_s, turn.forwards * load)
            streamed += max(turn.backward_s, turn.backwards * (load + back))
        units = self.sizes.shape.num_layers + 2  # the first load and the last return have nothing beside them
        return max(streamed + (load + back) / units, alone + self.once_s(strategy))
