"""Seconds of a switch: loading a strategy's weights from the master store, and returning its gradients.

Estimated from sizes alone, for the many strategies that a search looks at. The fluid port model (`plan/ports.py`) is a
lower bound: real transfers reach a part of it, given as `efficiency`, and every switch has a fixed cost.
"""

from collections.abc import Iterable

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.plan.ports import nic_bandwidth
from hf_hotspa.strategy import Strategy

EFFICIENCY = 0.6
"""Share of the port model's speed where nothing was measured; published systems reach 0.25 to 0.6."""


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
    moved while the phase computes (`costs.streams`).

    Args:
        efficiency: Measured speed over that of the port model.
        fixed_s: Seconds of a load and a return beside their bytes.

    Raises:
        HotspaConfigError: the efficiency is not between 0 and 1.
    """
    if not 0 < efficiency <= 1:
        raise HotspaConfigError(f"an efficiency of {efficiency} is impossible", fix="use a share between 0 and 1")
    weight_bytes = dtype_bytes(sizes.compute_dtype)
    gradient_bytes = dtype_bytes(sizes.gradients.moved(sizes.compute_dtype))
    loaded, returned = sizes.num_parameters * weight_bytes, sizes.num_trained * gradient_bytes
    moved = {0: loaded + returned, 2: loaded, 3: 0}
    return {s: port_seconds(s, moved[s.z], cluster) / efficiency + fixed_s for s in strategies}


def port_seconds(strategy: Strategy, num_bytes: float, cluster: Cluster) -> float:
    """Seconds of a switch at full speed of the links, as `estimate` counts them.

    Args:
        num_bytes: Weights and gradients of the whole model on the wire.
    """
    own = 1 / cluster.world_size
    seconds = num_bytes / (strategy.tp * strategy.pp) * (1 - own) / cluster.intra_bandwidth
    if cluster.num_nodes > 1:
        per_node = cluster.devices_per_node
        shards = min(1.0, per_node / strategy.tp) / strategy.pp
        stages = max(1.0, per_node / (strategy.dp * strategy.cp * strategy.tp))
        missed = num_bytes * min(1.0, shards * stages) * (1 - per_node * own)
        seconds = max(seconds, missed / per_node / nic_bandwidth(cluster))
    return seconds
