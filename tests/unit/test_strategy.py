"""Strategies and buckets: the two grammars, rank arithmetic, and which strategies are legal."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa import strategy as strategy_file
from hf_hotspa.errors import StrategyError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.seam import Options, StrategyOption
from hf_hotspa.strategy import (
    AXES,
    Bucket,
    Coord,
    Strategy,
    as_written,
    check_buckets,
    legal_strategies,
    parse_buckets,
    strategies_of,
)

LLAMA = ModelShape(
    family="llama",
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    hidden_size=64,
    attention_size=64,
    vocab_size=128,
    layer_parameters=50_000,
)
DEGREES = st.integers(1, 6)
STRATEGIES = st.builds(Strategy, dp=DEGREES, tp=DEGREES, pp=DEGREES, cp=st.integers(1, 3))


# ---------------------------------------------------------------------------------------------- the strategy grammar


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("dp4tp2pp1", (4, 2, 1)),
        ("pp2dp3", (3, 1, 2)),
        (" dp1 \n", (1, 1, 1)),
        ("dp007", (7, 1, 1)),
        ("dp1048576", (1 << 20, 1, 1)),
    ],
)
def test_parse(text: str, degrees: tuple[int, int, int]) -> None:
    strategy = Strategy.parse(text)
    assert (strategy.dp, strategy.tp, strategy.pp) == degrees
    assert strategy.world_size == prod(degrees)


BAD_STRATEGIES = [
    ("", "is not a strategy"),
    ("dp", "is not a strategy"),
    ("dp-1", "is not a strategy"),
    ("DP2", "is not a strategy"),
    ("dp٣", "is not a strategy"),
    ("dp2dp2", "names the axis dp twice"),
    ("dp0", "dp degree 0"),
    ("dp1048577", "dp degree 1048577"),
    ("dp" + "9" * 10_000, "too large"),
    ("dp2+sp", "without tensor parallelism"),
    ("dp2+", "the option ''"),
    ("+sp", "is not a strategy"),
    ("tp2+sp+sp", "'sp' twice"),
    ("tp2+rc+rc2", "'rc2' twice"),
    ("tp2+rc0", "the option 'rc0', which does not exist"),
    ("dp2+ck", "the option 'ck', which does not exist"),
    ("dp2+ck0", "chunks of 0 tokens"),
    ("dp2+kg2", "dp2+kg2 has +kg or +kh without token chunks"),
    ("dp2+kh", "without token chunks"),
    ("dp2pp2+ck8+kh", "has +kg or +kh in a pipeline"),
    ("dp2+ck8+kg0", "the option 'kg0', which does not exist"),
    ("pp2+v", "the option 'v', which does not exist"),
    ("pp2+v0", "the option 'v0', which does not exist"),
    ("pp2+v1", "asks for one stage on each rank"),
    ("tp2+v2", "has 2 stages on each rank and no pipeline"),
    ("dp2pp2+v2+z3", "has both several stages on each rank (+v2) and +z3"),
    ("dp2pp2ep2+v2", "has both several stages on each rank (+v2) and ep2"),
]


@pytest.mark.parametrize(("text", "says"), BAD_STRATEGIES, ids=[repr(t)[:20] for t, _ in BAD_STRATEGIES])
def test_a_bad_strategy_is_refused_with_a_fix(text: str, says: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    assert caught.value.fix
    assert says in caught.value.what


@pytest.mark.parametrize("degree", [0, -1, (1 << 20) + 1, 1.0, "2", None])
@pytest.mark.parametrize("axis", AXES)
def test_a_bad_degree_is_refused(axis: str, degree: object) -> None:
    with pytest.raises(StrategyError, match=f"{axis} degree") as caught:
        Strategy(**{axis: degree})  # type: ignore[arg-type]
    assert caught.value.fix


@given(STRATEGIES)
def test_format_and_parse_are_inverse(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)


def test_degrees_of_one_are_not_written() -> None:
    names = ["dp1", "dp2", "tp4", "pp4+v2", "cp4+z2", "dp2tp2", "dp2cp2tp2pp2", "dp4ep4", "cp2pp2ep2", "dp1+rc"]
    assert [str(Strategy.parse(name)) for name in names] == names
    assert [str(Strategy.parse(Strategy.parse(name).spelled_out)) for name in names] == names
    assert Strategy.parse("dp4tp1pp1+z3").spelled_out == "dp4tp1pp1+z3"
    assert as_written("dp1cp2tp1pp1+z2") == "cp2+z2"
    assert as_written("dp2tp1pp1:16@32") == "dp2:16@32"
    assert as_written("what a newer version wrote") == "what a newer version wrote"


# -------------------------------------------------------------------------------------------------- rank arithmetic


@given(STRATEGIES)
def test_rank_and_coord_are_inverse(strategy: Strategy) -> None:
    coords = [strategy.coord(rank) for rank in range(strategy.world_size)]
    assert [strategy.rank(coord) for coord in coords] == list(range(strategy.world_size))
    assert len(set(coords)) == strategy.world_size
    for coord in coords:
        assert 0 <= coord.dp < strategy.dp
        assert 0 <= coord.tp < strategy.tp
        assert 0 <= coord.pp < strategy.pp


def test_ranks_run_tp_first_then_dp_then_pp() -> None:
    strategy = Strategy(dp=2, tp=2, pp=2)
    assert [strategy.coord(rank) for rank in range(8)] == [
        Coord(dp=0, tp=0, pp=0),
        Coord(dp=0, tp=1, pp=0),
        Coord(dp=1, tp=0, pp=0),
        Coord(dp=1, tp=1, pp=0),
        Coord(dp=0, tp=0, pp=1),
        Coord(dp=0, tp=1, pp=1),
        Coord(dp=1, tp=0, pp=1),
        Coord(dp=1, tp=1, pp=1),
    ]
    assert strategy.group_of(3, "tp") == (2, 3)
    assert strategy.group_of(3, "pp") == (3, 7)


def test_cp_lies_between_tp_and_dp() -> None:
    strategy = Strategy.parse("dp2cp2tp2pp2")
    assert strategy == Strategy(2, 2, 2, cp=2)
    assert str(strategy) == "dp2cp2tp2pp2"
    assert strategy.world_size == 16
    assert [strategy.group_of(13, axis) for axis in ("tp", "cp", "dp", "pp")] == [(12, 13), (13, 15), (9, 13), (5, 13)]
    assert str(Strategy.parse("cp4+ck64")) == "cp4+ck64"


def test_strategies_that_differ_in_cp_and_options_have_one_layout() -> None:
    alike = [Strategy.parse(name) for name in ("dp8", "cp8", "dp4cp2+ck4096", "dp2cp4+rc")]
    assert {strategy.layout for strategy in alike} == {Strategy(8)}
    assert Strategy.parse("cp2tp2+sp").layout != Strategy.parse("dp2tp2").layout  # all its ranks add to a norm


@given(STRATEGIES)
def test_groups_cover_every_rank_once(strategy: Strategy) -> None:
    everyone = list(range(strategy.world_size))
    for axis in AXES:
        groups = strategy.groups(axis)
        assert sorted(rank for group in groups for rank in group) == everyone
        for group in groups:
            assert [getattr(strategy.coord(rank), axis) for rank in group] == list(range(getattr(strategy, axis)))
            assert all(strategy.group_of(rank, axis) == group for rank in group)


@given(STRATEGIES)
def test_shard_indices_are_a_permutation(strategy: Strategy) -> None:
    assert sorted(strategy.shard_index(coord) for coord in range(strategy.tp)) == list(range(strategy.tp))


# ------------------------------------------------------------------------------------------------- legal strategies


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 3), (4, 6), (7, 3), (8, 10), (12, 18), (64, 28)])
def test_strategies_of_a_world(world_size: int, count: int) -> None:
    found = list(strategies_of(world_size))
    assert len(found) == len(set(found)) == count
    assert {s.world_size for s in found} == {world_size}
    assert found == sorted(found, key=lambda s: (s.pp, s.tp))


@pytest.mark.parametrize(
    ("strategy", "change", "says"),
    [
        ("dp8", {}, None),
        ("tp2", {}, None),
        ("tp4", {}, None),  # twice the kv heads: each is held by two coords
        ("tp8", {}, None),
        ("tp3", {}, "tp3 is neither at most the 2 key/value heads nor a multiple"),
        ("tp6", {"num_key_value_heads": 4}, "tp6 is neither"),
        ("tp3", {"num_key_value_heads": 8}, None),  # uneven, but every coord has whole heads
        ("tp16", {}, "tp16 is more than the 8 attention heads"),
        ("pp4", {}, None),
        ("pp5", {}, "pp5 is more than the 4 layers"),
        ("pp2+v2", {}, None),
        ("pp2+v3", {}, "pp2+v3 has 6 stages, more than the 4 layers"),
        ("tp2", {"has_tp_plan": False}, "'llama' has no tensor-parallel plan"),
        ("dp2", {"has_tp_plan": False}, None),
        ("pp2", {"has_pp_plan": False}, "'llama' has no pipeline plan"),
        ("dp2", {"has_pp_plan": False}, None),
        ("tp2", {"tp_unsupported_reason": "tp would be wrong"}, "tp would be wrong"),
        ("pp2", {"tp_unsupported_reason": "tp would be wrong"}, None),
        ("pp2", {"pp_unsupported_reason": "pp would be wrong"}, "pp would be wrong"),
        ("tp2", {"pp_unsupported_reason": "pp would be wrong"}, None),
    ],
)
def test_what_a_strategy_lacks_is_said(strategy: str, change: dict[str, object], says: str | None) -> None:
    why = Strategy.parse(strategy).unsupported_reason(replace(LLAMA, **change))  # type: ignore[arg-type]
    if says is None:
        assert why is None
    else:
        assert says in (why or "")


def test_legal_strategies() -> None:
    assert [str(s) for s in legal_strategies(4, LLAMA)] == [
        "dp4",
        "dp2tp2",
        "tp4",
        "dp2pp2",
        "tp2pp2",
        "pp4",
    ]
    assert [str(s) for s in legal_strategies(7, LLAMA)] == ["dp7"]
    bare = replace(LLAMA, has_tp_plan=False, has_pp_plan=False)
    assert legal_strategies(8, bare) == [Strategy(dp=8)]


# ----------------------------------------------------------------------------------------------- the bucket grammar


def test_parse_buckets() -> None:
    assert parse_buckets("dp4:1024@4096,dp2tp2:4096, tp2pp2 : 8192 ") == (
        Bucket(Strategy(4, 1, 1), longest=1024, pack_tokens=4096, low=0),
        Bucket(Strategy(2, 2, 1), longest=4096, pack_tokens=4096, low=1024),
        Bucket(Strategy(1, 2, 2), longest=8192, pack_tokens=8192, low=4096),
    )
    assert parse_buckets("dp1:1") == (Bucket(Strategy(), 1, 1),)


BAD_BUCKETS = [
    ("", "is not a strategy"),
    ("dp4:1024,", "is not a strategy"),
    ("auto", "'auto' is not a list of buckets"),
    ("dp4", "no longest sequence"),
    ("dp4:-1", "no longest sequence"),
    ("dp4:1024@", "no longest sequence"),
    ("dp4:1024@2048@4096", "no longest sequence"),
    ("dp4:1234567890", "no longest sequence"),
    ("dp4:0", "not above 0"),
    ("dp4:1024,tp4:1024", "not above 1024"),
    ("dp4:1024@512", "a pack of 512 tokens cannot hold a sequence of 1024"),
    ("dp4:1024,dp4:2048", "used by two buckets"),
    ("dp4:1024,dp4tp1pp1:2048", "used by two buckets"),
    ("dp4:1024,tp2:2048", "different numbers of processes: dp4 = 4, tp2 = 2"),
    ("dp4:1024;tp4:2048", "no longest sequence"),
    ("dp4tp0:1024", "tp degree 0"),
    ("dp4+zz:1024", "the option 'zz'"),
]


@pytest.mark.parametrize(("text", "says"), BAD_BUCKETS)
def test_bad_buckets_are_refused_with_a_fix(text: str, says: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse_buckets(text)
    assert says in caught.value.what
    assert caught.value.fix


@st.composite
def _bucket_lists(draw: st.DrawFn) -> tuple[Bucket, ...]:
    pool = list(strategies_of(draw(st.sampled_from([1, 2, 4, 8, 12]))))
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=5, unique=True))
    buckets: list[Bucket] = []
    low = 0
    for strategy in chosen:
        longest = low + draw(st.integers(1, 100_000))
        buckets.append(Bucket(strategy, longest, longest + draw(st.integers(0, 100_000)), low))
        low = longest
    return tuple(buckets)


@given(_bucket_lists())
def test_format_and_parse_buckets_are_inverse(buckets: tuple[Bucket, ...]) -> None:
    text = ",".join(map(str, buckets))
    assert parse_buckets(text) == buckets
    assert ",".join(map(str, parse_buckets(text))) == text


# --------------------------------------------------------------------------------------- buckets, world and model


def test_a_wrong_world_lists_the_legal_choices() -> None:
    with pytest.raises(StrategyError) as caught:
        check_buckets(parse_buckets("dp4:1024"), 2, LLAMA)
    assert caught.value.why == "it needs 4 processes and 2 are running"
    assert "legal with 2 processes and this model: dp2, tp2, pp2" in (caught.value.fix or "")


def test_a_model_that_does_not_fit_lists_the_legal_choices() -> None:
    with pytest.raises(StrategyError, match="strategy pp8 cannot run") as caught:
        check_buckets(parse_buckets("dp8:1024,pp8:2048"), 8, LLAMA)
    assert caught.value.why == "pp8 is more than the 4 layers"
    for strategy in legal_strategies(8, LLAMA):
        assert str(strategy) in (caught.value.fix or "")


@given(_bucket_lists(), st.sampled_from([1, 2, 4, 8]))
def test_check_agrees_with_legal(buckets: tuple[Bucket, ...], world_size: int) -> None:
    legal = legal_strategies(world_size, LLAMA)
    if all(bucket.strategy in legal for bucket in buckets):
        check_buckets(buckets, world_size, LLAMA)
    else:
        with pytest.raises(StrategyError) as caught:
            check_buckets(buckets, world_size, LLAMA)
        assert caught.value.why
        assert caught.value.fix


# ------------------------------------------------------------------------------------------------------------- fuzz


WORDS = [*"dtp0123456789:@,+- \n\x00", "٣", "dp", "tp", "pp", "sp", "1024", "4096", "auto"]
CORRECT = ["dp4tp2pp1", "dp4:1024@4096,dp2tp2:4096,tp2pp2:8192", "tp4:8", "pp2dp2:16@32"]


def _changed(text: str, at: int, word: str) -> str:
    return text[:at] + word + text[at + 1 :]


TEXTS = (
    st.text(max_size=8)
    | st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
    | st.builds(_changed, st.sampled_from(CORRECT), st.integers(0, 40), st.sampled_from(["", *WORDS]))
)
"""Noise, words of the grammar in any order, or a correct text with a change."""


@given(TEXTS)
@settings(max_examples=300)
def test_any_text_is_parsed_or_refused_with_a_fix(text: str) -> None:
    for parse in (Strategy.parse, parse_buckets):
        try:
            value = parse(text)
        except StrategyError as error:
            assert error.fix  # noqa: PT017  # most texts are refused
        else:
            assert parse(",".join(map(str, [value] if isinstance(value, Strategy) else value))) == value


# ------------------------------------------------------------------------------------------- options of features


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A made-up feature with two options."""

    class Sparse(Options):
        grammar = (
            StrategyOption("sparse", "every n-th block", numbered=True, unsupported_reason=_of_tp),
            StrategyOption("quick", "quickly"),
        )

    def _hooks(name: str) -> tuple[type[Options], ...]:
        return (Sparse,) if name == "options" else ()

    monkeypatch.setattr(strategy_file, "hooks", _hooks)
    strategy_file._added.cache_clear()
    yield
    monkeypatch.undo()
    strategy_file._added.cache_clear()


