"""Which speeds divide the packs of which mini-batch.

Mini-batches may be planned ahead of training (by a loop; the Trainer does not); so speeds that are known after mini-batch n
(counted from 0) hold from mini-batch `n + 1 + delay` on, with `delay` at least as far as anybody plans ahead. Every rank
then divides alike, and so does a run that goes on from `state_dict`. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Positive, reading_state, typed


@dataclass(frozen=True)
class Speeds:
    """By which packs are divided over replicas.

    Args:
        ranks: The speed of each rank, relative to one another.
        loads: Where the stages of pipelines are cut by speed, too, what each has to do, by the mean of its pipeline: one
            tuple for each depth, as long as the pipeline has stages.
        works: Where tensor-parallel groups divide MLPs by speed, too, what each rank has to do by what it would with an even
            share: one tuple for each degree of tp, behind it.
    """

    ranks: tuple[Positive, ...]
    loads: tuple[tuple[Positive, ...], ...] = ()
    works: tuple[tuple[int, tuple[Positive, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or any(len(own) != len(self.ranks) for _, own in self.works):
            raise ValueError("works of another number of ranks")

    def of_replicas(self, strategy: Strategy) -> tuple[float, ...] | None:
        """The speed of each replica, that of the rank which is done last; None where all are as fast."""
        if strategy.dp == 1:
            return None
        stages, pp = strategy.num_stages, strategy.pp
        loads = next((loads for loads in self.loads if len(loads) == stages), (1.0,) * stages)
        of_ranks = [sum(loads[rank::pp]) / strategy.v for rank in range(pp)]  # stage s is on rank s mod pp
        slowest = [float("inf")] * strategy.dp
        works = dict(self.works).get(strategy.tp, (1.0,) * len(self.ranks))
        for rank, (speed, work) in enumerate(zip(self.ranks, works, strict=True)):
            coord = strategy.coord(rank)
            slowest[coord.dp] = min(slowest[coord.dp], speed / (of_ranks[coord.pp] * work))
        return tuple(slowest) if len(set(slowest)) > 1 else None


class SpeedHistory:
    """The speeds of a run, by mini-batch.

    Args:
        delay: See the head of the file.
    """

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self._in_force: list[tuple[int, Speeds | None]] = [(0, None)]

    def of(self, number: int) -> Speeds | None:
        """Those of a mini-batch; None divides evenly. May be asked in another thread than `trained` runs in."""
        known = self._in_force
        return next((speeds for first, speeds in reversed(known) if first <= number), known[0][1])

    def trained(self, number: int, speeds: Speeds | None) -> int | None:
        """Takes what is known after mini-batch `number`; the mini-batch from which on it holds, where it is new."""
        if speeds == self._in_force[-1][1]:
            return None
        # never in place: another thread may be looking
        needed = max(i for i, entry in enumerate(self._in_force) if i == 0 or entry[0] <= number + 1)
        first = number + 1 + self.delay
        self._in_force = [*self._in_force[needed:], (first, speeds)]
        return first

    def restart(self) -> None:
        """Counts from 0 again; what is known last stays."""
        self._in_force = [(0, self._in_force[-1][1])]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next divisions depend on, JSON-ready."""
        return {"in_force": [[first, *((None,) if s is None else vars(s).values())] for first, s in self._in_force]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("the speeds of devices", "packs are divided evenly until slow devices are found anew"):
            history = [(int(first), _read(numbers)) for first, *numbers in state["in_force"]]
            if not history:
                raise ValueError("no speeds")
        self._in_force = history


def _read(numbers: list[Any]) -> Speeds | None:
    """What stands for speeds in a state: their fields, or None; earlier versions had fewer fields."""
    if numbers[0] is None:
        return None
    return typed(dict(zip(Speeds.__match_args__[: len(numbers)], numbers, strict=True)), Speeds)
