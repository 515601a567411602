"""The plan behind `auto`: what must fit, what is searched, which buckets mini-batches may choose from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DataError, DeviceMemoryError, OverlongError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.automatic import RunQuestion, fitting_beside, make_auto_plan
from hf_hotspa.search.bucket_plan import limit_text, wrapped
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.chooser import Selector
from hf_hotspa.search.offers import CHUNK_SIZES, chunks_alone, with_chunks
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import SearchOptions, search
from hf_hotspa.search.setup import Setup
from hf_hotspa.search.single import Singles
from hf_hotspa.strategy import Bucket, Strategy, legal_strategies
from hf_hotspa.trainer import run_plan
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from tests.calibrations import made_calibration
from tests.families import tiny_model
from tests.vision_models import vision_model

SHAPE = ModelShape("llama", 8, 8, 4, 64, 64, 500, 40_000, max_position_embeddings=4096)
SIZES = ModelSizes(SHAPE, "float32")
MEMORY = MemoryModel(SIZES, 4, MemoryOptions(compute_dtype="float32", switch_bytes=0))
STRATEGIES = legal_strategies(4, SHAPE)
DP = Strategy(dp=4)
TIME = TimeModel(
    "test",
    StageCosts((1,) * 8),
    {1: Cost(1e-10, 1e-6, 1e-5), 2: Cost(1e-10, 8e-7, 2e-5), 4: Cost(1e-10, 7e-7, 4e-5)},
    forward_share=1 / 3,
)
LIMIT = 60
COST = CostModel(TIME, MEMORY, Cluster(4, 4, 1e30, 1e30), switch_s=1e-4)
RNG = np.random.default_rng(0)
LONG_TAILED = SequenceTable.from_lengths(np.clip(RNG.lognormal(4.5, 1.2, 3000), 8, 3000).astype(int))


def plan(table=LONG_TAILED, limit_mb=None, among=STRATEGIES, **options):
    limit = None if limit_mb is None else limit_mb * 2**20
    options = {"mini_batch_size": 64, "limit_bytes": limit, "limit_source": "as given"} | options
    return make_auto_plan(RunQuestion(table, **options), among, COST)


def test_without_a_limit_nothing_is_switched() -> None:
    found = plan()
    assert len(found.pool) == 1
    assert not found.choice.switches
    assert found.answers == wrapped(found.switching)
    assert found.switching.startswith("Switching would not gain more: ")
    assert limit_text(found.limit_bytes, found.limit_source).endswith("of a device: as given")
    assert found.longest == int(LONG_TAILED.lengths.max())


def test_under_a_limit_long_sequences_bring_a_strategy_of_their_own() -> None:
    limit = LIMIT
    found = plan(limit_mb=limit, may_chunk=False)
    assert found.choice.switches
    assert found.choice.seconds < found.choice.static_seconds
    assert found.pool[0].strategy.dp > found.pool[-1].strategy.dp
    assert found.pool[-1].longest == int(LONG_TAILED.lengths.max())
    assert len({bucket.strategy for bucket in found.pool}) == len(found.pool)
    assert all(memory.total <= limit * 2**20 for memory in found.memory)
    text = str(found)
    assert all(str(bucket.strategy) in text for bucket in found.choice.buckets)
    assert found.switching.startswith(("Switching pays: ", "Switching is about the same: "))
    assert f"of a device: {limit}.0 MiB, as given" in limit_text(found.limit_bytes, found.limit_source)
    assert found == plan(limit_mb=limit, may_chunk=False)


def test_every_mini_batch_may_decide_for_the_best_static_strategy() -> None:
    found = plan(limit_mb=LIMIT, may_chunk=False)
    static = next(bucket for bucket in found.pool if bucket.strategy == found.choice.static.strategy)
    assert static.capacity >= found.longest
    switch = COST.switch_seconds([bucket.strategy for bucket in found.pool])
    selector = Selector(found.pool, COST.time, switch, quadratic_cost=SHAPE.quadratic_cost)
    assert len(selector.select([50] * 200).buckets) == 1
    assert len(selector.select([50] * 200 + [2900]).buckets) == 2
    assert selector.select([2900] * 8).strategies == (static.strategy,)


def test_rivals_are_the_best_single_strategy_and_what_people_run() -> None:
    def singles(limit_mb: int | None, strategies: list[Strategy] = STRATEGIES) -> Singles:
        limit = None if limit_mb is None else limit_mb << 20
        return Singles.of(strategies, lambda s: plan(limit_mb=limit_mb, among=[s], max_phases=1), SHAPE, limit)

    free = singles(None)
    assert len(free.fitting) == len(STRATEGIES)
    assert not free.rejected
    rivals, left_out = free.rivals(4)
    assert rivals[0] == free.fitting[0]
    assert {str(bucket.strategy) for bucket in rivals} == {str(rivals[0].strategy), "dp4", "tp4", "pp4"}
    assert left_out == {"dp4+z3": "the flags or the calibration of this run leave it out"}
    rivals, left_out = singles(LIMIT, [*STRATEGIES, Strategy(4, z=3)]).rivals(4)
    assert DP not in [bucket.strategy for bucket in rivals]
    assert "dp4+ck1024" in [str(bucket.strategy) for bucket in rivals]
    assert left_out["dp4"] == "does not fit in 60 MiB, but in chunks"
    assert "no links" in left_out["dp4+z3"]
    _, left_out = singles(30).rivals(4)
    assert left_out["pp4"] == "does not fit in 30 MiB"
    of_two_heads = replace(SHAPE, num_attention_heads=2, num_key_value_heads=2)
    _, left_out = Singles.of([DP], lambda s: plan(among=[s], max_phases=1), of_two_heads, None).rivals(4)
    assert left_out["tp4"] == "tp4 is more than the 2 attention heads"
    # of several of a kind the fastest, whatever its options
    options = (Strategy(tp=4, sp=True), Strategy(tp=4, rc=1), Strategy(4, z=3, rc=1), Strategy(4, z=2))
    buckets = tuple(Bucket(s, 64, 64) for s in options)
    rivals, left_out = Singles(buckets, otherwise="because").rivals(4)
    assert rivals == [buckets[0], buckets[2]]
    assert left_out == {"dp4": "because", "pp4": "because"}


def test_one_bucket_at_most_when_asked() -> None:
    assert len(plan(limit_mb=LIMIT, max_phases=1).pool) == 1


def test_an_impossible_limit_names_the_smallest_that_works() -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        plan(limit_mb=6)
    text = str(caught.value)
    assert "hotspa_memory_limit_mb" in text
    needed = int(text.partition("a limit of ")[2].partition("MiB")[0])
    assert plan(limit_mb=needed).longest == int(LONG_TAILED.lengths.max())
    with pytest.raises(DeviceMemoryError):
        plan(limit_mb=needed - 1)
    with pytest.raises(DeviceMemoryError):
        plan(limit_mb=1, policy="split")  # no room at all: no policy helps


def test_what_must_fit_is_what_the_policy_leaves() -> None:
    shorter = plan(limit_mb=11, policy="split")
    assert 0 < shorter.longest < int(LONG_TAILED.lengths.max())
    assert plan(longest=500, policy="truncate").longest == 500
    assert plan(longest=4000).longest == 4000  # longer than the data
    over = SequenceTable.from_lengths([10, 5000])
    assert plan(over, policy="drop").longest == 4096  # the positions of the model


def test_rows_are_looked_at_before_the_machine_is_measured(monkeypatch, tmp_path) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(run_plan, "agreed_calibration", measure)
    model = tiny_model("llama_gqa_bias")
    most = model.config.max_position_embeddings
    args = HotSPaTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(OverlongError, match=f"longest row has {most + 1} tokens"):
        run_plan.prepare_auto(model, args, Agreement(None, 0), lambda: [SequenceTable.from_lengths([10, most + 1])], 2)
    run_plan.prepare_auto(model, args, Agreement(None, 0), lambda: [SequenceTable.from_lengths([10, most])], 2)
    args.hotspa_calibration = "measure"  # else one process, which has nothing to choose between, measures nothing
    with pytest.raises(AssertionError, match="measured"):
        run_plan.prepare_auto(model, args, Agreement(None, 0), lambda: [SequenceTable.from_lengths([10, most])], 2)


@pytest.mark.parametrize(("family", "parts_images"), [("gemma3", False), ("qwen3_vl", True)])
def test_images_whose_tokens_see_each_other_are_parted_by_no_strategy(
    family: str, parts_images: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, asked = vision_model(family, torch.float32), list[tuple[list[Strategy], RunQuestion]]()

    def planned(question: RunQuestion, strategies: list[Strategy], cost: CostModel) -> None:
        asked.append((strategies, question))
        raise AssertionError("planned")

    monkeypatch.setattr(HotSPaTrainingArguments, "world_size", 8)
    costs = {tp: Cost(1e-10, 1e-6 / tp, 1e-5) for tp in (1, 2, 4)}
    monkeypatch.setattr(run_plan, "agreed_calibration", lambda *_: made_calibration(model, 8, costs))
    monkeypatch.setattr(run_plan, "make_auto_plan", planned)
    args = HotSPaTrainingArguments(output_dir=str(tmp_path), use_cpu=True, hotspa_memory_limit_mb=64)
    for fields in (["input_ids", "labels"], ["text", "images"], ["input_ids", "pixel_values"]):
        with pytest.raises(AssertionError, match="planned"):
            run_plan.prepare_auto(
                model, args, Agreement(None, 0), lambda: [SequenceTable.from_lengths([10, 90])], 8, fields=fields
            )
    # cp8 gathers keys and values: there are 4 heads to divide
    parts = [Strategy(cp=8) in strategies and question.may_chunk for strategies, question in asked]
    assert parts == [True, parts_images, parts_images]
    assert all(Strategy(4, cp=2) in strategies for strategies, _ in asked)


def test_lengths_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(OverlongError, match="longest row has 5000 tokens, and the model has 4096 positions") as caught:
        plan(SequenceTable.from_lengths([10, 5000]))
    assert str(caught.value.fix).startswith("set hotspa_overlong to truncate, split or drop, or raise max_position")
    with pytest.raises(OverlongError, match="hotspa_longest is 5000"):
        plan(longest=5000)
    with pytest.raises(OverlongError, match="1 of 2 rows are over the limit"):
        plan(SequenceTable.from_lengths([10, 700]), longest=500)
    with pytest.raises(DataError, match="no row with a token"):
        plan(SequenceTable.from_lengths([0, 0]))
    with pytest.raises(DataError, match="none of 2 rows"):
        plan(SequenceTable.from_lengths([600, 700]), longest=500, policy="drop")


def test_a_mini_batch_has_as_many_sequences_as_the_policy_makes_of_its_rows() -> None:
    table = SequenceTable.from_lengths([1000, 2000] * 50)
    (row,) = plan(table, longest=500, policy="split", mini_batch_size=10).choice.rows
    assert row.num_sequences == 30
    assert row.num_tokens == 15_000
    (row,) = plan(table, longest=1000, policy="drop", mini_batch_size=10).choice.rows
    assert row.num_sequences == 5


@pytest.mark.parametrize("lengths", [[1], [1, 1], [4096], [7] * 5, [0, 0, 9]])
def test_tiny_data_sets(lengths) -> None:
    found = plan(SequenceTable.from_lengths(lengths), mini_batch_size=64)
    assert found.longest == max(lengths)
    assert str(found)


LONG = SequenceTable.from_lengths([*range(20, 220), 2000])  # one sequence is ten times as long as the others


@pytest.mark.parametrize("limit_mb", [8, 9, 12])
def test_a_sequence_that_fits_nowhere_is_trained_in_chunks(limit_mb: int) -> None:
    with pytest.raises(DeviceMemoryError, match="no strategy holds a sequence of 2000 tokens"):
        plan(LONG, limit_mb=limit_mb, may_chunk=False)
    found = plan(LONG, limit_mb=limit_mb)
    assert found.longest == 2000
    last = found.pool[-1]
    assert last.strategy.ck in CHUNK_SIZES
    assert all(memory.total <= limit_mb * 2**20 for memory in found.memory)
    # chunks as long as they may be, without host memory where it is not needed
    longer = replace(last.strategy, ck=2 * last.strategy.ck, kg=0)
    assert longer.ck > 2000 or MEMORY.breakdown(longer, 2000, longest=2000).total > limit_mb * 2**20
    assert not last.strategy.kh or MEMORY.breakdown(replace(last.strategy, kh=False), 2000).total > limit_mb * 2**20
    if not last.strategy.kh:
        assert plan(LONG, limit_mb=limit_mb, has_host_memory=False) == found
    # whatever is in the way of chunks, the error is as before
    shape = replace(SHAPE, ck_unsupported_reason="layers of it are given whole sequences")
    cost = replace(COST, memory=replace(MEMORY, sizes=replace(SIZES, shape=shape)))
    with pytest.raises(DeviceMemoryError, match="no strategy holds a sequence of 2000 tokens"):
        make_auto_plan(RunQuestion(LONG, 64, limit_mb * 2**20), STRATEGIES, cost)


def test_chunks_stay_out_of_a_search_where_everything_fits() -> None:
    def tokens(strategy: Strategy) -> int:
        return MEMORY.largest_pack(strategy, 52 << 20)

    assert with_chunks(STRATEGIES, 2000, tokens, SHAPE) == STRATEGIES
    longest = 2 * max(map(tokens, STRATEGIES))
    more = with_chunks(STRATEGIES, longest, tokens, SHAPE)[len(STRATEGIES) :]
    assert more
    assert all(tokens(strategy) >= longest for strategy in more)
    assert {s.pp for s in with_chunks(STRATEGIES, longest, tokens, SHAPE, schedule="1f1b") if s.ck} == {1}
    sharded = [Strategy(pp=4, z=3), Strategy(pp=4)]
    longest = max(map(tokens, sharded)) + 1
    assert {(s.pp, s.z) for s in with_chunks(sharded, longest, tokens, SHAPE) if s.ck} == {(4, 0), (4, 3)}


def test_chunks_are_a_single_strategy_where_others_hold_the_longest_with_more_ranks_or_recomputation() -> None:
    held = {DP: 1000, Strategy(4, rc=1): 2500, Strategy(2, 2): 1500, Strategy(tp=4): 3000, Strategy(4, z=3): 1200}

    def tokens(strategy: Strategy) -> int:
        return held.get(strategy, 5 * strategy.ck)

    offered = chunks_alone(list(held), 2000, tokens, SHAPE)
    assert [(s.dp, s.tp, s.z, s.rc) for s in offered] == [(4, 1, 0, 0), (2, 2, 0, 0), (4, 1, 3, 0)]
    assert all(tokens(s) >= 2000 for s in offered)
    # tp2 holds it, too: nothing that spreads as widely is offered, and nothing where replicas alone hold it or nobody does
    held[Strategy(2, 2)] = 2000
    assert {s.tp for s in chunks_alone(list(held), 2000, tokens, SHAPE)} == {1}
    assert chunks_alone(list(held), 1000, tokens, SHAPE) == []
    assert chunks_alone(list(held), 4000, tokens, SHAPE) == []
    reason = replace(SHAPE, ck_unsupported_reason="layers of it are given whole sequences")
    assert chunks_alone(list(held), 2000, tokens, reason) == []


def test_chunks_are_raced_against_other_plans_under_a_limit_and_make_none_slower() -> None:
    raced, without = plan(limit_mb=LIMIT, raced=True), plan(limit_mb=LIMIT, raced=True, may_chunk=False)
    chunked = [pool for pool in (raced.pool, *raced.raced) if any(bucket.strategy.ck for bucket in pool)]
    assert any([bucket.strategy.degrees for bucket in pool] == [DP.degrees] for pool in chunked)
    assert len(chunked) < 1 + len(raced.raced)
    assert raced.choice.seconds <= without.choice.seconds
    assert not any(bucket.strategy.ck for bucket in without.buckets)


def test_packs_that_ran_out_of_memory_become_smaller() -> None:
    static = plan().choice.static.strategy
    assert plan().pool[-1].pack_tokens > 3000
    found = plan(most_tokens={static: 3000})
    assert all(bucket.pack_tokens <= 3000 for bucket in found.pool if bucket.strategy == static)
    assert all(bucket.strategy != static for bucket in plan(most_tokens={static: 0}).pool)
    with pytest.raises(DeviceMemoryError, match="ran out of memory under.*delete hotspa_out_of_memory.json"):
        plan(most_tokens=dict.fromkeys(STRATEGIES, 100))


def test_plans_that_are_raced_differ_fit_together_and_have_data_parallelism_among_them() -> None:
    alone = plan()
    assert (alone.raced, alone.ready) == ((), ())
    raced = plan(raced=True)
    pools = [frozenset(bucket.strategy for bucket in pool) for pool in (raced.pool, *raced.raced)]
    assert len(set(pools)) == len(pools) > 1
    assert {bucket.strategy for bucket in raced.buckets} == frozenset().union(*pools)
    assert any(len(pool) == 1 and all(s.tp == s.pp == s.cp == 1 for s in pool) for pool in pools)
    # where longer rows may come, plans for these and for shorter ones are there, too
    sampled = plan(sampled=True)
    assert {b.strategy for b in sampled.buckets} >= {b.strategy for pool in sampled.ready for b in pool}
    assert all(bucket.capacity >= sampled.longest for pool in sampled.ready for bucket in pool[-1:])


def test_raced_are_the_best_single_strategy_the_best_replicas_the_best_that_moves_no_layers_and_the_best_pool() -> None:
    of_cluster = Setup.read("llama2-7b", "1x8", "a800-80g").cost
    lengths = LONG_TAILED.sequence_lengths.tolist()
    question = Question(of_cluster, Capacities(of_cluster.memory, 72 << 30), lengths, 64, max(lengths))

    def least(names: Sequence[str]) -> str:
        alone = {name: search(question, [Strategy.parse(name)]).seconds for name in names}
        return min(alone, key=alone.__getitem__)

    kinds = [
        ("dp2tp4", "tp8", "dp4tp2+z3", "dp8+z3", "dp8+rc+z3"),
        ("dp8+z3", "dp8+rc+z3", "dp2tp4", "pp8"),
        ("pp8", "tp8"),
    ]
    for names in kinds:
        among = list(map(Strategy.parse, names))
        found = search(question, among, SearchOptions(max_phases=1, raced=True))
        plans = [str(found.static.strategy), *(str(near.buckets[0].strategy) for near in found.near)]
        replicas, unmoved = [n for n in names if n.startswith("dp8")], [n for n in names if "+z3" not in n]
        assert plans[0] == least(names)
        assert set(plans) == {least(group) for group in (names, replicas, unmoved) if group}
        assert [near.seconds for near in found.near] == sorted(near.seconds for near in found.near)
        assert search(question, among, SearchOptions(max_phases=1)) == replace(found, near=(), num_simulated=ANY)
        chunks = [Strategy.parse(name) for name in ("dp8+ck512+z3", "dp8+ck8192+z3", "dp4tp2+ck512+z3")]
        offered = search(question, among, SearchOptions(max_phases=1, raced=True, alone=chunks))
        cut = {str(near.buckets[0].strategy) for near in offered.near if near.buckets[0].strategy.ck}
        assert cut - {plans[0]} == {least([str(chunk) for chunk in chunks[:2]])}
        pools = search(question, among, SearchOptions(raced=True))
        assert sum(len(plan) > 1 for plan in (pools.buckets, *(near.buckets for near in pools.near))) == 1
        assert {str(near.buckets[0].strategy) for near in pools.near if len(near.buckets) == 1} <= set(plans)


def test_a_plan_that_fills_the_memory_makes_room_for_the_weights_of_one_that_is_raced() -> None:
    limit = LIMIT << 20
    capacities, most = Capacities(MEMORY, limit), MEMORY.largest_pack(Strategy(tp=4), limit)
    full, other = (Bucket(Strategy(tp=4), 1000, most),), (Bucket(Strategy(2, 2), 1000, 1100),)
    assert capacities.arena(other[0].strategy) > capacities.arena(full[0].strategy)
    assert fitting_beside([full], [other], capacities) == ([full], [])
    ((smaller,),), plans = fitting_beside([full], [other], capacities, 0.75)
    assert plans == [other]
    assert 0.75 * most <= smaller.pack_tokens < most
    MEMORY.check_pool([smaller, *other], limit)
    # by no more than that, and never below the sequences
    assert fitting_beside([full], [other], capacities, smaller.pack_tokens / most + 0.001) == ([full], [])
    longest = (replace(full[0], longest=most),)
    assert fitting_beside([longest], [other], capacities, 0.75) == ([longest], [])


def test_of_plans_that_are_predicted_nearly_equal_a_race_tries_those_first_whose_layers_need_the_fewest_ranks() -> None:
    raced = plan(raced=True)
    seconds = {frozenset(b.strategy for b in near.buckets): near.seconds for near in raced.choice.near}
    pools = (raced.pool, *raced.raced)
    seconds[frozenset(b.strategy for b in raced.pool)] = raced.choice.seconds
    order = raced.trial_order
    assert sorted(order) == list(range(len(pools)))
    times = [seconds[frozenset(b.strategy for b in pools[index])] for index in order]
    near = [index for index, s in zip(order, times, strict=True) if s <= 1.08 * min(times)]
    assert order[: len(near)] == near
    ranks = [max(b.strategy.ranks_of_a_layer for b in pools[index]) for index in near]
    assert ranks == sorted(ranks)
    assert times[len(near) :] == sorted(times[len(near) :])
    names = ("dp8", "dp8+z3", "dp2tp4", "cp2pp4", "dp8ep4", "pp8")
    assert [Strategy.parse(name).ranks_of_a_layer for name in names] == [1, 8, 4, 2, 4, 1]
