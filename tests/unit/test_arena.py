"""What an arena holds is known exactly while nobody else has used it."""

import pytest
import torch

from hf_hotspa.engine.switching import Arenas, lay_out

WEIGHTS = [torch.float32, torch.bfloat16]
A, B, C = ("a", 0), ("b", 0), ("c", 0)
SIZES = {A: [100, 30], B: [60, 70], C: [10, 10]}
PLACES = {holder: lay_out(sizes, WEIGHTS, [None] * 2) for holder, sizes in SIZES.items()}


def made(copies: int) -> Arenas:
    arenas = Arenas(torch.device("cpu"), copies)
    for places in PLACES.values():
        arenas.reserve(places, places)
    return arenas


def use(arenas: Arenas, holder: tuple[str, int], value: float) -> bool:
    """Takes the buffers of a strategy and fills them; whether they were still filled before."""
    buffers, held = arenas.take_weights(PLACES[holder[0], 0], holder)
    if held:
        assert all((buffer == value).all() for buffer in buffers if buffer is not None)
    for buffer in buffers:
        assert buffer is not None
        buffer.fill_(value)
    arenas.last.holder = holder
    return held


@pytest.mark.parametrize(
    ("copies", "holders", "expected"),
    [(1, (A, A, B, A, A, C, C, B), "01001010"), (2, (A, B, A, B, B, A, C, A, B), "001111010")],
)
def test_as_many_memories_hold_the_last_strategies(
    copies: int, holders: tuple[tuple[str, int], ...], expected: str
) -> None:
    arenas = made(copies)
    assert "".join("01"[use(arenas, holder, 1.0 + ord(holder[0]))] for holder in holders) == expected


def test_the_last_weights_stay_while_the_next_are_loaded() -> None:
    arenas = made(2)
    for last, following in ((A, B), (B, C), (C, A), (A, B)):
        before, _ = arenas.take_weights(PLACES[last], last)
        for buffer in before:
            assert buffer is not None
            buffer.fill_(3.0)
        arenas.last.holder = last
        use(arenas, following, 4.0)
        assert all((buffer == 3.0).all() for buffer in before if buffer is not None)


def test_what_changed_or_was_not_finished_does_not_count() -> None:
    arenas = made(1)
    use(arenas, A, 1.0)
    assert not use(arenas, ("a", 1), 1.0)  # another version of the frozen weights
    arenas.take_weights(PLACES[A], ("a", 1))  # a load that failed
    assert not use(arenas, ("a", 1), 1.0)
    arenas.forget()
    assert not use(arenas, ("a", 1), 1.0)
    arenas.clear()
    assert not use(arenas, ("a", 1), 1.0)
    assert not arenas.take_weights(PLACES[A], None)[1]
