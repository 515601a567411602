"""What each rank gives away under each strategy while some devices are slow: to others (mode `migrate`), or to nobody (mode
`resize`).

The shares follow from the paces that are known (`SlowDevices`) and from what part of a rank's seconds are matrix products;
they change only when what is known changes. Every rank comes to the same. No torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.stragglers.ratios import excess_ratios, settled_ratios, undone
from hf_hotspa.strategy import Strategy

Shares = tuple[float, ...]
"""Of each rank: the share of its columns that it gives away."""


def tensor_groups(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """The ranks of each tensor-parallel group."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(strategy.world_size):
        coord = vars(strategy.coord(rank))
        groups.setdefault(tuple(value for axis, value in coord.items() if axis != "tp"), []).append(rank)
    return tuple(map(tuple, groups.values()))


class Giving:
    """The shares of a run.

    Args:
        strategies: Those that can give: of several shards.
        to_nobody: Whether what is given away is computed by nobody.
    """

    def __init__(self, strategies: Sequence[Strategy], to_nobody: bool = False) -> None:
        self.to_nobody = to_nobody
        self._groups = {str(strategy): tensor_groups(strategy) for strategy in strategies}
        self.shares: dict[str, Shares] = {str(s): (0.0,) * s.world_size for s in strategies}
        self._products = {str(s): [0.0] * s.world_size for s in strategies}
        self._decided: list[Any] | None = None

    def extra(self, strategy: str) -> Shares:
        """What each rank computes beyond its own columns, as a share of them; below 0 for one that gives."""
        shares = self.shares.get(strategy)
        if shares is None:
            return ()
        extra = [0.0] * len(shares)
        for group in self._groups[strategy]:
            helpers = [rank for rank in group if shares[rank] == 0.0]
            taken = sum(shares[rank] for rank in group) / len(helpers) if helpers and not self.to_nobody else 0.0
            for rank in group:
                extra[rank] = -shares[rank] if shares[rank] > 0.0 else taken
        return tuple(extra)

    def measured(self, strategy: str, seconds: Sequence[float], product_s: Sequence[float]) -> Shares:
        """Takes a phase.

        Args:
            seconds: Of each rank, of its own.
            product_s: The part of matrix products.

        Returns:
            How many times the seconds of each rank are what they would be if nothing were given; 1 where nothing is.
        """
        extra = self.extra(strategy)
        if not extra:
            return (1.0,) * len(seconds)
        known = self._products[strategy]
        for rank, (t, m) in enumerate(zip(seconds, product_s, strict=True)):
            if t > 0.0:
                known[rank] = undone(min(m / t, 1.0), extra[rank])
        return tuple(1.0 + a * p for a, p in zip(extra, known, strict=True))

    def decide(self, paces: Sequence[float], slow: frozenset[int]) -> bool:
        """Decides anew where what is known of the devices changed.

        Returns:
            Whether some share changed.
        """
        state = [list(paces), sorted(slow), sorted(s for s, known in self._products.items() if any(known))]
        if state == self._decided:
            return False
        self._decided, before = state, dict(self.shares)
        for strategy, groups in self._groups.items():
            shares = [0.0] * len(paces)
            for group in groups:
                givers = [place for place, rank in enumerate(group) if rank in slow]
                times = [paces[rank] if rank in slow else 1.0 for rank in group]
                products = [t * self._products[strategy][rank] for t, rank in zip(times, group, strict=True)]
                ratios = (
                    excess_ratios(times, products, True) if self.to_nobody else settled_ratios(times, products, givers)
                )
                for rank, share in zip(group, ratios, strict=True):
                    shares[rank] = share
            self.shares[strategy] = tuple(shares)
        return self.shares != before

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on, JSON-ready."""
        shares = {name: list(shares) for name, shares in self.shares.items()}
        return {"shares": shares, "products": self._products, "decided": self._decided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; what it holds of other strategies is left.

        Raises:
            HotspaConfigError: it is not one.
        """
        try:
            for name, shares in self.shares.items():
                if name in state["shares"]:
                    self.shares[name] = tuple(map(float, state["shares"][name]))
                    self._products[name] = list(map(float, state["products"][name]))
                    if not len(self.shares[name]) == len(self._products[name]) == len(shares):
                        raise ValueError(f"{name} is of another number of ranks")
            self._decided = state["decided"]
        except (KeyError, TypeError, ValueError) as error:
            raise HotspaConfigError(
                f"the state of migrated columns cannot be read: {type(error).__name__}: {error}",
                fix="leave it out; they are decided anew",
            ) from None
