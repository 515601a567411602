"""Moves: data."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
