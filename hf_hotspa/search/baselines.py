"""What one would run without this package, priced like a plan: with the same models of time and memory.

Data parallelism over all devices: DDP, ZeRO-1 and ZeRO-2 of DeepSpeed, and full sharding (FSDP, or ZeRO-3); on one
device the stock Trainer, without any of these. Each is as users set it, and otherwise at its best: packs (`packing` with
`bfd` of TRL, `sample_packing` of Axolotl) as large as memory allows, or halves of that, if faster, and balanced by our
packer. The logits of a pack exist whole: once as the model computes them, and twice in fp32 for the loss. Only what is
named "with Liger" computes them in chunks. What is named "padded" does not pack, but pads micro-batches of rows in
random order. Transfers overlap with computation as far as possible:

* DDP and stage 1: gradients are reduced behind the last backward pass; stage 1 gathers the trained weights at the end;
* stage 2: gradients are reduced behind each backward pass;
* stage 3 (FSDP's full shard): weights are gathered behind each forward and each backward pass, and gradients reduced.

Under stages 2 and 3 all replicas wait for one another in each pack. Bytes come from `formulas`, plus the activations of
the memory model and temporary full tensors: under stage 2 the gradients of one unit (a layer, or embedding and head),
under stage 3 the weights of the running layer, the next one and embedding and head. DDP keeps weights and gradients in
fp32, beside the weights in the compute dtype. A run uses gradient checkpointing if it is faster with it, or fits only
with it.

`people_run` adds what clusters run: tensor parallelism in a node with replicas, and constant Megatron-like degrees.
`dynamic_layout` is a layout of ours: one, whose replicas share packs of long rows. `Pricing` prices strategies, or
buckets, in the syntax of `hotspa_strategies`. Plain data, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_hotspa.costs.data_sheet import LINK_EFFICIENCY
from hf_hotspa.costs.formulas import model_state_bytes, traffic
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import UNLIMITED_TOKENS, MemoryBreakdown, MemoryModel, Rising, size
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import MASTER_BYTES, dtype_bytes
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError, OverlongError
from hf_hotspa.search.estimate import pack_choices, packed
from hf_hotspa.search.offers import sharing_layouts
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import SearchOptions, search
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, parse_buckets

STAGES = (0, 1, 2, 3)
NAMES = {0: "DDP", 1: "DDP + ZeRO-1", 2: "DDP + ZeRO-2", 3: "FSDP"}
ALONE = "the stock Trainer"
_ARGUMENTS = {
    0: "",
    1: 'deepspeed={"zero_optimization": {"stage": 1}}',
    2: 'deepspeed={"zero_optimization": {"stage": 2}}',
    3: 'fsdp="full_shard"',
}
CONFIGS = {
    "sft": "SFTConfig", "reward": "RewardConfig", "classify": "TrainingArguments", "rloo": "RLOOConfig",
    "embed": "SentenceTransformerTrainingArguments",
    **dict.fromkeys(("dpo", "dpo-precomputed"), "DPOConfig"), **dict.fromkeys(("grpo", "grpo-kl"), "GRPOConfig"),
}  # fmt: skip
"""The arguments' class by `terms.TASKS`."""
PACKED_TASK = "sft"  # only its trainer packs
_FP32_LOGITS = 2  # copies of the logits in fp32 that the loss holds at once
_ROWS = (1, 2, 4, 8, 16)  # sequences of a padded micro-batch
_Packs = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Baseline:
    """One way to run everything under data parallelism."""

    stage: int  # of ZeRO; 0 for DDP
    recompute: bool  # with gradient checkpointing
    pack_tokens: int  # of the largest pack that fits, if the longest sequence does not
    seconds: float | None  # predicted mean of a mini-batch; None if the longest sequence does not fit
    memory: MemoryBreakdown  # of a device with these packs
    liger: bool = False  # whether logits are computed in chunks, instead of all at once
    padded: int = 0  # sequences of a micro-batch without packing; 0 with packing
    world_size: int = 2
    task: str = PACKED_TASK

    @property
    def name(self) -> str:
        options = [text for text, on in (("checkpointing", self.recompute), ("Liger", self.liger)) if on]
        base = NAMES[self.stage] if self.world_size > 1 else ALONE
        return base + (f" with {' and '.join(options)}" if options else "") + (", padded" if self.padded else "")

    @property
    def arguments(self) -> str:
        parts = [
            _ARGUMENTS[self.stage],
            f"gradient_checkpointing={self.recompute}",
            "use_liger_kernel=True" if self.liger else "",
            f"per_device_train_batch_size={self.padded or 1}",
            "" if self.padded else f"packing=True, max_length={self.pack_tokens}",
        ]
        return ", ".join(filter(None, parts))

    @property
    def line(self) -> str:
        return f"{CONFIGS[self.task]}({self.arguments})"

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "stage": self.stage,
            "gradient_checkpointing": self.recompute,
            "liger": self.liger,
            "padded": self.padded,
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
    task: str = PACKED_TASK  # one of `terms.TASKS`

    @property
    def dtype(self) -> str:
        return self.memory.options.compute_dtype

    def breakdown(self, stage: int, recompute: bool, pack_tokens: int, liger: bool = False) -> MemoryBreakdown:
        """Returns the bytes on a device with packs (or padded micro-batches) of so many tokens."""
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
            master_weights=states(optimizer=MASTER_BYTES if width < MASTER_BYTES else 0),
            master_gradients=0.0,
            optimizer=states(optimizer=sizes.master(1, optimizer).optimizer_bytes / trained),
            weights=states(weights=width) + states(weights=width, of=frozen) + gathered,
            gradients=states(gradients=self._gradient_bytes(stage)) + reduced,
            arena=0.0,
            switch=0.0,
            logits=breakdown.logits
            if liger
            else pack_tokens * sizes.shape.head_rows(1) * (_FP32_LOGITS * MASTER_BYTES + width % MASTER_BYTES),
        )

    def largest_pack(self, stage: int, recompute: bool, limit_bytes: float | None, liger: bool = False) -> int:
        """Returns the most tokens that a pack may have; 0 if not even one fits."""
        if limit_bytes is None:
            return UNLIMITED_TOKENS
        total = Rising(lambda tokens: self.breakdown(stage, recompute, tokens, liger).total, UNLIMITED_TOKENS)
        return total.most_within(limit_bytes)

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
            if stage == 0:  # an all-reduce of gradients
                gather, reduce = 0.0, 2 * reduce * self._gradient_bytes(0) / dtype_bytes(self.dtype)
            alone = self._together([sum(of_batch) for of_batch in costs])
            last = (1 - forward_share) * busiest[-1]
            return fixed + alone + max(0.0, reduce - last) + gather
        # for each pack
        reduce /= steps
        backward = [max((1 - forward_share) * t, reduce + (gather / steps / 2 if stage == 3 else 0)) for t in busiest]
        if stage == 2:
            return fixed + sum(forward_share * t for t in busiest) + sum(backward) + gather
        return fixed + sum(max(forward_share * t, gather / steps / 2) for t in busiest) + sum(backward)

    def best(self, stage: int, question: Question, *, liger: bool = False, pads: bool = False) -> Baseline:
        """Returns the fastest run under a stage, with or without gradient checkpointing, or how much of it fits.
        `liger`: with logits in chunks. `pads`: without packing."""
        batches, weights = question.batches
        longest, limit_bytes = question.longest, question.capacities.limit_bytes
        most, plain = max(longest, *map(sum, batches)), self._strategy(False)
        quadratic_cost, dp = question.shape.quadratic_cost, self.memory.world_size
        capacities = {again: min(most, self.largest_pack(stage, again, limit_bytes, liger)) for again in (False, True)}
        runs: list[tuple[float, bool, int, int]] = []
        for again, capacity in capacities.items():
            if capacity < longest:
                continue
            sizes = [
                (rows * longest, rows)
                for rows in _ROWS
                if rows * longest <= capacity and (rows == 1 or rows * dp <= len(batches[0]))
            ]
            for tokens, rows in sizes if pads else [(tokens, 0) for tokens in pack_choices(capacity, longest)]:
                seconds = sum(
                    weight
                    * self.seconds(
                        stage, again,
                        padded(batch, dp, rows) if pads
                        else packed(sorted(batch), plain, tokens, quadratic_cost, longest),
                    )
                    for batch, weight in zip(batches, weights, strict=True)
                )  # fmt: skip
                runs.append((seconds, again, tokens, rows))
        fastest: float | None = None
        rows = int(pads)
        if runs:
            fastest, again, tokens, rows = min(runs, key=lambda run: run[0])
        else:
            again, tokens = max(capacities.items(), key=lambda each: each[1])
        need = self.breakdown(stage, again, tokens, liger)
        return Baseline(stage, again, tokens, fastest, need, liger, rows, dp, self.task)

    def settings(self, question: Question) -> tuple[Baseline, ...]:
        """Returns what one would run: under each stage; and the fastest stage without packing, and with Liger (also FSDP
        with Liger, if nothing fits with whole logits). On one device only the fastest of all, with Liger if it fits only so. Without packing if the task's trainer cannot."""
        dp, pads = self.memory.world_size, self.task != PACKED_TASK
        stages = STAGES if dp > 1 else STAGES[:1]
        plain = [self.best(stage, question, pads=pads) for stage in stages]
        first = _fastest(plain)
        fits = first.seconds is not None
        if dp == 1 and fits:
            return (first,)
        chunks = [self.best(stage, question, liger=True, pads=pads) for stage in ((first.stage,) if fits else stages)]
        if dp == 1:
            return (chunks[0],)
        shown = dict.fromkeys((_fastest(chunks).stage, chunks[-1].stage))
        without_packs = () if pads else (self.best(first.stage, question, pads=True),)
        return *plain, *without_packs, *(each for each in chunks if each.stage in shown)

    def _gradient_bytes(self, stage: int) -> int:
        """Bytes of a gradient: in DDP weights, and so gradients, are in fp32."""
        return MASTER_BYTES if stage == 0 else dtype_bytes(self.dtype)

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


