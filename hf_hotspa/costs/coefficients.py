"""The units of the time model: seconds of a pack as a quadratic in its sequence lengths, and of what ranks pass on."""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.typed import NotNegative


@dataclass(frozen=True)
class Cost:
    """`t = a * sum(l_i^2) + b * sum(l_i) + c` seconds for a pack of sequences l_i, forward and backward.

    Packed sequences do not attend to each other, so attention costs the sum of the squares; c is paid once a pack.

    Args:
        a: Seconds a pair of tokens.
        b: Seconds a token.
        c: Seconds a pack.
    """

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    def seconds(self, squares: float, tokens: float) -> float:
        """Seconds of a pack with that sum of squared lengths and that many tokens."""
        return self.a * squares + self.b * tokens + self.c

    def of(self, lengths: Iterable[int]) -> float:
        """Seconds of a pack of these sequences."""
        pack = list(lengths)
        return self.seconds(sum(length * length for length in pack), sum(pack))

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.a + other.a, self.b + other.b, self.c + other.c)

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.a * factor, self.b * factor, self.c * factor)


@dataclass(frozen=True)
class Hop:
    """Passing a hidden state, or its gradient, to the neighbouring stage.

    Args:
        latency_s: Fixed seconds.
        token_s: Seconds a token.
    """

    latency_s: NotNegative = 0.0
    token_s: NotNegative = 0.0

    def seconds(self, tokens: float) -> float:
        """Seconds for a pack of so many tokens."""
        return self.latency_s + self.token_s * tokens


@dataclass(frozen=True)
class Exchanges:
    """What ranks of cp exchange in a layer; a token is the bytes of its hidden state that a rank sends to the others.

    Args:
        all_to_all: Heads for tokens, and gradients to where they are summed.
        gather: Keys and values.
    """

    all_to_all: Hop
    gather: Hop
