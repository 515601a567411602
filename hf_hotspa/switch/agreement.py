"""Agreement: all ranks compare what they planned before anything moves.

A transfer that two ranks see differently is silent corruption (equal sizes) or the end of the process (other sizes), so
plans and everything else that decides what is sent are compared by digest first. Both exchanges have sizes that do not
depend on what is compared.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hf_hotspa.errors import PlanMismatchError
from hf_hotspa.switch.plan import SwitchPlan

_WORDS = 4  # int64 words of a SHA-256
_MAX_LISTED = 5


def agree_plans(
    plans: Sequence[SwitchPlan],
    extra: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Compares the digests of plans, and further named texts, over all ranks of a group. A collective call.

    Args:
        plans: The plans, in the same order on every rank.
        extra: Anything else that must be equal, by name: a digest of the configuration, of the model, ...
        group: The process group; None for the default one.
        device: Where the group's backend communicates.

    Raises:
        PlanMismatchError: on every rank, naming what differs and which ranks agree; nothing was sent.
    """
    digests = {f"plan {index} {plan.name!r}": plan.digest() for index, plan in enumerate(plans)}
    digests |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (extra or {}).items()}
    # First what is compared, in a fixed size: lists of different lengths cannot be gathered together.
    subject = f"{len(plans)} plans, {', '.join(extra or ())}"
    subject_digest = hashlib.sha256(subject.encode()).hexdigest()
    _compare({"what to compare": subject_digest}, group, device, f"this rank compares {subject}")
    _compare(digests, group, device, "the ranks would send different data")


def _compare(digests: Mapping[str, str], group: dist.ProcessGroup | None, device: torch.device | str, why: str) -> None:
    words = [_to_int64(digest[16 * i : 16 * (i + 1)]) for digest in digests.values() for i in range(_WORDS)]
    if not words:
        return
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rows = {rank: tuple(row.tolist()) for rank, row in zip(ranks, everyone, strict=True)}
    differing = []
    for index, name in enumerate(digests):
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, row in rows.items():
            holders.setdefault(row[index * _WORDS : (index + 1) * _WORDS], []).append(rank)
        if len(holders) > 1:
            sides = "; ".join(f"ranks {agreeing} have {_short(words)}" for words, agreeing in holders.items())
            differing.append(f"{name}: {sides}")
    if differing:
        more = f" (and {len(differing) - _MAX_LISTED} more)" if len(differing) > _MAX_LISTED else ""
        raise PlanMismatchError(
            f"ranks disagree on {' | '.join(differing[:_MAX_LISTED])}{more}",
            where=f"rank {dist.get_rank()}",
            why=f"{why}; nothing was sent",
            fix="start every rank with the same model, configuration, environment and package version",
        )


def _to_int64(digits: str) -> int:
    return int.from_bytes(bytes.fromhex(digits), "big", signed=True)


def _short(words: tuple[int, ...]) -> str:
    return words[0].to_bytes(8, "big", signed=True).hex()[:8]
