"""Which degrees and options a strategy may have together, whatever the model. Plain data, no torch."""

from typing import Any

from hf_hotspa.errors import StrategyError

DEGREES = ("dp", "cp", "tp", "pp", "ep")
MAX_DEGREE = 1 << 20
CHUNK_FIX = "write the most tokens of a chunk, such as +ck4096, or leave +ck out"


def check_strategy(strategy: Any) -> None:
    """Refuses a `Strategy` that cannot be (`StrategyError`, see there); it asks this when it is made."""
    for axis in DEGREES:
        degree = getattr(strategy, axis)
        if type(degree) is not int or not 1 <= degree <= MAX_DEGREE:
            raise StrategyError(
                f"{axis} degree {degree!r} is not an integer between 1 and {MAX_DEGREE}",
                fix="write a strategy such as dp4tp2",
            )
    if strategy.stage_size % strategy.ep:
        raise StrategyError(
            f"strategy {strategy} divides experts over {strategy.ep} ranks, and each of its stages has {strategy.stage_size}",
            why="ep divides the experts of a layer over neighbouring ranks of its stage: dp * cp * tp of them",
            fix="let ep divide dp * cp * tp: dp4ep4, dp4ep2, dp2tp2ep4",
        )
    if strategy.ep > 1 and (strategy.z or strategy.ck):
        option = f"+z{strategy.z}" if strategy.z else f"+ck{strategy.ck}"
        raise StrategyError(
            f"strategy {strategy} has both experts over ranks (ep{strategy.ep}) and {option}",
            why="ranks that exchange tokens keep step by packs, and their chunks, or the units of their layers, do not",
            fix=f"leave {option} out, or ep{strategy.ep}",
        )
    if type(strategy.v) is not int or not 1 <= strategy.v <= MAX_DEGREE:
        raise StrategyError(f"{strategy.v!r} stages on each rank", fix="write +v2, or leave it out")
    if strategy.v > 1:
        _check_rounds(strategy)
    if strategy.shard_order and sorted(strategy.shard_order) != list(range(strategy.tp)):
        raise StrategyError(f"{strategy.shard_order} is not an order of the {strategy.tp} shards of {strategy}")
    if strategy.sp and strategy.tp == 1:
        raise StrategyError(
            f"strategy {strategy} is sequence parallel without tensor parallelism",
            why="sp divides the tokens over the ranks of tp",
            fix="use tp2 or more, or leave +sp out",
        )
    if strategy.z not in (0, 2, 3):
        raise StrategyError(
            f"there is no +z{strategy.z}", fix="use +z2 or +z3, or leave it out: that is ZeRO's stage 1"
        )
    if strategy.ck < 0:
        raise StrategyError(f"a chunk of {strategy.ck} tokens", fix=CHUNK_FIX)
    if (strategy.kg or strategy.kh) and (not strategy.ck or strategy.pp > 1):
        raise StrategyError(
            f"strategy {strategy} has +kg or +kh {'in a pipeline' if strategy.ck else 'without token chunks'}",
            why="a pipeline keeps the graphs of all chunks, and their keys and values with them"
            if strategy.ck
            else "they say how chunks of packs are kept",
            fix="leave them out" if strategy.ck else "write +ck4096, too, or leave them out",
        )


def _check_rounds(strategy: Any) -> None:
    """Several stages on each rank: of a pipeline, and of one whose replicas go their own way."""
    if strategy.pp == 1:
        raise StrategyError(
            f"strategy {strategy} has {strategy.v} stages on each rank and no pipeline",
            why="+v cuts the stages of a pipeline finer, and packs go round over its ranks",
            fix=f"use pp2 or more, or leave +v{strategy.v} out",
        )
    if strategy.z or strategy.ep > 1:
        option = f"+z{strategy.z}" if strategy.z else f"ep{strategy.ep}"
        raise StrategyError(
            f"strategy {strategy} has both several stages on each rank (+v{strategy.v}) and {option}",
            why="the stages of all replicas keep step by packs there, in the order of one stage on each rank",
            fix=f"leave {option} or +v{strategy.v} out",
        )
