"""The cost model of a run: seconds of a phase, bytes of a rank, seconds of a switch.

Built from a calibration or a data sheet, for all planners: `hf-hotspa plan`, the Trainer (`auto` or given strategies),
benchmarks. `check_calibration` decides what a calibration may be used for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import MemoryBreakdown, MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import EFFICIENCY, Streams, estimate, moved_bytes, seconds_of_links
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Bucket, Strategy

_SAME_LAYER = 0.05  # tolerated relative difference in layer parameters: a config does not show biases and extra norms


@dataclass(frozen=True)
class CostModel:
    """Costs of a model's strategies on a cluster. A switch runs at `efficiency` of the links, plus `switch_s`."""

    time: TimeModel
    memory: MemoryModel
    cluster: Cluster
    efficiency: float = EFFICIENCY
    switch_s: float = 0.0

    @classmethod
    def of_calibration(
        cls, calibration: Calibration, sizes: ModelSizes, options: MemoryOptions, world_size: int | None = None
    ) -> "CostModel":
        """Builds the model from measurements. Raises `HotspaConfigError`: too few or impossible measurements.
        `world_size`: ranks, on nodes like the measured ones; the measured number if None."""
        memory = calibration.memory_model(sizes, options, world_size)
        return cls._of(
            calibration.time_model(sizes, world_size), memory, calibration.cluster(world_size), *calibration.switch_fit
        )

    @classmethod
    def of_hardware(cls, hardware: Hardware, sizes: ModelSizes, options: MemoryOptions, world_size: int) -> "CostModel":
        """Builds the model from a data sheet. Raises `HotspaConfigError`: the hardware has no speed for the dtype."""
        time = TimeModel.analytic(sizes, hardware, sizes.compute_dtype)
        return cls._of(time, MemoryModel(sizes, world_size, options), hardware.cluster(world_size))

    @classmethod
    def _of(
        cls,
        time: TimeModel,
        memory: MemoryModel,
        cluster: Cluster,
        efficiency: float = EFFICIENCY,
        switch_s: float = 0.0,
    ) -> "CostModel":
        options, streams = memory.options, Streams(memory.sizes, cluster, efficiency)
        time = replace(
            time, schedule=options.schedule, context_parallel=options.context_parallel, streams=streams,
            forwards=options.scoring.forwards,
        )  # fmt: skip
        return cls(time, memory, cluster, efficiency, switch_s)

    @property
    def sizes(self) -> ModelSizes:
        return self.memory.sizes

    def rank_bytes(self, buckets: Sequence[Bucket]) -> tuple[MemoryBreakdown, ...]:
        """Returns the memory of each bucket of a pool on its fullest rank with full packs."""
        pool = [bucket.strategy for bucket in buckets]
        arena = max(map(self.memory.arena_bytes, pool))
        return tuple(
            self.memory.breakdown(b.strategy, b.pack_tokens, longest=b.longest, arena_bytes=arena, pool=pool)
            for b in buckets
        )

    def switch_seconds(self, strategies: Iterable[Strategy]) -> dict[Strategy, float]:
        return estimate(strategies, self.sizes, self.cluster, efficiency=self.efficiency, fixed_s=self.switch_s)

    def seconds_of_links(self, strategy: Strategy) -> tuple[float, float]:
        """Returns a switch's transfer seconds inside nodes and between nodes, which overlap."""
        inside, between = seconds_of_links(strategy, moved_bytes(self.sizes)[strategy.z], self.cluster)
        return inside / self.efficiency, between / self.efficiency


def check_calibration(
    calibration: Calibration,
    where: str,
    shape: ModelShape,
    *,
    dtype: str,
    nodes: int,
    devices_per_node: int,  # processes per node
    strategies: Iterable[Strategy] = (),  # strategies that it must cover
    base: object = None,  # the frozen base of the run (or the name of its form), if any. Its rank is not compared.
) -> None:
    """Checks that a calibration applies to a case. Does not compare machine and versions; these are the user's choice.
    Raises `HotspaConfigError`: naming all differences."""
    key, facts = calibration.key, calibration.model
    pairs = [
        ("processes a node", key.devices_per_node, devices_per_node),
        ("dtype", key.dtype, dtype),
        ("family", facts.family, shape.family),
        ("hidden size", facts.hidden_size, shape.hidden_size),
        ("vocabulary", facts.vocab_size, shape.vocab_size),
        ("attention heads", facts.num_attention_heads, shape.num_attention_heads),
        ("frozen weights", *(str(known or "plain").partition(",")[0] for known in (key.base, base))),
    ]
    wrong = [f"{name} {measured} instead of {needed}" for name, measured, needed in pairs if measured != needed]
    if abs(facts.layer_parameters / shape.layer_parameters - 1) > _SAME_LAYER:
        wrong.append(f"{facts.layer_parameters} parameters of a layer instead of {shape.layer_parameters}")
    if nodes > 1 and calibration.inter is None:
        wrong.append("no links between nodes")
    if not wrong and not calibration.covers(needed := list(strategies)):
        wrong = [f"tp {', '.join(map(str, calibration.degrees))} of {sorted({s.tp for s in needed})}"]
    if wrong:
        raise HotspaConfigError(
            f"the calibration was measured for another case: {', '.join(wrong)}",
            where=where,
            fix="run hf-hotspa calibrate for this model and launch; training measures by itself without "
            "hotspa_calibration, and plan takes --hardware instead",
        )
