"""Moves: optimizers and schedulers."""

import torch

from tests.moves import Kit, Move, Seen, with_arguments


def _class_and_options(kit: Kit) -> Seen:
    return kit.train(kit.trainer(optimizer_cls_and_kwargs=(torch.optim.NAdam, {"lr": 5e-3})))


MOVES: tuple[Move, ...] = (
    Move('`optim="sgd"` with momentum', with_arguments(optim="sgd", optim_args="momentum=0.9")),
    Move("`optimizer_cls_and_kwargs`", _class_and_options),
    Move(
        '`optim="adafactor"`', with_arguments(optim="adafactor"), refused="'adafactor' cannot be honoured",
        instead="an elementwise optimizer, such as AdamW",
    ),
)  # fmt: skip
