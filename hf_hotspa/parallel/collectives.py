"""Collectives with gradients, and a clock for the time this rank spends on them.

torch's collectives define no gradients. Here one autograd function (`with_gradient`) serves all that move, copy or add up
tensors: the gradient of such a map is a map of the same kind.

`CLOCK` is this process's clock of the seconds that forward and backward spend with other ranks: in collectives and pipeline
messages. The rest is this rank's own computation. Only that shows which device is slow: ranks that share a layer wait for the
slowest in every collective, so their total seconds are equal. Code that waits uses `with CLOCK.waiting:`. On CPU the clock
reads the wall clock. On CUDA it records two events on the current stream, and reads them after the phase is synchronized,
so measuring never waits. Transfers of switches are not counted.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Context(Protocol):
    """What an autograd function keeps for its backward: tensors, and attributes of any name."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_dirty(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class _Span:
    """A kind of `with` block. Blocks of two kinds nest; threads take turns (autograd has its own on CUDA)."""

    def __init__(self, clock: "WaitClock", sign: float) -> None:
        self._clock, self._sign = clock, sign
        self._begins: list[Any] = []

    def __enter__(self) -> None:
        if self._clock.counts:
            self._begins.append(self._clock.now())

    def __exit__(self, *exc: object) -> None:
        if self._clock.counts:
            self._clock.add(self._sign, self._begins.pop(), self._clock.now())

    def forget(self) -> None:
        """Drops blocks that an error left open."""
        self._begins.clear()


class WaitClock:
    """Seconds inside of `waiting` blocks, less the `computing` blocks within them.

    Attributes:
        counts: Whether it counts: from a restart until it is read.
        waiting: A `with` block around waits for other ranks.
        computing: A `with` block around computation inside of a `waiting` block.
    """

    def __init__(self) -> None:
        self.waiting, self.computing = _Span(self, 1.0), _Span(self, -1.0)
        self.counts, self._seconds, self._on_cuda = False, 0.0, False
        self._spans: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []

    def wait(self, *works: dist.Work) -> None:
        with self.waiting:
            for work in works:
                work.wait()

    def restart(self, device: torch.device) -> None:
        self.counts, self._seconds, self._on_cuda = True, 0.0, device.type == "cuda"
        self.waiting.forget()
        self.computing.forget()
        self._let_go()

    def seconds(self) -> float:
        """Ends the count; returns its seconds. The current stream must be synchronized."""
        self.counts = False
        for sign, begin, end in self._spans:
            self._seconds += sign * begin.elapsed_time(end) / 1e3
        self._let_go()
        return max(self._seconds, 0.0)

    def _let_go(self) -> None:
        self._spare += [event for _, *pair in self._spans for event in pair]
        self._spans = []

    def now(self) -> Any:
        """The current moment: seconds, or an event on the current stream."""
        if not self._on_cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, sign: float, begin: Any, end: Any) -> None:
        if self._on_cuda:
            self._spans.append((sign, begin, end))
        else:
            self._seconds += sign * (end - begin)


CLOCK = WaitClock()  # the clock of this process


# torch before 2.13 has these collectives under their older names only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.of_gradients = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Any, ...]:
        made = ctx.of_gradients(*gradients)
        return None, None, *(made if isinstance(made, tuple) else (made,))


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
    """Applies `forward` to the tensors (result: one, or a tuple); `backward` maps its gradients to theirs in the same way.

    The graph keeps `backward`, and what it references, until it has run.
    """
    return _WithGradient.apply(forward, backward, *tensors)


def start_gather(x: Tensor, most: int, group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """Starts to gather [m, ...] of every rank, m <= `most`; returns the work, and [ranks, most, ...], valid once it is done."""
    own = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    size = dist.get_world_size(group)
    whole = x.new_empty(size * most, *x.shape[1:])
    work = _all_gather(whole, own.contiguous(), group=group, async_op=True)
    return work, whole.view(size, most, *x.shape[1:])


def gather_rows(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gathers [sum of rows, ...]; rank i has `rows[i]`."""
    work, whole = start_gather(x, max(rows), group)
    CLOCK.wait(work)
    return torch.cat([part[:own] for part, own in zip(whole, rows, strict=True)])


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers [n, ...] of P ranks to [P * n, ...]."""
    whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    with CLOCK.waiting:
        _all_gather(whole, x.contiguous(), group=group)
    return whole


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...], this rank's part of the sum of [P * n, ...] over P ranks."""
    mine = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    with CLOCK.waiting:
        _reduce_scatter(mine, x.contiguous(), group=group)
    return mine
