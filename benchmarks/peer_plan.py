"""The sides of ours in `peers.py`: which packs each static strategy takes, the paper's buckets, and the memory limit.

One world calibrates (or finds the machine's calibration in the cache), and the search answers for every strategy alone.
"""

from collections.abc import Sequence
from typing import Any

from contest import make_model, short_name
from peer_work import Work

from hf_hotspa.strategy import Bucket, Strategy

LIMIT_MARGIN, PLAN_MARGIN = 1.10, 1.05
"""The limit of a cell is so many times what the static strategy with the least memory takes, and planners plan with so many
times what they predict of it: beside what they count, a rank holds its rows and what Python and the libraries add."""
_PAPER = (("dp", 8), ("dp2tp2", 2), ("tp", 1))
"""Strategies and where their buckets end, as parts of the longest sequence: the published runs of 7B and 13B models on
8 GPUs have these three kinds, with edges at an eighth and a half."""


def paper_buckets(ranks: int, longest: int) -> str:
    """The paper's way: fixed buckets, and packs as long as the longest sequence of their bucket."""
    entries = []
    for text, part in _PAPER:
        strategy = Strategy.parse(text if text[-1].isdigit() else f"{text}{ranks}")
        entries.append(f"{strategy}:{longest // part}@{longest // part}")
    return ",".join(entries)


def plan_ours(rank: int, world_size: int, work: Work, force: bool) -> dict[str, Any]:
    """The plans of our sides; the work of one rank.

    `free` and `limited` have the bucket list of each static strategy, `room` the most tokens of a pack that fits under the
    limit whatever comes with it in a pipeline. Where that is less than the longest sequence, the packs of `limited` are as
    short as the longest sequence, as those of `short` are: what they take has to be measured. `plan_bytes` is what planners
    are given under the limit, `need_bytes` what the longest sequence needs at least under any strategy, with the model that
    the trainer was given (CPU processes hold it in the same memory); both by the calibrated memory model. `rank_bytes` is
    the most that a rank holds without a limit.

    Saves the untrained model for sides that load one.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        work: What all sides train.
        force: Whether to calibrate even if the cache has a calibration.
    """
    import torch

    from hf_hotspa.cost.automatic import MARGIN, PACK_MARGIN
    from hf_hotspa.cost.memory import MemoryOptions, MemoryRooms
    from hf_hotspa.cost.search import search
    from hf_hotspa.cost.sizes import ModelSizes
    from hf_hotspa.runtime.calibration import calibrate
    from hf_hotspa.runtime.specs import describe_model
    from hf_hotspa.strategy import legal_strategies
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

    model = make_model(work.model)
    if rank == 0:
        make_model(work.model).save_pretrained(work.start_folder)
    dtype = torch.bfloat16 if work.dtype == "bf16" else None
    description = describe_model(model, dtype)
    shape = description.shape
    strategies = legal_strategies(world_size, shape)
    calibration = calibrate(model.config, strategies=strategies, compute_dtype=description.compute_dtype, force=force)
    sizes = ModelSizes(shape, calibration.key.dtype, vector=description.vector)
    staging = HotSPaTrainingArguments.hotspa_staging_mb << 20
    memory = calibration.memory_model(sizes, MemoryOptions(optimizer_bytes=8, switch_bytes=2 * staging))
    time_model, switch = calibration.time_model(sizes), calibration.switch_seconds(strategies, sizes)
    given = sum(each.numel() * each.element_size() for each in model.parameters())
    need = min(memory.bytes_needed(s, work.longest) for s in strategies)
    limit = PLAN_MARGIN * need

    def buckets(strategy: Strategy, limit_bytes: float | None) -> tuple[Bucket, ...]:
        choice = search(
            work.lengths, [strategy], time_model, MemoryRooms(memory, limit_bytes), switch,
            mini_batch_size=work.mini_batch_rows, longest=work.longest, quadratic_cost=shape.quadratic_cost,
            margin=MARGIN, pack_margin=PACK_MARGIN,
        )  # fmt: skip
        return choice.buckets

    found: dict[str, Any] = {"plan_bytes": limit, "need_bytes": need + given, "rank_bytes": 0.0}
    found |= {"free": {}, "limited": {}, "short": {}, "room": {}}
    for strategy in strategies:
        name, rooms = short_name(strategy), MemoryRooms(memory, limit)
        free = buckets(strategy, None)
        found["free"][name] = ",".join(map(str, free))
        largest = max(bucket.pack_tokens for bucket in free)
        found["rank_bytes"] = max(found["rank_bytes"], memory.bytes_needed(strategy, largest))
        found["room"][name] = rooms.tokens(strategy, rooms.arena(strategy))
        found["short"][name] = found["limited"][name] = f"{strategy}:{work.longest}@{work.longest}"
        if found["room"][name] >= work.longest:
            found["limited"][name] = ",".join(map(str, buckets(strategy, limit)))
    return found


def our_works(work: Work, plan: dict[str, Any], limited: bool, names: Sequence[str]) -> dict[str, Work | str]:
    """For each of our sides what it trains, or why it cannot."""
    from dataclasses import replace

    limit = plan["plan_bytes"] if limited else None
    given: dict[str, Work | str] = {}
    for name in names:
        short = name.removeprefix("ours, ")
        if short == "auto":
            given[name] = replace(work, strategies="auto", limit_bytes=limit)
        elif short == "the paper's way":
            strategies = paper_buckets(work.ranks, work.longest)
            given[name] = replace(work, strategies=strategies, planner="algorithm1", limit_bytes=limit)
        elif short not in plan["free"]:
            given[name] = f"{short} is not legal for this model on {work.ranks} ranks"
        else:
            given[name] = replace(work, strategies=plan["limited" if limited else "free"][short], limit_bytes=limit)
    return given
