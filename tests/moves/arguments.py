"""Moves: training arguments."""

from tests.moves import Kit, Move, Seen, with_arguments


def _accumulation(kit: Kit) -> Seen:
    # 18 rows: where the last micro-batch of an epoch is short, the stock Trainer's epochs count micro-batches
    args = kit.arguments(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    return kit.train(kit.trainer(args=args, train_dataset=kit.rows(18)))


MOVES: tuple[Move, ...] = (
    Move("`gradient_accumulation_steps=2`", _accumulation, ours="the epoch in the log counts optimizer steps"),
    Move("`weight_decay`, `warmup_steps`, a cosine schedule", with_arguments(weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine")),
    Move("`label_smoothing_factor`", with_arguments(label_smoothing_factor=0.1)),
    Move("evaluation by steps", with_arguments(eval_strategy="steps", eval_steps=2)),
    Move(
        "`fp16=True`", with_arguments(fp16=True), refused="fp16=True cannot be honoured", instead="use `bf16` or fp32",
    ),
    Move(
        "`torch_compile=True`", with_arguments(torch_compile=True), refused="torch_compile=True", instead="leave it off",
    ),
)  # fmt: skip
