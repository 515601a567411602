"""`hf-hotspa bench`: its result file, verdict, page and comparison with made-up numbers; its work, sizes and ends."""

import json
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_hotspa import cli
from hf_hotspa.commands.bench import exactness, program
from hf_hotspa.commands.bench.contestants import STOCK, padded, save_model
from hf_hotspa.commands.bench.program import Bench, _Stopped, processes_of, size_of
from hf_hotspa.commands.bench.workload import LengthFile, llama
from hf_hotspa.commands.rank_world import SHARED_GPU, WorldError, run_world
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting.bench_result import (
    AUTO,
    EXACT,
    BenchResult,
    FileResult,
    Links,
    PoolErrors,
    Prediction,
    SideResult,
    bench_page,
    compared_page,
    compared_rows,
    compared_sentences,
    side_rows,
)
from hf_hotspa.strategy import parse_buckets

DDP, FSDP = STOCK[1].name, STOCK[2].name
SECONDS = {DDP: 1.5, FSDP: 2.0, "ours, dp4": 1.2, "ours, tp4": 3.0, AUTO: 1.0}


def file_of(name: str = "github", digest: str = "a" * 16, seconds: Mapping[str, float] = {}) -> FileResult:
    """A contest whose mini-batches take 0.99, 1 and 1.01 times so long, in two rounds."""
    sides = {
        side: SideResult(
            "ours" if side.startswith("ours") else "ddp",
            rounds=((0.99 * s, s, 1.01 * s),) * 2,
            losses=(6.5, 6.4, 6.3, 6.2 + 1e-6 * number),
            ran=("dp4", "tp4") if side == AUTO else (),
        )
        for number, (side, s) in enumerate(({**SECONDS, **seconds}).items())
    }
    sides["Trainer + DDP, padded"] = SideResult("ddp", failed="OutOfMemoryError: 14 GiB")
    words = "Yes: 1.40x over FSDP, predicted", "Switching pays: 1.10x as fast as dp4"
    return FileResult(
        name, digest, 16, 2048.0, 1024, Prediction("dp4:64,tp4:1024", {AUTO: 0.9, DDP: 1.4}, *words), sides
    )


def result_of(*files: FileResult, error: float = 1e-9, devices: str = "4 x Tesla T4", **more: Any) -> BenchResult:
    return BenchResult(
        program="hf_hotspa 0.1.0",
        started="2026-11-29T06:00Z",
        settings={"form": "quick"},
        model={"parameters": "254,000,000"},
        machine={"machine": {"system": "Linux"}, "cards": {"0": "Tesla T4, 15360 MiB, 550.54"}},
        ranks=4,
        devices=devices,
        exactness={"dp4:40@64": PoolErrors(0.0, error, "model.norm.weight"), "tp4:40@64": PoolErrors(0.0, 0.0, "x")},
        links=Links(2e-5, 12.5e9, None),
        files=files or (file_of(),),
        parts={"exactness": 12.5},
        not_done=("github, Trainer + DDP, padded, round 1: OutOfMemoryError: 14 GiB",),
        **more,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "other"}, "not of kind hf_hotspa bench"),
        ({"schema_version": 2}, "schema version 2"),
        ({"ranks": 0}, "ranks"),
        ({"files": [{"name": "x"}]}, "the field 'digest' is missing in files"),
    ],
)
def test_a_wrong_result_is_named_with_what_is_wrong(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "bench.json"
    result_of().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HotspaConfigError, match=words) as caught:
        BenchResult.load(path)
    assert "give the bench.json" in str(caught.value)


def test_the_verdict_has_exactness_first_then_both_answers_and_what_was_predicted() -> None:
    exact, other, single, predicted = result_of().sentences
    assert exact == "Exact: loss and gradients of 2 pools of strategies agree with one process to 1e-09."
    assert other == f"github: Yes: 1.50x over {DDP}, measured on 6 mini-batches."
    assert single.startswith("github: Switching pays: 1.20x as fast as DDP (dp4), the best single strategy")
    assert predicted.startswith("github, predicted before: Yes: 1.40x over FSDP, predicted. Switching pays")


def test_a_result_that_is_not_exact_says_so_before_any_speed() -> None:
    result = result_of(error=2 * EXACT)
    assert not result.exact
    assert result.sentences[0].startswith("NOT EXACT: under dp4:40@64 loss and gradients differ")
    assert "0 of 1 results are exact, 1 are not." in compared_sentences([result])
    assert compared_rows([result])[1][2] == "NO"


@pytest.mark.parametrize(("seconds", "words"), [(0.5, f"No: {DDP} is 2.00x as fast"), (1.001, "About the same as")])
def test_a_stock_trainer_that_is_faster_or_equal_is_called_so(seconds: float, words: str) -> None:
    assert f"github: {words}" in file_of(seconds={DDP: seconds}).sentences[0]


