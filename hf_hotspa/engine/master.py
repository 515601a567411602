"""The master store: each element of the parameter vector on exactly one rank, with its gradient.

Trained weights are in fp32; frozen ones have no gradient, and the dtype of the given model. If all strategies of a run
have all of a frozen segment on every rank, its memory is in the store, the rank's share is a part of it, and strategies
compute with it: it exists once.

The only authority on the weights: strategies load from it, gradients return to it, and only the optimizer step changes
it. Optimizers see one 1-D view per parameter under its Hugging Face name. Parameter groups and schedulers work as
usual, but only elementwise optimizers are exact on such shards.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.layout.placement import Interval, Layout, master_layout
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector
from hf_hotspa.model.replica import from_storage, to_storage
from hf_hotspa.strategy import Strategy


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    bare: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return bare


class MasterShare(NamedTuple):
    """A rank's part of a parameter: elements `[start, stop)` of its storage, or none, at `low` in the segment buffer."""

    spec: ParameterSpec
    start: int
    stop: int
    segment: int
    low: int


def _share(spec: ParameterSpec, segment: int, owned: Mapping[int, Interval]) -> MasterShare:
    interval = owned.get(segment)
    if interval is None or interval.stop <= spec.offset or spec.stop <= interval.start:
        return MasterShare(spec, 0, 0, segment, 0)
    start, stop = max(interval.start - spec.offset, 0), min(interval.stop - spec.offset, spec.numel)
    return MasterShare(spec, start, stop, segment, spec.offset + start - interval.start)


def _whole(
    own: Tensor | None,
    sizes: Sequence[int],
    dtype: torch.dtype,
    store: "MasterStore",
    group: dist.ProcessGroup | None,
    to: int | None,
) -> Tensor | None:
    """A complete segment, on one rank or on all, else None. Each share goes directly to its place. Collective."""
    rank, device = store.rank, store.compute_device
    if group is None:
        assert own is not None
        return own.to(device, dtype, copy=True)
    # to one rank by batches: on NCCL `dist.send` would make another communicator for each pair of ranks
    transport = ProcessGroupTransport(group, rank)
    if to is not None and rank != to:
        if own is not None:
            transport.send(own.to(device, dtype), to, 0)
            transport.start().wait()
        return None
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    parts = flat.split(list(sizes))
    if own is not None:
        parts[rank].copy_(own)
    for source, part in enumerate(parts):
        if not len(part):
            continue
        if to is None:
            dist.broadcast(part, source, group=group)
        elif source != rank:
            transport.recv(part, source, 0)
    transport.start().wait()
    return flat


def _parts(
    flat: Tensor | None, start: int, specs: Sequence[ParameterSpec], dtype_of: Callable[[ParameterSpec], torch.dtype]
) -> Iterator[tuple[ParameterSpec, Tensor]]:
    for spec in specs if flat is not None else ():
        assert flat is not None
        own = flat[spec.offset - start : spec.stop - start]
        whole = from_storage(own, spec.shape, spec.shard_dim).to(dtype_of(spec))
        # a caller that keeps the last tensor meanwhile must not keep all of this segment
        yield spec, whole.clone() if spec is specs[-1] else whole


