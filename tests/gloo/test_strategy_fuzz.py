"""Random mixes of strategies, options, lengths and families are exact, or refused by name before they train."""

import pytest

from tests.strategy_fuzz import outcome_of

pytestmark = pytest.mark.gloo

_QUICK = (2, 14)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in _QUICK else pytest.mark.slow) for s in range(40)])
def test_a_random_mix_is_exact_or_refused(seed):
    mix, outcome = outcome_of(seed)
    assert outcome == "exact" or outcome.startswith("refused: "), f"{mix}\n{outcome}"
