"""Frozen experts in 4 bits: what bitsandbytes keeps of the fused parameters of a mixture, and products with single experts.

transformers holds the experts of a layer as one parameter [experts, rows, columns], which `load_in_4bit` leaves as it is.
`quantize_experts` puts them into 4 bits with bitsandbytes' `replace_parameter_4bit`: a parametrization of torch, whose reading
dequantizes all experts of a layer. A replica has the same parametrization on the meta device, and this rank's codes and scales;
its experts compute here (`ExpertProducts`), as transformers' own functions of fused experts do, one expert after the other: a
weight is dequantized for a product forward, and again for the one backward.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations
from transformers import BitsAndBytesConfig, PreTrainedModel

from hf_hotspa.errors import ModelError
from hf_hotspa.features.four_bit.four_bit_weight import NARROW, SCALES, FourBitWeight
from hf_hotspa.features.four_bit.kinds import BLOCK, WEIGHT_BYTES, WITH_EXPERTS
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.model.tensor_plan import arguments_of, is_fused
from hf_hotspa.parallel.wrapped_model import is_wrapped, plain_name

_INSIDE = ".parametrizations."


@dataclass(frozen=True)
class FourBitExperts(FourBitWeight):
    """A parameter of fused experts in 4 bits as plain data: a `model.packed_layer.PackedLayer`. Its module is torch's
    `ParametrizationList`. The shape is [experts, rows, columns]; rows are of complete blocks."""

    leaf: ClassVar[str] = "original"
    skip: ClassVar[str] = "leave it out of quantize_experts"

    @property
    def kind(self) -> str:
        return f"{self.quant_type}{WITH_EXPERTS}"

    def specs(self, spec: ParameterSpec) -> tuple[ParameterSpec, ParameterSpec]:
        return super().specs(replace(spec, experts=self.shape[0]))

    @staticmethod
    def state_of(module: nn.Module, name: str) -> Any:
        return getattr(module, "0").quant_state

    def plain_weight(self, name: str) -> str:
        own = f".{SCALES}"
        return plain_name(f"{name.removesuffix(own)}.{self.leaf}" if name.endswith(own) else name)

    def put(self, model: nn.Module, name: str) -> None:
        """Puts the parametrization into a fresh model, on the meta device: what wraps modules treats parametrized parameters
        otherwise than plain ones."""
        from bitsandbytes.nn.parametrize import Bnb4bitParametrization

        owner, _, leaf = name.rpartition(_INSIDE)
        experts = model.get_submodule(owner)
        scales = torch.empty(self.numel // self.block, device="meta")
        codes = torch.empty(self.numel // 2, 1, dtype=torch.uint8, device="meta")
        setattr(experts, leaf, nn.Parameter(codes, requires_grad=False))
        way = Bnb4bitParametrization(self.state(scales, self.shape, self.dtype))
        register_parametrization(experts, leaf, way, unsafe=True)
        module = model.get_submodule(name)
        self.put_scales(module)
        vars(module)["hotspa_owner"] = experts, leaf  # not a submodule
        vars(experts).setdefault("hotspa_added", {})  # what is added to single experts, by parameter; filled by others

    def product(self, module: nn.Module) -> "ExpertWeight":
        """Makes the products of a replica's experts their forward."""
        experts, leaf = vars(module)["hotspa_owner"]
        weight = ExpertWeight(module, self)
        products = getattr(experts, "hotspa_product", None) or ExpertProducts(experts)
        products.weights[leaf] = weight
        return weight


# -- the user's model -------------------------------------------------------------------------------------------------


