"""Moves: losses."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
