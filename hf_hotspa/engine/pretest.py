"""The pretest of SEMI-migration (Wang et al., arXiv 2401.11469, sections IV-B and IV-C): what resizing and migrating cost here.

Before training, each tensor-parallel group of a strategy makes the copies, messages and products of a few shares of the
columns of every kind of linear that it has, on tensors of random numbers, forward and backward. Lines through these samples are
the curves of equations 2 and 3: Omega (resizing: a static part and one by column), Phi_1 (sending, the same) and Phi_2 (computing).
All ranks then agree on them in one gather a strategy.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.phase import moment
from hf_hotspa.parallel.collectives import PRODUCTS
from hf_hotspa.parallel.flexible_linear import Exchange, FlexibleWork, OwnColumns, Part, Product
from hf_hotspa.stragglers.columns import migrate
from hf_hotspa.stragglers.giving import Giving, fitted_line

SHARES = (0.25, 0.5, 0.75)
"""Of the columns, those that are tried."""
MOST_TOKENS = 1024
"""A pretest needs no more: costs are nearly in proportion from there on."""
_TIMES = 3


def pretest(engine: HotSPaEngine, giving: Giving) -> None:
    """Measures every strategy with shards, and gives the curves to who decides. Collective.

    Args:
        giving: Of the engine's strategies; gets its `curves`, the same on all ranks.
    """
    packs = {bucket.strategy: bucket.pack_tokens for bucket in engine.buckets}
    for strategy, runner in engine.phases.items():
        if (work := runner.replica.flexible) is None:
            continue
        tokens = min(packs[strategy], MOST_TOKENS)
        mine = measure(work, tokens, runner.replica.compute_dtype, engine.device)
        rows = engine.agreement.gather(mine).tolist()
        giving.take_pretest(str(strategy), rows, tokens)


def measure(work: FlexibleWork, tokens: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """What this rank found. Collective in the group.

    Returns:
        The columns of all its products; then, of all its products together, static, extract (of one column), send, compute, and
        the static part of send, in seconds.
    """
    kinds = Counter(work.products.values())
    columns = sum(product.columns[work.position] * number for product, number in kinds.items())
    exchange, work.exchange = work.exchange, Exchange.BROADCAST
    samples = []
    for share in SHARES:
        seconds_of = [0.0, 0.0, 0.0]
        for product, number in kinds.items():
            for i, seconds in enumerate(_sample(work, product, share, tokens, dtype, device)):
                seconds_of[i] += seconds * number
        samples.append((share * columns, seconds_of))
    work.exchange = exchange
    (static, extract), (send_static, send), (_, compute) = (
        fitted_line([(n, seconds_of[i]) for n, seconds_of in samples]) for i in range(3)
    )
    return [float(columns), static, extract, send, compute, send_static]


def _sample(
    work: FlexibleWork, product: Product, share: float, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of one linear, forward and backward: resizing a share of its columns, sending and computing as many."""
    columns, outputs = product.columns[work.position], product.outputs[work.position]
    x, w, grad = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((tokens, columns), (outputs, columns), (tokens, outputs))
    )
    count = max(round(columns * share), 1)
    kept = torch.arange(max(columns - count, 1), device=device)
    resized = OwnColumns(columns, columns, kept)

    def extract() -> None:
        for _ in range(2):  # forward and backward
            resized.take(x), resized.take(w)
        resized.of_input(x[:, : len(kept)])
        resized.of_weight(w[:, : len(kept)])

    def compute() -> None:
        PRODUCTS.of(x[:, :count], w[:, :count].t())
        PRODUCTS.of(grad, w[:, :count])
        PRODUCTS.of(grad.t(), x[:, :count])

    return (
        _least(extract, device, None),
        _least(lambda: _send(work, product, share, tokens, x), device, work.group),
        _least(compute, device, None),
    )


def _send(work: FlexibleWork, product: Product, share: float, tokens: int, like: Tensor) -> None:
    """The messages of a product of which the first position of the group gives a share away."""
    giver = 0
    migration = migrate(work.size, giver, product.columns[giver], share)
    if migration is None:
        return
    part, columns, outputs = Part(migration, work), product.columns[giver], product.outputs[giver]

    def given(rows: int, width: int) -> Tensor | None:
        return like.new_zeros(rows, width) if part.gives else None

    def made(rows: int) -> Tensor | None:
        return None if part.gives else like.new_zeros(rows, part.own.stop - part.own.start)

    sent = columns - migration.first
    part.columns(given(outputs, sent), outputs, like)
    if product.is_row:
        part.columns(given(tokens, sent), tokens, like)
        part.collect(made(tokens + outputs), tokens + outputs, like)
    else:
        part.sum_to_giver(like.new_zeros(tokens, outputs))
        part.whole(given(tokens, outputs), (tokens, outputs), like)
        part.collect(made(outputs), outputs, like)


def _least(run: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The least seconds of a few runs; of all ranks of a group at once, where one is given."""
    seconds = []
    for _ in range(_TIMES):
        if group is not None:
            dist.barrier(group)
        begin = moment(device)
        run()
        seconds.append(moment(device) - begin)
    return min(seconds)
