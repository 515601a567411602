"""How long sequences and packs may be under a memory limit, and the error for a sequence that fits nowhere.

The memory model answers; the strategies of a pool share one arena. Plain data, no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_hotspa.costs.memory import MemoryModel, round_up, size
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.strategy import Strategy


@dataclass(frozen=True)
class Capacities:
    """How many tokens a sequence and a pack of a strategy may have inside a pool."""

    model: MemoryModel
    limit_bytes: float | None
    # the most tokens of a pack, for strategies that ran out of memory; 0 if not even the weights fitted
    most: Mapping[Strategy, int] = field(default_factory=dict)
    least_arena: int = 0  # bytes of the existing arena, for other strategies of the engine
    # answers of the memory model, by strategy, arena and longest sequence: searches ask repeatedly
    _known: dict[tuple[Strategy, int, int | None], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def arena(self, strategy: Strategy) -> int:
        return max(self.model.arena_bytes(strategy), self.least_arena)

    def tokens(self, strategy: Strategy, arena: int | None = None) -> int:
        """Returns the longest sequence, with the smallest packs beside it in a pipeline, in a pool with that arena
        (None: its own); 0 if it cannot run."""
        if strategy.ck and strategy.ck > self.most.get(replace(strategy, ck=0, kg=0, kh=False), strategy.ck):
            return 0  # a pack that ran out of memory would do so again as a chunk
        capacity = self._by_model(strategy, self.arena(strategy) if arena is None else arena)
        return min(capacity, self.most.get(strategy, capacity))

    def _by_model(self, strategy: Strategy, arena: int) -> int:
        key = strategy, arena, None
        if key not in self._known:
            alone = self.model.largest_pack(strategy, self.limit_bytes, num_packs=1, arena_bytes=arena)
            if strategy.pp > 1 and self.limit_bytes is not None:  # GPipe keeps what the losses of all packs keep
                beside = self.model.largest_pack(strategy, self.limit_bytes, longest=None, arena_bytes=arena)
                alone = min(alone, beside)
            self._known[key] = alone
        return self._known[key]

    def pack_tokens(self, strategy: Strategy, arena: int, longest: int) -> int:
        """Returns the most tokens of packs beside sequences up to `longest`, which fit; see `Bucket`."""
        key = strategy, arena, longest
        if key not in self._known:
            self._known[key] = self.model.largest_pack(strategy, self.limit_bytes, longest=longest, arena_bytes=arena)
        tokens = self._known[key]
        return min(tokens, self.most.get(strategy, tokens))

    def too_long(self, longest: int, strategies: Sequence[Strategy]) -> DeviceMemoryError:
        """Returns the error for a sequence that no strategy holds: names strategies that ran out of memory although the
        model allows it, else the smallest changes that would work."""
        failed = [s for s in strategies if self.tokens(s, 0) < longest <= self._by_model(s, 0)]
        if failed:
            return DeviceMemoryError(
                f"no strategy is left for a sequence of {longest} tokens",
                why=f"an earlier run ran out of memory under {', '.join(map(str, failed))}",
                fix="use more devices or shorter sequences; if memory was lacking for another reason, delete "
                "hotspa_out_of_memory.json in the output directory",
            )
        needed = {s: self.model.breakdown(s, longest, num_packs=1).total for s in strategies}
        capacities = {s: self._by_model(s, 0) for s in strategies}
        cheapest, largest = min(needed, key=needed.__getitem__), max(capacities, key=capacities.__getitem__)
        shorter = f"sequences of at most {capacities[largest]} tokens ({largest} holds them under this limit)"
        return DeviceMemoryError(
            f"no strategy holds a sequence of {longest} tokens in {size(self.limit_bytes or 0.0)} a device",
            why=f"{cheapest} needs least: {size(needed[cheapest])}",
            fix=f"a limit of {round_up(needed[cheapest])} with {cheapest}, or {shorter if capacities[largest] else 'more devices'}",
        )