def _fastest(runs: Sequence[Baseline]) -> Baseline:
    fitting = [run for run in runs if run.seconds is not None]
    return min(fitting, key=lambda run: run.seconds or 0.0) if fitting else max(runs, key=lambda run: run.pack_tokens)


def padded(lengths: Sequence[int], dp: int, rows: int) -> list[list[list[int]]]:
    """Returns each replica's micro-batches of rows in the given order, each padded to its longest."""
    replicas: list[list[list[int]]] = [[] for _ in range(dp)]
    for index, first in enumerate(range(0, len(lengths), rows)):
        batch = lengths[first : first + rows]
        replicas[index % dp].append([max(batch)] * len(batch))
    return replicas


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
        most = max((strategy.cp for strategy in named), default=1)  # a pack has a token for each rank of cp
        some = (Bucket(s, most * (i + 1), most * (i + 1), most * i) for i, s in enumerate(named))
        known = parse_buckets(text) if as_given else tuple(some)
        check_buckets(known, world_size, shape)
        RunOptions(schedule).check(known, shape)
        for bucket in known:
            if not self.cost.time.knows(bucket.strategy):
                fix = "calibrate it, or use --hardware instead of --calibration"
                raise HotspaConfigError(f"{bucket.strategy} was not measured", fix=fix)
        return self.buckets(text, known) if as_given else self.best(text, named, len(named))


