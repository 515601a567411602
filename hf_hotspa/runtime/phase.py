"""Everything of one strategy on this rank: its replica, its two plans, its schedule. Runs one phase at a time.

A phase has three acts: `load` (weights from the master store into this strategy's layout), `compute` (forward and
backward of the replica's micro-batches), `return_gradients` (gradients summed into the master store). Between phases
nothing of the strategy is left but plans and an empty model.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_hotspa.cluster import Cluster
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.layout.placement import gradient_layout, strategy_layout
from hf_hotspa.runtime.arena import Arena
from hf_hotspa.runtime.master import MasterStore
from hf_hotspa.runtime.mesh import StrategyMesh
from hf_hotspa.runtime.pipeline import PipelineRunner
from hf_hotspa.runtime.replica import Replica
from hf_hotspa.runtime.specs import ModelDescription
from hf_hotspa.switch.executor import SwitchExecutor, SwitchStats
from hf_hotspa.switch.planner import plan_load, plan_return


class PhaseRunner:
    """One strategy on this rank.

    Args:
        description: The model as plain data.
        mesh: The strategy and its groups.
        cluster: Which ranks share a node.
        master: The master store.
        buffers: The model's buffers by name.
        schedule: The pipeline schedule, one of `pipeline.SCHEDULES`.
    """

    def __init__(
        self,
        description: ModelDescription,
        mesh: StrategyMesh,
        cluster: Cluster,
        master: MasterStore,
        buffers: Mapping[str, Tensor],
        schedule: str,
    ) -> None:
        self.mesh, self._master = mesh, master
        segments = description.vector.segments
        self._weight_dtypes = [getattr(torch, s.dtype) for s in segments]
        self._gradient_dtypes = [getattr(torch, s.master_dtype) if s.trainable else None for s in segments]
        layout = strategy_layout(description.vector, mesh.strategy)
        self._sizes = layout.sizes[mesh.rank]
        element_sizes = [dtype.itemsize for dtype in self._weight_dtypes]
        self.load_plan = plan_load(master.layout, layout, cluster, element_sizes)
        self.return_plan = plan_return(gradient_layout(description.vector, mesh.strategy), master.layout)
        self.replica = Replica(description, mesh, master.device, buffers)
        pad = description.config.get_text_config().pad_token_id
        self._runner = PipelineRunner(self.replica, mesh, schedule, pad if isinstance(pad, int) and pad >= 0 else 0)
        self._gradients: list[Tensor | None] = []

    def load(self, executor: SwitchExecutor, weight_arena: Arena, gradient_arena: Arena, epoch: int) -> SwitchStats:
        """Fills this strategy's weights from the master store and clears its gradients. Collective."""
        weights = weight_arena.take(self._sizes, self._weight_dtypes)
        self._gradients = gradient_arena.take(self._sizes, self._gradient_dtypes)
        stats = executor.run(self.load_plan, self._master.weights, weights, self._weight_dtypes, epoch)
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()
        self.replica.bind(weights, self._gradients)
        return stats

    def compute(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward and backward. Returns this rank's part of the loss (fp64 scalar): ranks add up to the phase's loss."""
        loss = self._runner.run(micro_batches, scale)
        # the coordinates of a tensor-parallel group all hold the same loss: one of them counts
        return loss if self.replica.is_last and self.mesh.coord.tp == 0 else torch.zeros_like(loss)

    def return_gradients(self, executor: SwitchExecutor, epoch: int) -> SwitchStats:
        """Adds this strategy's gradients to the master store and lets go of its storage. Collective."""
        stats = executor.run(self.return_plan, self._gradients, self._master.gradients, self._gradient_dtypes, epoch)
        self.release()
        return stats

    def release(self) -> None:
        """Unbinds the storage; also after a failed phase."""
        self.replica.release()
        self._gradients = []
