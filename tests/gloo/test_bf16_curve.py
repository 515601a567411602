"""Training in bf16 with fp32 masters follows fp32 as closely as docs/exactness.md says."""

import pytest

from tests.loss_curves import RUNS, STEPS, curve, differences

pytestmark = pytest.mark.gloo

MEAN, MOST, SIGNED = 0.01, 0.05, 0.01
"""Of the difference of the losses of any step, whose losses are between 3 and 5."""


@pytest.mark.slow
def test_200_steps_in_bf16_stay_near_fp32():
    exact = curve("stock, fp32", STEPS)
    assert exact[-1] < exact[0] - 1.5  # it learns
    assert differences(curve("hot-switched, fp32", STEPS), exact)[1] <= 1e-5
    stock, _, _ = differences(curve("stock, bf16 (autocast)", STEPS), exact)
    for name in RUNS:
        if name.startswith("hot-switched, bf16"):
            mean, most, signed = differences(curve(name, STEPS), exact)
            assert mean <= MEAN, name
            assert most <= MOST, name
            assert abs(signed) <= SIGNED, name
            assert mean <= 3 * stock, name  # and no further than the stock Trainer's bf16
