"""Adapters of fused experts whose weights are packed: in a replica, and in PEFT itself.

PEFT's wrapper parametrizes the experts' parameter with W + s B A during a forward: the weights of all experts exist at once. A
replica adds s B A x to the products with single experts instead.

Of a parameter that is already parametrized, as packed ones are, PEFT 0.21 looks for one of its two kinds of proxies only when
a forward ends, so that the next forward fails; and reads the parameter into torch's cache before the adapter is there, so that
the inner of two nested wrappers has no effect. `mend_wrappers` corrects both for the user's model.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_hotspa.parallel.wrapped_model import BASE, base_layer


class ExpertDelta:
    """What PEFT's wrapper around fused experts adds to products with single ones: s B A x, instead of s B A to the weights of
    all."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def pass_through(self) -> None:
        """Leaves the wrapper's base to itself."""
        self._wrapper.forward = partial(_base_forward, self._wrapper)

    def __call__(self, x: Tensor, expert: int) -> Tensor | float:
        """[n, out] for rows [n, in] of one expert."""
        wrapper, out = self._wrapper, 0.0
        for name in wrapper.active_adapters if not wrapper.disable_adapters else ():
            a, b, count = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
            of_expert = a.reshape(count, -1, a.shape[1])[expert], b.reshape(b.shape[0], -1, count)[..., expert]
            out = out + wrapper.scaling[name] * (x @ of_expert[0].mT) @ of_expert[1].mT
        return out


def _base_forward(wrapper: nn.Module, *args: object, **kwargs: object) -> Any:
    return wrapper.get_submodule(BASE)(*args, **kwargs)


def mend_wrappers(wrappers: Iterable[nn.Module]) -> None:
    """Corrects forwards of PEFT's wrappers around parametrized parameters, and removes what earlier ones have left there."""
    _mend_class()
    for wrapper in wrappers:
        base, name = _adapted(wrapper)
        while parametrize.is_parametrized(base, name) and _ends_with_proxy(base.parametrizations[name]):
            del base.parametrizations[name][-1]


def _adapted(wrapper: Any) -> tuple[Any, str]:
    return base_layer(wrapper), wrapper.parameter_name


def _ends_with_proxy(ways: nn.ModuleList) -> bool:
    from peft.tuners.lora import layer

    known = getattr(layer, "_LoraFactorsProxy", None)  # since 0.20
    return len(ways) > 1 and type(ways[-1]) is known


@cache
def _mend_class() -> None:
    from peft.tuners.lora.layer import ParamWrapper

    own_activate, own_remove = ParamWrapper._activate_lora, ParamWrapper._remove_parametrizations

    @contextmanager
    def activate(wrapper: nn.Module, active_adapters: Sequence[str]) -> Iterator[None]:
        with own_activate(wrapper, active_adapters):
            base, name = _adapted(wrapper)
            parametrize._cache.pop((id(base), name), None)
            yield

    def remove(wrapper: nn.Module) -> None:
        base, name = _adapted(wrapper)
        ways = base.parametrizations[name]
        if _ends_with_proxy(ways):
            del ways[-1]
        else:
            own_remove(wrapper)

    ParamWrapper._activate_lora, ParamWrapper._remove_parametrizations = activate, remove
