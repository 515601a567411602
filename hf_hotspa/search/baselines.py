"""What people run without switching, and what a user writes, priced like a plan: packed as well as possible.

Data parallelism over all devices with ZeRO (DeepSpeed) or FSDP gets the best conditions: packs as large as memory
allows (or halves of that, if faster), balanced by our packer, aligned over the replicas so that heavy packs meet heavy
ones, a loss that never holds all logits, and transfers that overlap with computation as far as possible:

* stage 1: gradients are reduced behind the last backward pass, and the trained weights gathered at the end;
* stage 2: gradients are reduced behind each backward pass;
* stage 3 (FSDP's full shard): weights are gathered behind each forward and each backward pass, and gradients reduced.

Under stages 2 and 3 all replicas wait for one another in each pack. Bytes come from `formulas`, plus the activations of
the memory model and temporary full tensors: under stage 2 the gradients of one unit (a layer, or embedding and head),
under stage 3 the weights of the running layer, the next one and embedding and head. A run uses gradient checkpointing
if it is faster with it, or fits only with it.

`people_run` adds tensor parallelism in a node with replicas, constant Megatron-like degrees, and dynamic context
parallelism: one layout, whose replicas share packs of long rows. `Pricing` prices strategies, or buckets, in the syntax
of `hotspa_strategies`. Times and memory use the plan's models. Plain data, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.costs.data_sheet import LINK_EFFICIENCY
from hf_hotspa.costs.formulas import model_state_bytes, traffic
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import UNLIMITED_TOKENS, MemoryBreakdown, MemoryModel, most_within, size
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import dtype_bytes
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError, OverlongError
from hf_hotspa.search.estimate import pack_choices, packed
from hf_hotspa.search.offers import sharing_layouts
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import SearchOptions, search
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, parse_buckets

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
    """One way to run everything under data parallelism."""

    stage: int  # of ZeRO
    recompute: bool  # with gradient checkpointing
    pack_tokens: int  # of the largest pack that fits, if the longest sequence does not
    seconds: float | None  # predicted mean of a mini-batch; None if the longest sequence does not fit
    memory: MemoryBreakdown  # of a device with these packs

    @property
    def name(self) -> str:
        return NAMES[self.stage] + (" with checkpointing" if self.recompute else "")

    @property
    def arguments(self) -> str:
        """The arguments for `TrainingArguments`."""
        return _ARGUMENTS[self.stage] + (", gradient_checkpointing=True" if self.recompute else "")

    def to_dict(self) -> dict[str, object]:
        """Returns bytes and seconds as plain data."""
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
    """Data parallelism of a model over all devices, each a replica. The memory model gives all but the model states."""

    memory: MemoryModel
    time: TimeModel
    hardware: Hardware

    @property
    def dtype(self) -> str:
        """The dtype of computation, weights and gradients."""
        return self.memory.options.compute_dtype

    def breakdown(self, stage: int, recompute: bool, pack_tokens: int) -> MemoryBreakdown:
        """Returns the bytes on a device with packs of so many tokens."""
        width, dp = dtype_bytes(self.dtype), self.memory.world_size
        breakdown = self.memory.breakdown(self._strategy(recompute), pack_tokens)
        (trained, frozen), sizes, optimizer = self._parameters, self.memory.sizes, self.memory.options.optimizer

        def states(weights: float = 0, gradients: float = 0, optimizer: float = 0, of: float = trained) -> float:
            each = {"weight_bytes": weights, "gradient_bytes": gradients, "optimizer_bytes": optimizer}
            return model_state_bytes(of, dp, stage, **each)

        layer = sizes.layer_bytes / width  # codes and scales count as in `_parameters`
        ends = trained + frozen - sizes.shape.num_layers * layer
        gathered = (2 * layer + ends) * width if stage == 3 and dp > 1 else 0
        reduced = max(layer, ends) * (trained / (trained + frozen)) * width if stage >= 2 and dp > 1 else 0
        return replace(
            breakdown,
            # fp32 weights beside the weights for computation, unless these are fp32
            master_weights=states(optimizer=_MASTER_BYTES if width < _MASTER_BYTES else 0),
            master_gradients=0.0,
            optimizer=states(optimizer=sizes.master(1, optimizer).optimizer_bytes / trained),
            weights=states(weights=width) + states(weights=width, of=frozen) + gathered,
            gradients=states(gradients=width) + reduced,
            arena=0.0,
            switch=0.0,
        )

    def largest_pack(self, stage: int, recompute: bool, limit_bytes: float | None) -> int:
        """Returns the most tokens that a pack may have; 0 if not even one fits."""
        if limit_bytes is None:
            return UNLIMITED_TOKENS
        return most_within(lambda tokens: self.breakdown(stage, recompute, tokens).total, limit_bytes, UNLIMITED_TOKENS)

    def seconds(self, stage: int, recompute: bool, replicas: _Packs) -> float:
        """Returns the seconds of a mini-batch with these packs, `[replica][pack][sequence]`."""
        (cost,) = self.time.stage_costs(self._strategy(recompute))
        costs = [sorted(map(cost.of, packs), reverse=True) for packs in replicas]
        steps = max(map(len, costs))
        # what all replicas wait for, pack by pack; replicas without packs left only join transfers
        busiest = [self._together([of_batch[i] for of_batch in costs if i < len(of_batch)]) for i in range(steps)]
        forward_share = self.time.forward_share
        if recompute:  # the backward pass includes another forward pass
            forward_share /= 1 + forward_share
        sent = traffic(*self._parameters, self.memory.world_size, stage, steps)
        gather, reduce = self._link_seconds(sent.gathers), self._link_seconds(sent.reduces)
        fixed = self.time.fixed_s
        if stage <= 1:
            alone = self._together([sum(of_batch) for of_batch in costs])
            last = (1 - forward_share) * busiest[-1]
            return fixed + alone + max(0.0, reduce - last) + gather
        # for each pack
        reduce /= steps
        backward = [max((1 - forward_share) * t, reduce + (gather / steps / 2 if stage == 3 else 0)) for t in busiest]
        if stage == 2:
            return fixed + sum(forward_share * t for t in busiest) + sum(backward) + gather
        return fixed + sum(max(forward_share * t, gather / steps / 2) for t in busiest) + sum(backward)

    def best(self, stage: int, question: Question) -> Baseline:
        """Returns the fastest run under a stage, with or without gradient checkpointing, or how much of it fits."""
        batches, weights = question.batches
        longest, limit_bytes = question.longest, question.capacities.limit_bytes
        most, plain = max(longest, *map(sum, batches)), self._strategy(False)
        quadratic_cost = question.shape.quadratic_cost
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
            again, tokens = max(capacities.items(), key=lambda each: each[1])
        return Baseline(stage, again, tokens, fastest, self.breakdown(stage, again, tokens))

    def _strategy(self, recompute: bool) -> Strategy:
        return Strategy(self.memory.world_size, rc=int(recompute))

    @property
    def _parameters(self) -> tuple[int, float]:
        sizes = self.memory.sizes
        return sizes.num_trained, sizes.weight_bytes / dtype_bytes(self.dtype) - sizes.num_trained

    def _together(self, alone: Sequence[float]) -> float:
        return max(max(alone), sum(alone) / self.time.slots)

    def _link_seconds(self, elements: float) -> float:
        link = self.hardware.ring_bandwidth(self.memory.world_size) * LINK_EFFICIENCY
        return elements * dtype_bytes(self.dtype) / link


MEGATRON, IN_NODE, DYNAMIC = "Megatron-like dp x tp x pp", "tp in a node + dp", "dynamic context parallelism"


@dataclass(frozen=True)
class Rival:
    """An alternative to a plan: its buckets (the requested ones, if any, if it does not fit), predicted mean seconds of
    a mini-batch with switches (None if it does not fit), and why not."""

    name: str
    buckets: tuple[Bucket, ...]
    seconds: float | None
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        text = ",".join(map(str, self.buckets))
        return {"name": self.name, "hotspa_strategies": text, "seconds": self.seconds, "why": self.why}


class Pricing(Question):
    """Prices alternatives to the plan for a question."""

    def best(self, name: str, strategies: Sequence[Strategy], max_phases: int = 1) -> Rival:
        """Returns the fastest alternative made of some strategies."""
        try:
            choice = search(self, strategies, SearchOptions(max_phases))
        except DeviceMemoryError as error:
            return Rival(name, (), None, error.what)
        return Rival(name, choice.buckets, choice.seconds)

    def buckets(self, name: str, buckets: tuple[Bucket, ...]) -> Rival:
        """Prices these buckets as they are: every sequence goes to the first one that is long enough. Raises
        `OverlongError`: sequences are longer than the last one."""
        if buckets[-1].longest < max(self.lengths):
            raise OverlongError(
                f"--strategies {name!r} takes sequences of {buckets[-1].longest} tokens, and the longest has {max(self.lengths)}",
                fix="let the last bucket take them, or give --longest and --overlong",
            )
        limit, strategies = self.capacities.limit_bytes, [bucket.strategy for bucket in buckets]
        for bucket, need in zip(buckets, self.cost.rank_bytes(buckets), strict=True):
            if limit is not None and need.total > limit:
                why = f"{bucket} needs {size(need.total)} of a device, and the limit is {size(limit)}"
                return Rival(name, buckets, None, why)
        evaluator = replace(self, longest=max(self.lengths)).price(strategies)
        phases = (evaluator.phase(b.strategy, b.low, b.longest, b.pack_tokens) for b in buckets)
        return Rival(name, buckets, sum(phase.seconds for phase in phases))

    def written(self, text: str, world_size: int, schedule: str = "auto") -> Rival:
        """Prices strategies in the syntax of `hotspa_strategies`: buckets as they are, or names, for which the best
        edges and packs are searched. Raises `HotspaError`: they are invalid, or cannot run this model on so many
        devices."""
        shape, as_given = self.shape, ":" in text
        named = [Strategy.parse(part.strip()) for part in text.split(",")] if not as_given else []
        known = parse_buckets(text) if as_given else tuple(Bucket(s, 1 + i, 1 + i, i) for i, s in enumerate(named))
        check_buckets(known, world_size, shape)
        RunOptions(schedule).check(known, shape)
        for bucket in known:
            if not self.cost.time.knows(bucket.strategy):
                fix = "calibrate it, or use --hardware instead of --calibration"
                raise HotspaConfigError(f"{bucket.strategy} was not measured", fix=fix)
        return self.buckets(text, known) if as_given else self.best(text, named, len(named))


def people_run(pricing: Pricing, strategies: Sequence[Strategy], devices_per_node: int) -> tuple[Rival, ...]:
    """Returns what a user would run instead of a plan, besides data parallelism (`DataParallel`)."""
    # with sequence parallelism and recomputation; without sharding or chunks
    plain = [s for s in strategies if s.is_common]
    whole = [s for s in plain if s.cp == 1]
    in_node = [s for s in whole if s.pp == 1 and 1 < s.tp <= devices_per_node]
    rivals = [pricing.best(IN_NODE, in_node)] if in_node else []
    rivals += [pricing.best(MEGATRON, megatron)] if (megatron := [s for s in whole if s.tp * s.pp > 1]) else []
    if any(s.cp > 1 for s in plain):
        # one layout, whose replicas share the packs of long rows, as in Megatron and verl
        priced = [pricing.best(DYNAMIC, own, max_phases=3) for own in sharing_layouts(pricing, plain)]
        known = [rival for rival in priced if rival.seconds is not None]
        none = Rival(DYNAMIC, (), None, f"no layout holds a sequence of {pricing.longest} tokens")
        rivals.append(min(known, key=lambda rival: rival.seconds or 0.0, default=none))
    return tuple(rivals)
