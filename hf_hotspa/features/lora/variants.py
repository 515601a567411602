"""What replicas compute in another way than PEFT's modules do, as their weights are shards: DoRA, biases of lora_B, and trained
rows of embeddings.

DoRA (Liu et al., 2024) scales each output by m / ||W + s B A||, with the norm over the inputs, as a constant in the backward pass.
If tensor parallelism cuts the inputs, the shards' squared norms are added up. All else is linear in the shards' products, so that
one sum over shards still serves base and adapter.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.parallel.collectives import CLOCK
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import plain_product
from hf_hotspa.parallel.wrapped_model import base_layer


class Dora:
    """DoRA on a linear layer of a replica, in the place of PEFT's variant.

    Attributes:
        sharers: The ranks with the other inputs of the layer; None if this rank has all.
    """

    sharers: dist.ProcessGroup | None = None

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """[..., out]: the layer's output, from its input [..., in], cast for the adapter, and the base's output."""
        layer: Any = base_layer(module)
        a, b, dropout = (of[active_adapter] for of in (module.lora_A, module.lora_B, module.lora_dropout))
        scaling = module.scaling[active_adapter]
        with torch.no_grad():
            norm = self._norm(_plain_weight(layer, x.dtype), (b.weight @ a.weight).to(x.dtype), scaling, 1)
        scale = module.lora_magnitude_vector[active_adapter].weight / norm
        if isinstance(dropout, nn.Identity) or not module.training:
            # the sum over shards comes before the bias
            base = result if layer.bias is None or self.sharers is not None else result - layer.bias
        else:
            x = dropout(x)
            base = plain_product(x, linear=layer)
        return result + ((scale - 1) * base + scale * b(a(x)) * scaling)

    def _norm(self, weight: Tensor, added: Tensor, scaling: float, dim: int) -> Tensor:
        norm = torch.linalg.vector_norm(weight + scaling * added, dim=dim)
        if self.sharers is None:
            return norm
        squares = norm.square()
        with CLOCK.waiting:
            dist.all_reduce(squares, group=self.sharers)
        return squares.sqrt()


class DoraOfEmbedding(Dora):
    """DoRA on an embedding, whose inputs are the tokens of the vocabulary."""

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: object) -> Tensor:
        """[..., h], from token ids and the base's output."""
        a, b = module.lora_embedding_A[active_adapter].T, module.lora_embedding_B[active_adapter].T
        scaling, weight = module.scaling[active_adapter], module.get_base_layer().weight
        with torch.no_grad():
            norm = self._norm(weight, a @ b, scaling, 0)
        scale = module.lora_magnitude_vector[active_adapter].weight / norm
        added = scale * (module._embed(x, a) @ b) * scaling
        factor = module._get_embed_scale()
        return scale * result + (added if factor is None else added * factor.to(added.dtype))


def put_dora(module: Any, name: str) -> None:
    """Gives a LoRA layer on the meta device the modules of DoRA; its weight may be packed."""
    from peft.tuners.lora import Embedding
    from peft.tuners.lora.dora import DoraEmbeddingLayer, DoraLinearLayer

    is_table = isinstance(module, Embedding)
    layer = (DoraEmbeddingLayer if is_table else DoraLinearLayer)(fan_in_fan_out=is_table)
    layer.weight = nn.Parameter(torch.empty(module.out_features, device="meta"))
    if not is_table and not module.lora_magnitude_vector:  # as PEFT does
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
    module.lora_magnitude_vector[name] = layer
    module.lora_variant[name] = DoraOfEmbedding() if is_table else Dora()


def _plain_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a linear layer, or of its shard, in a dtype; of a packed one, made for the call. A layer whose
    rows move between devices has a product, too, and its weight as usual."""
    made = getattr(getattr(layer, "hotspa_product", None), "weight", None)
    weight: Tensor = layer.weight.to(dtype) if made is None else made(dtype)
    return weight


def use_shards(replica: Replica, description: ModelDescription) -> None:
    """Makes the wrappers of a replica compute with its shards. Call before tp wraps their forwards."""
    added, tensor = description.added, replica.mesh.tensor
    assert added is not None
    specs = {name: spec for spec in description.vector.specs for name in (spec.name, *spec.tied_names)}
    for name, module in replica.model.named_modules():
        if name not in added.inside:
            continue
        if "token_adapter" in module._modules:
            cut = replica.shards.widths.get(name, ())
            place = (sum(cut[: tensor.shard]), cut[tensor.shard]) if tensor is not None and cut else None
            _use_rows(module.token_adapter, added.name, place, replica.device)
        elif tensor is not None and name in added.scalings:
            spec = specs.get(description.weight_of(name))
            is_table = isinstance(base_layer(module), nn.Embedding)
            if spec is not None and spec.shard_dim == (0 if is_table else 1):
                for own in added.scalings[name]:
                    _sum_inputs(module, own, tensor)


def _sum_inputs(module: Any, name: str, tensor: TensorGroup) -> None:
    if isinstance(variant := module.lora_variant.get(name), Dora):
        variant.sharers = tensor.group
    # each shard adds its share of a bias before the sum
    if name in module.lora_B and (b := module.lora_B[name]).bias is not None:
        b.forward = lambda x: functional.linear(x, b.weight, b.bias / tensor.size)


def _use_rows(layer: Any, name: str, place: tuple[int, int] | None, device: torch.device) -> None:
    """Makes a layer of trained rows use the ones in this rank's vocabulary. `place`: first row and number of rows; None if
    all are here."""
    indices: Sequence[int] = layer.token_indices[name]
    first, count = place or (0, max(indices, default=0) + 1)
    rows = [row for row, token in enumerate(indices) if first <= token < first + count]
    index = torch.tensor([indices[row] - first for row in rows], dtype=torch.int64, device=device)
    chosen = torch.tensor(rows, dtype=torch.int64, device=device) if len(rows) < len(indices) else slice(None)
    layer.get_merged_weights = partial(_merged, layer, name, index, chosen)


def _merged(layer: Any, name: str, index: Tensor, chosen: Tensor | slice, active: Sequence[str]) -> Tensor:
    weight: Tensor = layer.base_layer.weight
    return weight.index_copy(0, index, layer.trainable_tokens_delta[name][chosen].to(weight))
