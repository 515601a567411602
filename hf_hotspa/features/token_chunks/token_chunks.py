"""Exact training of a pack in chunks of tokens (`+ck`): keys and values go forward, their gradients come back.

From earlier tokens, a token needs only the keys and values of each attention, so a sequence can be computed chunk by chunk
(Li et al., 2021, "TeraPipe"). On one stage the chunks of a chain (`packing.cuts`) run in two rounds:

1. all but the last run forward without a graph, and leave their keys and values;
2. from the last to the first, each runs forward with a graph, in which the keys and values of earlier chunks are leaves, and
   at once backward: from its loss, and from its own keys and values with the gradients that later chunks have summed.

So the activations of one chunk exist at a time (`+kg2`: three chunks, and the last three run forward once), and the logits of
one. Only keys, values and their gradient sums, in at least fp32, grow with the sequence. With `+kh` they are in host memory: an
attention fetches what it needs, and no graph holds the copies. A chain of one chunk runs forward and backward once.

In a pipeline each chunk runs forward once, in the order of its tokens, and keeps its graph until it runs backward, in reverse
(`packing.pipeline_order`); each stage keeps the keys and values of its layers.

Layers of linear attention leave a state behind each chunk (`isolation`); its gradient comes from the next chunk alone.
A loss of whole sequences reads what all chunks leave (`_Carry.left_by`), and each adds its part of the gradient.

Promises: each chunk has one backward; the losses of a pack's chunks are one entry of the stage's `losses`.

Keys and values in host memory (`+kh`) are counted, and fetched one attention ahead, in the attentions' order forward or in
reverse: while one computes, the next one's are copied, on CUDA on a separate stream. The device holds at most two pairs. A
wrong guess costs an unused copy.

Shapes: P tokens of the prefix, K key/value heads, D head dim.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError
from hf_hotspa.packing.cuts import cut_for
from hf_hotspa.parallel.attention import ChunkPrefix
from hf_hotspa.parallel.collectives import with_gradient
from hf_hotspa.parallel.fused_attention import TakesGradients
from hf_hotspa.parallel.pipeline import Pack, PackRunner, Stage, loss_of_packs
from hf_hotspa.strategy import Strategy

Pair = tuple[Tensor, Tensor]  # keys and values, [1, K, P, D] each
StateKey = tuple[nn.Module, str]  # a layer of linear attention, and the name of one of its states


@dataclass
class HostBytes:
    """Bytes of keys, values and gradient sums in host memory with `+kh`: now, and at most so far."""

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
    """A copy in progress: its attention, and the event on the stream when it is done."""

    index: int
    pair: Pair
    there: Any = None


class PrefixFetcher:
    """Copies the prefixes of a stage's attentions to its device. Of `num_fetched` requested pairs, `num_ahead` were
    copied, or in progress, when requested."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _Copies | None = None
        self._last: _Copies | None = None
        self.num_fetched = self.num_ahead = 0

    def fetch(self, index: int, count: int, prefix_of: Callable[[int], Pair]) -> Pair:
        """The prefix of attention `index` of the stage's `count` on the device, in the graph. `prefix_of` returns each in
        host memory, where their gradients go."""
        pair, after = prefix_of(index), self._after(index, count)
        # the last one again if a layer is recomputed; in the next chunk an attention has another prefix
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
                copy.record_stream(current)  # it was allocated on the other stream
        keys, values = map(_in_graph, pair, copies.pair)
        return keys, values

    def _after(self, index: int, count: int) -> int | None:
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
    # a part of the tokens is contiguous only within a head, and only contiguous copies overlap with the computation
    for to, of in zip(copy.unbind(1), host.detach().unbind(1), strict=True):
        to.copy_(of, non_blocking=True)
    return copy


def _in_graph(host: Tensor, copy: Tensor) -> Tensor:
    """The copy, with its gradient going to the tensor in host memory."""
    device = host.device
    return with_gradient(lambda _, copy: copy.view_as(copy), lambda grad: (grad.to(device), None), host, copy)


