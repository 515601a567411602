"""Whether the ranks of a replica hold the same rows, at the price of one number in an agreement that is made anyway.

The ranks of a replica (tp, pp) train each of its packs together, so each reads the rows for itself: where a data set
gives them another crop, or another order, the activations of one row would be mixed with another's, with a plausible
loss. The collator leaves a digest of each pack (`MicroBatch.content`); a rank hands in their sum, weighted so that the
sums of all ranks add up to zero where every replica agrees. Ranks of different replicas hold different rows, and are not
compared. Only where they do not agree are the rows themselves compared and named.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hf_hotspa.data.collator import MicroBatch, MiniBatch
from hf_hotspa.errors import DataError, HotspaError
from hf_hotspa.parallel.agreement import Agreement, odd_ones, rank_names
from hf_hotspa.strategy import Strategy

_MODULUS = 1 << 64


def check_mini_batch(
    agreement: Agreement,
    mini_batch: MiniBatch,
    held: Mapping[str, str],
    error: HotspaError | None,
    where: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Returns when all ranks may begin a mini-batch: no error, one plan, and in each replica the same rows.

    Args:
        held: What ranks must have in common before a load. The others are as in `Agreement.check`.

    Raises:
        HotspaError: on every rank.
    """
    rank = agreement.rank
    agreement.check(
        {**mini_batch.digests(), **held},
        error,
        where,
        facts=facts,
        balance=balance_of(mini_batch, rank) if agreement.group is not None else 0,
        explain=lambda: rows_error(mini_batch, rank, agreement, where),
    )


def balance_of(mini_batch: MiniBatch, rank: int) -> int:
    """What this rank hands in: the numbers of all ranks add up to 0 modulo 2^64 where the rows are the same."""
    total = 0
    for phase in mini_batch.phases:
        content = 0
        for micro_batch in phase.micro_batches:
            content = (content * 0x9E3779B97F4A7C15 + micro_batch.content + 1) % _MODULUS
        total += _weight(phase.bucket.strategy, rank) * content
    return total % _MODULUS


def rows_error(mini_batch: MiniBatch, rank: int, agreement: Agreement, where: str) -> DataError:
    """What differs, where the numbers do not add up to 0 and the plan is the same on all ranks. A collective call."""
    mine = [[s for pack in phase.micro_batches for s in _sequences(pack)] for phase in mini_batch.phases]
    everyone = [json.loads(text) for text in agreement.texts(json.dumps(mine))]
    for index, phase in enumerate(mini_batch.phases):
        strategy = phase.bucket.strategy
        for replica in range(strategy.dp):
            ranks = replica_ranks(strategy, replica)
            rows = [place for place in zip(*(everyone[r][index] for r in ranks), strict=True) if _differ(place)]
            if rows:
                return _error(rows, ranks, strategy, f"{where}, strategy {strategy}, replica {replica}")
    return _error([], list(range(len(everyone))), None, where)


@lru_cache(maxsize=4096)
def replica_ranks(strategy: Strategy, replica: int) -> list[int]:
    """The ranks that train the packs of a replica together."""
    return [rank for rank in range(strategy.world_size) if strategy.coord(rank).dp == replica]


@lru_cache(maxsize=4096)
def _weight(strategy: Strategy, rank: int) -> int:
    """The weights of the ranks of a replica add up to 0; that of a rank alone is 0."""
    *others, last = replica_ranks(strategy, strategy.coord(rank).dp)
    return _odd(rank) if rank != last else -sum(map(_odd, others))


def _odd(rank: int) -> int:
    """An odd number of 64 bits: a product with it loses no bit."""
    return int.from_bytes(hashlib.sha256(str(rank).encode()).digest()[:8], "little") | 1


def _sequences(pack: MicroBatch) -> Iterator[tuple[int, int, str, str]]:
    """Dataset row, first token, digest of the tokens and of the labels of each sequence."""
    ends = pack.cu_seqlens.tolist()
    for (row, start), begin, end in zip(pack.keys, ends[:-1], ends[1:], strict=True):
        ids, labels = (t[0, begin:end].cpu().numpy().tobytes() for t in (pack.input_ids, pack.labels))
        yield row, start, hashlib.sha256(ids).hexdigest()[:16], hashlib.sha256(labels).hexdigest()[:16]


def _differ(place: Sequence[Any]) -> bool:
    return any(other != place[0] for other in place)


def _error(rows: list[Any], ranks: list[int], strategy: Strategy | None, where: str) -> DataError:
    what, odd, names = "tokens or labels", None, ""
    if rows:
        what = "tokens" if any(len({sequence[2] for sequence in place}) > 1 for place in rows) else "labels"
        odd = odd_ones([[tuple(sequence) for sequence in place] for place in rows])
        numbers = list(dict.fromkeys(place[0][0] for place in rows))
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        names = f", dataset row{'s' if len(numbers) > 1 else ''} {shown}"
    if odd:
        who = [ranks[at] for at in odd]
        text = f"{rank_names(who)} {'hold' if len(who) > 1 else 'holds'} other {what} than the ranks it trains with"
    else:
        text = f"{rank_names(ranks)} hold different {what} of the same rows"
    return DataError(
        text,
        where=where + names,
        why="the ranks of a replica train each row together, and each reads it for itself; nothing was sent",
        fix="give every rank the same rows: random crops and transforms must depend on the row and the epoch, not on the "
        "process; or train with dp alone, where each row is read by one rank",
    )
