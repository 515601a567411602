"""Mixtures of experts: experts over ranks, their capacity, and the balance loss of routers.

Its hooks; see `hf_hotspa.seam`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_hotspa.features.experts.capacity import Capacity
from hf_hotspa.features.experts.terms import TERMS
from hf_hotspa.seam import Described, Flags, Measure, settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription

options = Capacity

flags = Flags(arguments="hf_hotspa.features.experts.arguments:ExpertArguments")

terms = TERMS

measures = (
    Measure("expert_tokens", "expert_tokens"),  # under ep: computed, once for each expert of a token and each layer
    Measure("expert_tokens", "busiest_expert_tokens", is_total=False, metric="expert_load", over="expert_tokens"),
    # beyond the capacity, counted likewise; once for a replica's stage
    Measure("dropped_tokens", "dropped_expert_tokens", metric="dropped_expert_tokens", title="tokens dropped"),
)


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """How many routers have a balance loss."""

    def auxiliary_layers(if_asked: bool) -> int:
        from hf_hotspa.features.experts.routers import recordable_routers, router_layers

        return recordable_routers(model) if if_asked else router_layers(model)

    return Described(auxiliary_layers=auxiliary_layers)


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> Iterator[Any]:
    """The balance loss of routers, the exchange of tokens between the ranks of ep, and the limit of experts."""
    from hf_hotspa.features.experts.expert_parallel import ExpertCapacity, ExpertParallel, fits_grouped_kernels
    from hf_hotspa.features.experts.router_loss import RouterLoss

    mesh, limit = replica.mesh, settings(options.features, Capacity)
    if not fits_grouped_kernels(replica.compute_dtype, [slot.shape for slot in replica.slots]):
        replica.model.config._experts_implementation = "eager"
    if description.auxiliary_layers:
        yield RouterLoss(replica.model, description.auxiliary_layers, writes=mesh.coord.tp == 0)
    capacity = None
    if limit is not None:
        alone = () if mesh.experts is not None else description.experts
        capacity = ExpertCapacity(limit.factor, mesh.coord.tp == 0, alone)
    if mesh.experts is not None:
        parallel = ExpertParallel(mesh, capacity)
        parallel.divide(replica.model, description.experts)
        yield parallel
    if capacity is not None:
        yield capacity
