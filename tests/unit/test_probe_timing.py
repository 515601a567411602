"""What a pack costs, from seconds by the clock and seconds on a core."""

import pytest
import torch

from hf_hotspa.calibrate.probe import _on_shared_cores, layer_counts


def cost(clock: list[float], on_core: list[float], share: float = 0.5) -> float:
    rounds = torch.tensor(clock, dtype=torch.float64)[:, None], torch.tensor(on_core, dtype=torch.float64)[:, None]
    return float(_on_shared_cores(*rounds, share))


def test_waiting_for_a_core_costs_nothing():
    assert cost([2.0] * 4, [1.0] * 4) == 1.0  # two ranks on each core


def test_idle_cores_cost():
    assert cost([2.4] * 4, [1.0] * 4) == pytest.approx(1.2)


def test_other_programs_count_little():
    assert cost([9.0, 2.4, 7.0, 8.0], [1.0, 1.0, 1.1, 1.2]) == pytest.approx(1.2)  # the fastest round by the clock
    assert cost([90.0] * 4, [1.0] * 4) == 1.5  # and never more than the limit


class Text:
    def __init__(self, layers: int, hidden: int) -> None:
        self.num_hidden_layers, self.hidden_size = layers, hidden

    def get_text_config(self) -> "Text":
        return self


@pytest.mark.parametrize(
    ("layers", "hidden", "counts"),
    [(1, 64, (1, 2)), (4, 64, (1, 4)), (7, 320, (1, 7)), (48, 256, (1, 8)), (32, 4096, (1, 3)), (2, 8192, (1, 2))],
)
def test_copies_have_as_many_layers_as_can_be_measured(layers, hidden, counts):
    assert layer_counts(Text(layers, hidden)) == counts
