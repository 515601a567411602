"""What the fuzzers share: all draws of a world size run in one world, and a draw that fails is shrunk to one line.

A draw is a frozen dataclass with a default for every field, a `world_size` and a method `simpler`, which yields plainer draws.
A fuzzer is a function `run(rank, world_size, draw, folder)` that returns `exact`, `refused: ...` or `WRONG: ...` on every rank.
"""

import inspect
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from tests.harness import WorldError, run_ranks

SECONDS_TO_SHRINK = float(os.environ.get("HOTSPA_SHRINK_S", "120"))
"""For the first draw that fails; the others are given as they were drawn."""


VOID = "WRONG: the oracle raises "
"""How the outcome of a draw begins that is no use: the oracle does not run it."""


class Draw(Protocol):
    """What one seed draws."""

    @property
    def world_size(self) -> int: ...

    def simpler(self) -> Iterator[Self]: ...


D = TypeVar("D", bound=Draw)
Run = Callable[[int, int, Any, str], str]


def changed(draw: Any) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {f.name: getattr(draw, f.name) for f in fields(draw) if getattr(draw, f.name) != _default(f)}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def with_defaults(draw: D, groups: Sequence[Sequence[str]] = ()) -> Iterator[D]:
    of = {f.name: _default(f) for f in fields(draw)}  # type: ignore[arg-type]
    for names in [*groups, *([name] for name in changed(draw) if name != "world_size")]:
        plainer = {name: of[name] for name in names if getattr(draw, name) != of[name]}
        if plainer:
            yield replace(draw, **plainer)  # type: ignore[type-var]


def simpler_pools(pool: str) -> Iterator[str]:
    """Strategies in the user's grammar with one bucket, or one option of one strategy, less; the longest rows still fit."""
    buckets = pool.split(",")
    if len(buckets) > 1:
        longest = buckets[-1].partition(":")[2]
        yield from (f"{bucket.partition(':')[0]}:{longest}" for bucket in buckets)
    for found in re.finditer(r"\+[a-z]+\d*|ep\d+", pool):
        yield pool[: found.start()] + pool[found.end() :]


def line_of(draw: Any) -> str:
    """What runs this draw again, for a shell."""
    module, kind = (
        f"tests.{Path(inspect.getfile(type(draw))).stem}",
        type(draw).__name__,
    )  # where it is run as a script, too
    given = ", ".join(f"{name}={value!r}" for name, value in changed(draw).items()).replace('"', r"\"")
    return f'python -c "from {module} import *; FUZZER.replay({kind}({given}))"'


def _all_of_a_world(rank: int, world_size: int, run: Run, draws: Sequence[Any], folder: str) -> list[str]:
    found: list[str] = []
    for number, draw in enumerate(draws):
        found.append(run(rank, world_size, draw, folder))
        # of a world that ends early this is left: what was through, and so what was not
        Path(folder, f"done-{number}-{rank}.json").write_text(json.dumps(found[-1]))
    return found


def in_a_world(run: Run, draws: Sequence[D], folder: Path, size: int, timeout: float) -> list[str]:
    """The worst outcome of each draw over the ranks; a draw that ends its world is run no further, those behind it are."""
    found: list[str] = []
    while len(found) < len(draws):
        left = draws[len(found) :]
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            arguments = (run, left, inside)
            try:
                ranks = run_ranks(size, _all_of_a_world, *arguments, timeout=timeout)
            except WorldError as error:
                through = [_read(inside, rank, len(left)) for rank in range(size)]
                whole = min(len(texts) for texts in through)
                ranks = [[*texts[:whole], f"FAILED: {str(error)[-1800:]}"] for texts in through]
        found += [_worst(texts) for texts in zip(*ranks, strict=True)]
    return found


def _read(folder: str, rank: int, number: int) -> list[str]:
    texts: list[str] = []
    for n in range(number):
        path = Path(folder, f"done-{n}-{rank}.json")
        if not path.exists():
            break
        texts.append(json.loads(path.read_text()))
    return texts


