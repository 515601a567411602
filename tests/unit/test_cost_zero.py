"""ZeRO's memory table and the textbook formulas of 3D parallelism, against the published numbers."""

import pytest

from hf_hotspa.costs.formulas import (
    model_state_bytes,
)
from hf_hotspa.errors import HotspaConfigError

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
