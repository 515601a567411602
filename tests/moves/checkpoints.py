"""Moves: checkpoints."""

from tests.moves import Move

MOVES: tuple[Move, ...] = ()
