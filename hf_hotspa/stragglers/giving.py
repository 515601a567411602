"""What each rank does not compute under each strategy while some devices are slow: what it gives to others (mode `migrate`),
leaves to nobody (`resize`), or either (`semi`).

The shares follow from the paces that are known (`SlowDevices`) and from what part of a rank's seconds are matrix products;
they change only when what is known changes, but those of `semi`, which follow the seconds of each mini-batch as long as some
device is slow. Every rank comes to the same. No torch.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from hf_hotspa.stragglers.ratios import PretestCurves, excess_ratios, settled_ratios, settled_semi, undone
from hf_hotspa.strategy import Strategy, as_written
from hf_hotspa.typed import reading_state

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
        mode: `migrate`, `resize` or `semi`.

    Attributes:
        shares: By strategy, for each rank: the share of its columns that others compute.
        resized: The same of those that nobody computes.
        curves: Of the pretest, by strategy, for each of its tensor-parallel groups; `semi` decides nothing without them.
        columns: By strategy, for each rank: the columns of all its products.
    """

    def __init__(self, strategies: Sequence[Strategy], mode: str = "migrate") -> None:
        self.mode = mode
        self._groups = {str(strategy): tensor_groups(strategy) for strategy in strategies}
        self.shares: dict[str, Shares] = {str(s): (0.0,) * s.world_size for s in strategies}
        self.resized: dict[str, Shares] = dict(self.shares)
        self.curves: dict[str, list[PretestCurves]] = {}
        self.columns: dict[str, list[float]] = {}
        self._products = {str(s): [0.0] * s.world_size for s in strategies}
        self._token_s = {str(s): [0.0] * s.world_size for s in strategies}
        self._decided: list[Any] | None = None

    def extra(self, strategy: str, left_out: Sequence[float] | None = None) -> Shares:
        """What each rank computes beyond its own columns, as a share of them; below 0 for one that computes less.

        Args:
            left_out: What each rank was measured to leave out; as it was decided when None.
        """
        shares = self.shares.get(strategy)
        if shares is None:
            return ()
        left = self.resized[strategy] if left_out is None else left_out
        extra = [0.0] * len(shares)
        for group in self._groups[strategy]:
            helpers = [rank for rank in group if shares[rank] == 0.0]
            taken = sum(shares[rank] for rank in group) / len(helpers) if helpers else 0.0
            for rank in group:
                extra[rank] = (-shares[rank] if shares[rank] > 0.0 else taken) - left[rank]
        return tuple(extra)

    def measured(
        self,
        strategy: str,
        seconds: Sequence[float],
        product_s: Sequence[float],
        left_out: Sequence[float] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Shares:
        """Takes a phase.

        Args:
            seconds: Of each rank, of its own.
            product_s: The part of matrix products.
            left_out: The share of its columns that each rank left out; see `extra`.
            tokens: That each rank ran.

        Returns:
            How many times the seconds of each rank are what they would be if nothing were given; 1 where nothing is.
        """
        extra = self.extra(strategy, left_out)
        if not extra:
            return (1.0,) * len(seconds)
        known = self._products[strategy]
        for rank, (t, m) in enumerate(zip(seconds, product_s, strict=True)):
            if t > 0.0:
                known[rank] = undone(min(m / t, 1.0), extra[rank])
                if tokens is not None and tokens[rank] > 0:
                    self._token_s[strategy][rank] = t / (1.0 + extra[rank] * known[rank]) / tokens[rank]
        return tuple(1.0 + a * p for a, p in zip(extra, known, strict=True))

    def decide(self, paces: Sequence[float], slow: frozenset[int]) -> bool:
        """Decides anew where what is known of the devices changed.

        Returns:
            Whether some share changed.
        """
        state = [list(paces), sorted(slow), sorted(s for s, known in self._products.items() if any(known))]
        if state == self._decided and not (self.mode == "semi" and slow):
            return False
        self._decided, before = state, (dict(self.shares), dict(self.resized))
        for strategy, groups in self._groups.items():
            shares, resized = [0.0] * len(paces), [0.0] * len(paces)
            for index, group in enumerate(groups):
                decided = self._of_group(strategy, index, group, paces, slow)
                for rank, (share, left) in zip(group, decided, strict=True):
                    shares[rank], resized[rank] = share, left
            self.shares[strategy], self.resized[strategy] = tuple(shares), tuple(resized)
        return (self.shares, self.resized) != before

    def _of_group(
        self, strategy: str, index: int, group: Sequence[int], paces: Sequence[float], slow: frozenset[int]
    ) -> list[tuple[float, float]]:
        """For each rank of a group the shares that migrate and that are left out."""
        givers = [place for place, rank in enumerate(group) if rank in slow]
        if self.mode == "semi":
            return self._semi(strategy, index, group, slow)
        times = [paces[rank] if rank in slow else 1.0 for rank in group]
        products = [t * self._products[strategy][rank] for t, rank in zip(times, group, strict=True)]
        if self.mode == "resize":
            return [(0.0, share) for share in excess_ratios(times, products)]
        return [(share, 0.0) for share in settled_ratios(times, products, givers)]

    def _semi(self, strategy: str, index: int, group: Sequence[int], slow: frozenset[int]) -> list[tuple[float, float]]:
        """Algorithm 2 with the seconds of the last mini-batch, a pack of the pretest's tokens; ranks that are not slow are
        all as fast as the fastest of them."""
        known = [self._token_s[strategy][rank] for rank in group]
        usual = [t for rank, t in zip(group, known, strict=True) if rank not in slow and t > 0.0]
        if not usual or strategy not in self.curves or all(rank not in slow for rank in group):
            return [(0.0, 0.0)] * len(group)
        least = min(usual)
        times = [max(t, least) if rank in slow else least for rank, t in zip(group, known, strict=True)]
        products = [t * self._products[strategy][rank] for t, rank in zip(times, group, strict=True)]
        columns = [self.columns[strategy][rank] for rank in group]
        work = settled_semi(times, products, columns, self.curves[strategy][index])
        return [(task.migrated, task.resized) for task in work]

    def take_pretest(self, strategy: str, rows: Sequence[Sequence[float]], pack_tokens: int) -> None:
        """Takes what all ranks measured in the pretest of a strategy.

        Args:
            rows: Of each rank: the columns of all its products, then static, extract, send and compute seconds and the static
                part of send, as `PretestCurves` has them.
            pack_tokens: The tokens that it was made with; curves are kept for one token, as seconds are.
        """
        self.columns[strategy] = [row[0] for row in rows]
        curves = []
        for group in self._groups[strategy]:
            mine = [rows[rank][1:] for rank in group]
            # what is computed and copied is that of a usual rank; a message takes as long as its slowest end
            static, extract, compute = (median_low(row[i] for row in mine) for i in (0, 1, 3))
            send, send_static = (max(row[i] for row in mine) for i in (2, 4))
            curves.append(PretestCurves(*(s / pack_tokens for s in (static, extract, send, compute, send_static))))
        self.curves[strategy] = curves

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on, JSON-ready."""
        shares = {name: list(shares) for name, shares in self.shares.items()}
        resized = {name: list(shares) for name, shares in self.resized.items()}
        curves = {name: [list(vars(curve).values()) for curve in curves] for name, curves in self.curves.items()}
        return {
            "shares": shares, "resized": resized, "products": self._products, "token_s": self._token_s,
            "decided": self._decided, "curves": curves,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; what it holds of other strategies is left.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("migrated columns", "they are decided anew"):
            keys = ("shares", "resized", "products", "token_s", "curves")
            saved = {
                key: {as_written(name): values for name, values in state[key].items()} for key in keys if key in state
            }
            for name, shares in self.shares.items():
                if name not in saved["shares"]:
                    continue
                lists = [list(map(float, saved[key][name])) for key in keys[:-1]]
                if {len(values) for values in lists} != {len(shares)}:
                    raise ValueError(f"{name} is of another number of ranks")
                self.shares[name], self.resized[name] = tuple(lists[0]), tuple(lists[1])
                self._products[name], self._token_s[name] = lists[2:]
                if name in self.curves and name in saved["curves"]:
                    self.curves[name] = [PretestCurves(*map(float, curve)) for curve in saved["curves"][name]]
            decided = state["decided"]
            self._decided = decided and [*decided[:2], sorted(map(as_written, decided[2]))]
