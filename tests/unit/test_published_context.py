"""Published runs with context parallelism are predicted from their configurations alone, and the predictions are kept."""

import json

from published_context import PREDICTED, ROWS, predict  # type: ignore[import-not-found]

from hf_hotspa.strategy import Strategy


def test_the_predictions_of_published_rows_are_those_that_are_committed() -> None:
    rows, predicted = json.loads(ROWS.read_text()), json.loads(PREDICTED.read_text())
    assert len(rows) == 7
    for row, kept in zip(rows, predicted, strict=True):
        # memory was predicted before its formula was corrected (docs/paper.md)
        assert {**predict(row), "memory_gib": kept["memory_gib"]} == kept
    for row, found in zip(rows, predicted, strict=True):
        assert Strategy.parse(found["strategy"]).cp == row["parallel"]["cp"] > 1
        assert "step_s" not in row  # configurations without their results
