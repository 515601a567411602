"""Moves: callbacks."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
