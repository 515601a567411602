"""The textbook's formulas: its worked numbers, and `hf-hotspa formulas`, which prints them."""

import json
from pathlib import Path

import pytest

from hf_hotspa.cli import main
from hf_hotspa.costs import formulas
from hf_hotspa.costs.formulas import Matmul
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.search.formula_table import FormulaTable, Row, divisions, make_table
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy
from tests.gpt_formulas import gpt_parameters

MODEL, TOKENS = "llama2-7b", 2048


@pytest.fixture(scope="module")
def found() -> FormulaTable:
    return make_table(Setup.read(MODEL, "4x8", "a100-80g"), batch=512, micro=1, tokens=TOKENS)


def row_of(found: FormulaTable, pp: int, tp: int, dp: int) -> Row:
    (row,) = [row for row in found.rows if (row.pp, row.tp, row.dp) == (pp, tp, dp)]
    return row


# ---------------------------------------------------------------------------------------------- single formulas


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_product_under_tensor_parallelism(tp: int) -> None:
    n = 1024
    one, cut = Matmul.of(n), Matmul.of(n, tp)
    assert one.flops == 2 * n**3
    assert one.bytes == 6 * n**2
    assert cut.flops == one.flops / tp
    assert cut.bytes == pytest.approx((1 + 2 / tp) / 3 * one.bytes)
    assert cut.intensity == pytest.approx(n / (2 + tp))


def test_a_batch_in_a_pipeline() -> None:
    # (b'/b + p - 1) (t_f + t_b), and its bubble: what it takes over the ideal, which is m times a micro-batch
    for pp, m, micro_batch_s in ((1, 8, 0.5), (4, 8, 0.5), (8, 64, 0.01)):
        seconds = formulas.pipeline_seconds(pp, m, micro_batch_s)
        assert seconds == (m + pp - 1) * micro_batch_s
        assert seconds / (m * micro_batch_s) - 1 == pytest.approx(formulas.bubble_fraction(pp, m))
    with pytest.raises(HotspaConfigError):
        formulas.pipeline_seconds(4, 0, 1.0)


def test_the_175b_of_the_source() -> None:
    parameters = gpt_parameters(96, 12288, 51200, 2048)
    assert parameters == pytest.approx(175e9, rel=5e-3)
    each = formulas.parameters_per_device(175e9, 8, 16)
    assert each == pytest.approx(1.37e9, rel=3e-3)  # the source prints 1.73 B
    assert formulas.state_bytes_per_device(175e9, 8, 16) == pytest.approx(27.4e9, rel=3e-3)


def test_communication_and_activations() -> None:
    message, bandwidth = 2.0 * 4 * 2048 * 12288, 300e9
    assert formulas.tensor_seconds(message, bandwidth, 8, 12, 64) == pytest.approx(
        (message / bandwidth) * (2 * 7 / 8) * (3 + 3) * 12 * 64
    )
    assert formulas.tensor_seconds(message, bandwidth, 1, 12, 64) == 0
    assert formulas.data_seconds(2.74e9, 25e9, 8) == pytest.approx(2.74e9 / 25e9 * 2 * 7 / 8)
    assert formulas.data_seconds(2.74e9, 25e9, 1) == 0
    p, t, m = 16, 8, 64
    assert formulas.stage_seconds(message, 25e9, bandwidth, t, p, m) == pytest.approx(
        (2 * m + 2 * (p - 1)) * (message / t) / 25e9 + (m + (p - 1)) * message / bandwidth * (t - 1) / t
    )
    assert formulas.stage_seconds(message, 25e9, bandwidth, t, 1, m) == 0
    assert formulas.logit_bytes(4 * 2048, 51200, 8) == 2 * 4 * 2048 * 51200 / 8
    assert formulas.recomputed_bytes(4 * 2048, 12288, 96, 16) == 2 * 4 * 2048 * 12288 * 96 / 16


# ------------------------------------------------------------------------------------------------------ the table


