"""The order of a pipeline's passes: the plain schedule without a limit, never more tokens than the limit, no deadlock."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest

from hf_hotspa.costs.memory import most_packs
from hf_hotspa.errors import StrategyError
from hf_hotspa.packing.cuts import cut_for
from hf_hotspa.packing.pipeline_order import (
    SCHEDULES,
    Passes,
    backward_order,
    check_runs,
    choose_passes,
    delays,
    joint_passes,
    operations,
    reaches,
)
from hf_hotspa.strategy import Bucket, Strategy


def plain_1f1b(total: int, num_stages: int, stage: int) -> list[tuple[int, bool]]:
    """Warm-up, one forward and one backward in turn, drain: as in the paper."""
    warm_up = min(total, num_stages - 1 - stage)
    order = [(i, False) for i in range(warm_up)]
    for i in range(warm_up, total):
        order += [(i, False), (i - warm_up, True)]
    return order + [(i, True) for i in range(total - warm_up, total)]


def drawn(seed: int) -> tuple[list[int], int, int]:
    """Tokens of packs, a limit (often of a few packs, sometimes below the largest), and stages."""
    rng = random.Random(seed)
    num_stages = rng.randint(1, 8)
    tokens = [round(rng.lognormvariate(4, 1.2)) + 1 for _ in range(rng.randint(0, 14))]
    return tokens, rng.randint(1, max(1, num_stages * 120)), num_stages


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_without_a_limit_it_is_the_plain_schedule(num_stages: int) -> None:
    for total in range(9):
        for reach in (reaches([7] * total), reaches([7] * total, 7 * num_stages)):
            for stage in range(num_stages):
                assert operations(reach, num_stages, stage) == plain_1f1b(total, num_stages, stage)


def test_every_pass_once_in_order_within_the_limit_and_as_late_as_it_allows() -> None:
    """Limits may be below the largest pack. A stage goes back as late as its place and the limit allow."""
    shorter = 0
    for seed in range(400):
        tokens, limit, num_stages = drawn(seed)
        reach = reaches(tokens, limit)
        assert delays(reach, num_stages) == (operations(reach, num_stages, 0) != plain_1f1b(len(tokens), num_stages, 0))
        for stage in range(num_stages):
            order = operations(reach, num_stages, stage)
            held, begun = list[int](), 0
            for i, is_backward in order:
                if is_backward:
                    if begun < len(tokens) and len(held) < num_stages - stage:
                        assert sum(tokens[j] for j in held) + tokens[begun] > limit
                    assert held.pop(0) == i
                else:
                    assert i == begun
                    held.append(i)
                    begun += 1
                assert len(held) <= num_stages - stage
                assert len(held) <= 1 or sum(tokens[i] for i in held) <= limit
            assert (begun, held) == (len(tokens), [])
            shorter += order != plain_1f1b(len(tokens), num_stages, stage)
    assert shorter > 500  # the limit mattered


def held(passes: Passes, stage: int) -> list[list[int]]:
    """Tokens of the packs that a stage holds, after each forward pass."""
    now: dict[int, int] = {}
    found = []
    for i, is_backward in passes.operations(stage):
        if is_backward:
            del now[i]
        else:
            now[i] = passes.tokens[i]
            found.append(list(now.values()))
    assert not now
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_holds_more_than_the_limit_padding_included(schedule: str) -> None:
    kinds = set()
    for seed in range(400):
        tokens, limit, num_stages = drawn(seed)
        limit = max([limit, *tokens])  # as a bucket gives it: the longest sequence is within it
        passes = choose_passes(schedule, tokens, num_stages, limit)
        kinds.add((passes.kind, passes.replaced))
        assert all(padded >= n for padded, n in zip(passes.tokens, tokens, strict=True))
        assert [at for group in passes.groups for at in range(*group)] == list(range(len(tokens)))
        for stage in range(num_stages):
            most = most_packs(schedule, num_stages, stage, len(tokens))
            order = passes.operations(stage)
            for kind in (False, True):
                assert [i for i, is_backward in order if is_backward == kind] == list(range(len(tokens)))
            for packs in held(passes, stage):
                assert sum(packs) <= limit
                assert most is None or len(packs) <= most
        for first, end in passes.groups if passes.kind != "own" else []:
            assert len(set(passes.tokens[first:end])) == 1  # one shape
    assert (
        kinds
        == {
            "auto": {("own", False)},
            "own": {("own", False)},
            "1f1b": {("own", False), ("own", True), ("1f1b", False)},  # too few packs, too many tokens, or as asked
            "gpipe": {("own", False), ("gpipe", False)},  # nothing to run or no pipeline, or as asked
        }[schedule]
    )


def test_a_schedule_that_was_asked_for_runs_where_the_limit_allows() -> None:
    # 4 packs of 20,000 tokens where 32,768 are allowed
    assert choose_passes("1f1b", [20000, 100, 100, 100], 4, 32768) == Passes(
        "own", 4, (20000, 100, 100, 100), (4, 4, 4, 4), replaced=True
    )
    assert choose_passes("1f1b", [900, 800, 700, 600, 500], 4, 4000).tokens == (900,) * 5
    # eight packs of 10 tokens where 40 are allowed: two groups
    assert choose_passes("gpipe", [10] * 8, 4, 40).groups == [(0, 4), (4, 8)]
    assert choose_passes("gpipe", [10] * 8, 4).groups == [(0, 8)]
    # padded within a group only
    assert choose_passes("gpipe", [20000, 100, 90, 80], 4, 32768).tokens == (20000, 100, 100, 100)


Message = tuple[int, int, int, bool]
"""Sender, receiver, pack, whether it is a gradient."""


def exchanges(order: Sequence[tuple[int, bool]], stage: int, num_stages: int, together: bool) -> list[set[Message]]:
    """What a stage posts, one set after the other, as `parallel.pipeline` does: with `together`, a send and the receive
    that follows it from the same neighbour are one."""
    found: list[set[Message]] = []
    sent: Message | None = None
    for i, is_backward in order:
        wanted: Message | None = (stage + 1 if is_backward else stage - 1, stage, i, is_backward)
        if wanted is not None and not 0 <= wanted[0] < num_stages:
            wanted = None
        if sent is not None and wanted is not None and sent[1] == wanted[0] and together:
            found.append({sent, wanted})
        else:
            found += [{message} for message in (sent, wanted) if message is not None]
        receiver = stage - 1 if is_backward else stage + 1
        sent = (stage, receiver, i, is_backward) if 0 <= receiver < num_stages else None
    return found + ([{sent}] if sent is not None else [])


def finishes(posts: list[list[set[Message]]]) -> bool:
    """Whether all stages come to their end where each waits until all messages of a set are through."""
    at = [0] * len(posts)
    open_ = [set(lane[0]) if lane else set() for lane in posts]
    moved = True
    while moved:
        moved = False
        for message in {m for lane in open_ for m in lane}:
            sender, receiver = message[:2]
            if message in open_[sender] and message in open_[receiver]:
                open_[sender].discard(message)
                open_[receiver].discard(message)
                moved = True
        for stage, lane in enumerate(posts):
            while not open_[stage] and at[stage] < len(lane):
                at[stage] += 1
                open_[stage] = set(lane[at[stage]]) if at[stage] < len(lane) else set()
                moved = True
    return all(at[stage] == len(lane) for stage, lane in enumerate(posts))


def all_finish(orders: Sequence[Sequence[tuple[int, bool]]], together: bool = True) -> bool:
    return finishes([exchanges(order, stage, len(orders), together) for stage, order in enumerate(orders)])


def test_no_stage_waits_for_itself_where_sends_block() -> None:
    stuck = 0
    for seed in range(600):
        tokens, limit, num_stages = drawn(seed)
        reach = reaches(tokens, limit)
        orders = [operations(reach, num_stages, stage) for stage in range(num_stages)]
        assert all_finish(orders), seed
        stuck += not all_finish(orders, together=False)
    assert stuck  # it is the posting of both at once that prevents it


# ---- chunks of packs


def drawn_chains(seed: int) -> tuple[list[int], list[int], int, int]:
    """Tokens of chunks, how many each chain has, a limit that holds any chain (often hardly more), and stages."""
    rng = random.Random(seed)
    chains = [rng.choice([1, 1, 2, 3, 5, 9]) for _ in range(rng.randint(1, 7))]
    tokens = [rng.randint(1, 100) for _ in range(sum(chains))]
    largest = max(sum(tokens[end - n : end]) for n, end in zip(chains, accumulate(chains), strict=True))
    num_stages = rng.randint(2, 8)
    return tokens, chains, rng.choice([largest, largest + 100 * num_stages, 10**6]), num_stages


def test_chains_come_first_in_first_out_and_their_chunks_go_back_last_in_first_out() -> None:
    assert backward_order([3, 1, 2]) == [2, 1, 0, 3, 5, 4]
    # Seq1F1B, two chains of three on the last of two stages and on the first: n - 1 more forward passes ahead
    last, first = (operations([6] * 6, 2, stage, [3, 3]) for stage in (1, 0))
    assert "".join("FB"[is_backward] for _, is_backward in last) == "FFFBFBFBFBBB"
    assert "".join("FB"[is_backward] for _, is_backward in first) == "FFFFBFBFBBBB"


def test_chunks_are_within_the_limit_behind_all_of_their_chain_and_no_stage_waits_for_itself() -> None:
    for seed in range(600):
        tokens, chains, limit, num_stages = drawn_chains(seed)
        passes = choose_passes("auto", tokens, num_stages, limit, chains)
        for stage in range(num_stages):
            order = passes.operations(stage)
            assert [i for i, is_backward in order if not is_backward] == list(range(len(tokens)))
            assert [i for i, is_backward in order if is_backward] == backward_order(chains)
            begun, held = 0, dict[int, int]()
            ends = [end for n, end in zip(chains, accumulate(chains), strict=True) for _ in range(n)]
            for i, is_backward in order:
                if is_backward:
                    assert begun >= ends[i]
                    del held[i]
                else:
                    begun, held[i] = begun + 1, tokens[i]
                assert sum(held.values()) <= limit
                most = most_packs("auto", num_stages, stage, None, max(chains))
                assert most is not None
                assert len(held) <= most
        assert all_finish([passes.operations(stage) for stage in range(num_stages)]), seed


def test_no_stage_of_a_replica_that_sits_chunks_out_waits_for_itself_where_sends_block() -> None:
    """Replicas that keep step (`packing.pipeline_order`) run what they have of the joint order."""
    for seed in range(300):
        rng = random.Random(seed)
        strategy = Strategy(dp=3, pp=rng.randint(2, 6), ck=rng.choice([3, 5, 100]), z=3)
        replicas = [
            [[rng.randint(1, 14) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(0, 4))] for _ in range(3)
        ]
        limit = rng.choice([None, 1, 20, 40])
        joint = joint_passes(strategy, replicas, limit, 0.05)
        for replica, packs in enumerate(replicas):
            orders = [joint.operations(stage, replica) for stage in range(strategy.pp)]
            chains = [len(chain) for pack in packs for chain in cut_for(strategy, pack, 0.05)]
            assert [i for i, is_backward in orders[0] if is_backward] == backward_order(chains)
            assert all_finish(orders), seed


def test_a_bucket_knows_what_its_pipeline_may_hold() -> None:
    assert Bucket(Strategy(1, 1, 4), 2048, 1000).most_tokens == 4000  # a full pipeline of packs
    assert Bucket(Strategy(1, 1, 4), 8192, 1000).most_tokens == 8192  # one sequence, and nothing beside it
    assert Bucket(Strategy(4, 1, 1), 100, 300).most_tokens == 300
    assert Bucket(Strategy(1, 1, 4), 8192, 1000).capacity == 8192
    assert Bucket(Strategy(1, 1, 4), 100, 300).capacity == 300
    assert Bucket(Strategy(pp=4, ck=100), 1000, 1000).most_tokens == 1400  # all of one sequence, and a chunk a stage
    assert Bucket(Strategy(pp=4, ck=100), 80, 1000).most_tokens == 400
    assert Bucket(Strategy(pp=4, ck=1000), 80, 500).most_tokens == 2000


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_schedules_of_whole_packs_are_refused_for_chunks(schedule: str) -> None:
    with pytest.raises(
        StrategyError, match=rf"pipeline schedule is {schedule}.*use the schedule own, or leave .ck8 out"
    ):
        check_runs(schedule, Strategy(pp=2, ck=8))
    check_runs(schedule, Strategy(ck=8))
    check_runs("own", Strategy(pp=2, ck=8))
