"""Moves: collators."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
