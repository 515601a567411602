"""Moves: models."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