def test_noise_is_not_called_the_same_and_sides_are_compared_on_the_mini_batches_that_both_ran() -> None:
    noisy = replace(file_of().sides[DDP], rounds=((0.5, 2.0, 3.0),) * 2)
    first = replace(file_of(), sides={DDP: noisy, AUTO: file_of().sides[AUTO]}).sentences[0]
    assert first.startswith(f"github: Not clear, against {DDP}: 1.83x")

    file = file_of()
    short = replace(file.sides[DDP], rounds=((2.0, 2.0),))
    rival = replace(file, sides={**file.sides, DDP: short}).against(DDP)
    assert rival is not None
    assert (rival.count, rival.alone) == (2, 2.0)
    assert file.against("Trainer + DDP, padded") is None


def test_losses_of_sides_are_compared_step_by_step() -> None:
    assert file_of().loss_difference == pytest.approx(4e-6 / 6.2, rel=1e-3)
    off = replace(file_of().sides[DDP], losses=(6.5, 9.0, 6.3, 6.2))
    assert replace(file_of(), sides={**file_of().sides, DDP: off}).loss_difference == pytest.approx((9 - 6.4) / 9)


def test_a_table_has_every_side_and_why_one_failed() -> None:
    rows = side_rows(file_of())
    assert [row[0] for row in rows[1:]] == list("abcdef")
    assert rows[1] == ["a", DDP, "1.500", "1.50x", "1.400", "-", "6.20000"]
    assert rows[-1][2] == "OutOfMemoryError: 14 GiB"


def test_the_page_has_everything_and_a_run_that_ended_early_says_so() -> None:
    page = bench_page(result_of(ended="stopped by SIGINT"))
    for words in ("Ended early: stopped by SIGINT", "4 x Tesla T4", "1.50x", "12.5 GB/s", "OutOfMemoryError", "550.54"):
        assert words in page, words
    assert "nothing" not in page
    bare = BenchResult("hf_hotspa 0.1.0", "2026", {}, {}, {}, 1, "1 CPU processes")
    assert "Exactness was not checked" in bench_page(bare)


def test_results_of_several_people_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result_of().save(tmp_path / "a.json")
    result_of(file_of(digest="c" * 16, seconds={DDP: 0.8}), devices="2 x A100").save(tmp_path / "b.json")
    page = tmp_path / "page.html"
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", str(page)]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 results are exact, 0 are not." in text
    assert "auto is 0.80 to 1.50x as fast as the fastest stock Trainer; ahead in 1 of 2 contests." in text
    assert "Lengths of one name but with another hash are other rows" in text
    assert "2: 2 x A100" in page.read_text()
    assert page.read_text() == compared_page([BenchResult.load(tmp_path / f"{name}.json") for name in "ab"])


def test_a_comparison_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(result_of(), files=()).save(tmp_path / "a.json")
    assert cli.main(["bench", "--compare", str(tmp_path / "a.json")]) == 2
    assert "no result has a contest" in capsys.readouterr().err


# -- the work ---------------------------------------------------------------------------------------------------------


def test_rows_are_the_same_everywhere_and_their_hash_tells_others_apart() -> None:
    file = LengthFile.of("github", 1024, 2048, 4, 3)
    assert (file.rows % 4, len(file.lengths), file.longest) == (0, 3 * file.rows, max(file.lengths))
    assert file == LengthFile.of("github", 1024, 2048, 4, 3)
    assert len(file.digest) == 16
    assert file.digest != LengthFile.of("github", 1024, 2048, 4, 4).digest