@dataclass
class _CutSequence:
    """What the chunks of one sequence leave for each other."""

    chunks: tuple[int, ...]  # tokens of each chunk but the last
    num_tokens: int = 0  # how many of them are kept on this rank
    host: HostBytes | None = None  # counts host memory; None if the tensors are on the device
    # keys and values by attention module, from the first token on
    kept: dict[nn.Module, Pair] = field(default_factory=dict)
    # their gradients, summed over later chunks, in fp32 or wider
    sums: dict[nn.Module, Pair] = field(default_factory=dict)
    left: dict[object, dict[int, Any]] = field(default_factory=dict)  # what others leave of each chunk, by owner
    # the states of linear attention behind each chunk, by layer, name and chunk
    states: dict[tuple[StateKey, int], Tensor] = field(default_factory=dict)
    # the gradients of the states, from the next chunk
    of_states: dict[tuple[StateKey, int], Tensor] = field(default_factory=dict)
    fetcher: PrefixFetcher | None = None  # copies from host memory to the device

    def keep(self, module: nn.Module, first: int, key: Tensor, value: Tensor) -> None:
        if module not in self.kept:
            self.kept[module] = self._storage(key, key.dtype), self._storage(value, value.dtype)
        for storage, x in zip(self.kept[module], (key, value), strict=True):
            storage[:, :, first : first + x.shape[2]] = x.detach()

    def add(self, module: nn.Module, is_value: bool, leaf: Tensor) -> None:
        """Moves a leaf's gradient, for the tokens from the first on, into the sums."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # else its blocks were added
            self._sums_of(module, gradient.dtype)[is_value][:, :, : gradient.shape[2]] += gradient

    def add_block(self, module: nn.Module, tokens: slice, of_keys: Tensor, of_values: Tensor) -> None:
        """Adds the gradients of a block of tokens, which no leaf gets."""
        for total, gradient in zip(self._sums_of(module, of_keys.dtype), (of_keys, of_values), strict=True):
            total[:, :, tokens.start : tokens.start + gradient.shape[2]] += gradient

    def take_gradient(self, place: tuple[StateKey, int], leaf: Tensor) -> None:
        """Moves the gradient of the state that the next chunk began with from its leaf."""
        assert leaf.grad is not None
        self.of_states[place], leaf.grad = leaf.grad, None

    def fetched(self, module: nn.Module, before: Pair, device: torch.device) -> Pair:
        """The keys and values of the tokens before a chunk, on a device; starts to copy the next attention's."""
        if not fetches(before[0], device):
            return before
        self.fetcher = self.fetcher or PrefixFetcher(device)
        modules, tokens, at = list(self.kept), before[0].shape[2], list(self.kept).index(module)

        def prefix_of(index: int) -> Pair:
            if index == at:
                return before
            keys, values = (x[:, :, :tokens] for x in self.kept[modules[index]])
            return keys, values

        return self.fetcher.fetch(at, len(modules), prefix_of)

    def _sums_of(self, module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if module not in self.sums:
            wide = torch.promote_types(dtype, torch.float32)
            keys, values = (self._storage(x, wide).zero_() for x in self.kept[module])
            self.sums[module] = keys, values
        return self.sums[module]

    def _storage(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        shape = *x.shape[:2], self.num_tokens, x.shape[3]
        if self.host is None:
            return x.new_empty(shape, dtype=dtype)
        # page-locked memory is copied at full speed
        storage = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())
        self.host.count(storage)
        return storage


def fetches(host: Tensor, device: torch.device) -> bool:
    """Whether kept tensors must be copied to compute with them: not on CPU."""
    return host.device != device


class _Carry:
    """The prefix of one chunk's forward, and what that forward leaves.

    Args:
        sequence: The sequence that the chunk's chain cuts.
        before: Tokens of earlier chunks that are kept here.
        own: Tokens of this chunk to keep, if the sequence continues behind it; else 0.
        chunks: The tokens of each earlier chunk, wherever they are kept.
        keeps: Whether this forward stores its keys and values for later chunks; False if an earlier forward did.
    """

    def __init__(
        self, sequence: _CutSequence, before: int, own: int, keeps: bool, chunks: tuple[int, ...] = ()
    ) -> None:
        self.lengths: tuple[int, ...] = (before,)
        self.chunks = chunks
        self.continues = len(chunks) < len(sequence.chunks)
        self.in_host = sequence.host is not None
        self.more_roots: list[Callable[[], list[tuple[Tensor, Tensor]]]] = []
        self._sequence, self._own, self._keeps = sequence, own, keeps
        self._states: dict[StateKey, Tensor] = {}
        self._in_graph: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._seen: set[nn.Module] = set()
        self._is_over = False

    def before(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_over:  # after the end, a layer is recomputed
            if module in self._seen:
                raise ModelError(
                    f"{type(module).__name__} attended twice to the same tokens",
                    why="keys and values of a chunk are kept by the module",
                    fix="leave +ck out of the strategies, and report the model_type",
                )
            self._seen.add(module)
            self._leave(module, key, value)
        before = self.lengths[0]
        if not before:
            return key[:, :, :0], value[:, :, :0]
        # `data`: autograd must not take what later chunks write behind these tokens for a change of the leaves
        leaves = [x.data[:, :, :before] for x in self._sequence.kept[module]]
        for is_value, (leaf, own) in enumerate(zip(leaves, (key, value), strict=True)):
            if own.requires_grad:
                leaf.requires_grad_()
                if not self._is_over:
                    leaf.register_post_accumulate_grad_hook(partial(self._sequence.add, module, bool(is_value)))
        return leaves[0], leaves[1]

    def takes_gradients(self, module: nn.Module) -> TakesGradients:
        return partial(self._sequence.add_block, module)

    def fetched(self, module: nn.Module, before: Pair, device: torch.device) -> Pair:
        return self._sequence.fetched(module, before, device)

    def state(self, key: StateKey, takes_gradient: bool) -> Tensor | None:
        """The previous chunk's state, a leaf whose gradient goes back there; None for the first chunk."""
        place = key, len(self.chunks) - 1
        state = self._sequence.states.get(place)
        if state is None:
            return None
        leaf = state.detach()
        if takes_gradient and torch.is_grad_enabled():
            leaf.requires_grad_()
            if not self._is_over:
                leaf.register_post_accumulate_grad_hook(partial(self._sequence.take_gradient, place))
        return leaf

    def leave_state(self, key: StateKey, state: Tensor) -> None:
        if self._is_over:  # a recomputed layer
            return
        self._sequence.states[key, len(self.chunks)] = state.detach()
        if state.requires_grad:
            self._states[key] = state

    def left_by(self, owner: object) -> dict[int, Any]:
        return self._sequence.left.setdefault(owner, {})

    def end(self) -> None:
        self._is_over = True

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """This chunk's keys, values and states in the graph, with their gradients summed over later chunks."""
        place, roots = slice(self.lengths[0], self.lengths[0] + self._own), []
        for module, pair in self._in_graph.items():
            if module in self._sequence.sums:
                for own, total in zip(pair, self._sequence.sums[module], strict=True):
                    if own.requires_grad:
                        roots.append((own, total[:, :, place].to(own)))
        for key, state in self._states.items():
            gradient = self._sequence.of_states.pop((key, len(self.chunks)), None)
            if gradient is not None:
                roots.append((state, gradient))
        return roots

    def _leave(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        if not self._own:
            return
        key, value = key[:, :, : self._own], value[:, :, : self._own]  # without the padding
        if self._keeps:
            self._sequence.keep(module, self.lengths[0], key, value)
        if key.requires_grad or value.requires_grad:
            self._in_graph[module] = key, value


@dataclass(eq=False)
class Chunk(Pack):
    """A chunk of a pack on this rank's stage."""

    sequence: _CutSequence | None = None  # what chunks of its chain leave for each other; None for a chain of one
    index: int = 0  # its place in the chain
    carry: _Carry | None = None  # what its last forward left

    def forward(
        self,
        stage: Stage,
        hidden: Tensor | None,
        scale: float,
        with_loss: bool = True,
        prefix: ChunkPrefix | None = None,
        *,
        keeps: bool = True,  # whether to store keys and values for later chunks: not if an earlier forward did
    ) -> Tensor:
        """As for `Pack`, and"""
        sequence, at = self.sequence, self.index
        if sequence is None:
            return super().forward(stage, hidden, scale, with_loss)
        kept = [stage.tokens_kept(tokens) for tokens in sequence.chunks]
        sequence.num_tokens = sum(kept)
        own = kept[at] if at < len(kept) else 0
        carry = _Carry(sequence, sum(kept[:at]), own, keeps, sequence.chunks[:at])
        out = super().forward(stage, hidden, scale, with_loss, carry)
        carry.end()
        self.carry = carry
        return out

    def backward(
        self, stage: Stage, out: Tensor, gradient: Tensor | None, more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Runs backward from the last forward's result, keys and values, after later chunks' backwards."""
        if self.carry is not None:
            more = [*self.carry.roots(), *(root for roots in self.carry.more_roots for root in roots())]
        self.forget()
        super().backward(stage, out, gradient, more)

    def forget(self) -> None:
        self.carry = self.sequence = None


class ChunkRunner(PackRunner):
    """Runs a replica's packs in chunks. `stage`: one that has all layers, or the last of a pipeline on this rank.
    `strategy`: gives the chunk size in tokens. `pair_cost`: see `cut_into_chains`; for pipelines."""

    def __init__(self, stage: Stage, strategy: Strategy, pair_cost: float) -> None:
        super().__init__(stage)
        self._graphs = strategy.kg
        self._cut = partial(cut_for, strategy, pair_cost=pair_cost)
        self._host = HostBytes() if strategy.kh else None

    @property
    def host_bytes(self) -> int:
        return self._host.most if self._host is not None else 0

    def num_backwards(self, micro_batches: Sequence[MicroBatch]) -> int:
        return sum(len(chain) for m in micro_batches for chain in self._cut(m.lengths))

    def chains(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Sequence[Chunk]]:
        chains = list[list[Chunk]]()
        for pack, micro_batch in enumerate(micro_batches):
            for chain in self._cut(micro_batch.lengths):
                if len(chain) == 1:
                    chains.append([Chunk(micro_batch.part(*chain[0]), pack)])
                else:
                    sequence = _CutSequence(tuple(stop - first for first, stop in chain[:-1]), host=self._host)
                    chains.append([Chunk(micro_batch.part(*c), pack, sequence, i) for i, c in enumerate(chain)])
        return chains

    def run(self, micro_batches: Sequence[MicroBatch], scale: float, *of_pipelines: Any) -> Tensor:
        stage, ran = self._stage, list[Chunk]()
        total = torch.zeros((), dtype=torch.float64, device=stage.device)
        for chain in self.chains(micro_batches):
            num_again = max(len(chain) - 1 - self._graphs, 0)
            again, once, outs = chain[:num_again], chain[num_again:], list[Tensor]()
            with torch.no_grad():
                for chunk in again:
                    chunk.forward(stage, None, scale, with_loss=False)
            for chunk in once:
                outs.append(chunk.forward(stage, None, scale))
                total += outs[-1].detach()
            for chunk in reversed(once):
                chunk.backward(stage, outs.pop(), None)
            for chunk in reversed(again):
                outs.append(chunk.forward(stage, None, scale, keeps=False))
                total += outs[-1].detach()
                chunk.backward(stage, outs.pop(), None)
            ran += reversed(chain)
        loss_of_packs(ran, stage.losses)
        return total
