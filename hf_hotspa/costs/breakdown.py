"""Bytes of a rank by what they are for, and how sizes are written. Plain data, no torch."""

from dataclasses import dataclass, fields

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one rank of the fullest stage.

    Args:
        master_weights: Its share of the master store.
        master_gradients: The gradients of that share.
        optimizer: The optimizer state of that share.
        weights: Weights of the strategy.
        arena: What the pool's largest strategy needs beyond these two.
        activations: Of all micro-batches in flight.
        logits: Of one pack, on the last stage; and what the losses of others that are in flight there keep.
        switch: Buffers of switches.
        in_flight: Micro-batches in flight on it, at most.
        held_tokens: Tokens in flight on it, at most.
        pack_tokens: Tokens of the largest pack.
    """

    master_weights: float
    master_gradients: float
    optimizer: float
    weights: float
    gradients: float
    arena: float
    activations: float
    logits: float
    switch: float
    stage: int
    in_flight: int
    held_tokens: int
    pack_tokens: int

    def parts(self) -> dict[str, float]:
        """Bytes by name."""
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum([getattr(self, name) for name in _PARTS])

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(part)}" for name, part in self.parts().items() if part)
        return f"{size(self.total)} on stage {self.stage} ({parts})"


_PARTS = tuple(f.name for f in fields(MemoryBreakdown)[:-4])


def size(num_bytes: float) -> str:
    """In GiB, or in MiB where it is less."""
    return f"{num_bytes / _GIB:,.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"


def round_up(num_bytes: float) -> str:
    """A limit that one can type, rounded up to a mebibyte."""
    mebibytes = -(-int(num_bytes + 1) // (1 << 20))
    return f"{mebibytes}MiB ({mebibytes / 1024:,.2f} GiB)"
