"""Published runs with context parallelism are predicted from their configurations alone, and the predictions are kept."""

import json

from published_context import PREDICTED, ROWS, predict  # type: ignore[import-not-found]

from hf_hotspa.strategy import Strategy


def test_the_predictions_of_published_rows_stay_as_they_were_committed() -> None:
    rows, predicted = json.loads(ROWS.read_text()), json.loads(PREDICTED.read_text())
    assert len(rows) == 7
    for row, kept in zip(rows, predicted, strict=True):
        now = predict(row)
        # the formulas of seconds and of memory have changed since (docs/paper.md, docs/predicted.md)
        assert now.keys() == kept.keys()
        assert all(now[name] == kept[name] for name in ("id", "strategy", "way"))
        assert 0.5 < now["step_s"] / kept["step_s"] < 2
    for row, found in zip(rows, predicted, strict=True):
        assert Strategy.parse(found["strategy"]).cp == row["parallel"]["cp"] > 1
        assert "step_s" not in row  # configurations without their results
