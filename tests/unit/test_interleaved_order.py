"""Several stages on each rank (`+v2`): what the ranks run, in one order, without waiting for themselves, within the limit."""

import dataclasses
import random
from types import SimpleNamespace

import pytest

from hf_hotspa.costs.memory import most_packs
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import StrategyError
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.packing.pipeline_order import (
    Turn,
    backward_order,
    check_runs,
    choose_interleaved,
    interleaved_order,
    torch_order,
)
from hf_hotspa.strategy import Strategy
from tests.unit.test_cost_memory import LLAMA_7B
from tests.unit.test_pipeline_order import finishes


def drawn(seed: int) -> tuple[list[int], list[int], int, int, int]:
    """Tokens of units, how many each chain has, ranks, stages on each, and a limit, often of little more than one chain."""
    rng = random.Random(seed)
    num_ranks, rounds = rng.randint(2, 5), rng.choice([2, 2, 3, 4])
    with_chunks = rng.random() < 0.4
    chains = [rng.choice([1, 1, 2, 5]) if with_chunks else 1 for _ in range(rng.randint(0, 11))]
    tokens = [round(rng.lognormvariate(4, rng.choice([0.0, 1.2]))) + 1 for _ in range(sum(chains))]
    ends = [sum(chains[: i + 1]) for i in range(len(chains))]
    largest = max((sum(tokens[end - n : end]) for n, end in zip(chains, ends, strict=True)), default=1)
    return tokens, chains, num_ranks, rounds, rng.choice([largest, largest + 90, num_ranks * largest, 10**6])


def sequences(order: tuple[Turn, ...], num_ranks: int, rank: int) -> list[Turn]:
    return [turn for turn in order if turn.stage % num_ranks == rank]


def test_every_pass_once_behind_what_it_needs_and_within_the_limit_and_what_the_memory_model_says() -> None:
    """A stage takes chunks of a chain back against their order."""
    fewer = 0
    for seed in range(250):
        tokens, chains, num_ranks, rounds, limit = drawn(seed)
        last, done = num_ranks * rounds - 1, set[Turn]()
        order = interleaved_order(tokens, num_ranks, rounds, limit, chains)
        for turn in order:
            if turn.is_backward:
                assert Turn(turn.stage, turn.unit, False) in done
                assert turn.stage == last or Turn(turn.stage + 1, turn.unit, True) in done
            else:
                assert turn.stage == 0 or Turn(turn.stage - 1, turn.unit, False) in done
            done.add(turn)
        for stage in range(last + 1):
            own = [turn for turn in order if turn.stage == stage]
            assert [t.unit for t in own if not t.is_backward] == list(range(len(tokens)))
            assert [t.unit for t in own if t.is_backward] == backward_order(chains)
        for rank in range(num_ranks):
            most = most_packs("auto", num_ranks, rank, None, max(chains, default=1), rounds)
            assert most is not None
            held: dict[tuple[int, int], int] = {}
            for turn in sequences(order, num_ranks, rank):
                if turn.is_backward:
                    del held[turn.stage, turn.unit]
                else:
                    held[turn.stage, turn.unit] = tokens[turn.unit]
                assert sum(held.values()) <= rounds * limit
                if max(chains, default=1) == 1:
                    assert len(held) <= rounds * most
            assert not held
        fewer += order != interleaved_order(tokens, num_ranks, rounds, None, chains)
    assert fewer > 50  # the limit mattered


def test_no_rank_waits_for_itself_where_messages_block() -> None:
    """As `parallel.interleaved` posts them: one by one, in the order of the passes that make them."""
    for seed in range(250):
        tokens, chains, num_ranks, rounds, limit = drawn(seed)
        is_trained = seed % 5 > 0
        posts: list[list[set[tuple[int, int, int, bool]]]] = [[] for _ in range(num_ranks)]
        for turn in interleaved_order(tokens, num_ranks, rounds, limit, chains, is_trained):
            target = turn.stage + (-1 if turn.is_backward else 1)
            if 0 <= target < num_ranks * rounds:
                ends = turn.stage % num_ranks, target % num_ranks
                for rank in ends:
                    posts[rank].append({(*ends, turn.stage * len(tokens) + turn.unit, turn.is_backward)})
        assert finishes(posts), seed


