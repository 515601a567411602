"""The sides of ours in `side_by_side.py`: which packs each static strategy takes, the paper's buckets, and the memory limit.

One world calibrates (or finds the machine's calibration in the cache), and the search answers for every strategy alone.
"""

from collections.abc import Sequence
from typing import Any

from contest import PAPER_STATIC, check_runs_everywhere, make_model

from hf_hotspa.search.capacities import Capacities
from hf_hotspa.strategy import Bucket, Strategy
from peers.work import Work

LIMIT_MARGIN, PLAN_MARGIN = 1.10, 1.07
"""The limit of a cell is so many times the peak of the static strategy that needs the least, and planners plan for so many
times it: their part is what they predict of that strategy, the rest (rows, what Python and the libraries add) all have.
Which it is, the memory model says: what a pipeline takes depends on what else a mini-batch holds, and it needs to hold
the longest sequence in any."""
_PAPER_EDGES = (8, 2, 1)
"""Where the paper's buckets end, as parts of the longest sequence: the published runs of 7B and 13B models on 8 GPUs have
three kinds of strategies (dp, both, tp), with edges at an eighth and a half."""


def paper_buckets(ranks: int, longest: int) -> str:
    """The paper's way: fixed buckets, and packs as long as the longest sequence of their bucket."""
    both = Strategy(dp=ranks // 2, tp=2) if ranks % 2 == 0 else Strategy(dp=ranks)
    kinds = zip((Strategy(dp=ranks), both, Strategy(tp=ranks)), _PAPER_EDGES, strict=True)
    edges = {strategy: longest // part for strategy, part in kinds}  # with few ranks some are one: its longest edge
    return ",".join(f"{strategy}:{edge}@{edge}" for strategy, edge in edges.items())


def plan_ours(rank: int, world_size: int, work: Work, force: bool) -> dict[str, Any]:
    """The plans of our sides without a limit; the work of one rank.

    `free` has the bucket list of each static strategy, `short` that with packs as short as the longest sequence.
    `need_bytes` is what the longest sequence needs at least under any strategy, by the calibrated memory model, and `least`
    that strategy. `given_bytes` is what the model takes that the trainer was given (CPU processes hold it in the same
    memory), `rank_bytes` the most that a rank holds without a limit.

    Saves the untrained model for sides that load one.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        work: What all sides train.
        force: Whether to calibrate even if the cache has a calibration.
    """
    if rank == 0:
        make_model(work.model).save_pretrained(work.start_folder)
    planner = _Planner(work, world_size, force)
    memory, free, rank_bytes = planner.memory, {}, 0.0
    for strategy in planner.strategies:
        buckets = planner.buckets(strategy, None)
        free[str(strategy)] = ",".join(map(str, buckets))
        largest = max(bucket.pack_tokens for bucket in buckets)
        rank_bytes = max(rank_bytes, memory.breakdown(strategy, largest).total)
    need = {s: memory.breakdown(s, work.longest).total for s in planner.strategies}
    least = min(need, key=lambda s: need[s])
    return {
        "free": free,
        "short": {str(s): str(planner.shortest(s)) for s in planner.strategies},
        "least": str(least),
        "need_bytes": need[least],
        "given_bytes": planner.given_bytes,
        "rank_bytes": rank_bytes,
    }


def plan_limited(rank: int, world_size: int, work: Work, limit_bytes: float) -> dict[str, Any]:
    """The static strategies under a limit, with the calibration of `plan_ours`; the work of one rank.

    `room` has the most tokens of a pack that fits whatever comes with it in a pipeline, `limited` the bucket list. Where
    there is no room for the longest sequence, its packs are as short as that: what they take has to be measured.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        work: What all sides train.
        limit_bytes: What planners are given.
    """
    planner, found = _Planner(work, world_size, force=False), {}
    rooms = _FullPipelines(planner.memory, limit_bytes)
    room = {s: rooms.tokens(s) for s in planner.strategies}
    for strategy, tokens in room.items():
        fits = tokens >= work.longest
        buckets = planner.buckets(strategy, limit_bytes) if fits else (planner.shortest(strategy),)
        found[str(strategy)] = ",".join(map(str, buckets))
    return {"limited": found, "room": {str(s): tokens for s, tokens in room.items()}}


class _FullPipelines(Capacities):
    """Pipelines that are full of the longest packs: how a fixed strategy is run elsewhere. Only `auto` takes smaller ones."""

    def tokens(self, strategy: Strategy, arena: int | None = None) -> int:
        arena = self.arena(strategy) if arena is None else arena
        return self.model.largest_pack(strategy, self.limit_bytes, arena_bytes=arena)

    def pack_tokens(self, strategy: Strategy, arena: int, longest: int) -> int:
        return self.tokens(strategy, arena)


class _Planner:
    """The cost models of a cell, from the machine's calibration, and the search with them."""

    def __init__(self, work: Work, world_size: int, force: bool) -> None:
        import bf16_products
        import torch

        from hf_hotspa.calibrate.model_calibration import calibrate
        from hf_hotspa.costs.cost_model import CostModel
        from hf_hotspa.costs.memory import MemoryOptions
        from hf_hotspa.costs.sizes import ModelSizes
        from hf_hotspa.model.specs import describe_model
        from hf_hotspa.strategy import legal_strategies
        from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

        if work.dtype == "bf16":
            bf16_products.install()
        model = make_model(work.model)
        description = describe_model(model, torch.bfloat16 if work.dtype == "bf16" else None)
        self.work, self.shape = work, description.shape
        check_runs_everywhere(self.shape)
        self.given_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        self.strategies = legal_strategies(world_size, self.shape)
        dtype = description.compute_dtype
        calibration = calibrate(model.config, strategies=self.strategies, compute_dtype=dtype, force=force)
        sizes = ModelSizes(self.shape, calibration.key.dtype, vector=description.vector)
        staging = HotSPaTrainingArguments.hotspa_staging_mb << 20
        self.cost = cost = CostModel.of_calibration(calibration, sizes, MemoryOptions(switch_bytes=2 * staging))
        self.memory, self.time, self.switch = cost.memory, cost.time, cost.switch_seconds(self.strategies)

    def shortest(self, strategy: Strategy) -> Bucket:
        """Packs as short as the longest sequence."""
        return Bucket(strategy, self.work.longest, self.work.longest)

    def buckets(self, strategy: Strategy, limit_bytes: float | None) -> tuple[Bucket, ...]:
        """The packs that the search finds best for one strategy."""
        from hf_hotspa.search.automatic import PACK_MARGIN
        from hf_hotspa.search.offers import MARGIN
        from hf_hotspa.search.question import Question
        from hf_hotspa.search.search import SearchOptions, search

        capacities = _FullPipelines(self.memory, limit_bytes)
        question = Question(
            self.cost, capacities, self.work.lengths, self.work.mini_batch_rows, longest=self.work.longest
        )
        return search(question, [strategy], SearchOptions(margin=MARGIN, pack_margin=PACK_MARGIN)).buckets


def our_works(work: Work, plan: dict[str, Any], limited: bool, names: Sequence[str]) -> dict[str, Work | str]:
    """For each of our sides what it trains, or why it cannot."""
    from dataclasses import replace

    limit = plan["plan_bytes"] if limited else None
    given: dict[str, Work | str] = {}
    for name in names:
        short = name.removeprefix("ours, ")
        if short == "auto":
            given[name] = replace(work, strategies="auto", limit_bytes=limit)
        elif (how := short.removeprefix("static, ")) in PAPER_STATIC:
            # the strategy that the longest sequence asks for
            strategies = plan["short"][plan["least"]]
            given[name] = replace(work, strategies=strategies, packed=PAPER_STATIC[how], limit_bytes=limit)
        elif short == "the paper's way":
            strategies = paper_buckets(work.ranks, work.longest)
            given[name] = replace(work, strategies=strategies, planner="algorithm1", limit_bytes=limit)
        elif short not in plan["free"]:
            given[name] = f"{short} is not legal for this model on {work.ranks} ranks"
        else:
            given[name] = replace(work, strategies=plan["limited" if limited else "free"][short], limit_bytes=limit)
    return given
