"""The gradients that a caller's backward has brought: what is still to be trained, and what those of the next step will be."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.switched.calls import Assumed, Call, common
from hf_hotspa.switched.documents import Documents
from hf_hotspa.switched.passes import Passes, Seeds
from hf_hotspa.typed import reading_state


class CallGradients:
    """Reads the gradients of the calls of a step.

    Args:
        own: Whether the loss is a token loss of the engine's.
        looks: Whether logits were looked at in the last step or call, by mode; the model keeps it.

    Attributes:
        expected: The factor that the backward of the last step applied to the loss.
        linear: What the gradients by log-probabilities had in common in the last step.
    """

    def __init__(self, passes: Passes, own: bool, looks: dict[tuple[bool, bool], bool]) -> None:
        self._looks = looks
        self._passes, self._engine, self._own = passes, passes.engine, own
        self.expected, self.linear = float(self._engine.world_size), Assumed()
        self._tolerance = 64 * torch.finfo(passes.wide).eps

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to compute the same bits; JSON-ready."""
        world, looks = self._engine.world_size, [list(mode) for mode, looked in self._looks.items() if looked]
        linear = {name: getattr(self.linear, name) for name in ("by_token", "by_mean", "by_probability")}
        return {"expected": self.expected, "world": world, "looks": looks} | linear

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            HotspaConfigError: it is damaged.
        """
        with reading_state("what gradients will be", "the first step may be trained twice"):
            expected = float(state["expected"])
            # a Trainer multiplies by the number of ranks, which may be another one now
            self.expected = float(self._engine.world_size) if expected == state.get("world") else expected
            by_probability = bool(state.get("by_probability"))  # a checkpoint of before has none
            self.linear = Assumed(0.0, float(state["by_token"]), bool(state["by_mean"]), by_probability)
            looks = {(bool(training), bool(trains)): True for training, trains in state.get("looks", ())}
        self._looks.clear()
        self._looks.update(looks)

    def compare(
        self, calls: Sequence[Call], documents: Documents, where: str, beside: Sequence[float]
    ) -> tuple[float | None, Seeds, Tensor]:
        """What the gradients that are there have to become. Collective; it also learns what those of the next step will be.

        Args:
            beside: Numbers that go along with what is compared, as many on every rank.

        Returns:
            What the gradients of what was trained at once must be multiplied by; None where it must be trained again. What
            is still to be trained. And of every rank the numbers `beside`, fp64 [ranks, numbers].
        """
        rank, tolerance, gather = self._engine.rank, self._tolerance, self._engine.agreement.gather
        at_once = torch.tensor([call.assumed is not None for call in calls])
        said = [
            call.constant(rank, tolerance) if call.assumed is None else call.ratio(rank, tolerance, self._own)
            for call in calls
        ]
        weighed = [call.constant(rank, tolerance, True) if call.assumed is None else 0.0 for call in calls]
        seeds = self._own_seeds(calls, again=False)
        parts = [len(said), len(weighed), 2, len(beside)]
        rows, weighed_rows, sizes, numbers = gather([*said, *weighed, *_sizes(seeds), *beside]).split(parts, dim=1)
        scale = self._scale(calls, rows, weighed_rows, at_once, where)
        if scale is None:
            seeds = self._own_seeds(calls, again=True)
            sizes = gather(_sizes(seeds))
        for call in calls:
            call.logit_seeds = None
        seeds.columns = int(sizes[:, 0].max())
        if bool(sizes[:, 1].any()):
            of_all = self._passes.exchange.facts(sorted(seeds.logits))
            seeds.of_logits = frozenset(int(number) for part in of_all for number in part)
        if self._passes.routers is not None:
            seeds.routers = self._router_seeds(calls, documents)
        return scale, seeds, numbers

    def _scale(self, calls: Sequence[Call], rows: Tensor, weighed: Tensor, at_once: Tensor, where: str) -> float | None:
        """See `compare`.

        Args:
            rows: Of each rank [ranks, calls] the factor of what was trained at once, or the seed of all log-probabilities.
            weighed: The same seed, over the probability of its token.
            at_once: [calls], whether each was.
        """
        rank, tolerance, gather = self._engine.rank, self._tolerance, self._engine.agreement.gather
        if self._own:  # a part of a token loss is the same on all ranks, and so counts on all
            rows[:, at_once] = rows[:, at_once].mean(0)
        if not bool(at_once.any()):
            if not bool(rows.isinf().all()):
                self.linear = Assumed.learnt((rows, weighed), calls, tolerance)
            return 1.0
        scale = common(rows[:, at_once].flatten(), tolerance)
        if self._own or self._engine.updates is not None:
            self._refuse_other_factors(scale, where)
        if scale is None:
            self.linear = Assumed()
            losses = [call for call in calls if isinstance(call.assumed, float)]
            factors = [call.factor if call.labels[rank] else float("inf") for call in losses]
            self.expected = common(gather(factors or [self.expected]).flatten(), tolerance) or self.expected
        elif scale:
            if any(isinstance(call.assumed, float) for call in calls):
                self.expected *= scale
            else:
                self.linear = self.linear.scaled(scale)
        return scale

    def _refuse_other_factors(self, scale: float | None, where: str) -> None:
        """What was trained at once cannot be trained again."""
        stages = self._engine.updates is not None
        if scale is None or (stages and scale != 1.0):
            raise UnsupportedError(
                "the loss was multiplied by other factors than in the step before"
                if stages
                else "the calls of a step multiply the token loss by different factors",
                where=where,
                why="stages have updated after every pack" if stages else "the batches of a step are trained together",
                fix="train on the loss that forward returns, times the number of processes",
            )

    def _own_seeds(self, calls: Sequence[Call], again: bool) -> Seeds:
        """What is still to be trained of this rank's documents.

        Args:
            again: Whether what was trained at once counts for nothing.
        """
        world, rank, seeds = self._engine.world_size, self._engine.rank, Seeds()
        tokens: dict[int, Tensor] = {}
        for call in calls:
            final = call.final_seeds(rank, again)
            if final is not None:
                tokens |= {n: part / world for n, part in call.of_document(final.permute(1, 2, 0))}
            if call.logit_seeds is not None:
                parts = call.of_document(call.logit_seeds)
                seeds.logits |= {n: part / world for n, part in parts if bool(part.any())}
        seeds.tokens = {n: part for n, part in tokens.items() if bool(part.any())}
        return seeds

    def _router_seeds(self, calls: Sequence[Call], documents: Documents) -> Tensor | None:
        routers = self._passes.routers
        assert routers is not None
        mine = torch.zeros(len(calls), routers.num_experts, dtype=torch.float64)
        for index, call in enumerate(calls):
            if call.of_routers:
                mine[index] = call.balance(routers)[1] * call.of_routers / self._engine.world_size
        of_all = self._engine.agreement.gather(mine.flatten().tolist()).view(-1, len(calls), routers.num_experts)
        if not bool(of_all.any()):
            return None
        table = torch.zeros(len(documents), routers.num_experts, dtype=torch.float64)
        for index, call in enumerate(calls):
            for rank, numbers in enumerate(call.ranges):
                table[numbers.start : numbers.stop] = of_all[rank, index]
        return table

    def active(self, seeds: Seeds) -> set[int]:
        """The documents that have a seed; the others are not run. Collective."""
        mine = set(seeds.tokens) | set(seeds.logits)
        parts = self._passes.exchange.facts(sorted(mine)) if seeds.columns or seeds.of_logits else []
        active = {int(number) for part in parts for number in part}
        if seeds.routers is not None:
            active |= set(seeds.routers.any(1).nonzero().flatten().tolist())
        return active


def _sizes(seeds: Seeds) -> list[float]:
    """Numbers that each token of this rank has, and its documents with seeds by logits."""
    has_entropy = any(bool(part[:, 1].any()) for part in seeds.tokens.values())
    return [float(bool(seeds.tokens) + has_entropy), float(len(seeds.logits))]
