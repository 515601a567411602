"""Moves: overrides."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