def people_run(pricing: Pricing, strategies: Sequence[Strategy], devices_per_node: int) -> tuple[Rival, ...]:
    """Returns what one would run on several nodes instead of a plan, besides data parallelism (`DataParallel`)."""
    # with sequence parallelism and recomputation; without sharding or chunks
    whole = [s for s in strategies if s.is_common and s.cp == 1]
    if not whole or whole[0].world_size <= devices_per_node:
        return ()
    in_node = [s for s in whole if s.pp == 1 and 1 < s.tp <= devices_per_node]
    rivals = [pricing.best(IN_NODE, in_node)] if in_node else []
    rivals += [pricing.best(MEGATRON, megatron)] if (megatron := [s for s in whole if s.tp * s.pp > 1]) else []
    return tuple(rivals)


def dynamic_layout(pricing: Pricing, strategies: Sequence[Strategy]) -> tuple[Rival, ...]:
    """Returns the layout of ours that comes nearest to switching: one, whose replicas share the packs of long rows. Empty
    if no strategy can."""
    plain = [s for s in strategies if s.is_common]
    if all(s.cp == 1 for s in plain):
        return ()
    priced = [pricing.best(DYNAMIC, own, max_phases=3) for own in sharing_layouts(pricing, plain)]
    known = [rival for rival in priced if rival.seconds is not None]
    none = Rival(DYNAMIC, (), None, f"no layout holds a sequence of {pricing.longest} tokens")
    return (min(known, key=lambda rival: rival.seconds or 0.0, default=none),)
