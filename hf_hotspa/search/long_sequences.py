"""Strategies in chunks of tokens (`+ck`) for a sequence that no strategy holds without.

Owns when chunks come into a search, how long they are, how many keep their graphs and whether keys and values wait in host
memory; and how long a sequence each way holds (`longest_by_strategy`). Chunks cost a second forward pass, so they are looked at only where a sequence would not fit otherwise; longer ones
cost less than shorter ones, graphs that are kept spare a forward pass, and host memory is the last resort. Plain data.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import runs_chunks
from hf_hotspa.strategy import Strategy

CHUNK_SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
"""Tokens of chunks that are looked at: below, launches and the second pass over keys and values cost more than they save."""
_GRAPHS = (15, 7, 3, 1)


def with_chunks(
    strategies: Sequence[Strategy],
    longest: int,
    tokens: Callable[[Strategy], int],
    shape: ModelShape,
    *,
    schedule: str = "auto",
    has_host_memory: bool = True,
) -> list[Strategy]:
    """The strategies, and where none of them holds a sequence, those in chunks that do; or that come nearest to it.

    Args:
        strategies: What is looked at anyway.
        tokens: The longest sequence that a strategy holds.
        has_host_memory: Whether there is memory beside that of the devices.
    """
    if shape.ck_unsupported_reason or any(tokens(strategy) >= longest for strategy in strategies):
        return list(strategies)
    may_pipeline = runs_chunks(schedule)
    plain = [s for s in strategies if not s.ck and s.cp == s.ep == 1 and (s.pp == 1 or may_pipeline)]
    chunked = _that_hold(plain, longest, tokens, in_host=False)
    if not chunked and has_host_memory:
        chunked = _that_hold([s for s in plain if s.pp == 1], longest, tokens, in_host=True)
    if not chunked:  # what is missing is said of those that need the least
        chunked = [replace(s, ck=CHUNK_SIZES[-1], kh=has_host_memory and s.pp == 1) for s in plain]
    return [*strategies, *chunked]


def longest_by_strategy(
    asked: Strategy, shape: ModelShape, tokens: Callable[[Strategy], int], *, schedule: str = "auto"
) -> list[tuple[Strategy, int]]:
    """The longest sequence of some strategies: of the one asked for, of dp alone, and of as much of tp, of cp and of pp as
    divides the devices and the model allows. Each as it is, with `+rc`, and in the chunks that hold most, then with keys
    and values in host memory.

    Args:
        asked: With its options, which its row has, too.
        tokens: The longest sequence that a strategy holds.
    """
    longest = []
    for strategy in _shapes_beside(asked, shape):
        ways = [strategy, replace(strategy, rc=strategy.rc or 1)]
        plain = replace(strategy, ck=0, kg=0, kh=False)
        may_pipeline = strategy.pp == 1 or runs_chunks(schedule)
        if not shape.ck_unsupported_reason and may_pipeline and strategy.ep == 1:
            again = list(dict.fromkeys((plain, replace(plain, rc=plain.rc or 1))))
            for in_host in (False, True) if plain.pp == plain.cp == 1 else (False,):
                tried = [replace(way, ck=size, kh=in_host) for size in CHUNK_SIZES for way in again]
                ways.append(max(tried, key=tokens))
        longest += [(way, tokens(way)) for way in dict.fromkeys(ways)]
    return longest


def _shapes_beside(asked: Strategy, shape: ModelShape) -> list[Strategy]:
    """A strategy, and those that spread over one axis; the rest of the devices are dp."""
    world, shapes = asked.world_size, [asked, Strategy(dp=asked.world_size)]
    degrees = [degree for degree in range(world, 1, -1) if world % degree == 0]
    for axis in ("tp", "cp", "pp"):
        for degree in degrees:
            strategy = replace(Strategy(dp=world // degree), **{axis: degree})  # type: ignore[arg-type]
            if strategy.unsupported_reason(shape) is None:
                shapes.append(replace(strategy, sp=axis == "tp" and not shape.sp_unsupported_reason))
                break
    return list(dict.fromkeys(shapes))


def _that_hold(
    strategies: Iterable[Strategy], longest: int, tokens: Callable[[Strategy], int], *, in_host: bool
) -> list[Strategy]:
    """Of each strategy the longest chunks that hold the sequence, with as many graphs as do."""
    chunked = []
    for strategy in strategies:
        sized = (replace(strategy, ck=size, kh=in_host) for size in CHUNK_SIZES if size < longest)
        fitting = next((s for s in sized if tokens(s) >= longest), None)
        if fitting is not None:
            chunked.append(next((s for s in _with_graphs(fitting, longest) if tokens(s) >= longest), fitting))
    return chunked


def _with_graphs(strategy: Strategy, longest: int) -> Iterator[Strategy]:
    chunks = -(-longest // strategy.ck)
    for graphs in _GRAPHS if strategy.pp == 1 else ():
        if graphs < chunks:
            yield replace(strategy, kg=graphs)