def _worst(texts: Sequence[str]) -> str:
    for start in ("FAILED", "WRONG", "refused"):
        if chosen := [text for text in texts if text.startswith(start)]:
            mixed = start == "refused" and len(chosen) < len(texts)
            return f"WRONG: refused on some ranks alone: {chosen[0]}" if mixed else chosen[0]
    return "exact"


def outcomes(run: Run, draws: Sequence[D], folder: str | Path | None = None, timeout: float = 240.0) -> list[str]:
    """What became of each draw, in their order; every world size is one world.

    Args:
        folder: Of files that `run` reads and writes; by default one that is removed.
        timeout: Of a world.
    """
    found: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="hotspa-fuzz-") as own:
        for size in sorted({draw.world_size for draw in draws}):
            places = [place for place, draw in enumerate(draws) if draw.world_size == size]
            texts = in_a_world(run, [draws[place] for place in places], Path(folder or own), size, timeout)
            found.update(zip(places, texts, strict=True))
    return [found[place] for place in range(len(draws))]


def shrunk(draw: D, fails: Callable[[D], bool], seconds: float = SECONDS_TO_SHRINK) -> D:
    """A plainer draw that still fails: each of the simpler ones is tried, until none fails or the time is up."""
    end = time.monotonic() + seconds
    while True:
        for other in draw.simpler():
            if time.monotonic() > end:
                return draw
            if other != draw and fails(other):
                draw = other
                break
        else:
            return draw


@dataclass(frozen=True)
class Fuzzer(Generic[D]):
    """Draws of one kind, and what they must come to.

    Attributes:
        draw: The draw of a seed.
        found_of: What became of each draw: `exact`, `refused: ...`, `WRONG: ...` or `FAILED: ...`; within seconds.
        reasons: Why a draw may be refused, as its message says.
    """

    draw: Callable[[int], D]
    found_of: Callable[[Sequence[D], float], list[str]]
    reasons: Sequence[str]

    def is_bad(self, outcome: str) -> bool:
        """Whether a draw is neither exact nor refused for one of the reasons."""
        named = outcome.startswith("refused: ") and any(reason in outcome for reason in self.reasons)
        return outcome != "exact" and not named

    def check(self, draws: Sequence[D]) -> str:
        """What is wrong with draws, with a line for each that runs it again; empty where nothing is."""
        found = self.found_of(draws, 120.0 + 20.0 * len(draws))
        bad = [(draw, outcome) for draw, outcome in zip(draws, found, strict=True) if self.is_bad(outcome)]
        lines = []
        for number, (draw, outcome) in enumerate(bad):
            plain = shrunk(draw, self._fails) if number == 0 and not outcome.startswith(VOID) else draw
            lines.append(f"{line_of(plain)}\n  # as drawn: {draw}\n  # {outcome}")
        refused = sum(outcome.startswith("refused: ") for outcome in found)
        if not bad and refused > 0.3 * len(found) + 1:
            lines.append(f"{refused} of {len(found)} draws are refused: most draws are to run")
        return "\n".join(lines)

    def _fails(self, draw: D) -> bool:
        [outcome] = self.found_of([draw], 60.0)
        return self.is_bad(outcome) and not outcome.startswith(VOID)

    def replay(self, draw: D) -> None:
        """Runs one draw, and says what became of it."""
        [outcome] = self.found_of([draw], 120.0)
        print(outcome)
        sys.exit(int(self.is_bad(outcome)))

    def main(self) -> None:
        """`python -m tests.x_fuzz 0-39` or `3,7`: the outcomes of these seeds, with a line for each."""
        ranges = [part.partition("-") for part in sys.argv[1].split(",")]
        draws = [self.draw(seed) for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
        found = self.found_of(draws, 120.0 + 20.0 * len(draws))
        for draw, outcome in zip(draws, found, strict=True):
            said = " ".join(outcome.split())[:600]
            print(f"{said} | {line_of(draw)}")
        print(Counter(outcome.split(":")[0] for outcome in found))
        sys.exit(int(any(map(self.is_bad, found))))
