"""The capacity of experts: how many tokens of a pack one may compute, and what becomes of the others.

An expert takes at most `ceil(factor * T * k / E)` of the T tokens of a pack, of which each asks for k of E experts (Lepikhin
et al., 2021, "GShard", section 2.2; Fedus et al., 2022, "Switch Transformers", section 2.2): the first ones, in the order of
the pack. What comes later is not computed by it: its routing weight is 0, its other experts compute it as before, and the
residual connection passes it on.

Promise: what is dropped is a function of the pack alone, so it is the same under every strategy that runs whole packs on one
rank, or on the ranks of tp and ep.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

_signature = cache(inspect.signature)


def arguments_of(experts: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and routing weights, of a call of fused experts."""
    _, hidden, index, weights = _signature(type(experts).forward).bind(experts, *args, **kwargs).args
    return hidden, index, weights


class ExpertCapacity:
    """The rule of a run.

    Args:
        factor: Times the share of tokens that an expert would have if all had as many.

    Attributes:
        num_dropped: Tokens that an expert has not computed since it was set to 0, each time counted; forward.
        is_counting: Whether they are counted now.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.num_dropped, self.is_counting = factor, 0, False

    def kept(self, index: Tensor, num_experts: int) -> Tensor:
        """Which pairs of a token and an expert are computed.

        Args:
            index: int64 [T, k], the experts of each token of a whole pack.

        Returns:
            bool [T, k].
        """
        pairs = index.reshape(-1)
        most = math.ceil(self.factor * len(pairs) / num_experts)
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs, minlength=num_experts)
        place = torch.arange(len(pairs), device=pairs.device) - (counts.cumsum(0) - counts)[pairs[order]]
        kept = torch.empty_like(pairs, dtype=torch.bool)
        kept[order] = place < most
        if self.is_counting:
            self.num_dropped += int((counts - most).clamp_min(0).sum())
        return kept.view_as(index)

    def limit(self, modules: Iterable[nn.Module]) -> None:
        """Makes some modules of experts, all of whose experts are here, keep to it."""
        for module in modules:
            module.forward = partial(self._run, module, module.forward)

    def _run(self, module: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = arguments_of(module, *args, **kwargs)
        return forward(hidden, index, weights * self.kept(index, int(module.num_experts)))