class _OfTheLoss:
    """The hooks of a parameter that the loss reads itself. A term that is 0.0 times it, as scripts for DDP add, changes
    nothing: its gradient of zeros is not accumulated."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self._name, self._parameter = name, weakref.ref(parameter)
        self._kept: Tensor | None = None
        parameter.register_hook(self._before)
        parameter.register_post_accumulate_grad_hook(self._after)

    def _before(self, gradient: Tensor) -> None:
        if gradient.any():
            raise UnsupportedError(
                f"the loss is a function of the weight {self._name!r} itself, beside the logits",
                why="a process holds only a share of the weights, and their gradients come from the logits",
                fix="leave the term out: weight_decay replaces an L2 norm; or train with the stock Trainer",
            )
        parameter = self._parameter()
        assert parameter is not None
        self._kept, parameter.grad = parameter.grad, None

    def _after(self, parameter: Tensor) -> None:
        parameter.grad, self._kept = self._kept, None


class MasterStore:
    """This rank's share of the weights and gradients."""

    def __init__(
        self,
        vector: ParameterVector,
        rank: int,
        world_size: int,
        device: torch.device,
        # where this rank computes and its process groups are; `device` by default. A share in host memory beside an
        # accelerator is pinned.
        compute_device: torch.device | None = None,
        by_stage: Strategy | None = None,  # see `master_layout`
        trained: bool = True,  # whether there will be gradients; otherwise strategies only load from it
        in_place: Collection[int] = (),  # the segments of which each rank keeps all, see `PlanPool.in_place`
    ) -> None:
        self.vector, self.rank, self.world_size, self.device = vector, rank, world_size, device
        self.by_stage = by_stage
        self.compute_device = compute_device or device
        pinned = device.type == "cpu" and self.compute_device.type == "cuda"
        self.layout: Layout = master_layout(vector, world_size, by_stage)
        self.frozen_version = 0  # counts changes of frozen weights, so that strategies know when their copies are old
        self._frozen_in: tuple[weakref.ref[nn.Module], int] | None = None  # a model that has them, and the version
        self.in_place: dict[int, Tensor] = {}  # all of these segments, 1-D
        self.completed = -1  # the `frozen_version` for which the other ranks' shares of them are here; -1: never
        # by segment, 1-D in the segment's master dtype; None if this rank owns nothing of it
        self.weights: list[Tensor | None] = []
        self.gradients: list[Tensor | None] = []  # likewise, for trained segments
        owned = {interval.segment: interval for interval in self.layout.holdings[rank]}
        for segment in vector.segments:
            size, dtype = self.layout.sizes[rank][segment.index], getattr(torch, segment.master_dtype)
            memory = {"dtype": dtype, "device": device, "pin_memory": pinned}
            if segment.index in in_place:
                whole = self.in_place[segment.index] = torch.empty(segment.numel, **memory)
                self.weights.append(whole[owned[segment.index].start - segment.start :][:size] if size else None)
            else:
                self.weights.append(torch.empty(size, **memory) if size else None)
            has_gradient = size and segment.trainable and trained
            self.gradients.append(torch.zeros(size, **memory) if has_gradient else None)
        # 1-D views of `weights` by Hugging Face name, `requires_grad` as in the model. Their `.grad` is a view of
        # `gradients` after `bind_gradients`. Size 0 without elements on this rank.
        self.parameters: dict[str, nn.Parameter] = {}
        self._views: dict[str, Tensor] = {}
        self._bound: Collection[str] = ()
        self.reached = frozenset[str]()  # the parameters with a gradient on any rank since gradients were zeroed
        # this rank's part of each parameter, by Hugging Face name
        self.shares = {spec.name: _share(spec, vector.segment_of(spec).index, owned) for spec in vector.specs}
        for name, (spec, start, stop, index, low) in self.shares.items():
            here = slice(low, low + stop - start)
            buffer, grad = self.weights[index], self.gradients[index]
            dtype = getattr(torch, spec.master_dtype)
            view = buffer[here] if buffer is not None else torch.empty(0, dtype=dtype, device=device)
            parameter = self.parameters[name] = nn.Parameter(view, requires_grad=spec.trainable and trained)
            if parameter.requires_grad:
                self._views[name] = grad[here] if grad is not None else torch.empty_like(view)
                _OfTheLoss(name, parameter)
        self.trained = tuple(self._views)  # names of the parameters with gradients, the same on all ranks

    def empty_buffers(self) -> list[Tensor | None]:
        """Zeros laid out as this rank's trained weights: by segment, None if it owns nothing or nothing is trained."""
        pairs = zip(self.vector.segments, self.weights, strict=True)
        return [torch.zeros_like(own) if own is not None and segment.trainable else None for segment, own in pairs]

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's share from full parameters by name, on any device; others keep their values."""
        self.frozen_version += 1
        for name, (spec, start, stop, *_) in self.shares.items():
            if stop > start and name in tensors:
                self.parameters[name].copy_(to_storage(tensors[name].reshape(spec.shape), spec.storage_dim)[start:stop])

    @torch.no_grad()
    def gather(
        self,
        group: dist.ProcessGroup | None,  # all ranks; None with one rank
        frozen: bool = True,
        before: Callable[[], None] = lambda: None,  # called before each segment
        # what to gather instead, with the weights' layout and dtypes: the gradients, `empty_buffers`
        buffers: Sequence[Tensor | None] | None = None,
        units: Collection[int] | None = None,  # the only ones; all by default
    ) -> Iterator[tuple[str, Tensor]]:
        """Every complete parameter, on every rank, in master precision; one segment at a time is in memory. Collective.
        Yields the Hugging Face name (each tied name once) and a tensor of that shape, valid until the next one."""
        if buffers is None:
            buffers = self.weights
        for segment in self.vector.segments:
            if (not segment.trainable and not frozen) or (units is not None and segment.unit not in units):
                continue
            sizes = [self.layout.sizes[rank][segment.index] for rank in range(self.world_size)]
            dtype = getattr(torch, segment.master_dtype)
            own = buffers[segment.index]
            before()
            if group is None:
                assert own is not None
                flat = own
            else:
                # gloo requires equal sizes
                padded = torch.zeros(max(sizes), dtype=dtype, device=self.compute_device)
                if own is not None:
                    padded[: own.numel()] = own
                parts = [torch.empty_like(padded) for _ in sizes]
                dist.all_gather(parts, padded, group=group)
                flat = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
            for spec in self.vector.specs_of(segment):
                own_flat = flat[spec.offset - segment.start : spec.stop - segment.start]
                whole = from_storage(own_flat, spec.shape, spec.storage_dim)
                for name in (spec.name, *spec.tied_names):
                    yield name, whole

    @torch.no_grad()
    def stream(
        self,
        group: dist.ProcessGroup | None,  # all ranks; None with one rank
        dtype_of: Callable[[ParameterSpec], torch.dtype],
        to: int | None = None,  # the only rank that receives them; all by default
        before: Callable[[], None] = lambda: None,  # called before each segment
    ) -> Iterator[tuple[ParameterSpec, Tensor]]:
        """Every complete parameter, in the requested dtype: shares are cast before they travel. Collective.

        A rank holds at most one segment beyond its share, and if it casts its part of that, a second copy of the part.
        Yields the spec, and a tensor of the Hugging Face shape, which stays valid; nothing on other ranks than `to`."""
        for segment in self.vector.segments:
            specs = self.vector.specs_of(segment)
            wanted = {dtype_of(spec) for spec in specs}
            dtype = wanted.pop() if len(wanted) == 1 else getattr(torch, segment.master_dtype)
            own = self.weights[segment.index]
            before()
            sizes = [of_rank[segment.index] for of_rank in self.layout.sizes]
            yield from _parts(_whole(own, sizes, dtype, self, group, to), segment.start, specs, dtype_of)

    @property
    def is_complete(self) -> bool:
        """Whether this rank has all of its segments in place, if there are any; the same on all ranks."""
        return self.world_size == 1 or self.completed == self.frozen_version

    def note_frozen_in(self, model: nn.Module) -> None:
        """Notes that a model has the frozen weights of this store."""
        self._frozen_in = weakref.ref(model), self.frozen_version

    def is_frozen_in(self, model: nn.Module) -> bool:
        """Whether it was the last model noted, and they have not changed since."""
        return self._frozen_in == (weakref.ref(model), self.frozen_version)

    def zero_gradients(self) -> None:
        """Begins a mini-batch."""
        self.reached = frozenset()
        for gradient in self.gradients:
            if gradient is not None:
                gradient.zero_()

    def bind_gradients(self, names: Collection[str] | None = None) -> None:
        """Sets `.grad` on these parameters, or on all (an optimizer's `zero_grad` may have dropped it). Removes it from
        others: an optimizer then skips them, also their decay."""
        self._bound = self.trained if names is None else names
        for name, gradient in self._views.items():
            self.parameters[name].grad = gradient if name in self._bound else None

    def are_cleared(self, since: int) -> bool:
        """Whether gradients were zeroed, or one was removed, since `gradient_version` had this value."""
        for name in self._bound:
            if self.parameters[name].grad is None:
                return True
        return self.gradient_version != since and not any(bool(g.any()) for g in self.gradients if g is not None)

    @property
    def gradient_version(self) -> int:
        """Grows with every change of a gradient."""
        version = 0
        for gradient in self.gradients:
            if gradient is not None:
                version += gradient._version
        return version

    def drop_gradients_of(self, names: Collection[str]) -> None:
        """Zeros and removes the gradients of some parameters."""
        for name in names:
            self._views[name].zero_()
        self.bind_gradients(set(self._bound) - set(names))

    def squared_norm(self) -> float:
        """Sum of squares of this rank's gradients, in fp64. Every element has one owner: rank sums add up exactly."""
        norms = list[Tensor]()
        for gradient in self.gradients:
            if gradient is not None:
                norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients, for clipping."""
        for gradient in self.gradients:
            if gradient is not None:
                gradient.mul_(factor)

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters with a non-finite gradient on this rank."""
        return [name for name, gradient in self._views.items() if not torch.isfinite(gradient).all()]
