"""The quick form of every benchmark that a page quotes runs, and has the sides that it must have. No look at a time.

They run in this process, and so share its server of ranks. (`planner.py`: tests/unit/test_planner_benchmark.py;
`bf16_products.py`: test_bf16_products.py; `one_gpu.py`: tests/gpu; the rules of `side_by_side.py`: tests/unit/test_peers.py.)
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo


Quick = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Quick]:
    """Runs the quick form of a benchmark: what it writes, and what it prints.

    What it sets in the environment does not stay, and calibrations come from nowhere else.
    """
    before, path = dict(os.environ), tmp_path / "found.json"
    os.environ["HF_HOTSPA_CACHE"] = str(tmp_path / "cache")

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
        importlib.import_module(name).main(["--quick", "--json", str(path), *arguments])
        return json.loads(path.read_text()), capsys.readouterr().out

    yield run
    os.environ.clear()
    os.environ.update(before)


def test_switch(quick: Quick) -> None:
    found, text = quick("switch")
    assert found["machine"]["ranks"] == found["options"]["ranks"]
    load, returned = found["rows"]
    assert load["pair"] in text
    assert returned["pair"] in text
    assert {"ours", "raw whole", "pack and unpack", "local copies"} < set(returned["seconds"])
    assert {"per slice", "all-gather"} < set(load["seconds"])
    for row in found["rows"]:
        assert row["wire_bytes"] > 0
        assert all(len(values) == found["options"]["rounds"] for values in row["all_seconds"].values())
        assert row["memory"]["reserved_bytes"] > 0
        assert 0 < row["ratios"]["raw / ours"] <= row["ratios"]["raw plus copies / ours"]


@pytest.mark.parametrize(
    "part", [pytest.param(name, marks=pytest.mark.slow) for name in ("one", "four", "table", "stages")]
)
def test_stragglers(quick: Quick, part: str) -> None:
    found, text = quick("stragglers", "--part", part)
    [run] = found["runs"]
    if part == "table":
        assert [cell[:3] for cell in run["cells"][:2]] == [
            ["broadcast and reduce", 1, 0.25],
            ["broadcast and reduce", 1, 0.5],
        ]
        assert len(run["cells"]) == 16
        return
    sides = {"tp8: none slow", "tp8: off", *(f"tp8: lambda {x}" for x in range(5)), "tp8: semi (equation 3)"}
    if part == "one":
        migrations = {"migrate", "migrate, own reduces", "migrate, scatter and gather"}
        resized = {"resize Rd", "resize Pri", "resize PriDiffR", "resize PriDiffE", "semi", "semi, PriDiffR"}
        answers = {"none slow", "off"} | migrations | resized
        sides = {f"tp4: {answer}" for answer in answers | {"balance (shares)"}} | {
            f"dp4: {answer}" for answer in ("none slow", "off", "balance")
        }
    if part == "stages":
        sides = {f"pp4: {answer}" for answer in ("none slow", "off", "balance")}
        assert run["sides"]["pp4: balance"]["shares"].startswith("layers 2+1+")  # of eight
    assert set(run["sides"]) == sides
    assert all(side in text for side in sides)
    exact = [side["loss"] for side in run["sides"].values() if side["exact"]]
    assert max(exact) - min(exact) <= 1e-3 * min(exact)


@pytest.mark.slow
def test_resize_loss(quick: Quick, tmp_path: Path) -> None:
    found, _ = quick("resize_loss", "--svg", str(tmp_path / "curves.svg"))
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == len(found["sides"])
    exact, *resized = found["sides"].values()
    assert len(exact["losses"]) == 2
    assert all(side["losses"][0] != exact["losses"][0] for side in resized)
    assert exact["left_out"] == 0.0 < min(side["left_out"] for side in resized)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["all", "turns", "semi", "four"])
def test_other_figures_of_resizing(quick: Quick, part: str) -> None:
    sides = quick("resize_loss", "--part", part)[0]["sides"]
    exact = sides.pop("exact")
    for name, side in sides.items():
        # what migrates is computed by others
        if "migrate" in name:
            assert side["losses"] == pytest.approx(exact["losses"], rel=1e-4)
        else:
            assert side["left_out"] > 0
            assert side["losses"] != exact["losses"]


@pytest.mark.slow
def test_long_sequences(quick: Quick) -> None:
    found, text = quick("long_sequences")
    chunks = "dp1+ck128"
    assert list(found["sides"]) == ["stock, checkpointing", "dp1+rc", chunks, f"{chunks}+kh"]
    for name, side in found["sides"].items():
        assert set(side) == ({"256", "512", "1024"} if "+ck" in name else {"256", "512"})
        assert all(each["peak_bytes"] > 0 for each in side.values())
    # bytes a further token: activations of a chunk do not grow with the sequence, its keys and values do
    stock, recomputed, chunked, hosted = found["growth"].values()
    assert max(chunked, hosted) < recomputed / 2 < stock / 2
    assert found["sides"][f"{chunks}+kh"]["1024"]["host_bytes"] == found["carried"] * (1024 - 128)
    assert list(found["rounds"]) == ["dp1", "dp1+rc", chunks, f"{chunks}+kg3"]
    aims = found["aims"]
    assert len(aims) == 7
    assert all(f"{'yes' if aim['is_met'] else 'NO '}  {aim['text']}" in text for aim in aims)
    assert all(aim["is_met"] for aim in aims if "host memory" in aim["text"])  # the others need more tokens


@pytest.mark.slow
def test_packed_hybrids(quick: Quick) -> None:
    found, text = quick("packed_hybrids")
    assert list(found["sides"]) == ["at once", "one by one"]
    for side in found["sides"].values():
        assert all(min(side[name]) > 0 for name in ("seconds", "layer_seconds"))
    assert all(f"{ratio:.2f} times as fast" in text for ratio in found["ratios"].values())


@pytest.mark.slow
def test_interleaved(quick: Quick) -> None:
    found, text = quick("interleaved", "--packs", "2", "3", "--vocabulary", "32")
    two, three = found["runs"]
    assert (two["packs"], three["packs"]) == (2, 3)
    assert list(two["sides"]) == list(three["sides"]) == ["pp2", "pp2+v2"]
    assert three["sides"]["pp2"]["formula"] == 1 / 3
    for rounds, side in enumerate(two["sides"].values(), start=1):
        assert len(side["forward"]) == len(side["backward"]) == 2 * rounds  # every stage has run
        assert min(*side["forward"], *side["backward"], side["idle over busy"]) > 0
        # no rank is done before it has run all of its passes
        passes = [sum(pair) for pair in zip(side["forward"], side["backward"], strict=True)]
        assert side["simulated"] >= max(sum(passes[rank::2]) for rank in (0, 1)) * 2 * (1 - 1e-9)
        assert side["formula"] == 1 / (2 * rounds)
    assert "+v2 is" in text


@pytest.mark.slow
def test_layer_cut(quick: Quick) -> None:
    found, text = quick("layer_cut")
    assert [layers for layers, _ in found["layers"]] == [[0, 2, 3], [1]]
    assert len(found["stages"]) == 3  # every cut of four layers
    assert min(map(min, found["stages"])) > 0
    slowest = [max(stages) for stages in found["stages"]]
    assert found["ours / best"] == slowest[found["ours"] - 1] / min(slowest)
    assert "slowest stage of our partition" in text


@pytest.mark.slow
def test_fully_sharded(quick: Quick, tmp_path: Path) -> None:
    """Ours and both ways of FSDP2 that run on CPU; DeepSpeed is left to the whole run."""
    command = ["--logs", str(tmp_path / "logs"), "--sides", "dp4", "FSDP2"]
    found, text = quick("fully_sharded", *command)
    ours, peers = {f"ours, dp4{z}" for z in ("", "+z2", "+z3")}, {"FSDP2, plain loop", "FSDP2 of transformers, Trainer"}
    assert found["ratios"].keys() == ours | peers
    for name in ours | peers:
        side = found["sides"][name]
        assert len(side["seconds"]) == found["options"]["steps"]
        assert side["tokens"] == side["slots"] == 4 * 2 * 32 * 3
        assert found["ratios"][name]["of +z3"] > 0
        assert name in text
    assert "distributed type MULTI_CPU" in found["sides"]["FSDP2 of accelerate, Trainer"]["reason"]
    losses = [found["sides"][name]["loss"] for name in ours | peers]
    assert max(losses) - min(losses) <= 1e-4 * min(losses)


@pytest.mark.parametrize("nics", [(), pytest.param(("--nics-per-node", "1"), marks=pytest.mark.slow)])
def test_slow_link(quick: Quick, nics: tuple[str, ...]) -> None:
    found, text = quick("slow_link", *nics)
    (row,) = found["rows"]
    assert row["pair"] in text
    direct, relay = row["algorithm1"], row["relay"]
    # two nodes of two: every node lacks half of what each of its ranks needs
    assert direct["inter_bytes"] == 2 * relay["inter_bytes"] > 0
    assert relay["intra_bytes"] > direct["intra_bytes"]
    for side in (direct, relay):
        assert len(side["all_seconds"]) == found["options"]["rounds"]
        assert side["predicted"]["groups"] >= side["predicted"]["ports"] > 0


@pytest.mark.slow
def test_step_with_all_static_pipelines_and_hot_sides(quick: Quick) -> None:
    """Beside what the budget keeps out, every legal strategy is a side, and each with dp beside it; and the Trainer."""
    found, text = quick("step")
    model_parallel = ("tp4", "pp4", "tp2pp2")
    hot = {f"hot dp4 + {name}" for name in model_parallel}
    static = {
        f"static {name}{how}" for name in model_parallel for how in ("", ", packed to the context", ", not packed")
    }
    assert {row["side"] for row in found["rows"]} == static | hot
    packs = {row["side"]: row["packs"] for row in found["rows"]}
    assert (
        packs["static tp4, not packed"] == [9] > packs["static tp4, packed to the context"]
    )  # eight short ones and a long one
    assert {line.split(" does not fit: ")[0] for line in found["left_out"]} == {"dp4", "dp2tp2", "dp2pp2"}
    for row in found["rows"]:
        assert len(row["all_seconds"]) == found["options"]["rounds"]
        assert len(row["packs"]) == (2 if row["side"] in hot else 1)  # phases that had work
    assert found["trainer_overhead"]["steps"] > 0
    assert "HotSPaTrainer, 1 steps after the first" in text
    assert all(row["side"] in text for row in found["rows"])


@pytest.mark.parametrize(
    ("ranks", "static"), [(2, {"tp2", "pp2"}), (4, {"tp4", "pp4", "tp2pp2"}), (8, {"tp8", "tp4pp2", "tp2pp4"})]
)
def test_the_sides_of_a_step_follow_from_the_ranks(ranks: int, static: set[str]) -> None:
    step = importlib.import_module("step")
    options = step.parse_options(["--quick", "--ranks", str(ranks)])
    sides, left_out = step.make_sides(options, step.mini_batch_lengths(options))
    kinds = (f"hot dp{ranks} + {{}}", "static {}", "static {}, packed to the context", "static {}, not packed")
    assert {side.name for side in sides} == {kind.format(n) for n in static for kind in kinds}
    longest = max(step.mini_batch_lengths(options))
    assert all(side.buckets[0].pack_tokens == longest for side in sides if "," in side.name)
    assert {side.name.endswith("not packed") for side in sides if not side.packed} == {True}
    legal = {line.split()[0]: "does not fit: its packs of" in line for line in left_out}
    assert legal.pop("pp8", False) is False  # more stages than the model has layers
    assert all(legal.values())


def test_a_side_that_is_legal_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_hotspa.model import specs

    step = importlib.import_module("step")
    with pytest.raises(SystemExit, match="there are no sides"):
        step.main(["--quick", "--only", "static tp3"])
    monkeypatch.setattr(specs, "stage_unsupported_reason", lambda *_: "llama cannot run as a later pipeline stage: why")
    with pytest.raises(SystemExit, match="sides that are legal cannot run: llama cannot run as a later"):
        step.main(["--quick"])


@pytest.mark.slow
def test_cost_model(quick: Quick, tmp_path: Path) -> None:
    found, text = quick("cost_model", "--cache", str(tmp_path / "cache"))
    (model,) = found["models"]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    cases = {row["case"] for row in model["rows"]}
    assert cases == {"32", "64", "mixed"}
    assert {row["strategy"] for row in model["rows"]} == {"dp2", "tp2", "pp2"}
    for row in model["rows"]:
        assert len(row["all_seconds"]) == found["options"]["rounds"]
        assert row["predicted_s"] == row["predicted_compute_s"] + row["predicted_switch_s"]
        assert row["measured_s"] >= row["measured_compute_s"] > 0
        assert row["predicted_cpu_s"] > 0
        assert row["measured_cpu_s"] > 0
    assert -1 <= model["summary"]["all"]["tau"] <= 1
    assert model["summary"]["all"]["worst_regret"] >= 0
    assert "over all: tau" in text


def test_a_steady_step_enters_few_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["functions_a_step"])
    assert importlib.import_module("functions_a_step").main() == 0, capsys.readouterr().out


@pytest.mark.slow
def test_auto_after_its_race(quick: Quick) -> None:
    cells, text = quick("auto", "--published", "--cells", r"2x-0.9M-fp32-chat")
    assert list(cells) == ["2x-0.9M-fp32-chat", "2x-0.9M-fp32-chat-limit"]
    for name, cell in cells.items():
        assert {"switching", "computation alone", "balanced computation"} < cell["seconds"].keys()
        assert all(len(seconds) == 2 for seconds in cell["seconds"].values())
        assert cell["kept"] in cell["plans"]
        assert f"| {name} | {cell['kept']} of {len(cell['plans'])} |" in text
    assert cells["2x-0.9M-fp32-chat"]["limit_mb"] is None
    assert cells["2x-0.9M-fp32-chat-limit"]["limit_mb"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_peers(quick: Quick, tmp_path: Path, ranks: int) -> None:
    command = ["--ranks", f"{ranks}", "--logs", str(tmp_path / "logs"), "--cache", str(tmp_path / "cache")]
    mine = [f"ours, dp{ranks}", f"ours, tp{ranks}", f"ours, pp{ranks}", "ours, the paper's way", "ours, auto"]
    peers = ["Trainer + DDP, padded", f"tp{ranks} of transformers, plain loop, packed"]
    sides = "DDP, padded", "accelerate", "plain loop", *mine
    found, text = quick("side_by_side", *command, "--lengths", "commoncrawl", "--sides", *sides)
    (cell,) = found["cells"].values()
    assert {*mine, *(f"{name} (limit)" for name in mine), *peers} < cell["sides"].keys()
    found = cell["sides"]
    assert "distributed type MULTI_CPU" in found["FSDP2 of accelerate, flattened"]["reason"]
    assert "reason" in found[f"ours, dp{ranks} (limit)"]
    ran = {name: each for name, each in found.items() if "loss" in each}
    assert {*peers, *mine, "ours, auto (limit)"} <= ran.keys()
    losses = [each["loss"] for each in ran.values()]
    assert max(losses) - min(losses) < 1e-4
    for name, each in ran.items():
        assert [len(seconds) for seconds in each["seconds"]] == [4]
        assert each["tokens"] == sum(cell["lengths"]), name
        assert each["slots"] >= each["tokens"]
        assert each["peak_bytes"] > 0
    assert "losses of the exact sides agree to" in text


@pytest.mark.slow
def test_switched_model(quick: Quick) -> None:
    found, text = quick("switched_model", "--ranks", "2")
    assert set(found["ratios"]) == {"loss", "scores"}
    assert all(name in text for name in found["sides"])
    for name, side in found["sides"].items():
        travels = name != "raw loop"
        assert (side["bytes"]["rows"] > 0) == (side["bytes"]["numbers"] > 0) == travels
        assert (side["bytes"]["seeds"] > 0) == name.startswith("scores")


@pytest.mark.slow
def test_trl_trainers(quick: Quick) -> None:
    found, text = quick("trl_trainers")
    assert set(found["summary"]) == {"sft", "sft bfd", "dpo", "grpo", "distill"}
    for task, row in found["summary"].items():
        assert task in text
        assert row["ours tokens"] <= row["trl tokens"]
        assert row["ours loss"] == pytest.approx(row["trl loss"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_images(quick: Quick) -> None:
    found, text = quick("images")
    [row] = found["exactness"]
    assert row["packed"] == pytest.approx(row["single"], rel=1e-12)
    assert max(row["language"], row["vision"]) < 1e-12
    assert set(found["speed"]["sides"]) == {"TRL, padded", "TRL, rows alone", "ours"}
    tokens = {name: side["tokens"] for name, side in found["speed"]["sides"].items()}
    assert tokens["ours"] == tokens["TRL, rows alone"] < tokens["TRL, padded"]
    assert "times our seconds" in text


@pytest.mark.slow
def test_pipedream_loss(quick: Quick, tmp_path: Path) -> None:
    found, _ = quick("pipedream_loss", "--svg", str(tmp_path / "curves.svg"))
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == len(found["sides"]) == 4
    one, every, *asynchronous = found["sides"].values()  # with two stages, syncing delays the last
    assert [side["updates"] for side in found["sides"].values()] == [2, 6, 6, 6]
    assert len({side["losses"][0] for side in found["sides"].values()}) >= 3
    assert every["idle"] == 0.5 > one["idle"] == asynchronous[0]["idle"]
