"""How much each column of each weight varies from one period to the next: what the paper's Pri and PriDiff choose columns by.

The weights of the period before are kept as they are in the master store, each element on one rank. At the end of a period
`|w(t) - w(t-1)|` is taken where the weights are, gathered like weights are gathered, and each rank takes the means over the
rows of its own shards: `delta_i` of arXiv 2401.11469, section III-B, of every strategy with shards. Columns that were left out in the
period keep their old value. Frozen weights have no statistics: their columns are drawn at random.

`tensors` is everything that the next columns depend on, for this rank's file of a checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.layout.shares import shard_rows
from hf_hotspa.parallel.flexible_linear import FlexibleWork
from hf_hotspa.stragglers.columns import Resizing, kept_variation
from hf_hotspa.strategy import Strategy

_BEFORE, _VARIATION, _LEFT_OUT, _GRADIENT = "weights", "variation", "left out", "gradient"


class ColumnStatistics:
    """The statistics of a run, and what else of resized products outlives a mini-batch.

    Args:
        engine: Its strategies with shards are resized.
        resizing: How; the same on all ranks. From now on it is that of all products.
    """

    def __init__(self, engine: HotSPaEngine, resizing: Resizing) -> None:
        self._engine, self._works, self._resizing = engine, engine.flexible_works(), resizing
        self._is_kept = resizing.columns != "rd"
        self._before: list[Tensor | None] | None = None
        self._rows = {name: list(shards) for name, shards in self._shards().items()} if self._is_kept else {}
        for work in self._works.values():
            work.resizing = resizing

    def _shards(self) -> dict[str, list[tuple[Strategy, str, tuple[tuple[int, int], ...], int]]]:
        """Parameter name -> of each strategy the linear, and the rows of this rank's shard along the dim that is cut."""
        description = self._engine.description
        specs = {spec.name: spec for spec in description.vector.specs}
        shards: dict[str, list[tuple[Strategy, str, tuple[tuple[int, int], ...], int]]] = {}
        for strategy, work in self._works.items():
            for linear in work.products:
                spec = specs.get(description.weight_of(linear))
                if spec is not None and spec.trainable and spec.shard_dim is not None:
                    rows = shard_rows(description.vector, strategy, spec, self._engine.rank)
                    shards.setdefault(spec.name, []).append((strategy, linear, rows, spec.shard_dim))
        return shards

    @torch.no_grad()
    def begin(self, step: int, pass_steps: int) -> None:
        """Before a mini-batch: where a period has ended, columns are chosen anew. Collective.

        Args:
            step: Mini-batches trained so far.
            pass_steps: The period where none was given.
        """
        if not self._is_kept:
            return
        period = self._resizing.period or pass_steps
        for work in self._works.values():
            work.resizing = replace(self._resizing, period=period)
        weights = self._engine.master.weights
        if self._before is None:
            self._before = [_copied(w) for w in self._kept(weights)]
            return
        if step == 0 or step % period:
            return
        changes = [
            (w - before).abs() if w is not None and before is not None else None
            for w, before in zip(weights, self._before, strict=True)
        ]
        variation: dict[Strategy, dict[str, tuple[float, ...]]] = {strategy: {} for strategy in self._works}
        for name, whole in self._engine.weights(frozen=False, buffers=changes):
            for strategy, linear, rows, dim in self._rows.get(name, ()):
                variation[strategy][linear] = self._means(self._works[strategy], linear, whole, rows, dim)
        for strategy, work in self._works.items():
            work.take_statistics(variation[strategy])
        for before, w in zip(self._before, weights, strict=True):
            if before is not None and w is not None:
                before.copy_(w)

    def _kept(self, buffers: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """Of trained segments alone."""
        for segment, buffer in zip(self._engine.description.vector.segments, buffers, strict=True):
            yield buffer if segment.trainable else None

    @staticmethod
    def _means(
        work: FlexibleWork, linear: str, change: Tensor, rows: tuple[tuple[int, int], ...], dim: int
    ) -> tuple[float, ...]:
        """The statistics of the columns of a shard, from |w(t) - w(t-1)| of the whole weight."""
        shard = torch.cat([change.narrow(dim, low, high - low) for low, high in rows], dim)
        left_out = work.left_out.get(linear, set())
        kept = [i for i in range(shard.shape[1]) if i not in left_out]
        return kept_variation(shard.mean(0).tolist(), work.variation.get(linear), kept)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What this rank needs to go on bit for bit, copied to host memory; empty where that is nothing."""
        state: dict[str, Tensor] = {}
        for index, before in enumerate(self._before or ()):
            if before is not None:
                state[f"{_BEFORE}/{index}"] = before.detach().to("cpu", copy=True)
        for strategy, work in self._works.items():
            for linear, variation in work.variation.items():
                state[f"{_VARIATION}/{strategy}/{linear}"] = torch.tensor(variation, dtype=torch.float64)
            for linear, columns in work.left_out.items():
                if columns:
                    state[f"{_LEFT_OUT}/{strategy}/{linear}"] = torch.tensor(sorted(columns))
            for linear, memory in work.memories.items():
                gradient = memory.now if memory.now is not None else memory.before
                if gradient is not None:
                    state[f"{_GRADIENT}/{strategy}/{linear}"] = gradient.detach().to("cpu", copy=True).contiguous()
        return dict(sorted(state.items()))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from `tensors` of the same rank. What does not fit (other strategies, another model) is left."""
        if self._is_kept:
            self._before = [
                _fitting(tensors.get(f"{_BEFORE}/{index}"), w)
                for index, w in enumerate(self._kept(self._engine.master.weights))
            ]
        for strategy, work in self._works.items():
            variation: dict[str, tuple[float, ...]] = {}
            for linear, product in work.products.items():
                stored = tensors.get(f"{_VARIATION}/{strategy}/{linear}")
                if stored is not None and len(stored) == product.columns[work.position]:
                    variation[linear] = tuple(stored.tolist())
            work.take_statistics(variation)
            for linear in work.products:
                if (stored := tensors.get(f"{_LEFT_OUT}/{strategy}/{linear}")) is not None:
                    work.left_out[linear] = set(stored.tolist())
                stored, memory = tensors.get(f"{_GRADIENT}/{strategy}/{linear}"), work.memory(linear)
                if stored is not None and memory is not None:
                    memory.now, memory.before = stored.to(self._engine.device), None


def _copied(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _fitting(saved: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A saved tensor where it is one of the same size, else a copy of what is there now."""
    if like is None or saved is None or saved.shape != like.shape:
        return _copied(like)
    return saved.to(like)
