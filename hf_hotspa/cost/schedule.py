"""How long a pipeline takes: an exact event simulation of a schedule, ours or another, with unequal micro-batches.

Follows `hf_hotspa/runtime/pipeline.py`: each stage runs the operations of `data.pipeline_order`. Sends do not block; a
stage waits for what it needs next. The usual closed form `sum(t) + (p - 1) * max(t)` ignores that packs differ and that
the last stage also runs the head.
"""

from collections.abc import Sequence

from hf_hotspa.data.pipeline_order import Operation, operations


def one_forward_one_backward(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    hops: Sequence[float] | None = None,
    order: Sequence[Sequence[Operation]] | None = None,
) -> float:
    """Seconds until the last stage operation of a replica has ended.

    Args:
        forward: `forward[stage][micro-batch]` seconds.
        backward: `backward[stage][micro-batch]` seconds.
        hops: Seconds that the hidden state of each micro-batch, or its gradient, travels between two stages.
        order: `order[stage]`: what each stage runs, in order; our 1F1B without a limit when None.
    """
    num_stages, total = len(forward), len(forward[0])
    if num_stages == 1:
        return sum(forward[0]) + sum(backward[0])
    if total == 0:
        return 0.0
    if hops is None:
        hops = [0.0] * total
    order = order or [operations([total] * total, num_stages, stage) for stage in range(num_stages)]
    clock = [0.0] * num_stages
    # when the forward (backward) of a micro-batch ended on each stage; they end in order, so a list grows
    forwards: list[list[float]] = [[] for _ in range(num_stages)]
    backwards: list[list[float]] = [[] for _ in range(num_stages)]
    left = 2 * num_stages * total
    last = num_stages - 1
    while left:
        before = left
        for stage in range(num_stages):
            ended, back = forwards[stage], backwards[stage]
            now = clock[stage]
            while len(ended) + len(back) < 2 * total:
                i, is_backward = order[stage][len(ended) + len(back)]
                if not is_backward:
                    if stage == 0:
                        ready = now
                    elif i < len(forwards[stage - 1]):
                        ready = max(now, forwards[stage - 1][i] + hops[i])
                    else:
                        break
                    now = ready + forward[stage][i]
                    ended.append(now)
                else:
                    if stage == last:
                        ready = now
                    elif i < len(backwards[stage + 1]):
                        ready = max(now, backwards[stage + 1][i] + hops[i])
                    else:
                        break
                    now = ready + backward[stage][i]
                    back.append(now)
                left -= 1
            clock[stage] = now
        assert left < before, "the schedule waits for itself"
    return max(clock)


def closed_form(stage_seconds: Sequence[float], num_stages: int) -> float:
    """`sum(t) + (p - 1) * max(t)`: the estimate that published planners use (Hetu's cost_model.py, for one)."""
    return sum(stage_seconds) + (num_stages - 1) * max(stage_seconds, default=0.0)