def test_padding_has_no_label_and_is_masked() -> None:
    batch = padded([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_llama_has_whole_heads() -> None:
    for hidden in (128, 1024):
        config = llama(hidden, 4, 512, 1024)
        assert hidden % config["num_attention_heads"] == 0
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_quick_has_an_end_and_small_gpus_get_short_rows() -> None:
    t4, h100 = size_of(True, 15 << 30), size_of(True, 80 << 30)
    assert t4.longest < h100.longest
    assert all(0 < size.minutes < 10 and 60 * size.minutes + size.warmup for size in (t4, h100, size_of(True, 0)))
    assert size_of(False, 15 << 30).minutes == 0


def test_ranks_share_a_gpu_only_if_the_library_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_GPU, raising=False)
    assert processes_of(None, 2) == 2
    with pytest.raises(HotspaConfigError, match="--processes 2 on 1 GPUs"):
        processes_of(2, 1)
    monkeypatch.setenv(SHARED_GPU, "1")
    assert processes_of(2, 1) == 2


# -- a run, with parts that are made up -------------------------------------------------------------------------------


def make_up(monkeypatch: pytest.MonkeyPatch, answer: Any, errors: dict[str, Any]) -> None:
    """Makes up the parts on ranks alone: `answer(name, side)` gives a turn, or raises."""

    def run(ranks: int, fn: Any, *args: Any, **options: Any) -> Any:
        if fn is exactness.run:
            return errors
        if fn is save_model:
            return 10
        if fn is program.measure:
            raise WorldError("rank 1 failed:\nRuntimeError: no links")
        return answer(args[0], args[2])

    monkeypatch.setattr(program, "run_world", run)


def bench_of(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, **more: Any) -> Bench:
    make_up(monkeypatch, answer, {"dp2:40@64": {"loss": 0.0, "gradient": 1e-12, "parameter": "x"}})
    given: dict[str, Any] = {"longest": 256, "tokens": 512, "steps": 3, "rounds": 2, "minutes": None, "model": None}
    given |= {"quick": True, "use_cpu": True, "processes": 2, "output": str(folder)}
    return Bench(Namespace(**given | more))


def turn(*_: Any) -> dict[str, Any]:
    return {"seconds": [1.0, 1.0], "losses": [3.0, 2.0], "peak_bytes": 0, "micro_rows": 4, "ran": []}


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(side: Any, micro_rows: int) -> dict[str, Any]:
        if side.rows == "padded" and micro_rows != 1:
            raise WorldError("rank 0 failed:\ntorch.OutOfMemoryError: CUDA out of memory")
        if side.kind == "fsdp":
            raise WorldError("TimeoutError: no result within 120 s")
        return turn()

    bench = bench_of(tmp_path, monkeypatch, answer)
    bench.run()
    result = BenchResult.load(tmp_path / "bench.json")
    assert result == bench.result
    assert not result.ended
    for file in result.files:
        counts = {name: len(side.rounds) for name, side in file.sides.items()}
        assert counts == {STOCK[0].name: 2, DDP: 2, FSDP: 0, "ours, dp2": 2}  # without links nothing is predicted
        assert "no result within 120 s" in file.sides[FSDP].failed
    assert "links: RuntimeError: no links" in result.not_done
    assert any("single rows" in name for name in result.parts)
    assert (tmp_path / "bench.html").is_file()


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def answer(*_: Any) -> dict[str, Any]:
        turns.append(1)
        if len(turns) == 3:
            raise _Stopped("stopped by SIGINT")
        return turn()

    bench_of(tmp_path, monkeypatch, answer).run()
    result = BenchResult.load(tmp_path / "bench.json")
    assert result.ended == "stopped by SIGINT"
    assert sum(len(side.rounds) for file in result.files for side in file.sides.values()) == 2


def test_nothing_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(tmp_path, monkeypatch, turn, minutes=0.01)
    bench.run()
    assert bench.result.ended
    assert "the 0.01 minutes were over" in bench.result.not_done[0]


def wrong_gradients(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The real check, where one rank's gradients of one parameter are off by a factor under one pool."""
    whole, pools, found = HotSPaEngine.full_gradients, exactness.pools(world_size), list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "pools", lambda ranks: pools[:2])
        for factor in FACTORS:

            def full_gradients(engine: HotSPaEngine, factor: float = factor) -> dict[str, torch.Tensor]:
                gradients = whole(engine)
                if rank and engine.buckets == parse_buckets(pools[1]):
                    gradients[PLANTED] *= factor
                return gradients

            patch.setattr(HotSPaEngine, "full_gradients", full_gradients)
            found.append(exactness.run(rank, world_size, cuda=False))
    return found


PLANTED, FACTORS = "model.layers.1.mlp.up_proj.weight", (1.0, 1 + 1e-5, float("nan"))


@pytest.mark.gloo
def test_a_wrong_gradient_is_in_the_verdict_the_exit_code_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for factor, errors in zip(FACTORS, run_world(2, wrong_gradients, limit_s=200.0), strict=True):
        make_up(monkeypatch, turn, errors)
        command = "bench --quick --use-cpu --processes 2 --longest 256 --tokens 512 --rounds 1 -o"
        code = cli.main([*command.split(), str(tmp_path)])
        result, pool = BenchResult.load(tmp_path / "bench.json"), exactness.pools(2)[1]
        assert result.ended == ""
        words = "Exact: loss and gradients of 2 pools" if factor == 1 else f"NOT EXACT: under {pool} loss and gradients"
        assert (result.exact, code) == (factor == 1, int(factor != 1))
        if factor != 1:
            assert result.exactness[pool].parameter == PLANTED
            assert result.exactness[pool].gradient >= 0.99e-5
        assert words in capsys.readouterr().out
        assert words in (tmp_path / "bench.html").read_text()


def hangs(rank: int, world_size: int) -> None:
    if rank:
        time.sleep(600)


def fails(rank: int, world_size: int) -> None:
    if rank:
        raise ValueError("what went wrong")


@pytest.mark.gloo
def test_a_world_ends_with_the_rank_that_failed_and_in_its_time() -> None:
    with pytest.raises(WorldError) as failed:
        run_world(2, fails)
    assert failed.value.reason == "ValueError: what went wrong"
    with pytest.raises(WorldError, match="no result within 1 s"):
        run_world(2, hangs, limit_s=1.0)
