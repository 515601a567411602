"""ZeRO's memory table and the textbook formulas of 3D parallelism, against the published numbers."""

import pytest

from hf_hotspa.costs.formulas import (
    ALL_REDUCES_PER_LAYER,
    STATE_BYTES_PER_PARAMETER,
    bubble_fraction,
    inter_elements,
    intra_elements,
    model_state_bytes,
    parameters_per_device,
    state_bytes_per_device,
)
from hf_hotspa.errors import HotspaConfigError
from tests.gpt_formulas import gpt_activation_bytes, gpt_parameters

# ZeRO (SC'20), Table 1: GB a device by data-parallel degree, for stages 1, 2 and 3 of models of 7.5B, 128B and 1T.
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


def decimals(printed: float) -> int:
    return len(repr(printed).partition(".")[2].rstrip("0"))


@pytest.mark.parametrize("dp", TABLE_1)
def test_table_1_of_the_zero_paper(dp: int) -> None:
    for parameters, printed in zip((7.5e9, 128e9, 1e12), TABLE_1[dp], strict=True):
        for stage, gigabytes in zip((1, 2, 3), printed, strict=True):
            found = model_state_bytes(parameters, dp, stage) / 1e9
            # the paper rounds some entries and cuts others: both are within one unit of the last digit
            assert abs(found - gigabytes) < 10 ** -decimals(gigabytes), (parameters, stage)
        assert model_state_bytes(parameters, dp, 0) == 16 * parameters


def test_zero_refuses_what_does_not_exist() -> None:
    with pytest.raises(HotspaConfigError, match="0, 1, 2, 3"):
        model_state_bytes(1e9, 4, 4)
    with pytest.raises(HotspaConfigError, match="degree of 0"):
        model_state_bytes(1e9, 0, 1)


def test_bubble() -> None:
    assert bubble_fraction(1, 5) == 0
    assert bubble_fraction(4, 12) == 0.25
    with pytest.raises(HotspaConfigError):
        bubble_fraction(4, 0)


def test_tensor_parallel_traffic_against_pipeline_traffic() -> None:
    tokens, hidden, layers = 2048, 12288, 12
    for tp in (1, 2, 8):
        ratio = intra_elements(tokens, hidden, tp, layers) / inter_elements(tokens, hidden)
        assert ratio == pytest.approx(layers * ALL_REDUCES_PER_LAYER * (1 - 1 / tp))
    assert intra_elements(1, 1, 8, 1) == pytest.approx(4 * 2 * 7 / 8)  # four ring all-reduces of one element


def test_gpt3() -> None:
    parameters = gpt_parameters(96, 12288, 51200, 2048)
    assert parameters == pytest.approx(175e9, rel=0.005)
    assert parameters_per_device(parameters, 8, 8) == parameters / 64
    assert STATE_BYTES_PER_PARAMETER == 2 + 2 + 4 + 4 + 4 + 4
    assert state_bytes_per_device(parameters, 8, 8) == pytest.approx(54.6e9, rel=0.005)


def test_gpt_activations() -> None:
    assert gpt_activation_bytes(10, 4) == 34 * 40
    assert gpt_activation_bytes(10, 4, 8) == (10 + 3) * 40
    assert gpt_activation_bytes(10, 4, 8, sequence_parallel=True) == 34 / 8 * 40
