"""Finds slow devices, and decides what each rank does not compute while some are slow.

Giving: slow ranks hand work over to others (mode `migrate`), leave it out (`resize`), or either (`semi`), by equations
1 to 3 and algorithm 2 of "Accelerating Heterogeneous Tensor Parallelism via Flexible Workload Control" (Wang et al.,
arXiv 2401.11469). The shares follow from the known relative step times (`SlowDevices`) and from the part of a rank's
seconds that are matrix products. They change only with these, except in `semi`, which follows the seconds of each
mini-batch while a device is slow. Tasks are the ranks of a tensor-parallel group. Where the paper contradicts itself
this follows its text: line 8 of algorithm 2 prints `if T_i = T_min` for the straggler, and lines 10-11 print `L * beta`
for `L * gamma * beta`.

Finding: seconds cover a rank's computation without waiting for others. Lengths differ from step to step, so the seconds
are divided by the predicted cost of what the rank ran and compared over all ranks. The relative step time is 1 for
ranks that are not slow, and 3 for three times as long. The measure is the fastest ranks, up to the first gap
(`usual_step_time`), and not a median: a slow majority would measure itself. Ranks with the same part of the model (a
pipeline stage) are compared first. A complete stage is slow only if it is slow by the costs that favour it most:
predictions of embedding and head are rough.

The rule is the paper's (section III-A): what is known of a rank changes only when its own runtime changed by more than
10 %, in either direction, so recoveries are detected like onsets. Beyond the paper, two mini-batches in a row must
agree on a change, and a slow device stays slow until it is well below the limit (hysteresis). A strategy's first run is
ignored: it includes allocation and kernel start-up.

All ranks come to the same state; `state_dict` goes into checkpoints. No torch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression, median_low
from typing import Any

from hf_hotspa.strategy import Strategy, as_written
from hf_hotspa.typed import Count, Positive, reading_state, typed

CHANGE = 0.10  # the paper's significant change of a runtime
SLOW, RECOVERED = 1.3, 1.15
"""Relative step times: a device is slow from the first on, and has recovered below the second."""
CLEAR = 1.5  # the gap, as a factor, to the next rank from which a minority of ranks is the measure
ALIKE = 1.25  # two mini-batches agree on a relative step time within this factor: a busy machine explains the rest
LEAST_LOST_S = 0.03  # a device that loses less per mini-batch is not slow: scheduling noise of small models


@dataclass(frozen=True)
class PhaseWork:
    """What the ranks did in one phase."""

    strategy: str
    seconds: tuple[float, ...]  # per rank, without waiting
    costs: tuple[float, ...]  # predicted cost of what each rank ran, in any unit; 0 for nothing
    peers: tuple[int, ...]  # a number per rank; ranks with the same number did comparable work
    least: tuple[float, ...] = ()  # lower bounds of the costs, relative to ranks with another number; default: `costs`
    most: tuple[float, ...] = ()  # upper bounds


def usual_step_time(step_times: Iterable[float]) -> float:
    """The median of the ranks that are not slow: up to the first gap, or all."""
    ordered = sorted(step_times)
    for count in range(1, len(ordered)):
        if ordered[count] >= ordered[count - 1] * (SLOW if 2 * count >= len(ordered) else CLEAR):
            return median_low(ordered[:count])
    return median_low(ordered)


def expected_seconds(work: PhaseWork) -> tuple[float, ...]:
    """Each rank's seconds at the relative step time of ranks that are not slow; 0 if it ran nothing."""
    seconds, costs, most = work.seconds, work.costs, work.most or work.costs
    least, groups = work.least or costs, dict[int, list[int]]()
    for rank, cost in enumerate(costs):
        if cost > 0.0 and seconds[rank] > 0.0:
            groups.setdefault(work.peers[rank], []).append(rank)
    usual = {number: usual_step_time(seconds[r] / costs[r] for r in ranks) for number, ranks in groups.items()}
    # a group is measured by the lower bound of its cost, and judged by the upper
    fastest = (
        usual_step_time(usual[number] * costs[r] / least[r] for number, (r, *_) in groups.items()) if groups else 0.0
    )
    expected = [0.0] * len(costs)
    for number, ranks in groups.items():
        is_slow = usual[number] * costs[ranks[0]] >= SLOW * fastest * most[ranks[0]]
        for rank in ranks:
            expected[rank] = fastest * most[rank] if is_slow else usual[number] * costs[rank]
    return tuple(expected)


