"""The cost models compute what they computed when `tests/data/cost_table.json` was written."""

import json

import pytest

from hf_hotspa.seam import FEATURES
from tests.cost_table import TABLE, rows


def test_bytes_and_seconds_are_those_of_the_table() -> None:
    table, computed = json.loads(TABLE.read_text()), rows()
    if "pipedream" not in FEATURES:
        table = {case: rows for case, rows in table.items() if "pipedream" not in case}
    assert computed.keys() == table.keys()
    for case, of_case in computed.items():
        assert of_case.keys() == table[case].keys(), case
        for strategy, row in of_case.items():
            assert row == pytest.approx(table[case][strategy], rel=1e-12, abs=0), f"{case} under {strategy}"
