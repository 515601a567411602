"""The sides of `side_by_side.py`: who they are, and which file runs them.

Each adapter has `run(work, turns, **options)`, which builds a trainer on this rank, trains, and returns the trained
weights on rank 0. What cannot be done raises, and the message is what the table says.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any

from contest import PAPER_STATIC

from hf_hotspa.strategy import strategies_of


@dataclass(frozen=True)
class Side:
    """One contestant.

    Args:
        name: Its name in tables and on the command line.
        module: The adapter, a file in this folder.
        options: Keyword arguments of its `run`.
        ours: Whether it is one of ours, which plan their packs and take a memory limit.
        tuned: Whether its micro-batch size is found by trial; others take single rows, or packs.
        divisible: Whether it packs rows that it could as well train one by one.
        ladder: Whether one run can measure the memory of several lengths: not where rows of a mini-batch
            share packs, or are padded to the longest of all.
        differs: Why its loss cannot agree with the others', if it cannot.
        own_batches: Whether its mini-batches hold other sequences.
        steps: The most mini-batches that it trains, for one that takes a minute for each.
    """

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    ours: bool = False
    tuned: bool = False
    divisible: bool = False
    ladder: bool = True
    differs: str = ""
    own_batches: bool = False
    steps: int | None = None

    def run(self, work: Any, turns: Any) -> Any:
        """Trains on this rank."""
        return importlib.import_module(f"peers.sides.{self.module}").run(work, turns, **self.options)


def static_names(ranks: int) -> tuple[str, ...]:
    """Our strategies for so many ranks; those without a pipeline first."""
    found = sorted(strategies_of(ranks), key=lambda s: (s.pp > 1, s.tp, s.pp))
    return tuple(map(str, found))


def sides_of(ranks: int) -> tuple[Side, ...]:
    """All contestants, on so many ranks."""
    return (
        Side("Trainer + DDP, padded", "stock", {"kind": "padded"}, tuned=True),
        Side("Trainer + DDP, batch_rebalance", "stock", {"kind": "rebalanced"}, tuned=True),
        Side("Trainer + DDP, flattened", "stock", {"kind": "flattened"}, tuned=True),
        Side(
            "TRL SFTTrainer, bfd",
            "trl_sft",
            ladder=False,
            differs="packs over the whole data set: its mini-batches hold other sequences",
            own_batches=True,
        ),
        Side("FSDP2 of transformers, flattened", "fsdp", {"kind": "native"}, tuned=True),
        Side("FSDP2 of accelerate, flattened", "fsdp", {"kind": "accelerate"}),
        Side(f"cp{ranks} of accelerate, FSDP2, flattened", "fsdp", {"kind": "context"}),
        Side(f"tp{ranks} of transformers, Trainer", "tensor_parallel", {"kind": "trainer"}),
        Side(
            f"tp{ranks} of transformers, plain loop, packed",
            "tensor_parallel",
            {"kind": "loop"},
            divisible=True,
            ladder=False,
        ),
        *(
            Side(
                f"DeepSpeed ZeRO-{stage}, flattened",
                "deepspeed_zero",
                {"stage": stage},
                tuned=True,
            )
            for stage in (1, 2, 3)
        ),
        Side(
            f"DeepSpeed Ulysses (sp{ranks}), padded to the longest",
            "deepspeed_zero",
            {"stage": 3, "ulysses": True},
            ladder=False,
            differs="the mean over a micro-batch: every row weighs the same, however long",
            steps=2,
        ),
        *(Side(f"ours, {name}", "ours", ours=True) for name in static_names(ranks)),
        *(Side(f"ours, static, {how}", "ours", ours=True) for how in PAPER_STATIC),
        Side("ours, the paper's way", "ours", ours=True),
        Side("ours, auto", "ours", ours=True),
    )
