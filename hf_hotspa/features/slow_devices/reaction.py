"""What an engine does about slow devices: partitions by relative step time (`StageCuts`), the cost of handing over
product columns (`pretest`), and which columns can be left out (`ColumnStatistics`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.phase import moment
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.features.slow_devices.columns import Resizing, kept_variation, migrate
from hf_hotspa.features.slow_devices.flexible_linear import (
    PRODUCTS,
    Exchange,
    FlexibleWork,
    OwnColumns,
    Part,
    Product,
    flexible_works,
)
from hf_hotspa.features.slow_devices.giving import Giving, fitted_line
from hf_hotspa.features.slow_devices.speeds import (
    StepTimes,
    can_share,
    cut_by_speed,
    shares_by_speed,
    stage_loads,
    step_times_of_ranks,
    works_by_degree,
)
from hf_hotspa.layout.shares import is_uneven, shard_rows, shard_widths, step_times_of_groups
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import PositiveCount, reading_state, typed

# -- partitions by relative step time ----------------------------------------------------------------------------------


_Cut = tuple[StepTimes, tuple[int, ...]]  # step times that partition stages, and step times of ranks that divide MLPs


class StageCuts:
    """Partitions an engine's pipelines, and the MLPs of its tensor-parallel groups."""

    def __init__(
        self,
        engine: HotSPaEngine,
        fits: Callable[[ModelDescription], None],  # raises if a device cannot hold the pool in a partition
        takes: Callable[[ModelDescription], None] | None = None,  # called with every new partition
    ) -> None:
        self._engine, self._fits, self._takes = engine, fits, takes
        self._decided: tuple[float, ...] | None = None
        self._resumed: _Cut | None = None
        self._reported_no_room = self._reported_even = False

    @property
    def can_share(self) -> bool:
        """Whether there are MLPs that tensor-parallel groups can divide unevenly."""
        return can_share(self._vector)

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """Each stage's work, see `Speeds.loads`; empty while all partitions are the usual ones."""
        return stage_loads(self._vector.stage_costs)

    @property
    def works(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Each rank's work in tensor-parallel groups, see `Speeds.works`."""
        return works_by_degree(self._vector, self._engine.phases)

    @property
    def _vector(self) -> ParameterVector:
        return self._engine.description.vector

    def begin(self) -> str:
        """Before a mini-batch: takes the partition of the resumed run. Returns what changes, or an empty string.
        Collective if the partition changes."""
        cut, self._resumed = self._resumed, None
        return self._recut([cut]) if cut is not None else ""

    def decide(self, speeds: Sequence[float] | None) -> str:
        """After a mini-batch: partitions by `SlowDevices.speeds`. Returns what changes from the next one on, or an
        empty string. Collective if a partition changes."""
        known = tuple(speeds) if speeds is not None else None
        if known == self._decided:
            return ""
        self._decided = known
        vector = self._vector
        shares = shares_by_speed(vector, self._engine.phases, known)
        wanted = [(self._stages(vector.with_step_times(shares), known), shares)]
        if shares != vector.step_times:  # if memory does not hold these shares, another stage partition may fit
            wanted.append((self._stages(vector, known), vector.step_times))
        return "; ".join(text for text in (self._recut(wanted), self._why_even(known)) if text)

    def _stages(self, vector: ParameterVector, speeds: tuple[float, ...] | None) -> StepTimes:
        if speeds is None:
            return ()
        ranks = step_times_of_ranks(speeds)
        pool = self._engine.phases
        return cut_by_speed(vector.stage_costs, pool, speeds, lambda s: step_times_of_groups(vector, s, ranks))

    def _why_even(self, speeds: tuple[float, ...] | None) -> str:
        groups = [str(strategy) for strategy in self._engine.phases if strategy.tp > 1]
        if speeds is None or self._reported_even or not groups or self.can_share:
            return ""
        self._reported_even = True
        return f"the shards of {', '.join(groups)} stay even, as no layer has a dense MLP that its plan divides"

    def _recut(self, wanted: Sequence[_Cut]) -> str:
        """Takes the first that memory holds."""
        before, message = (self._cuts(), self._shares()), ""
        for step_times, of_ranks in wanted:
            if (step_times, of_ranks) == (self._vector.stage_costs.step_times, self._vector.step_times):
                break
            try:
                changed = self._engine.recut(step_times, self._fits, of_ranks)
            except DeviceMemoryError as error:
                if not self._reported_no_room:
                    message = (
                        f"layers and columns stay where they are, as memory does not hold another partition: {error}"
                    )
                continue
            if self._takes is not None:
                self._takes(self._engine.description)
            if not changed:
                return ""
            self._reported_no_room = False
            return self._difference(*before)
        self._reported_no_room |= bool(message)
        return message

    def _difference(self, cuts: dict[Strategy, list[int]], shares: list[str]) -> str:
        lines, now, of_ranks = list[str](), self._cuts(), self._shares()
        if layers := [f"{s} {'+'.join(map(str, now[s]))}" for s in now if now[s] != cuts[s]]:
            lines.append(f"layers per stage are now: {', '.join(layers)}")
        if of_ranks != shares:
            slow = f"MLP shares of slow ranks are now: {', '.join(of_ranks)}"
            lines.append(slow if of_ranks else "MLPs are divided evenly again")
        return "; ".join(lines)

    def _cuts(self) -> dict[Strategy, list[int]]:
        costs = self._vector.stage_costs
        return {s: [len(stage) for stage in costs.stages(s.num_stages)] for s in self._engine.phases}

    def _shares(self) -> list[str]:
        """The ranks with fewer columns than an even share, in the first layer with a divided MLP."""
        vector = self._vector
        divided = (s for s in vector.specs if s.parts and all(part.by_step_time for part in s.parts))
        spec = next((s for s in divided if vector.unit_costs[s.unit].by_step_time), None)
        if not vector.step_times or spec is None:
            return []
        shown = []
        for strategy in (s for s in self._engine.phases if is_uneven(vector, s)):
            for rank in range(strategy.world_size):
                widths = shard_widths(vector, strategy, spec, rank)
                own = widths[strategy.shard_index(strategy.coord(rank).tp)]
                if own < min(sum(widths) // strategy.tp, max(widths)):
                    shown.append(f"{strategy} rank {rank} {own / sum(widths):.0%}")
        return shown

    def state_dict(self) -> dict[str, Any]:
        return {
            "paces": self._vector.stage_costs.step_times,
            "ranks": self._vector.step_times,
            "decided": self._decided,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state for the next mini-batch. Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("the stages of pipelines", "stages are cut evenly until slow devices are found anew"):
            saved = typed(dict(state), _SavedCuts)
        self._decided, self._resumed = saved.decided, (saved.paces, saved.ranks)


@dataclass(frozen=True)
class _SavedCuts:
    """The state of `StageCuts`: `StageCosts.step_times`, the speeds of the last decision, and step times by rank."""

    paces: tuple[tuple[PositiveCount, ...], ...]
    decided: tuple[float, ...] | None
    ranks: tuple[PositiveCount, ...] = ()  # not in earlier states


# -- the cost of handing columns over ----------------------------------------------------------------------------------

# The pretest of SEMI-migration (Wang et al., arXiv 2401.11469, sections IV-B and IV-C) measures the costs of resizing
# and migrating on this machine.
#
# Before training, each tensor-parallel group of a strategy makes the copies, messages and products for a few column
# shares of every kind of linear, on random tensors, forward and backward. Lines through these samples are the curves of
# equations 2 and 3: Omega (resizing: a static part and a part per column), Phi_1 (sending, likewise) and Phi_2
# (computing). All ranks agree on them in one gather per strategy.


SHARES = (0.25, 0.5, 0.75)  # shares of the columns that are measured
MOST_TOKENS = 1024  # the pretest needs no more: costs are nearly proportional from there on
_TIMES = 3


def pretest(engine: HotSPaEngine, giving: Giving) -> None:
    """Measures every strategy with shards, and sets the `curves` of `giving`, the same on all ranks. Collective."""
    packs = {bucket.strategy: bucket.pack_tokens for bucket in engine.buckets}
    for strategy, work in flexible_works(engine).items():
        tokens = min(packs[strategy], MOST_TOKENS)
        mine = measure(work, tokens, engine.description.compute_dtype, engine.device)
        rows = engine.agreement.gather(mine).tolist()
        giving.take_pretest(str(strategy), rows, tokens)


def measure(work: FlexibleWork, tokens: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Measures this rank: the columns of all its products; then, for these together, static, extract (per column), send,
    compute, and the static part of send, in seconds. Collective in the group."""
    kinds = Counter(work.products.values())
    columns = sum(product.columns[work.position] * number for product, number in kinds.items())
    exchange, work.exchange = work.exchange, Exchange.BROADCAST
    samples = []
    for share in SHARES:
        seconds_of = [0.0, 0.0, 0.0]
        for product, number in kinds.items():
            for i, seconds in enumerate(_sample(work, product, share, tokens, dtype, device)):
                seconds_of[i] += seconds * number
        samples.append((share * columns, seconds_of))
    work.exchange = exchange
    (static, extract), (send_static, send), (_, compute) = (
        fitted_line([(n, seconds_of[i]) for n, seconds_of in samples]) for i in range(3)
    )
    return [float(columns), static, extract, send, compute, send_static]


def _sample(
    work: FlexibleWork, product: Product, share: float, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of one linear, forward and backward: resizing a share of its columns; sending, and computing, as many."""
    columns, outputs = product.columns[work.position], product.outputs[work.position]
    x, w, grad = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((tokens, columns), (outputs, columns), (tokens, outputs))
    )
    count = max(round(columns * share), 1)
    kept = torch.arange(max(columns - count, 1), device=device)
    resized = OwnColumns(columns, columns, kept)

    def extract() -> None:
        for _ in range(2):  # forward and backward
            resized.take(x), resized.take(w)
        resized.of_input(x[:, : len(kept)])
        resized.of_weight(w[:, : len(kept)])

    def compute() -> None:
        PRODUCTS.of(x[:, :count], w[:, :count].t())
        PRODUCTS.of(grad, w[:, :count])
        PRODUCTS.of(grad.t(), x[:, :count])

    return (
        _least(extract, device, None),
        _least(lambda: _send(work, product, share, tokens, x), device, work.group),
        _least(compute, device, None),
    )


def _send(work: FlexibleWork, product: Product, share: float, tokens: int, like: Tensor) -> None:
    """The messages of a product if position 0 of the group hands over a share."""
    giver = 0
    migration = migrate(work.size, giver, product.columns[giver], share)
    if migration is None:
        return
    part, columns, outputs = Part(migration, work), product.columns[giver], product.outputs[giver]

    def given(rows: int, width: int) -> Tensor | None:
        return like.new_zeros(rows, width) if part.gives else None

    def made(rows: int) -> Tensor | None:
        return None if part.gives else like.new_zeros(rows, part.own.stop - part.own.start)

    sent = columns - migration.first
    part.columns(given(outputs, sent), outputs, like)
    if product.is_row:
        part.columns(given(tokens, sent), tokens, like)
        part.collect(made(tokens + outputs), tokens + outputs, like)
    else:
        part.sum_to_giver(like.new_zeros(tokens, outputs))
        part.whole(given(tokens, outputs), (tokens, outputs), like)
        part.collect(made(outputs), outputs, like)


def _least(run: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The fewest seconds of a few runs; a group's ranks start each run together."""
    seconds = []
    for _ in range(_TIMES):
        if group is not None:
            dist.barrier(group)
        begin = moment(device)
        run()
        seconds.append(moment(device) - begin)
    return min(seconds)


# -- how much columns vary ---------------------------------------------------------------------------------------------

# How much each column of each weight varies between periods: the paper's Pri and PriDiff choose columns by it.
#
# The previous period's weights are kept as in the master store, each element on one rank. At the end of a period
# `|w(t) - w(t-1)|` is computed there and gathered like weights. Each rank takes the means over the rows of its shards,
# for every strategy with shards: `delta_i` of arXiv 2401.11469, section III-B. Columns that were left out in the period
# keep their old value. Frozen weights have no statistics: their columns are drawn at random.
#
# `tensors` is everything that the next columns depend on, for this rank's file in a checkpoint.


_BEFORE, _VARIATION, _LEFT_OUT, _GRADIENT = "weights", "variation", "left out", "gradient"


class ColumnStatistics:
    """The statistics of a run, and other state of resized products that outlives a mini-batch.

    For an engine that resizes all products of its strategies with shards, on all ranks."""

    def __init__(self, engine: HotSPaEngine, resizing: Resizing) -> None:
        self._engine, self._works, self._resizing = engine, flexible_works(engine), resizing
        self._is_kept = resizing.columns != "rd"
        self._before: dict[int, Tensor] | None = None  # this rank's trained weights a period ago, by segment
        self._rows = self._shards() if self._is_kept else {}
        for work in self._works.values():
            work.resizing = resizing

    def _shards(self) -> dict[str, list[tuple[Strategy, str, tuple[tuple[int, int], ...], int]]]:
        """Parameter name -> per strategy the linear, and this rank's rows along the sharded dim."""
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
        """Before a mini-batch, with `step` mini-batches trained: chooses columns anew each period (default: `pass_steps`). Collective."""
        if not self._is_kept:
            return
        period = self._resizing.period or pass_steps
        for work in self._works.values():
            work.resizing = replace(self._resizing, period=period)
        if self._before is None:
            self._before = {index: w.detach().clone() for index, w in self._trained()}
            return
        if step == 0 or step % period:
            return
        changes: list[Tensor | None] = [None] * len(self._engine.master.weights)
        for index, w in self._trained():
            changes[index] = (w - self._before[index]).abs()
        variation: dict[Strategy, dict[str, tuple[float, ...]]] = {strategy: {} for strategy in self._works}
        for name, whole in self._engine.weights(frozen=False, buffers=changes):
            for strategy, linear, rows, dim in self._rows.get(name, ()):
                variation[strategy][linear] = self._means(self._works[strategy], linear, whole, rows, dim)
        for strategy, work in self._works.items():
            work.take_statistics(variation[strategy])
        for index, w in self._trained():
            self._before[index].copy_(w)

    def _trained(self) -> Iterator[tuple[int, Tensor]]:
        """This rank's part of each trained segment."""
        for segment, w in zip(self._engine.description.vector.segments, self._engine.master.weights, strict=True):
            if segment.trainable and w is not None:
                yield segment.index, w

    @staticmethod
    def _means(
        work: FlexibleWork, linear: str, change: Tensor, rows: tuple[tuple[int, int], ...], dim: int
    ) -> tuple[float, ...]:
        """A shard's column statistics, from |w(t) - w(t-1)| of the complete weight."""
        shard = torch.cat([change.narrow(dim, low, high - low) for low, high in rows], dim)
        left_out = work.left_out.get(linear, set())
        kept = [i for i in range(shard.shape[1]) if i not in left_out]
        return kept_variation(shard.mean(0).tolist(), work.variation.get(linear), kept)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What this rank needs to resume bit for bit, copied to host memory; empty if nothing."""
        state: dict[str, Tensor] = {}
        for index, before in (self._before or {}).items():
            state[f"{_BEFORE}/{index}"] = before.to("cpu", copy=True)
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
        """Restores `tensors` of the same rank; ignores what does not fit (other strategies, another model)."""
        if self._is_kept:
            self._before = {i: _fitting(tensors.get(f"{_BEFORE}/{i}"), w) for i, w in self._trained()}
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


def _fitting(saved: Tensor | None, like: Tensor) -> Tensor:
    """A saved tensor of the right size, else a copy of the current one."""
    return like.detach().clone() if saved is None or saved.shape != like.shape else saved.to(like)
