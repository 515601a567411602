"""Moves: training arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tests.moves import COMMON, MINI_BATCH, STRATEGIES, Drawn, Kit, Move, Seen, on, with_arguments


def _accumulation_of_accelerate(kit: Kit) -> Seen:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = kit.arguments(per_device_train_batch_size=4, accelerator_config=config)
    return kit.train(kit.trainer(args=args, train_dataset=kit.rows(16)))


def _accumulation_read(kit: Kit) -> Seen:
    seen: list[int] = []
    read = on(on_step_end=lambda args, **_: seen.append(args.gradient_accumulation_steps))
    args = kit.arguments(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    trainer = kit.trainer(args=args, callbacks=[read])
    trainer.train()
    return {"in training": seen, "afterwards": trainer.args.gradient_accumulation_steps}


def _of_one_length(kit: Kit) -> list[dict[str, Any]]:
    long = [row for row in kit.rows(80) if len(row["input_ids"]) >= 24]
    return [{name: value[:24] for name, value in row.items()} for row in long[:20]]


def _tokens(kit: Kit, kind: str, rows: Any = None) -> Seen:
    trainer = kit.trainer(args=kit.arguments(include_num_input_tokens_seen=kind), train_dataset=rows)
    trainer.train()
    logged = [log["num_input_tokens_seen"] for log in trainer.state.log_history]
    seen = {"seen": trainer.state.num_input_tokens_seen, "logged": logged}
    return seen if rows is None else {**seen, "flos": float(trainer.state.total_flos)}


def _last_dropped(kit: Kit) -> Seen:
    rows = kit.rows()
    size = 18 // kit.world_size
    args = kit.arguments(
        dataloader_drop_last=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=size
    )
    trainer = kit.trainer(args=args, train_dataset=rows, eval_dataset=rows)
    seen = kit.train(trainer)
    predicted = trainer.predict(rows)
    return {**seen, "rows": len(predicted.predictions), "loss": predicted.metrics["test_loss"]}


def _plain(kit: Kit) -> Seen:
    size = MINI_BATCH // kit.world_size
    args = TrainingArguments(
        **{**COMMON, "output_dir": str(kit.folder / "out"), "per_device_train_batch_size": size, "max_steps": 9}
    )
    if not kit.stock:
        args.hotspa_strategies, args.hotspa_report = STRATEGIES[kit.world_size], False
    trainer = kit.trainer(args=args)
    args.max_steps = 4
    return kit.train(trainer)


def _by_length(kit: Kit) -> Seen:
    # one mini-batch of all rows: their order is specific to this trainer
    changes = {"per_device_train_batch_size": 20, "train_sampling_strategy": "group_by_length"}
    return kit.train(kit.trainer(args=kit.arguments(**changes)))


def _by_place(kit: Kit) -> Seen:
    def made(model: Any, args: Any, data_collator: Any = None, train_dataset: Any = None, **rest: Any) -> Any:
        return kit.trainer_class(model, args, data_collator, train_dataset, **rest)

    return kit.train(kit.trainer(made))


def _loaders(kit: Kit) -> Seen:
    args = kit.arguments(per_device_eval_batch_size=4 // kit.world_size)
    trainer = kit.trainer(args=args, eval_dataset=kit.rows())
    loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    return {"batches": [len(loader) for loader in loaders], "rows": [loader.total_batch_size for loader in loaders]}


def _data_sets(kit: Kit) -> Seen:
    rows, others = kit.rows(), kit.rows(seed=4)
    args = kit.arguments(dataloader_persistent_workers=True, dataloader_num_workers=1)
    trainer = kit.trainer(args=args, train_dataset=rows, eval_dataset={"rows": rows, "others": others})
    loaders = [trainer.get_eval_dataloader(name) for name in ("rows", "others", "rows")]
    own = [loader.dataset is given for loader, given in zip(loaders, (rows, others, rows), strict=True)]
    return {"own": own, "kept": loaders[0] is loaders[2]}


@dataclass
class _OwnArguments(TrainingArguments):
    temperature: float = 0.5


def _own_arguments_saved(kit: Kit) -> Seen:
    own: Any = _OwnArguments(**{**COMMON, "output_dir": str(kit.folder / "out")}, temperature=0.7)
    own.hotspa_stock_checkpoints = True
    trainer = kit.trainer(args=own)
    trainer.save_model(str(kit.folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    found: Any = torch.load(Path(kit.folder, "saved", "training_args.bin"), weights_only=False)
    return {"temperature": found.temperature, "steps": found.max_steps, "kind": isinstance(found, _OwnArguments)}


def _own_arguments_read(kit: Kit) -> Seen:
    def read(args: Any, optimizer: Any, **_: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = args.temperature

    own: Any = _OwnArguments(**{**COMMON, "output_dir": str(kit.folder / "out")}, temperature=0.7)
    own.per_device_train_batch_size = MINI_BATCH // kit.world_size
    own.hotspa_strategies, own.hotspa_report = STRATEGIES[kit.world_size], False
    return kit.train(kit.trainer(args=own, callbacks=[on(on_step_begin=read)]))


def _arguments_of_a_library(kit: Kit) -> Seen:
    @dataclass
    class TunedConfig(TrainingArguments):
        loss_type: str = "nll"
        max_length: int | None = 1024

    TunedConfig.__module__ = "tuned.config"  # as of one that is installed with a TunedTrainer
    given: Any = TunedConfig(**{**COMMON, "output_dir": str(kit.folder / "out")}, loss_type="dft")
    return kit.train(kit.trainer(args=given))


MOVES: tuple[Move, ...] = (
    Move("a custom subclass of `TrainingArguments`, whose fields a callback reads", _own_arguments_read),
    Move(
        "the arguments of another library's trainer (TRL's `SFTConfig`), with a field that cannot be honoured", _arguments_of_a_library,
        error="TunedConfig has loss_type='dft'",
        instead="the alternative is in the message and in the [table of TRL's fields](migration.md#from-trls-sfttrainer)",
    ),
    Move("`Trainer(model, args, collator, rows)`: arguments by their place", _by_place),
    Move("`len` and `total_batch_size` of the data loaders", _loaders),
    Move("`dataset` of the evaluation data loaders, with `dataloader_persistent_workers=True`", _data_sets),
    Move(
        "a subclass of `TrainingArguments`, read from the `training_args.bin` of `save_model`", _own_arguments_saved,
        ours="with `hotspa_stock_checkpoints=True`; without it nothing is pickled",
    ),
    Move("`accelerator_config` with `num_steps=2`", _accumulation_of_accelerate),
    Move("`args.gradient_accumulation_steps` read by a callback and afterwards", _accumulation_read),
    Move('`include_num_input_tokens_seen="non_padding"`', lambda kit: _tokens(kit, "non_padding")),
    Move(
        '`include_num_input_tokens_seen="all"`, and `total_flos`', lambda kit: _tokens(kit, "all", _of_one_length(kit)),
        ours="there are no pads to count",
    ),
    Move("`dataloader_drop_last` in evaluation and prediction", _last_dropped),
    Move("plain `TrainingArguments`, changed afterwards", _plain, ours="every `hotspa_*` flag at its default"),
    Move('`train_sampling_strategy="group_by_length"`', _by_length, ours="the order depends on the seed and the epoch only"),
    Move("`bf16_full_eval=True` in fp32 training", with_arguments(bf16_full_eval=True, eval_strategy="steps", eval_steps=2)),
    Move("`auto_find_batch_size=True`", with_arguments(auto_find_batch_size=True), ours="packs bound the memory"),
    Move("`torch_empty_cache_steps=1`", with_arguments(torch_empty_cache_steps=1)),
    Move("`gradient_accumulation_steps=2`", Drawn("accumulation", 2), ours="the epoch in the log counts optimizer steps"),
    Move("`weight_decay`, `warmup_steps`, a cosine schedule", Drawn("lr_scheduler_type", "cosine")),
    Move("`label_smoothing_factor`", Drawn("label_smoothing_factor", 0.1)),
    Move("evaluation by steps", Drawn("evaluates", "loss")),
    Move(
        "`fp16=True`", with_arguments(fp16=True), left=True, error="fp16=True cannot be honoured", instead="use `bf16` or fp32",
    ),
    Move(
        "`torch_compile=True`", with_arguments(torch_compile=True, torch_compile_backend="eager", max_steps=1), left=True, error="torch_compile=True", instead="leave it off",
    ),
)  # fmt: skip
