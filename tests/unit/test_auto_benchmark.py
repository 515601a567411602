"""What `benchmarks/auto.py` draws and concludes; its cells take minutes."""

import auto as benchmark  # type: ignore[import-not-found]


def test_cells_follow_from_the_seed_alone() -> None:
    for seed in range(5):
        drawn = benchmark.shapes(seed)
        assert drawn == benchmark.shapes(seed)
        assert drawn[0]["hidden_size"] < drawn[1]["hidden_size"]
        lengths = [benchmark.distribution(seed, number, 300, 2048) for number in range(6)]
        assert lengths == [benchmark.distribution(seed, number, 300, 2048) for number in range(6)]
        assert all(min(each) >= 16 and max(each) <= 2048 for each in lengths)
        assert len({tuple(each) for each in lengths}) == 6
    assert benchmark.shapes(1) != benchmark.shapes(2) or benchmark.shapes(1) != benchmark.shapes(3)


def cell(hot, others, single=()):
    alone = {"computation alone": [0.5] * len(hot), "balanced computation": [0.4] * len(hot)}
    return {
        "single": list(single),
        "cost": 1.0,
        "kept": "x",
        "plans": ["x"],
        "seconds": {"switching": hot, **others, **alone},
    }


def test_a_cell_holds_where_auto_is_as_fast_as_the_best_or_the_interval_reaches_it() -> None:
    even = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = benchmark.verdict(cell([1.01] * 6, {"dp2": even, "tp2": [2.0] * 6}))
    assert (found["best"], found["ok"]) == ("dp2", True)
    assert abs(found["alone"] - 0.5 / 1.01) < 1e-9
    assert not benchmark.verdict(cell([1.1] * 6, {"dp2": even}))["ok"]
    assert benchmark.verdict(cell([1.1, 0.95, 1.2, 0.9, 1.3, 0.99], {"dp2": even}))["ok"]
    # what auto runs is one of the sides: the others count
    assert benchmark.verdict(cell(even, {"dp2": [0.8] * 6, "tp2": [1.5] * 6}, ["dp2"]))["best"] == "tp2"
    # what auto runs alone, and all others are far behind: they count although they ran two mini-batches only
    alone = cell(even, {"dp2": [0.97] * 6}, ["dp2"]) | {"behind": {"tp2": [1.5, 1.6], "pp2": [1.3, 1.4]}}
    assert (benchmark.verdict(alone)["best"], benchmark.verdict(alone)["ok"]) == ("pp2", True)
    mixed = cell(even, {"dp2": even, "tp2": [2.0] * 6}) | {"beyond_dp": 0.5}
    assert "best plain static by auto 1.000, by balanced computation 2.500" in benchmark.table(
        {"2x-0-0-limit": mixed}, 200
    )
    text = benchmark.table({"2x-0-0": cell(even, {"dp2": even}), "2x-0-1": {"error": "it failed"}}, 200)
    assert "1 of 1 cells hold" in text
    assert "it failed" in text
    assert "| 0.50 |" in text  # 1 of 200 mini-batches
