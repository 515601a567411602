"""Modules of the user's model that are trained beside the strategies: the encoders of images, and their projections.

No strategy holds their weights. Every rank runs them on its own rows, in the model object, with plain autograd. Their shares
are in the master store (unit `BESIDE`), like all others; so optimizers, clipping, checkpoints and files of weights need not
know of them. Two acts join the two:

* `load` writes the current weights into the modules, before a step runs them;
* `reduce` adds the gradients that the modules then have, over all ranks, to the shares.
"""

import itertools
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_hotspa.engine.faults import refuse_non_finite
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.layout.vector import BESIDE, ParameterSpec
from hf_hotspa.parallel.agreement import Agreement, any_flag, packed_flags


class Beside:
    """The trained parameters of a model that no strategy holds.

    Attributes:
        exist: Whether there are any.
    """

    def __init__(
        self, model: nn.Module, master: MasterStore, group: dist.ProcessGroup | None, agreement: Agreement
    ) -> None:
        self._model, self._master, self._group, self._agreement = weakref.ref(model), master, group, agreement
        self._segments = [segment for segment in master.vector.segments if segment.unit == BESIDE]
        self._specs = [spec for segment in self._segments for spec in master.vector.specs_of(segment)]
        self._names = [spec.name for spec in self._specs]
        self.exist = bool(self._specs)
        self._version: int | None = None  # of the weights that the modules have
        self._trains = False  # whether this step trains the modules

    def _parameters(self) -> Iterator[tuple[ParameterSpec, nn.Parameter]]:
        model = self._model()
        assert model is not None
        return ((spec, model.get_parameter(spec.name)) for spec in self._specs)

    @torch.no_grad()
    def load(self, version: int, trains: bool) -> None:
        """Gives the modules the current weights: to be called before they run, in each step that runs them on any rank.
        Collective; nothing moves if they have the weights of this version. `version`: grows with each change of the weights
        (`Steps.version`). `trains`: whether gradients will come; `reduce` then expects them.

        A Trainer guards the parameters: run the modules inside `switched.model_object.structure_only()`.
        """
        self._trains |= trains and self.exist
        if not self.exist or version == self._version:
            return
        with torch._C.DisableTorchFunctionSubclass():
            targets = {name: p for spec, p in self._parameters() for name in (spec.name, *spec.tied_names)}
            for name, whole in self._master.gather(self._group, units=(BESIDE,)):
                targets[name].copy_(whole)
        self._version = version

    @torch.no_grad()
    def reduce(self) -> bool:
        """Adds the gradients that the modules have, summed over all ranks in their order and in the master store's precision, to
        the shares, and drops them there. A rank without one adds zeros; a parameter without one on any rank gets none.
        Collective. Returns whether this step trains the modules."""
        if not self._trains:
            return False
        self._trains = False
        with torch._C.DisableTorchFunctionSubclass():
            gradients = {spec.name: p.grad for spec, p in self._parameters()}
            for _, parameter in self._parameters():
                parameter.grad = None
        flags = self._agreement.gather(packed_flags(gradient is not None for gradient in gradients.values()))
        reached = any_flag(flags, len(self._specs))
        for segment in self._segments:
            dtype, device = getattr(torch, segment.master_dtype), self._master.compute_device
            flat = torch.zeros(segment.numel, dtype=dtype, device=device)
            for spec in self._master.vector.specs_of(segment):
                if (gradient := gradients.pop(spec.name)) is not None:
                    flat[spec.offset - segment.start : spec.stop - segment.start] = gradient.reshape(-1)
            summed, own = self._sum(flat, segment.index), self._master.gradients[segment.index]
            if own is not None:
                own += summed.to(own.device)
        self._master.reached |= set(itertools.compress(self._names, reached))
        self._master.bind_gradients(self._master.reached)
        return True

    def _sum(self, flat: Tensor, segment: int) -> Tensor:
        """This rank's share of the sum of all ranks' tensors for a segment."""
        if self._group is None:
            return flat
        sizes = [of_rank[segment] for of_rank in self._master.layout.sizes]
        own = sizes[self._master.rank]
        parts = flat.new_empty(len(sizes) * own)
        dist.all_to_all_single(parts, flat, [own] * len(sizes), sizes, group=self._group)
        summed, *others = parts.view(len(sizes), own)
        for part in others:
            summed += part
        return summed

    def check_finite(self, where: str) -> None:
        """Raises `NonFiniteError` on every rank if a gradient is not finite, naming the parameter. Collective."""

        def check() -> None:
            refuse_non_finite([name for name in self._master.non_finite_parameters() if name in self._names], where)

        self._agreement.run(where, check)