def _of_tp(strategy: Strategy, shape: ModelShape) -> str | None:
    return "+sparse needs whole layers" if strategy.tp > 1 else None


@pytest.mark.usefixtures("sparse")
def test_features_add_options() -> None:
    strategy = Strategy.parse("dp2+rc+sparse4+quick")
    assert str(strategy) == str(Strategy.parse("dp2+quick+sparse4+rc")) == "dp2+rc+quick+sparse4"
    assert (strategy.option("sparse"), strategy.option("quick"), strategy.option("other")) == (4, 1, 0)
    assert strategy != Strategy.parse("dp2+rc+sparse2+quick")
    assert strategy.layout == Strategy(2)
    assert Strategy.parse("dp2+sparse4").unsupported_reason(LLAMA) is None
    assert Strategy.parse("tp2+sparse4").unsupported_reason(LLAMA) == "+sparse needs whole layers"
    with pytest.raises(
        StrategyError, match=r"'sparse', which does not exist.*\+sparse4 \(every n-th block\); \+quick \(quickly\)"
    ):
        Strategy.parse("dp2+sparse")
    with pytest.raises(StrategyError, match="'quick2', which does not exist"):
        Strategy.parse("dp2+quick2")
    with pytest.raises(StrategyError, match="'quick' twice"):
        Strategy.parse("dp2+quick+quick")
