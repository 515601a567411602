"""How much work a slow device should lose, and how: equations 1 to 3 and algorithm 2 of "Accelerating Heterogeneous
Tensor Parallelism via Flexible Workload Control" (Wang et al., arXiv 2401.11469).

Tasks are the ranks of a tensor-parallel group. Seconds are those of one iteration without waiting for other ranks.
Where the paper contradicts itself its text is followed: its line 8 of algorithm 2 prints `if T_i = T_min` where the
straggler is meant, and its lines 10-11 print `L * beta` for `L * gamma * beta`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

Curve = Callable[[float], float]
"""Seconds of a number of columns."""

MOST = 0.95
"""The most of a device's columns that are taken from it: a product needs some."""

_ROUNDS, _SETTLED = 200, 1e-9


def excess_ratio(seconds: float, product_s: float, reference_s: float) -> float:
    """Equation 1: the share of its matrix products that a task should lose to be as fast as the reference.

    Args:
        seconds: Of the task.
        product_s: Of all its matrix products.
        reference_s: The mean over tasks in the paper's section III, the least in its section IV.

    Returns:
        gamma, 0 for a task that is no slower than the reference; at most `MOST`.
    """
    if seconds <= reference_s or product_s <= 0.0:
        return 0.0
    return min((seconds - reference_s) / product_s, MOST)


def excess_ratios(seconds: Sequence[float], product_s: Sequence[float]) -> tuple[float, ...]:
    """Equation 1 for every task; the reference is the fastest."""
    return tuple(excess_ratio(t, m, min(seconds)) for t, m in zip(seconds, product_s, strict=True))


def settled_ratios(seconds: Sequence[float], product_s: Sequence[float], givers: Collection[int]) -> tuple[float, ...]:
    """Equation 1, repeated until it settles: the shares that slow tasks give to the others so that all are done at once.

    The paper measures, gives and measures again; with the mean as reference a first answer leaves a task of four times
    the seconds at 1.75 times, and later ones bring it down. Here the seconds that an answer would lead to are reckoned.

    Args:
        seconds: Of each task, as if nothing were given.
        product_s: Of its matrix products, the same way.
        givers: The slow tasks; the others divide what they give evenly.
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
    """The share that products would have of a task's seconds, if it neither gave nor took any.

    Args:
        product_share: As it was measured, M / T.
        extra: What the task computed beyond its own columns, as a share of them; below 0 for one that gives.
    """
    return product_share / (1.0 + extra - extra * product_share)


@dataclass(frozen=True)
class PretestCurves:
    """What a pretest found; linear, seconds and columns.

    Args:
        static_s: Omega_1, the allocation of the reduced matrices.
        extract_s: Omega_2 of one column: taking it out and putting it back.
        send_s: Phi_1 of one column: broadcast and reduce.
        compute_s: Phi_2 of one column.
        send_static_s: The part of Phi_1 that does not depend on the columns: gradients and outputs travel whole.
    """

    static_s: float
    extract_s: float
    send_s: float
    compute_s: float
    send_static_s: float = 0.0

    def __post_init__(self) -> None:
        assert min(vars(self).values()) >= 0.0, self

    def send(self, columns: float) -> float:
        """Phi_1 of some columns; nothing costs nothing."""
        return self.send_static_s + self.send_s * columns if columns > 0.0 else 0.0


def fitted_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """`(a, b)` of the line `a + b x` through samples `(x, y)` by least squares, neither of them negative: a cost does not
    fall with the columns, and what a slope below 0 would say is noise.

    Args:
        samples: Of at least two different x.
    """
    x, y = zip(*samples, strict=True)
    slope, start = linear_regression(x, y)
    if slope < 0.0:
        return fmean(y), 0.0
    return (start, slope) if start >= 0.0 else (0.0, linear_regression(x, y, proportional=True).slope)


def migrated_share(columns: float, num_tasks: int, curves: PretestCurves) -> float:
    """Equation 2, one slow task: the share beta of the columns it loses that migrate; the rest is resized away.

    Both sides cost the same then: `Omega_1 + Omega_2((1 - beta) n) = Phi_1(beta n) + Phi_2(beta n / (e - 1))`. Where sending
    anything costs more than resizing everything, nothing migrates.

    Args:
        columns: n = L * gamma.
        num_tasks: e.
    """
    slope = curves.extract_s + curves.send_s + curves.compute_s / (num_tasks - 1)
    if columns <= 0.0 or slope <= 0.0:
        return 1.0
    share = (curves.static_s - curves.send_static_s + curves.extract_s * columns) / (columns * slope)
    return min(max(share, 0.0), 1.0)


def num_migrating(seconds: Sequence[float], workloads: Sequence[float], send: Curve) -> int:
    """Equation 3, several slow tasks: how many of the slowest migrate; the others are resized.

    `f(x) = (T_x - T_min) - Phi_1(Gamma(x)) - max over the tasks y behind x of Gamma(x) / (e - x) * T_y / L_y` with
    `Gamma(x) = sum of L_k (T_k - T_min) / T_k over the x slowest`: what the x-th saves, less what its columns cost.

    Args:
        seconds: Of the tasks, the slowest first.
        workloads: L of each, in columns.
        send: Phi_1.

    Returns:
        The largest x up to the first f(x) <= 0; 0 when nothing pays.
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
    """What one task does differently.

    Args:
        migrated: Share of its columns that other tasks compute.
        resized: Share of its columns that nobody computes.
    """

    migrated: float = 0.0
    resized: float = 0.0


def divide_semi(
    seconds: Sequence[float], product_s: Sequence[float], workloads: Sequence[float], curves: PretestCurves
) -> tuple[TaskWork, ...]:
    """Algorithm 2: who migrates and who is resized.

    Args:
        seconds: T of each task.
        product_s: M of each.
        workloads: L of each, in columns of all its layers.
        curves: Of the pretest.
    """
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
    """Algorithm 2, repeated until it settles: the division that measuring and deciding again and again leads to.

    What migrates makes the others slower, a resized one at its own pace, so `T_min` rises and all shares with it. Who migrates
    and who is resized stays as the algorithm says; the shares follow the seconds that they would lead to.

    Args:
        seconds: T of each task, as if nothing were given.
        product_s: M of each, the same way.
        workloads: L of each, in columns of all its layers.
        curves: Of the pretest.
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
                # damped: what a task gives comes back to it in what it waits for
                change = (now[task] - target) / product_s[task] / 2
                lost[task] = min(max(before[task] + change, 0.0), MOST + taken[task])
        if max(abs(a - b) for a, b in zip(lost, before, strict=True)) < _SETTLED:
            break
    return tuple(
        TaskWork(share * part, min(share * (1.0 - part), MOST)) for share, part in zip(lost, beta, strict=True)
    )
