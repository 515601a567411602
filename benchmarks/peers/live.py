"""Sides of `side_by_side.py` that are alive at the same time and train one mini-batch each when it is their turn.

Every side has its own world: DDP, FSDP and DeepSpeed keep global state. A side that raises, dies or does not
answer in time becomes a `SideError`, and the others continue.
"""

import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

from hf_hotspa.commands.rank_world import World, WorldError, write_to
from peers.sides import Side
from peers.work import Work

PRELOAD = (
    "torch",
    "torch.distributed.pipelining",
    "datasets",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "hf_hotspa.trainer",
    "deepspeed",
)
"""Imported once for all ranks. transformers imports DeepSpeed into every side anyway, where it is installed."""
_PATIENCE_S = 1.0
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class SideError(WorldError):
    """A side failed: the last line says why, the text has the traceback."""


class LiveSide:
    """A side that waits for its turns.

    Args:
        side: Who.
        work: What it trains.
        log: Where its ranks write what they print; `-RANK.log` is appended.
        limit_s: The longest that it may take to be ready, or for a mini-batch.
    """

    def __init__(self, side: Side, work: Work, log: Path, limit_s: float) -> None:
        self.side, self.work, self._limit_s = side, replace(work, name=log.name), limit_s
        self.steps_left = work.steps
        log.parent.mkdir(parents=True, exist_ok=True)
        pairs = [Pipe() for _ in range(work.ranks)]
        self._gates = [ours for ours, _ in pairs]
        self._world = World(
            work.ranks,
            side_main,
            side,
            self.work,
            str(log),
            of_rank=[(theirs,) for _, theirs in pairs],
            timeout_s=limit_s,
            preload=PRELOAD,
        )
        for _, theirs in pairs:
            theirs.close()

    def ready(self) -> None:
        """Waits until all ranks wait for their turn.

        Raises:
            SideError: it failed before.
        """
        for kind, value in self._messages():
            assert kind == "ready", kind
            self.steps_left = value

    def turn(self) -> dict[str, Any]:
        """Lets it train a mini-batch, and wait for the next turn.

        Returns:
            `seconds` of the slowest rank, `cpu` seconds of all, `phases` of our sides.

        Raises:
            SideError: it failed.
        """
        self._go()
        found = [value for _, value in self._messages()]
        self.steps_left -= 1
        self._messages()  # it waits again
        return {
            "seconds": max(each["seconds"] for each in found),
            "cpu": sum(each["cpu"] for each in found),
            "phases": [
                phase | _mean(each["inside"].get(phase["strategy"]) for each in found) for phase in found[0]["phases"]
            ],
        }

    def finish(self) -> dict[str, Any]:
        """Lets it continue after its last mini-batch; what it says at the end.

        Raises:
            SideError: it failed.
        """
        if self.work.measure == "time":
            self._go()
        (found, *_) = [value for _, value in self._messages()]
        self._world.end(patience_s=5.0)
        return dict(found)

    def kill(self) -> None:
        """Ends it at once."""
        self._world.end(patience_s=0.0)

    def _go(self) -> None:
        try:
            for gate in self._gates:
                gate.send("go")
        except OSError:  # it died while the others had their turns
            self._fail_of_world()

    def _messages(self) -> list[tuple[str, Any]]:
        """One message of each rank."""
        found: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + self._limit_s
        while len(found) < len(self._gates):
            waiting = {gate: rank for rank, gate in enumerate(self._gates) if rank not in found}
            left = deadline - time.monotonic()
            ready = connection.wait([*waiting, *self._world.pipes], timeout=max(0.0, left))
            if not ready:
                self._fail(f"TimeoutError: no answer within {self._limit_s:.0f} s, the limit of a side")
            for pipe in ready:
                if pipe in waiting:
                    try:
                        found[waiting[pipe]] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        self._fail_of_world()
                elif not any(gate in ready for gate in waiting):
                    self._fail_of_world()
        return [found[rank] for rank in range(len(self._gates))]

    def _fail_of_world(self) -> None:
        """Raises what a rank raised first: what its peers say about the lost connection is of no use."""
        texts = []
        time.sleep(_PATIENCE_S)
        for pipe in self._world.pipes:
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll():
                    ok, value = pipe.recv()
                    texts += [] if ok else [str(value)]
        silent = f"RuntimeError: a rank died without a word; exit codes {self._world.exit_codes}"
        own = [text for text in texts if not any(word in text for word in _LOST)]
        self._fail((own or texts or [silent])[0])

    def _fail(self, text: str) -> None:
        self.kill()
        raise SideError(text)


def run_untimed(side: Side, work: Work, log: Path, limit_s: float) -> dict[str, Any]:
    """Lets a side train alone; what it says at the end.

    Raises:
        SideError: it failed.
    """
    alone = LiveSide(side, work, log, limit_s)
    return alone.finish()


def seconds_alone(side: Side, work: Work, log: Path, limit_s: float) -> float:
    """Mean seconds of a side's mini-batches after the first, alone.

    Raises:
        SideError: it failed.
    """
    alone = LiveSide(side, work, log, limit_s)
    alone.ready()
    found = [alone.turn()["seconds"] for _ in range(alone.steps_left)]
    alone.kill()
    return statistics.fmean(found[1:])


def _mean(parts: Iterable[dict[str, float] | None]) -> dict[str, float]:
    """The mean over ranks, of those that were measured."""
    known = [each for each in parts if each]
    return {name: statistics.fmean(each[name] for each in known) for name in (known[0] if known else ())}


# -- on the ranks -----------------------------------------------------------------------------------------------------


def side_main(rank: int, world_size: int, side: Side, work: Work, log: str, gate: Any) -> None:
    """One rank of a side, to the end of its training."""
    import importlib

    import bf16_products
    import torch

    write_to(f"{log}-{rank}.log")
    importlib.import_module(f"peers.sides.{side.module}")  # libraries count as nobody's memory
    from hf_hotspa.calibrate.probe import freeing_at_once
    from peers.sides.common import Turns, evaluated_loss, warm_up

    timed = work.measure == "time"
    if work.dtype == "bf16":
        # oneDNN keeps kernels for every shape that it has met in 16-bit, which are nobody's tensors: three times as much
        # as all else of the 0.9M model
        bf16_products.install(everywhere=not timed)
    turns = Turns(work, gate if timed else None)
    if timed:
        weights = side.run(work, turns)
        found = turns.summary()
        if rank == 0:
            found["loss"] = evaluated_loss(weights, work)
    else:
        with freeing_at_once(), torch.backends.mkldnn.flags(enabled=False):
            warm_up(work)
            turns.start_memory()
            side.run(work, turns)
            found = turns.summary()
    gate.send(("done", found))


def in_turns(
    live: Sequence[LiveSide], names: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, SideError]]:
    """Every side trains mini-batch after mini-batch, one side after the other; each time another side begins.

    Returns:
        What the turns of each side took, and the sides that failed (all others are still alive).
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, SideError] = {}
    most = max((side.steps_left for side in live), default=0)
    for number in range(most):
        for turn in range(len(live)):
            at = (number + turn) % len(live)
            name, side = names[at], live[at]
            if name in failed or not side.steps_left:
                continue
            try:
                found[name].append(side.turn())
            except SideError as error:
                failed[name] = error
    return found, failed
