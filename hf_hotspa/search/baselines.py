"""What people run without switching: data parallelism over all devices with ZeRO (DeepSpeed) or FSDP, and packing.

Owns the seconds and the memory of such a run, for the table of `hf-hotspa plan`. It is given the best of conditions: packs
as large as memory allows (or halves of that, where faster), balanced by our packer, aligned over the replicas so that
heavy packs meet heavy ones, a loss that never holds all logits, and transfers that hide behind computation as far as they
can:

* stage 1: gradients are reduced behind the backward pass of the last pack, and the trained weights gathered at the end;
* stage 2: gradients are reduced behind each backward pass;
* stage 3 (FSDP's full shard): weights are gathered behind each forward and each backward pass, and gradients reduced.

Under stages 2 and 3 all replicas wait for one another in each pack. Bytes are those of `formulas`; on top of the model
states come the activations of the memory model, and what is whole for a moment: under stage 2 the gradients of one unit
(a layer, or embedding and head), under stage 3 the weights of the layer that runs, of the next one and of embedding
and head, too. Where a run is faster with gradient checkpointing, or fits with it only, it has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.costs.analytic import LINK_EFFICIENCY
from hf_hotspa.costs.breakdown import MemoryBreakdown
from hf_hotspa.costs.formulas import model_state_bytes, traffic
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import UNLIMITED_TOKENS, MemoryModel, most_within
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.search.estimate import pack_choices, packed
from hf_hotspa.strategy import Strategy

STAGES = (1, 2, 3)
NAMES = {1: "DDP + ZeRO-1", 2: "DDP + ZeRO-2", 3: "FSDP"}
_ARGUMENTS = {
    1: 'deepspeed={"zero_optimization": {"stage": 1}}',
    2: 'deepspeed={"zero_optimization": {"stage": 2}}',
    3: 'fsdp="full_shard"',
}
_MASTER_BYTES = 4

_Packs = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Baseline:
    """One way to run everything under data parallelism.

    Args:
        stage: The stage of ZeRO.
        recompute: Whether it has gradient checkpointing.
        pack_tokens: Tokens of its packs; of the largest that fits, where the longest sequence does not.
        seconds: Predicted mean seconds of a mini-batch; None where the longest sequence does not fit.
        memory: What a device holds with these packs.
    """

    stage: int
    recompute: bool
    pack_tokens: int
    seconds: float | None
    memory: MemoryBreakdown

    @property
    def name(self) -> str:
        """What people call it."""
        return NAMES[self.stage] + (" with checkpointing" if self.recompute else "")

    @property
    def arguments(self) -> str:
        """What it is in `TrainingArguments`."""
        return _ARGUMENTS[self.stage] + (", gradient_checkpointing=True" if self.recompute else "")

    def to_dict(self) -> dict[str, object]:
        """Plain data; bytes and seconds."""
        return {
            "name": self.name,
            "stage": self.stage,
            "gradient_checkpointing": self.recompute,
            "fits": self.seconds is not None,
            "longest_that_fits": None if self.seconds is not None else self.pack_tokens,
            "pack_tokens": self.pack_tokens,
            "seconds": self.seconds,
            "memory_bytes": self.memory.total,
        }


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism of a model over all devices.

    Args:
        memory: The memory model; of it, what is not a model state. Each of its devices is a replica.
    """

    memory: MemoryModel
    time: TimeModel
    hardware: Hardware

    @property
    def dtype(self) -> str:
        """Of computation, of weights and of gradients."""
        return self.memory.options.compute_dtype

    def breakdown(self, stage: int, recompute: bool, pack_tokens: int) -> MemoryBreakdown:
        """Bytes on a device with packs of so many tokens."""
        width, dp = dtype_bytes(self.dtype), self.memory.world_size
        held = self.memory.breakdown(self._strategy(recompute), pack_tokens)
        (trained, frozen), sizes, optimizer = self._parameters, self.memory.sizes, self.memory.options.optimizer

        def states(weights: float = 0, gradients: float = 0, optimizer: float = 0, of: float = trained) -> float:
            return model_state_bytes(
                of, dp, stage, weight_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer
            )

        layer, ends = self._units()
        gathered = (2 * layer + ends) * width if stage == 3 and dp > 1 else 0
        reduced = max(layer, ends) * (trained / (trained + frozen)) * width if stage >= 2 and dp > 1 else 0
        return replace(
            held,
            # fp32 weights beside those of computation, where these are not fp32 themselves
            master_weights=states(optimizer=_MASTER_BYTES if width < _MASTER_BYTES else 0),
            master_gradients=0.0,
            optimizer=states(optimizer=sizes.master(1, optimizer).optimizer_bytes / trained),
            weights=states(weights=width) + states(weights=width, of=frozen) + gathered,
            gradients=states(gradients=width) + reduced,
            arena=0.0,
            switch=0.0,
        )

    def largest_pack(self, stage: int, recompute: bool, limit_bytes: float | None) -> int:
        """The most tokens that a pack may have; 0 when not even one fits."""
        if limit_bytes is None:
            return UNLIMITED_TOKENS
        return most_within(lambda tokens: self.breakdown(stage, recompute, tokens).total, limit_bytes, UNLIMITED_TOKENS)

    def seconds(self, stage: int, recompute: bool, replicas: _Packs) -> float:
        """Seconds of a mini-batch whose packs lie on the replicas like that, `[replica][pack][sequence]`."""
        (cost,) = self.time.stage_costs(self._strategy(recompute))
        costs = [sorted(map(cost.of, packs), reverse=True) for packs in replicas]
        steps = max(map(len, costs))
        # what all replicas wait for, pack by pack; those that have none left join transfers only
        busiest = [self._together([of_batch[i] for of_batch in costs if i < len(of_batch)]) for i in range(steps)]
        forward_share = self.time.forward_share
        if recompute:  # the backward pass has another forward pass in it
            forward_share /= 1 + forward_share
        sent = traffic(*self._parameters, self.memory.world_size, stage, steps)
        gather, reduce = self._link_seconds(sent.gathers), self._link_seconds(sent.reduces)
        fixed = self.time.fixed_s
        if stage <= 1:
            alone = self._together([sum(of_batch) for of_batch in costs])
            last = (1 - forward_share) * busiest[-1]
            return fixed + alone + max(0.0, reduce - last) + gather
        # of each pack
        reduce /= steps
        backward = [max((1 - forward_share) * t, reduce + (gather / steps / 2 if stage == 3 else 0)) for t in busiest]
        if stage == 2:
            return fixed + sum(forward_share * t for t in busiest) + sum(backward) + gather
        return fixed + sum(max(forward_share * t, gather / steps / 2) for t in busiest) + sum(backward)

    def best(
        self,
        stage: int,
        batches: Sequence[Sequence[int]],
        weights: Sequence[float],
        longest: int,
        limit_bytes: float | None,
    ) -> Baseline:
        """The fastest run under a stage, with or without gradient checkpointing; or how much of it fits.

        Args:
            weights: What each counts.
        """
        most, plain = max(longest, *map(sum, batches)), self._strategy(False)
        quadratic_cost = self.memory.sizes.shape.quadratic_cost
        capacities = {again: min(most, self.largest_pack(stage, again, limit_bytes)) for again in (False, True)}
        runs: list[tuple[float, bool, int]] = []
        for again, capacity in capacities.items():
            for tokens in pack_choices(capacity, longest) if capacity >= longest else ():
                seconds = sum(
                    weight * self.seconds(stage, again, packed(sorted(batch), plain, tokens, quadratic_cost, longest))
                    for batch, weight in zip(batches, weights, strict=True)
                )
                runs.append((seconds, again, tokens))
        fastest: float | None = None
        if runs:
            fastest, again, tokens = min(runs, key=lambda run: run[0])
        else:
            again, tokens = max(capacities.items(), key=lambda held: held[1])
        return Baseline(stage, again, tokens, fastest, self.breakdown(stage, again, tokens))

    def _strategy(self, recompute: bool) -> Strategy:
        return Strategy(self.memory.world_size, rc=int(recompute))

    @property
    def _parameters(self) -> tuple[int, float]:
        """Those that are trained, and those that are not; codes and scales as elements of as many bytes."""
        sizes = self.memory.sizes
        return sizes.num_trained, sizes.weight_bytes / dtype_bytes(self.dtype) - sizes.num_trained

    def _units(self) -> tuple[float, float]:
        """Parameters of a layer, and of embedding and head; codes and scales likewise."""
        sizes = self.memory.sizes
        layer = sizes.layer_bytes / dtype_bytes(self.dtype)
        return layer, sum(self._parameters) - sizes.shape.num_layers * layer

    def _together(self, alone: Sequence[float]) -> float:
        """Seconds until all replicas are done that started together; they may share cores."""
        return max(max(alone), sum(alone) / self.time.slots)

    def _link_seconds(self, elements: float) -> float:
        """Seconds of a ring that passes so many elements through each device."""
        link = self.hardware.ring_bandwidth(self.memory.world_size) * LINK_EFFICIENCY
        return elements * dtype_bytes(self.dtype) / link