def test_every_division_once() -> None:
    found = divisions(32, 512, 1, 32, 32)
    assert len(set(found)) == len(found) == 21
    assert all(p * t * d == 32 for p, t, d in found)
    assert divisions(8, 4, 1, 2, 4) == [(1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 2, 2), (2, 4, 1)]
    assert divisions(7, 6, 1, 4, 4) == []
    assert divisions(3, 6, 1, 1, 4) == [(1, 1, 3)]


def test_rows_follow_the_formulas(found: FormulaTable) -> None:
    shape = found.setup.model.shape
    for row in found.rows:
        assert row.micro_batches == 512 // row.dp
        assert row.bubble == (row.pp - 1) / row.micro_batches
        assert row.parameters == found.setup.sizes.num_parameters / (row.pp * row.tp)
        assert row.state_bytes == 20 * row.parameters
        assert row.zero_bytes == tuple(
            row.parameters * size for size in (16, 4 + 12 / row.dp, 2 + 14 / row.dp, 16 / row.dp)
        )
        assert row.intensity == pytest.approx(3 / (2 + row.tp))
        inter = 2 * TOKENS * shape.hidden_size
        assert row.inter_elements == (inter if row.pp > 1 else 0)
        assert row.intra_elements == pytest.approx(shape.num_layers / row.pp * 4 * (1 - 1 / row.tp) * inter)


def test_links_inside_a_node_and_between_nodes(found: FormulaTable) -> None:
    hardware = found.setup.hardware
    assert hardware is not None
    inside, across = row_of(found, 4, 8, 1), row_of(found, 2, 16, 1)
    message = 2 * TOKENS * found.setup.model.shape.hidden_size
    assert inside.tp_seconds == pytest.approx(formulas.tensor_seconds(message, hardware.intra_bandwidth, 8, 8, 512))
    assert across.tp_seconds == pytest.approx(formulas.tensor_seconds(message, hardware.inter_bandwidth, 16, 16, 512))


def test_ours_beside_them(found: FormulaTable) -> None:
    row, setup = row_of(found, 4, 2, 4), found.setup
    strategy = Strategy(dp=4, tp=2, pp=4, rc=1)
    whole = setup.cost.time.phase_seconds(strategy, [[(TOKENS,)] * 128] * 4)
    assert row.our_seconds == pytest.approx(whole, rel=1e-9)  # what is not simulated is exact for equal packs
    assert row.our_bytes == setup.memory.breakdown(strategy, TOKENS, longest=TOKENS, num_packs=128).total


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formulas", MODEL, "--nodes", "1x8", "--batch", "64"]) == 0
    text = capsys.readouterr().out
    assert "bubble" in text
    assert "1 8 1" in text
    assert "misprint in a source" in text
    assert main(["formulas", MODEL, "--nodes", "1x8", "--batch", "64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "hf_hotspa formulas"
    assert len(data["rows"]) == 10
    assert {"bubble", "zero_bytes", "our_seconds", "our_bytes", "unsupported_reason"} <= set(data["rows"][0])


def test_a_model_that_we_cannot_cut_has_its_textbook_numbers_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100, "n_positions": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["formulas", str(tmp_path), "--nodes", "1x4", "--batch", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    for row in rows:
        assert (row["our_seconds"] is None) == bool(row["unsupported_reason"])
    assert any(row["unsupported_reason"] for row in rows if row["tp"] > 1)
    assert any(row["our_seconds"] for row in rows if row["tp"] == row["pp"] == 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["--sequence", "9999999"], "--sequence is 9999999"),
        (["--sequence", "100000"], "positions"),
        (["--nodes", "1x37"], "no (p, t, d) divides"),
        (["--hardware", "abacus"], "abacus"),
        (["--nodes", "x"], "x"),
    ],
)
def test_bad_input_is_said_in_a_message(changes: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formulas", MODEL, "--nodes", "1x8", *changes]) == 2
    assert text in capsys.readouterr().err


def test_numbers_below_one_are_refused_by_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["formulas", MODEL, "--nodes", "1x8", "--micro-batch", "-1"])
    assert "argument --micro-batch: '-1' is not a whole number of at least 1" in capsys.readouterr().err
