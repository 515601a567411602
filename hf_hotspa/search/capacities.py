"""How long sequences and packs may be under a limit of memory, and the error for a sequence that fits nowhere.

The memory model answers; a pool of strategies shares one arena. Plain data, no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hf_hotspa.costs.breakdown import round_up
from hf_hotspa.costs.memory import MemoryModel, most_within
from hf_hotspa.errors import DeviceMemoryError, HotspaError
from hf_hotspa.strategy import Strategy

_GIB = 1 << 30


class Capacities(Protocol):
    """How many tokens the packs of a strategy may have."""

    def arena(self, strategy: Strategy) -> int:
        """Bytes that a pool must keep for the strategy's weights and gradients."""

    def tokens(self, strategy: Strategy, arena: int) -> int:
        """The longest sequence in a pool with that arena; 0 when the strategy cannot run there."""

    def pack_tokens(self, strategy: Strategy, arena: int, longest: int) -> int:
        """The most tokens of packs that run with sequences up to `longest`, which fit; see `Bucket`."""

    def too_long(self, longest: int, strategies: Sequence[Strategy]) -> HotspaError:
        """The error for a sequence that no strategy holds."""


@dataclass(frozen=True)
class MemoryCapacities:
    """How many tokens a sequence and a pack of a strategy may have inside a pool, from the memory model.

    Args:
        limit_bytes: Memory of a device; None for no limit.
    """

    model: MemoryModel
    limit_bytes: float | None

    def arena(self, strategy: Strategy) -> int:
        """Bytes that a pool must keep for the strategy's weights and gradients."""
        return self.model.arena_bytes(strategy)

    def tokens(self, strategy: Strategy, arena: int) -> int:
        """The longest sequence, with the smallest packs beside it in a pipeline, in a pool with that arena; 0 when it
        cannot run."""
        alone = self.model.largest_pack(strategy, self.limit_bytes, num_packs=1, arena_bytes=arena)
        if strategy.pp == 1 or self.limit_bytes is None:
            return alone

        def total(length: int) -> float:  # GPipe keeps what the losses of all packs keep
            return self.model.breakdown(strategy, 1, longest=length, arena_bytes=arena).total

        return most_within(total, self.limit_bytes, alone)

    def pack_tokens(self, strategy: Strategy, arena: int, longest: int) -> int:
        """The most tokens of packs that run with sequences up to `longest`, which fit; see `Bucket`."""
        return self.model.largest_pack(strategy, self.limit_bytes, longest=longest, arena_bytes=arena)

    def too_long(self, longest: int, strategies: Sequence[Strategy]) -> DeviceMemoryError:
        """The error that says what it takes to hold a sequence that fits nowhere."""
        return too_long(
            longest,
            strategies,
            self.limit_bytes or 0.0,
            lambda strategy: self.tokens(strategy, 0),
            lambda strategy: self.model.bytes_needed(strategy, longest, num_packs=1),
        )


def too_long(
    longest: int,
    strategies: Iterable[Strategy],
    limit_bytes: float,
    tokens: Callable[[Strategy], int],
    needed: Callable[[Strategy], float],
) -> DeviceMemoryError:
    """The error for a sequence that no strategy can hold: names the smallest changes that would work.

    Args:
        tokens: The longest pack of a strategy under the limit.
        needed: The limit under which a strategy would hold it.
    """
    tried = list(strategies)
    cheapest = min(tried, key=needed)
    largest = max(tried, key=tokens)
    most = tokens(largest)
    shorter = (
        f", or sequences of at most {most} tokens ({largest} holds them under this limit)"
        if most
        else ", or more devices"
    )
    return DeviceMemoryError(
        f"no strategy holds a sequence of {longest} tokens in {limit_bytes / _GIB:,.2f} GiB a device",
        why=f"the smallest need is that of {cheapest}: {needed(cheapest) / _GIB:,.2f} GiB",
        fix=f"a limit of {round_up(needed(cheapest))} with {cheapest}{shorter}",
    )
