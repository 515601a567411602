"""From rows to a plan: policies, buckets, label counts, and that nothing is trained twice or lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.errors import HotspaConfigError, OverlongError
from hf_hotspa.packing.bucketing import (
    check_lengths,
    cut_rows,
    plan_mini_batch,
)
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import parse_buckets

BUCKETS = parse_buckets("dp4:8@16,dp2tp2:20,tp2pp2:50@60")


def table_of(*lengths):
    return SequenceTable.from_lengths(lengths)


def slices(sequences):
    return [(s.row, s.start, s.stop, s.num_labels) for s in sequences]


def test_error_names_row_length_limit_and_fix():
    with pytest.raises(OverlongError, match=r"(?s)51 tokens.*longest bucket, 50 tokens.*dataset row 1.*split"):
        cut_rows([0, 1], table_of(50, 51), 50, "error")


def test_truncate_split_and_drop():
    table = table_of(7, 121, 100, 101)
    truncated, counts = cut_rows([1, 0], table, 50, "truncate")
    assert slices(truncated) == [(1, 0, 50, 49), (0, 0, 7, 6)]
    assert counts["num_truncated"] == 1
    split, counts = cut_rows([1, 2, 3], table, 50, "split")
    assert slices(split) == [
        (1, 0, 50, 49),
        (1, 50, 100, 49),
        (1, 100, 121, 20),
        (2, 0, 50, 49),
        (2, 50, 100, 49),
        (3, 0, 50, 49),
        (3, 50, 100, 49),
        (3, 100, 101, 0),  # a last piece of one token: planned, and without a label
    ]
    assert counts["num_split"] == 3
    dropped, counts = cut_rows([1, 0], table, 50, "drop")
    assert slices(dropped) == [(0, 0, 7, 6)]
    assert (counts["num_dropped"], counts["num_rows"]) == (1, 2)


def test_edges_of_buckets_belong_to_the_shorter_one():
    table = table_of(1, 8, 9, 20, 21, 50)
    for buckets, expected in ((BUCKETS, [[1, 8], [9, 20], [21, 50]]), (BUCKETS[::-1], [[21, 50], [9, 20], [1, 8]])):
        plan = plan_mini_batch(range(6), table, buckets)
        assert [sorted(s.num_tokens for s in phase.sequences()) for phase in plan.phases] == expected


@given(
    st.lists(st.integers(0, 130), min_size=1, max_size=80),
    st.sampled_from(["truncate", "split", "drop"]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=150)
def test_every_token_is_planned_exactly_once(lengths, policy, random):
    table = table_of(*lengths)
    rows = list(range(len(lengths)))
    random.shuffle(rows)
    plan = plan_mini_batch(rows, table, BUCKETS, quadratic_cost=1e-2, policy=policy)
    seen = {row: [] for row in rows}
    for phase in plan.phases:
        for packs in phase.replicas:
            for pack in packs:
                assert pack.num_tokens <= phase.bucket.pack_tokens
                for s in pack.sequences:
                    assert phase.bucket.low < s.num_tokens <= phase.bucket.longest
                    seen[s.row].append((s.start, s.stop))
    for row, length in enumerate(lengths):
        if policy == "split":
            expected = length
        else:
            expected = length if length <= 50 else {"truncate": 50, "drop": 0}[policy]
        covered = sorted(seen[row])
        assert [a for a, _ in covered] + [expected] == [0] + [b for _, b in covered]  # gapless, no overlap
    assert plan.num_labels == sum(max(s.num_tokens - 1, 0) for s in plan.sequences())
    assert plan.num_rows == len(lengths)
    assert plan.num_empty == lengths.count(0)
    over = sum(length > 50 for length in lengths)
    assert plan.num_truncated + plan.num_split + plan.num_dropped == over
    again = plan_mini_batch(tuple(rows), table_of(*lengths), BUCKETS, quadratic_cost=1e-2, policy=policy)
    assert again == plan
    assert again.digest() == plan.digest()


def test_the_whole_table_is_checked_before_training():
    table = table_of(3, 90, 60, 50)
    for policy in ("truncate", "split", "drop"):
        check_lengths(table, 50, policy)
    check_lengths(table, 90, "error")


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        (False, "let the last bucket of hotspa_strategies take 90 tokens"),
        (True, "raise hotspa_longest to 90 or leave it out"),
    ],
)
def test_what_to_do_about_a_row_that_is_too_long(chosen, fix):
    with pytest.raises(OverlongError, match=r"90 tokens.*row 1.*2 of 4 rows") as caught:
        check_lengths(table_of(3, 90, 60, 50), 50, "error", chosen=chosen)
    assert caught.value.fix == f"set hotspa_overlong to truncate, split or drop, or {fix}"


def test_unknown_policy_and_missing_buckets_are_refused():
    with pytest.raises(HotspaConfigError, match="truncate, split, drop"):
        cut_rows([0], table_of(1), 10, "wrap")
    with pytest.raises(HotspaConfigError, match="no bucket"):
        plan_mini_batch([0], table_of(1), ())