def test_a_schedule_of_one_stage_on_a_rank_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"pipeline schedule is gpipe.*use the schedule own or 1f1b.*leave .v2 out"):
        check_runs("gpipe", Strategy(pp=2, v=2))
    check_runs("1f1b", Strategy(pp=2, v=2))
    with pytest.raises(StrategyError, match="hotspa_stragglers=balance"):
        HandOver().check_strategy(Strategy(pp=2, v=2), LLAMA_7B, "own")
    check_runs("own", Strategy(pp=2, v=2))


TORCH_GRID = [
    (num_packs, num_ranks, rounds)
    for num_ranks in (2, 3, 4, 5)
    for rounds in (2, 3, 4)
    for num_packs in range(num_ranks, 4 * num_ranks + 1)
    if num_packs % (num_packs // num_ranks) == 0
]


def test_torchs_order_is_what_torch_makes() -> None:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    for num_packs, num_ranks, rounds in TORCH_GRID:
        stages = [
            SimpleNamespace(num_stages=num_ranks * rounds, group_size=num_ranks, group_rank=0, is_last=False)
            for _ in range(rounds)
        ]
        theirs = ScheduleInterleaved1F1B(stages, num_packs).pipeline_order
        ours = torch_order(num_packs, num_ranks, rounds)
        done = set[Turn]()
        for turn in ours:  # each behind what it needs
            step = 1 if turn.is_backward else -1
            needed = turn._replace(stage=turn.stage + step)
            assert needed in done or not 0 <= needed.stage < num_ranks * rounds
            done.add(turn)
        for rank in range(num_ranks):
            made = [
                Turn(each.stage_index, each.microbatch_index, each.computation_type.name != "FORWARD")
                for each in theirs[rank]
                if each is not None
            ]
            assert sequences(ours, num_ranks, rank) == made


def test_torchs_schedule_runs_within_the_limit_or_not_at_all() -> None:
    kinds = set()
    for seed in range(250):
        tokens, _, num_ranks, rounds, limit = drawn(seed)
        passes = choose_interleaved("1f1b", tokens, num_ranks, rounds, limit)
        kinds.add((passes.kind, passes.replaced))
        assert all(padded >= n for padded, n in zip(passes.tokens, tokens, strict=True))
        if passes.kind == "own":
            assert passes.order == interleaved_order(tokens, num_ranks, rounds, limit)
            continue
        assert len(set(passes.tokens)) == 1
        for rank in range(num_ranks):
            most = most_packs("1f1b", num_ranks, rank, None, 1, rounds)
            held = 0
            for turn in sequences(passes.order, num_ranks, rank):
                held += -1 if turn.is_backward else 1
                assert held * passes.tokens[0] <= rounds * limit
                assert most is not None
                assert held <= rounds * most
    assert kinds == {("own", False), ("own", True), ("1f1b", False)}


@pytest.mark.parametrize(("num_ranks", "num_packs"), [(2, 8), (4, 8)])
def test_the_time_model_takes_torchs_order_and_padding(num_ranks: int, num_packs: int) -> None:
    """Of equal packs idle over busy is (p - 1) / (v m), as in our own order; unequal ones take as long as if all were the
    longest."""
    theirs = TimeModel("test", StageCosts((1,) * 2 * num_ranks), {1: Cost(0.0, 1.0, 0.0)}, schedule="1f1b")
    ours = dataclasses.replace(theirs, schedule="own")
    strategy = Strategy(pp=num_ranks, v=2)
    equal, unequal = [(60,)] * num_packs, [(60,), *[(20,)] * (num_packs - 1)]
    seconds = theirs.phase_seconds(strategy, [equal])
    busy = 60.0 * num_packs * 2
    assert seconds / busy - 1 == pytest.approx((num_ranks - 1) / (2 * num_packs))
    others = theirs.phase_seconds(strategy, [unequal]), ours.phase_seconds(strategy, [equal])
    assert others == pytest.approx((seconds, seconds))
    assert ours.phase_seconds(strategy, [unequal]) < seconds
