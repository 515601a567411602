"""How long a pipeline takes: an exact event simulation of our 1F1B schedule with unequal micro-batches.

Follows `hf_hotspa/runtime/pipeline.py`: stage i of p runs `min(m, p - 1 - i)` warm-up forwards, then one forward and
one backward in turn, then the remaining backwards. Sends do not block; a stage waits for what it needs next. The usual
closed form `sum(t) + (p - 1) * max(t)` ignores that packs differ and that the last stage also runs the head.
"""

from collections.abc import Sequence


def one_forward_one_backward(
    forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], hops: Sequence[float] | None = None
) -> float:
    """Seconds until the last stage operation of a replica has ended.

    Args:
        forward: `forward[stage][micro-batch]` seconds.
        backward: `backward[stage][micro-batch]` seconds.
        hops: Seconds that the hidden state of each micro-batch, or its gradient, travels between two stages.
    """
    num_stages, total = len(forward), len(forward[0])
    if num_stages == 1:
        return sum(forward[0]) + sum(backward[0])
    if total == 0:
        return 0.0
    if hops is None:
        hops = [0.0] * total
    warm_up = [min(total, num_stages - 1 - stage) for stage in range(num_stages)]
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
            now, warm = clock[stage], warm_up[stage]
            while True:
                i, j = len(ended), len(back)
                if i < total and i <= warm + j:  # the next operation is a forward
                    if stage == 0:
                        ready = now
                    elif i < len(forwards[stage - 1]):
                        ready = max(now, forwards[stage - 1][i] + hops[i])
                    else:
                        break
                    now = ready + forward[stage][i]
                    ended.append(now)
                elif j < total:
                    if stage == last:
                        ready = now
                    elif j < len(backwards[stage + 1]):
                        ready = max(now, backwards[stage + 1][j] + hops[j])
                    else:
                        break
                    now = ready + backward[stage][j]
                    back.append(now)
                else:
                    break
                left -= 1
            clock[stage] = now
        assert left < before, "the schedule waits for itself"
    return max(clock)


def closed_form(stage_seconds: Sequence[float], num_stages: int) -> float:
    """`sum(t) + (p - 1) * max(t)`: the estimate that published planners use (Hetu's cost_model.py, for one)."""
    return sum(stage_seconds) + (num_stages - 1) * max(stage_seconds, default=0.0)
