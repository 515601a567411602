"""Keys and values that wait in host memory (`+kh`): counted by their owner, and fetched one attention ahead.

The attentions of a stage come one after the other, forward in their order and backward against it. So while one computes,
the keys and values of the next are copied already, on CUDA on a stream of their own; those of at most two are on the device.
A wrong guess costs a copy that nobody uses, and nothing else.

Shapes: P tokens of the prefix, K key/value heads, D head dim.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.parallel.collectives import with_gradient

Pair = tuple[Tensor, Tensor]
"""Keys and values, [1, K, P, D] each."""


@dataclass
class HostBytes:
    """What keys, values and sums of their gradients take in host memory with `+kh`, in bytes.

    Args:
        now: At the moment.
        most: At most so far.
    """

    now: int = 0
    most: int = 0

    def count(self, storage: Tensor) -> None:
        """Counts a tensor as long as it lives."""
        self.now += storage.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage.nbytes)

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


@dataclass
class _Copies:
    """What is being copied: of which attention, and the moment on the stream when it is there."""

    index: int
    pair: Pair
    there: Any = None


class PrefixFetcher:
    """Brings the prefixes of the attentions of a stage to its device.

    Attributes:
        num_fetched: Pairs that were asked for.
        num_ahead: Of them, those that were copied, or on their way, by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _Copies | None = None
        self._last: _Copies | None = None
        self.num_fetched = self.num_ahead = 0

    def fetch(self, index: int, count: int, prefix_of: Callable[[int], Pair]) -> Pair:
        """The prefix of an attention on the device, in the graph; the gradients of these go back to the host.

        Args:
            index: Its place among the attentions of the stage.
            count: How many there are.
            prefix_of: Gives the prefix of each, in host memory.
        """
        pair, after = prefix_of(index), self._after(index, count)
        # the last one again, where a layer is computed again; a chunk later the same attention has another prefix
        known = (copies for copies in (self._ahead, self._last) if copies is not None and copies.index == index)
        ready = next((copies for copies in known if copies.pair[0].shape == pair[0].shape), None)
        self.num_fetched += 1
        self.num_ahead += ready is not None
        copies = self._last = ready or self._copy(index, pair)
        if after is None:
            self._ahead = None
        elif self._ahead is None or self._ahead.index != after:
            self._ahead = self._copy(after, prefix_of(after))
        if copies.there is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copies.there)
            for copy in copies.pair:
                copy.record_stream(current)  # was allocated on the other stream
        keys, values = map(_in_graph, pair, copies.pair)
        return keys, values

    def _after(self, index: int, count: int) -> int | None:
        """The attention that comes next, as far as can be told."""
        first, last = not index, index == count - 1
        before = self._last.index if self._last is not None else -1
        if not torch.is_grad_enabled():
            return None if last else index + 1
        if last or (before >= index and not first):
            return None if first else index - 1
        return None if first and before == 1 else index + 1

    def _copy(self, index: int, pair: Pair) -> _Copies:
        if self._stream is None:
            return _Copies(index, (pair[0].detach().clone(), pair[1].detach().clone()))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            copies = _to_device(pair[0], self._device), _to_device(pair[1], self._device)
            return _Copies(index, copies, self._stream.record_event())


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty(host.shape, dtype=host.dtype, device=device)
    # a part of the tokens is contiguous in each head alone, and only what is contiguous is copied beside the computation
    for to, of in zip(copy.unbind(1), host.detach().unbind(1), strict=True):
        to.copy_(of, non_blocking=True)
    return copy


def _in_graph(host: Tensor, copy: Tensor) -> Tensor:
    """A copy whose gradient goes to the tensor in host memory."""
    device = host.device
    return with_gradient(lambda _, copy: copy.view_as(copy), lambda grad: (grad.to(device), None), host, copy)