@dataclass(frozen=True)
class SlowEvent:
    """Devices that became slow (rank -> relative step time), or recovered, after a mini-batch, counted from 1."""

    step: int
    slow: dict[int, float]
    recovered: tuple[int, ...]

    def __str__(self) -> str:
        lines = [
            f"rank {rank} computes {step_time:.1f} times as long as ranks that are not slow"
            for rank, step_time in self.slow.items()
        ]
        lines += [f"rank {rank} has recovered" for rank in self.recovered]
        return "; ".join(lines)


class SlowDevices:
    """What is known of each rank's relative step time."""

    def __init__(self, num_ranks: int) -> None:
        self.known: list[float] = [1.0] * num_ranks  # as of the last change; 1 for ranks that are not slow
        self.slow: frozenset[int] = frozenset()
        self.num_refreshes = 0  # changes of `known`
        self._changed: list[float | None] = [None] * num_ranks  # the last mini-batch's, if they differed
        self._seen: set[str] = set()

    def observe(self, step: int, phases: Sequence[PhaseWork]) -> tuple[tuple[float | None, ...], SlowEvent | None]:
        """Takes the phases of a mini-batch, counted from 1. Returns each rank's relative step time in it (None if it
        ran nothing measurable), and what changed."""
        known = [phase for phase in phases if phase.strategy in self._seen]
        self._seen.update(phase.strategy for phase in phases)
        ranks = range(len(self.known))
        taken, wanted = [0.0] * len(self.known), [0.0] * len(self.known)
        for phase in known:
            for rank, expected in enumerate(expected_seconds(phase)):
                if expected > 0.0:
                    taken[rank] += phase.seconds[rank]
                    wanted[rank] += expected
        step_times = tuple(taken[r] / wanted[r] if wanted[r] > 0.0 else None for r in ranks)
        before, refreshed = self.slow, False
        for rank, step_time in enumerate(step_times):
            if step_time is not None:
                refreshed |= self._take(rank, step_time, taken[rank] - wanted[rank])
        self.num_refreshes += refreshed
        if self.slow == before:
            return step_times, None
        onset = {rank: self.known[rank] for rank in sorted(self.slow - before)}
        return step_times, SlowEvent(step, onset, tuple(sorted(before - self.slow)))

    def _take(self, rank: int, step_time: float, lost_s: float) -> bool:
        refreshed = self._refresh(rank, step_time)
        if self.known[rank] >= SLOW and lost_s >= LEAST_LOST_S:
            self.slow |= {rank}
        elif self.known[rank] < RECOVERED:
            self.slow -= {rank}
        return refreshed

    def _refresh(self, rank: int, step_time: float) -> bool:
        kept, last = self.known[rank], self._changed[rank]
        if abs(step_time / kept - 1.0) <= CHANGE:
            self._changed[rank] = None
            return False
        if last is None or (last > kept) != (step_time > kept) or max(last, step_time) > ALIKE * min(last, step_time):
            self._changed[rank] = step_time
            return False
        # the milder of the two: one outlier beside a small change has no effect
        self.known[rank] = min(last, step_time) if step_time > kept else max(last, step_time)
        self._changed[rank] = None
        return True

    def speeds(self) -> tuple[float, ...] | None:
        """Each rank's speed for a division of work, 1 for ranks that are not slow; None if no rank is slow."""
        if not self.slow:
            return None
        return tuple(1.0 / step_time if rank in self.slow else 1.0 for rank, step_time in enumerate(self.known))

    def state_dict(self) -> dict[str, Any]:
        """What the next observations depend on, JSON-ready."""
        return {
            "known": list(self.known),
            "slow": sorted(self.slow),
            "changed": list(self._changed),
            "seen": sorted(self._seen),
            "num_refreshes": self.num_refreshes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a state; returns whether it was taken: not with another number of ranks, which are other devices. Raises
        `HotspaConfigError`: the state is invalid."""
        with reading_state("slow devices", "they are found anew"):
            saved = typed(dict(state), _SavedDevices)
        if len(saved.known) != len(self.known):
            return False
        self.known, self.slow, self._changed = list(saved.known), frozenset(saved.slow), list(saved.changed)
        self._seen, self.num_refreshes = set(map(as_written, saved.seen)), saved.num_refreshes
        return True


@dataclass(frozen=True)
class _SavedDevices:
    """The state of `SlowDevices`, by rank."""

    known: tuple[Positive, ...]
    slow: tuple[Count, ...]
    changed: tuple[float | None, ...]
    seen: tuple[str, ...]
    num_refreshes: Count

    def __post_init__(self) -> None:
        if len(self.changed) != len(self.known) or max(self.slow, default=-1) >= len(self.known):
            raise ValueError("its lists do not belong together")


# -- what slow ranks hand over ----------------------------------------------------------------------------------------


MOST = 0.95  # the largest share of its columns that a device can lose: a product needs some
_ROUNDS, _SETTLED = 200, 1e-9


def excess_ratio(seconds: float, product_s: float, reference_s: float) -> float:
    """Equation 1: gamma, the share of its matrix products (of `product_s` seconds) that a task should lose to match the
    reference: the mean over tasks in the paper's section III, the minimum in section IV. 0 for a task that is not slower
    than the reference; at most `MOST`."""
    if seconds <= reference_s or product_s <= 0.0:
        return 0.0
    return min((seconds - reference_s) / product_s, MOST)


def excess_ratios(seconds: Sequence[float], product_s: Sequence[float]) -> tuple[float, ...]:
    """Equation 1 for every task, relative to the fastest."""
    return tuple(excess_ratio(t, m, min(seconds)) for t, m in zip(seconds, product_s, strict=True))


def settled_ratios(seconds: Sequence[float], product_s: Sequence[float], givers: Collection[int]) -> tuple[float, ...]:
    """Equation 1, repeated until it converges: the shares to give to others so that all finish together.

    The paper measures, gives and measures again: with the mean as reference the first result leaves a task with four
    times the seconds at 1.75 times, and later ones reduce it. Here the resulting seconds are computed instead. `seconds`
    and their part in matrix products are per task, as if nothing were given. `givers` are the slow tasks; the others
    divide the given work evenly.
    """
    gammas = [0.0] * len(seconds)
    helpers = [task for task in range(len(seconds)) if task not in givers]
    if not helpers:
        return tuple(gammas)
    for _ in range(_ROUNDS):
        taken = sum(gammas) / len(helpers)
        now = [
            t + m * (-g if i in givers else taken)
            for i, (t, m, g) in enumerate(zip(seconds, product_s, gammas, strict=True))
        ]
        mean, before = sum(now) / len(now), list(gammas)
        for task in givers:
            if product_s[task] > 0.0:
                gammas[task] = min(max(gammas[task] + (now[task] - mean) / product_s[task], 0.0), MOST)
        if max(abs(a - b) for a, b in zip(gammas, before, strict=True)) < _SETTLED:
            break
    return tuple(gammas)


def undone(product_share: float, extra: float) -> float:
    """The product share M / T of a task as if it neither gave nor took any. `extra` is what it computed beyond its own
    columns, as a share of them; below 0 for a giver."""
    return product_share / (1.0 + extra - extra * product_share)


@dataclass(frozen=True)
class PretestCurves:
    """A pretest's results; linear, in seconds and columns."""

    static_s: float  # Omega_1, the allocation of the reduced matrices
    extract_s: float  # Omega_2 per column: extracting it and putting it back
    send_s: float  # Phi_1 per column: broadcast and reduce
    compute_s: float  # Phi_2 per column
    send_static_s: float = 0.0  # the part of Phi_1 that is independent of the columns: complete gradients and outputs

    def __post_init__(self) -> None:
        assert min(vars(self).values()) >= 0.0, self

    def send(self, columns: float) -> float:
        return self.send_static_s + self.send_s * columns if columns > 0.0 else 0.0


def fitted_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """`(a, b)` of the line `a + b x` through samples `(x, y)`, with at least two different x, by least squares. Neither is
    negative: costs do not fall with more columns, and a negative slope is noise."""
    x, y = zip(*samples, strict=True)
    slope, start = linear_regression(x, y)
    if slope < 0.0:
        return fmean(y), 0.0
    return (start, slope) if start >= 0.0 else (0.0, linear_regression(x, y, proportional=True).slope)


def migrated_share(columns: float, num_tasks: int, curves: PretestCurves) -> float:
    """Equation 2, one slow task: the share beta of the `columns` it loses (n = L * gamma) that migrate; the rest is resized
    away.

    Both sides then cost the same, with e tasks: `Omega_1 + Omega_2((1 - beta) n) = Phi_1(beta n) + Phi_2(beta n / (e - 1))`.
    If sending anything costs more than resizing everything, nothing migrates.
    """
    slope = curves.extract_s + curves.send_s + curves.compute_s / (num_tasks - 1)
    if columns <= 0.0 or slope <= 0.0:
        return 1.0
    share = (curves.static_s - curves.send_static_s + curves.extract_s * columns) / (columns * slope)
    return min(max(share, 0.0), 1.0)


def num_migrating(seconds: Sequence[float], workloads: Sequence[float], send: Callable[[float], float]) -> int:
    """Equation 3, several slow tasks: how many of the slowest migrate; the others are resized.

    `f(x) = (T_x - T_min) - Phi_1(Gamma(x)) - max over the tasks y behind x of Gamma(x) / (e - x) * T_y / L_y` with
    `Gamma(x) = sum of L_k (T_k - T_min) / T_k over the x slowest`: what task x saves, minus the cost of its columns.
    Returns the largest x before the first f(x) <= 0; 0 if nothing pays. `seconds` (T) are slowest first, `workloads` (L)
    in columns, and `send` is Phi_1.
    """
    least, total = seconds[-1], len(seconds)
    slower = sum(t > least for t in seconds)
    moved = 0.0
    for x in range(1, slower + 1):
        moved += workloads[x - 1] * (seconds[x - 1] - least) / seconds[x - 1]
        taken = max(moved / (total - x) * t / load for t, load in zip(seconds[x:], workloads[x:], strict=True))
        if seconds[x - 1] - least - send(moved) - taken <= 0.0:
            return x - 1
    return slower


@dataclass(frozen=True)
class TaskWork:
    """The shares of its columns that a task leaves to others (`migrated`), or to nobody (`resized`)."""

    migrated: float = 0.0
    resized: float = 0.0


def divide_semi(
    seconds: Sequence[float], product_s: Sequence[float], workloads: Sequence[float], curves: PretestCurves
) -> tuple[TaskWork, ...]:
    """Algorithm 2: who migrates and who is resized, from each task's T (`seconds`), M (`product_s`) and L (`workloads`,
    in columns of all its layers), and the pretest's curves."""
    gammas = excess_ratios(seconds, product_s)
    order = sorted(range(len(seconds)), key=lambda i: (-seconds[i], i))
    slower = [i for i in order if gammas[i] > 0.0]
    work = [TaskWork() for _ in seconds]
    if len(slower) == 1:
        (slow,) = slower
        beta = migrated_share(workloads[slow] * gammas[slow], len(seconds), curves)
        work[slow] = TaskWork(gammas[slow] * beta, gammas[slow] * (1.0 - beta))
        return tuple(work)
    x = num_migrating([seconds[i] for i in order], [workloads[i] for i in order], curves.send)
    for place, i in enumerate(slower):
        work[i] = TaskWork(migrated=gammas[i]) if place < x else TaskWork(resized=gammas[i])
    return tuple(work)


def settled_semi(
    seconds: Sequence[float], product_s: Sequence[float], workloads: Sequence[float], curves: PretestCurves
) -> tuple[TaskWork, ...]:
    """Algorithm 2, repeated until it converges, as if it were measured and decided again and again.

    Migrated work makes the others slower (a resized task at its own relative step time), so `T_min` rises and all
    shares with it. The algorithm decides once who migrates and who is resized; the shares follow the seconds that they
    lead to. Arguments as for `divide_semi`, as if nothing were given.
    """
    first = divide_semi(seconds, product_s, workloads, curves)
    lost = [work.migrated + work.resized for work in first]
    beta = [work.migrated / share if share > 0.0 else 0.0 for work, share in zip(first, lost, strict=True)]
    helpers = [task for task, work in enumerate(first) if work.migrated == 0.0]
    if not any(beta) or not helpers:
        return first
    tasks = range(len(seconds))
    for _ in range(_ROUNDS):
        moved = sum(share * part * load for share, part, load in zip(lost, beta, workloads, strict=True)) / len(helpers)
        taken = [moved / workloads[task] if task in helpers else 0.0 for task in tasks]
        now = [seconds[task] + product_s[task] * (taken[task] - lost[task]) for task in tasks]
        target = min(now[task] for task in tasks if lost[task] == 0.0)
        before = list(lost)
        for task in tasks:
            if before[task] > 0.0:
                # damped: what a task gives returns to it as waiting time
                change = (now[task] - target) / product_s[task] / 2
                lost[task] = min(max(before[task] + change, 0.0), MOST + taken[task])
        if max(abs(a - b) for a, b in zip(lost, before, strict=True)) < _SETTLED:
            break
    return tuple(
        TaskWork(share * part, min(share * (1.0 - part), MOST)) for share, part in zip(lost, beta, strict=True)
    )


Shares = tuple[float, ...]  # for each rank the share of its columns that it hands over


class Giving:
    """The shares of a run, for strategies with several shards, in one of the modes `GIVING`."""

    def __init__(self, strategies: Sequence[Strategy], mode: str = "migrate") -> None:
        self.mode = mode
        self._groups = {str(strategy): strategy.groups("tp") for strategy in strategies}
        # by strategy, for each rank: the share of its columns that others compute, and the share that nobody computes
        self.shares: dict[str, Shares] = {str(s): (0.0,) * s.world_size for s in strategies}
        self.resized: dict[str, Shares] = dict(self.shares)
        # from the pretest, by strategy, per tensor-parallel group; `semi` decides nothing without them
        self.curves: dict[str, list[PretestCurves]] = {}
        self.columns: dict[str, list[float]] = {}  # by strategy, for each rank: of all its products
        self._products = {str(s): [0.0] * s.world_size for s in strategies}
        self._token_s = {str(s): [0.0] * s.world_size for s in strategies}
        self._decided: list[Any] | None = None

    def extra(self, strategy: str, left_out: Sequence[float] | None = None) -> Shares:
        """What each rank computes beyond its own columns, as a share of them; negative if less. `left_out`: measured
        shares that each rank left out; by default as decided."""
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
        seconds: Sequence[float],  # per rank, without waiting for others
        product_s: Sequence[float],  # the part in matrix products
        left_out: Sequence[float] | None = None,  # see `extra`
        tokens: Sequence[int] | None = None,  # per rank
    ) -> Shares:
        """Takes the measurements of a phase; returns each rank's seconds relative to those without giving."""
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

    def decide(self, step_times: Sequence[float], slow: frozenset[int]) -> bool:
        """Decides anew if the known step times changed; returns whether a share changed."""
        state = [list(step_times), sorted(slow), sorted(s for s, known in self._products.items() if any(known))]
        if state == self._decided and not (self.mode == "semi" and slow):
            return False
        self._decided, before = state, (dict(self.shares), dict(self.resized))
        for strategy, groups in self._groups.items():
            shares, resized = [0.0] * len(step_times), [0.0] * len(step_times)
            for index, group in enumerate(groups):
                decided = self._of_group(strategy, index, group, step_times, slow)
                for rank, (share, left) in zip(group, decided, strict=True):
                    shares[rank], resized[rank] = share, left
            self.shares[strategy], self.resized[strategy] = tuple(shares), tuple(resized)
        return (self.shares, self.resized) != before

    def _of_group(
        self, strategy: str, index: int, group: Sequence[int], step_times: Sequence[float], slow: frozenset[int]
    ) -> list[tuple[float, float]]:
        """Per rank the share that migrates, and the share that is left out."""
        givers = [place for place, rank in enumerate(group) if rank in slow]
        if self.mode == "semi":
            return self._semi(strategy, index, group, slow)
        times = [step_times[rank] if rank in slow else 1.0 for rank in group]
        products = [t * self._products[strategy][rank] for t, rank in zip(times, group, strict=True)]
        if self.mode == "resize":
            return [(0.0, share) for share in excess_ratios(times, products)]
        return [(share, 0.0) for share in settled_ratios(times, products, givers)]

    def _semi(self, strategy: str, index: int, group: Sequence[int], slow: frozenset[int]) -> list[tuple[float, float]]:
        """Algorithm 2 with the last mini-batch's seconds, for a pack of the pretest's tokens; ranks that are not slow
        count as the fastest of them."""
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
        """Takes all ranks' pretest of a strategy, of `pack_tokens`; curves are per token, like seconds. `rows`: per rank the
        columns of all its products, then static, extract, send and compute seconds and the static part of send."""
        self.columns[strategy] = [row[0] for row in rows]
        curves = []
        for group in self._groups[strategy]:
            mine = [rows[rank][1:] for rank in group]
            # computing and copying take a usual rank's time; a message takes as long as its slowest end
            static, extract, compute = (median_low(row[i] for row in mine) for i in (0, 1, 3))
            send, send_static = (max(row[i] for row in mine) for i in (2, 4))
            curves.append(PretestCurves(*(s / pack_tokens for s in (static, extract, send, compute, send_static))))
        self.curves[strategy] = curves

    def state_dict(self) -> dict[str, Any]:
        """What the next decisions depend on, JSON-ready."""
        shares = {name: list(shares) for name, shares in self.shares.items()}
        resized = {name: list(shares) for name, shares in self.resized.items()}
        curves = {name: [list(vars(curve).values()) for curve in curves] for name, curves in self.curves.items()}
        return {
            "shares": shares, "resized": resized, "products": self._products, "token_s": self._token_s,
            "decided": self._decided, "curves": curves,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state; ignores its other strategies. Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("migrated columns", "they are decided anew"):
            saved = typed(dict(state), _SavedGiving)
            parts = [
                {as_written(name): values for name, values in part.items()}
                for part in (saved.shares, saved.resized, saved.products, saved.token_s)
            ]
            curves = {as_written(name): of_groups for name, of_groups in saved.curves.items()}
            for name, shares in self.shares.items():
                if name not in parts[0]:
                    continue
                lists = [part[name] for part in parts]
                if {len(values) for values in lists} != {len(shares)}:
                    raise ValueError(f"{name} is of another number of ranks")
                self.shares[name], self.resized[name] = tuple(lists[0]), tuple(lists[1])
                self._products[name], self._token_s[name] = lists[2:]
                if name in self.curves and name in curves:
                    self.curves[name] = [PretestCurves(*curve) for curve in curves[name]]
            self._decided = saved.decided and [*saved.decided[:2], sorted(map(as_written, saved.decided[2]))]


_ByRank = dict[str, list[float]]


@dataclass(frozen=True)
class _SavedGiving:
    """The state of `Giving`, by strategy."""

    shares: _ByRank
    resized: _ByRank
    products: _ByRank
    token_s: _ByRank
    decided: tuple[list[float], list[Count], list[str]] | None
    curves: dict[str, list[tuple[float, float, float, float, float]]] = field(default_factory=dict)