def quantize_experts(model: PreTrainedModel, quantization: BitsAndBytesConfig | None = None) -> tuple[str, ...]:
    """Puts every parameter of fused experts of a loaded model into 4 bits, in place and one by one, with bitsandbytes'
    `replace_parameter_4bit`. Call it right after the model was loaded.

    Args:
        model: A causal language model of transformers, on any device.
        quantization: Its `bnb_4bit_quant_type` and `bnb_4bit_use_double_quant` are used; by default the one with which the
            model was loaded (`load_in_4bit`).

    Returns:
        The names of the parameters; empty for a dense model.

    Raises:
        ModelError: no quantization is known, the model is wrapped, or a parameter cannot be cut into blocks.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    quantization = quantization or getattr(model.config, "quantization_config", None)
    if quantization is None or not getattr(quantization, "load_in_4bit", False):
        raise ModelError(
            "quantize_experts has no 4-bit quantization",
            why="the model was not loaded with one, and none was given",
            fix="call quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'))",
        )
    if is_wrapped(model):
        raise ModelError(
            "quantize_experts was given a model inside a wrapper",
            fix="call it on the loaded model, before anything else is done with it",
        )
    names = plain_experts(model)
    for name in names:  # before any is changed
        _check_blocks(name, tuple(model.get_parameter(name).shape), BLOCK)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        replace_parameter_4bit(
            model.get_submodule(owner),
            leaf,
            compress_statistics=quantization.bnb_4bit_use_double_quant,
            quant_type=quantization.bnb_4bit_quant_type,
            blocksize=BLOCK,
        )
    return names


def dequantize_experts(model: nn.Module) -> None:
    """Puts plain weights into the place of experts in 4 bits, in the dtype that they had before."""
    for name in read_experts(model, None):
        owner, _, leaf = name.rpartition(_INSIDE)
        experts = model.get_submodule(owner)
        whole = getattr(experts, leaf)
        remove_parametrizations(experts, leaf, leave_parametrized=False)
        setattr(experts, leaf, nn.Parameter(whole, requires_grad=False))


def plain_experts(model: nn.Module) -> tuple[str, ...]:
    """The parameters of fused experts that are not quantized, by name."""
    return tuple(
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if is_fused(module)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    )


def left_out(description: ModelDescription) -> str | None:
    """What a warning says of a quantized base whose experts are not; None for others."""
    packed = list(description.packed.values())
    plain = [s for s in description.vector.specs if s.experts and not (s.packed or s.trainable) and len(s.shape) == 3]
    if not packed or not plain:
        return None
    weights = sum(spec.numel for spec in plain)
    stay = sum(spec.numel * getattr(torch, spec.dtype).itemsize for spec in plain)
    is_ours = isinstance(packed[0], FourBitWeight)
    fix = "call" if is_ours else "load the base with BitsAndBytesConfig(load_in_4bit=True), and call"
    return (
        f"the base is in {packed[0].form}, but its experts stay in {plain[0].dtype}: {stay / 2**30:,.2f} GiB of {len(plain)} parameters "
        f"({plain[0].name}, ...), which would be {weights * WEIGHT_BYTES / 2**30:,.2f} GiB in 4 bits; {fix} "
        "hf_hotspa.quantize_experts(model) after loading"
    )


def _check_blocks(name: str, shape: tuple[int, ...], block: int) -> None:
    if shape[-1] % block or block % 2:
        raise ModelError(
            f"the rows of {name!r} {list(shape)} are not of complete blocks of {block} weights",
            why="a block would belong to two rows, and bitsandbytes dequantizes such weights wrong on CPUs",
            fix=f"leave the experts in 16 bits, or quantize with a blocksize that divides {shape[-1]}",
        )


def read_experts(model: nn.Module, compute_dtype: torch.dtype | None) -> dict[str, FourBitExperts]:
    """The hook `describe`: see `model.packed_layer.packed_layers`. Raises `ModelError`: blocks of a parameter are not
    of one row each."""
    packed = dict[str, FourBitExperts]()
    bnb = sys.modules.get("bitsandbytes.nn.parametrize")  # an object of a module that was never imported does not exist
    if bnb is None:
        return packed
    narrow = compute_dtype if compute_dtype in (torch.bfloat16, torch.float16) else None
    for name, module in model.named_modules():
        if not is_parametrized(module) or not is_fused(module):
            continue
        for leaf, ways in module.parametrizations.items():
            if len(ways) != 1 or type(ways[0]) is not bnb.Bnb4bitParametrization or hasattr(ways, SCALES):
                continue  # of a replica, or not known
            state = ways[0].quant_state
            shape = tuple(state.shape)
            if len(shape) != 3:
                continue
            _check_blocks(f"{name}.{leaf}", shape, state.blocksize)
            packed[f"{name}{_INSIDE}{leaf}"] = FourBitExperts(
                shape, state.blocksize, state.quant_type, state.dtype, narrow, bool(state.nested)
            )
    return packed


# -- products ---------------------------------------------------------------------------------------------------------


class ExpertWeight:
    """One parameter of a replica's experts, dequantized expert by expert: a `model.packed_layer.Product`. `module`: has
    the codes (uint8) of this rank's experts as `original`, and their scales as `absmax`."""

    def __init__(self, module: nn.Module, layer: FourBitExperts) -> None:
        self._module, self._layer, self._shape = module, layer, layer.shape[1:]
        self._slice: tuple[int, tuple[tuple[int, int], ...]] | None = None

    def cut(self, dim: int, rows: Sequence[tuple[int, int]], held_whole: bool, group: dist.ProcessGroup) -> None:
        """Makes it a shard: these rows of each expert along the cut dim. With `held_whole` the rank holds all codes, and
        slices the dequantized weight."""
        if held_whole:
            self._slice = dim - 1, tuple(rows)
        else:
            local = list(self._shape)
            local[dim - 1] = sum(stop - start for start, stop in rows)
            self._shape = tuple(local)

    def dtype(self, x: Tensor) -> torch.dtype:
        return self._layer.compute_dtype or x.dtype

    def __call__(self, expert: int, num_experts: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of one of the experts here."""
        from bitsandbytes.functional import dequantize_4bit

        layer, module = self._layer, self._module
        codes, scales = (
            each.detach().reshape(num_experts, -1) if each.dim() < 3 else each.detach()
            for each in map(module.get_parameter, (layer.leaf, SCALES))
        )
        if not min(self._shape):
            return torch.empty(self._shape, dtype=dtype, device=codes.device)
        # rounded as the parametrization's own result
        first = dtype if layer.dtype == torch.float32 and dtype in NARROW else layer.dtype
        state = layer.state(scales[expert], self._shape, first)
        whole: Tensor = dequantize_4bit(codes[expert].contiguous().view(-1, 1), state).to(dtype)
        if self._slice is None:
            return whole
        dim, rows = self._slice
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in rows], dim)


class ExpertProducts:
    """The forward of a replica's experts, with some of their parameters in 4 bits, as transformers' functions of fused experts
    compute (`transformers.integrations.moe`).

    Attributes:
        weights: The parameters in 4 bits, by name.
    """

    def __init__(self, experts: Any) -> None:
        self._experts, self.weights = experts, dict[str, ExpertWeight]()
        experts.hotspa_product, experts.forward = self, self.forward
        self._added = experts.hotspa_added
        for each in self._added.values():
            each.pass_through()

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """[..., h] of tokens [..., h], with their experts [T, k] int64 and routing weights [T, k]."""
        hidden, index, weights = arguments_of(self._experts, *args, **kwargs)
        x, top_k, count = hidden.reshape(-1, hidden.shape[-1]), index.shape[-1], self._experts.num_experts
        pairs = index.reshape(-1)
        order = torch.argsort(pairs, stable=True)
        # a pair without an expert has the number after the last one
        counts = torch.bincount(pairs, minlength=count + 1).tolist()
        rows = x[order // top_k].split(counts)
        out = [self._expert(rows[expert], expert) for expert in range(count) if counts[expert]]
        out += [rows[count].new_zeros(rows[count].shape)]
        weighted = torch.cat(out) * weights.reshape(-1)[order][:, None]
        # into the order of tokens, and summed as the family's own grouped products do
        whole = weighted.new_zeros(weighted.shape).index_copy(0, order, weighted)
        return whole.view(len(x), top_k, -1).sum(1).to(hidden.dtype).view_as(hidden)

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        """[n, h] of the rows [n, h] of one expert."""
        experts = self._experts
        inner = self._linear(x, "gate_up_proj" if experts.has_gate else "up_proj", expert)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = self._linear(inner, "down_proj", expert)
        return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out

    def _linear(self, x: Tensor, leaf: str, expert: int) -> Tensor:
        experts = self._experts
        weight = self.weights.get(leaf)
        if weight is None:
            plain = getattr(experts, leaf)[expert]
            out = x @ (plain if experts.is_transposed else plain.mT)
        else:
            read = partial(weight, expert, experts.num_experts)
            product: Tensor = _Product.apply(x.to(weight.dtype(x)), read, experts.is_transposed)
            out = product.to(x.dtype)
        if (added := self._added.get(leaf)) is not None:
            out = out + added(x, expert)
        return out + getattr(experts, f"{leaf}_bias")[expert] if experts.has_bias else out


class _Product(torch.autograd.Function):
    """Saves nothing: the backward dequantizes the expert's codes again, wherever they lie then."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, read: Callable[[torch.dtype], Tensor], is_transposed: bool) -> Tensor:
        ctx.read, ctx.is_transposed = read, is_transposed
        weight = read(x.dtype)
        return x @ (weight if is_transposed else weight.mT)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight = ctx.read(grad.dtype)
        return grad @ (weight.mT if ctx.is_transposed else weight), None, None
