"""Moves: checkpoints."""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback

from tests.families import MIXTURE
from tests.lora import tiny_lora
from tests.moves import MINI_BATCH, Drawn, Kit, Move, Seen


def folders(kit: Kit, name: str = "out") -> list[str]:
    """The remaining checkpoints."""
    return sorted(path.name for path in (kit.folder / name).glob("checkpoint-*"))


def flat(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loaded(path: Path) -> Tensor:
    """The weights that `from_pretrained` reads from a folder."""
    return flat(AutoModelForCausalLM.from_pretrained(path))


def everyone(kit: Kit) -> None:
    """Waits for all ranks: a user's script reads files after its own barrier."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def saved(**changes: Any) -> Any:
    """The move of training with saves, and loading the saved model."""

    def run(kit: Kit) -> Seen:
        rows = kit.rows()
        args = kit.arguments(**{"save_strategy": "steps", "save_steps": 2, **changes})
        seen = kit.train(kit.trainer(args=args, train_dataset=rows, eval_dataset=rows))
        everyone(kit)
        seen["folders"] = folders(kit)
        seen["loaded"] = {name: loaded(kit.folder / "out" / name) for name in folders(kit)}
        return seen

    return run


def best(**changes: Any) -> Any:
    """The move of training for the best model, which is then evaluated and saved."""

    def run(kit: Kit) -> Seen:
        rows = kit.rows()
        options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **changes}
        # a rate that makes the last steps worse than the previous one
        args = kit.arguments(load_best_model_at_end=True, learning_rate=0.2, **options)
        trainer = kit.trainer(args=args, train_dataset=rows, eval_dataset=rows)
        seen = kit.train(trainer)
        seen["evaluated"] = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(kit.folder / "saved"))
        everyone(kit)
        state = trainer.state
        seen["best"] = [state.best_metric, state.best_global_step, Path(state.best_model_checkpoint).name]
        return {**seen, "folders": folders(kit), "saved": loaded(kit.folder / "saved")}

    return run


def reused(kit: Kit) -> Seen:
    """A new run in the folder of an earlier one, whose checkpoints have higher steps; then it resumes."""
    options = {"save_strategy": "steps", "save_total_limit": 2}
    for last in (4, 2):
        for name in folders(kit):  # written long ago
            os.utime(kit.folder / "out" / name, (0, 10**9 + int(name.rpartition("-")[2])))
        everyone(kit)
        seen = kit.train(kit.trainer(args=kit.arguments(max_steps=last, save_steps=last // 2, **options)))
        everyone(kit)
    seen["folders"] = folders(kit)
    trainer = kit.trainer(args=kit.arguments(max_steps=3, save_steps=1, **options))
    return {**seen, **{f"resumed {k}": v for k, v in kit.train(trainer, resume_from_checkpoint=True).items()}}


def odd_generation_config(kit: Kit) -> Seen:
    """A model whose generation config transformers loads but cannot write: the stock Trainer raises at its first save."""
    model = kit.model()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.6
    return kit.train(kit.trainer(model=model, args=kit.arguments(save_strategy="steps", save_steps=2)))


class StopAt(TrainerCallback):
    """Ends a run early, like an interrupted job."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def resumed(resume: Any, model: Any = None, **changes: Any) -> Any:
    """The move of resuming a run that ended early; `resume` is True, or the name of a checkpoint."""

    def run(kit: Kit) -> Seen:
        args = kit.arguments(save_strategy="steps", save_steps=1, **changes)
        make = model or kit.model
        kit.train(kit.trainer(args=args, model=make(), callbacks=[StopAt(2)]))
        kit.close()
        everyone(kit)
        again = kit.trainer(args=args, model=kit.model(seed=5) if model is None else make())
        return kit.train(again, resume_from_checkpoint=resume if resume is True else str(kit.folder / "out" / resume))

    return run


def from_stock(step: int, resume: Any = None, damage: Any = None, model: Any = None, **changes: Any) -> Any:
    """The move of resuming, with either Trainer, a run of the stock one (on several processes with DDP)."""

    def run(kit: Kit) -> Seen:
        options = {"save_strategy": "steps", "save_steps": step, **changes}
        writer = Kit(True, kit.world_size, kit.folder)
        options["per_device_train_batch_size"] = MINI_BATCH // options.get("gradient_accumulation_steps", 1)
        args = writer.arguments(**options)
        make, rows = model or kit.model, kit.rows(18)
        writer.train(writer.trainer(args=args, model=make(), train_dataset=rows, callbacks=[StopAt(step)]))
        checkpoint = kit.folder / "out" / f"checkpoint-{step}"
        everyone(kit)
        if damage is not None and int(torch.distributed.is_initialized() and torch.distributed.get_rank()) == 0:
            damage(checkpoint)
        everyone(kit)
        args = kit.arguments(**{**options, "save_strategy": "no"})
        trainer = kit.trainer(args=args, model=make(seed=5), train_dataset=rows)
        return kit.train(trainer, resume_from_checkpoint=resume or str(checkpoint))

    return run


@cache
def _stock_resumes_on_cpu() -> None:
    """The stock Trainer asks for the device `cpu:0`, which an older torch does not accept when it reads files."""
    torch.serialization.register_package(
        30, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )


def to_stock(step: int, model: Any = None, **changes: Any) -> Any:
    """The move of going back: the stock Trainer resumes a run of either (on several processes with DDP)."""

    def run(kit: Kit) -> Seen:
        make, rows = model or kit.model, kit.rows(18)
        options = {"save_strategy": "steps", "save_steps": step, "hotspa_stock_checkpoints": True, **changes}
        args = kit.arguments(**options)
        kit.train(kit.trainer(args=args, model=make(), train_dataset=rows, callbacks=[StopAt(step)]))
        kit.close()
        everyone(kit)
        stock = Kit(True, kit.world_size, kit.folder)
        args = stock.arguments(**{**options, "save_strategy": "no"})
        trainer = stock.trainer(args=args, model=make(seed=5), train_dataset=rows)
        _stock_resumes_on_cpu()
        return stock.train(trainer, resume_from_checkpoint=str(kit.folder / "out" / f"checkpoint-{step}"))

    return run


class Opens(TrainerCallback):
    """Opens the folder in `on_save`, like a script that pushes or evaluates it."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        config = json.loads((path / "config.json").read_text())
        step = json.loads((path / "trainer_state.json").read_text())["global_step"]
        self.found.append([config["architectures"], config["dtype"], step, loaded(path)])


def opened_in_on_save(kit: Kit) -> Seen:
    callback = Opens()
    seen = kit.train(kit.trainer(args=kit.arguments(save_strategy="steps", save_steps=2), callbacks=[callback]))
    return {**seen, "found": callback.found}


def model_files(kit: Kit) -> Seen:
    from tests.gloo.test_checkpoint import tokenizer

    args = kit.arguments(save_strategy="steps", save_steps=4, save_only_model=True)
    kit.train(kit.trainer(args=args, processing_class=tokenizer()))
    everyone(kit)
    path = kit.folder / "out" / "checkpoint-4"
    own = {"training_args.bin", "training_args.json", "MANIFEST.json"}  # the arguments, pickled or not; our hashes
    ids = AutoTokenizer.from_pretrained(path)("def return")["input_ids"]
    return {"files": sorted({file.name for file in path.iterdir()} - own), "ids": ids, "weights": loaded(path)}


def tokenizer_of_the_collator(kit: Kit) -> Seen:
    from tests.gloo.test_checkpoint import tokenizer

    collator = DataCollatorForSeq2Seq(tokenizer())
    args = kit.arguments(save_strategy="steps", save_steps=4)
    trainer = kit.trainer(args=args, data_collator=collator)
    seen = kit.train(trainer)
    trainer.save_model(str(kit.folder / "saved"))
    everyone(kit)
    paths = [kit.folder / "out" / "checkpoint-4", kit.folder / "saved"]
    return {**seen, "ids": [AutoTokenizer.from_pretrained(path)("def return")["input_ids"] for path in paths]}


def best_adapter(kit: Kit) -> Seen:
    rows = kit.rows()
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so that it is not the last one
    args = kit.arguments(load_best_model_at_end=True, save_only_model=True, **options)
    trainer = kit.trainer(model=lora_model(), args=args, train_dataset=rows, eval_dataset=rows)
    return {**kit.train(trainer), "best": trainer.state.best_global_step, "evaluated": trainer.evaluate()["eval_loss"]}


_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def lora_model(seed: int = 0) -> Any:
    return tiny_lora("llama_gqa_bias", seed=seed)


def named_adapter(seed: int = 0) -> Any:
    return tiny_lora("llama_gqa_bias", seed=seed, adapter_name="mine")


_BESIDE: dict[str, Any] = {
    "target_modules": ["q_proj", "embed_tokens"],
    "modules_to_save": ["lm_head", "norm"],
    "use_dora": True,
}


def adapter_with_copies(seed: int = 0) -> Any:
    model = tiny_lora(
        "llama_gqa_bias", **_BESIDE
    )  # the base is the same: PEFT saves an adapted embedding's weights, too
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + seed)
    return model


def adapter(family: str, **config: Any) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        from peft import PeftModel

        model = tiny_lora(family, **config)
        seen = kit.train(kit.trainer(model=model, args=kit.arguments(save_strategy="steps", save_steps=2)))
        everyone(kit)
        path, name = kit.folder / "out" / "checkpoint-2", config.get("adapter_name", "default")
        names = {"adapter_config.json", "adapter_model.safetensors", "trainer_state.json", "README.md"}
        seen["files"] = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.name in names)
        inside = path if name == "default" else path / name
        return {**seen, "loaded": flat(PeftModel.from_pretrained(kit.model(family), str(inside)))}

    return run


def not_found(resume: str | bool, words: str) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        asked = resume if resume is True else str(kit.folder / str(resume))
        trainer = kit.trainer()
        everyone(kit)
        try:
            trainer.train(resume_from_checkpoint=asked)
        except ValueError as error:
            return {"said": words in str(error)}
        return {"said": "nothing"}

    return run


MOVES: tuple[Move, ...] = (
    Move("`from_pretrained` of a `checkpoint-N`", saved()),
    Move("`save_only_model=True`", saved(save_only_model=True)),
    Move("files of a checkpoint: configs, weights, tokenizer", model_files),
    Move("`save_total_limit=1`", saved(save_total_limit=1)),
    Move("`save_total_limit=2` in the folder of an earlier run with higher steps", reused),
    Move(
        "saving a generation config that transformers cannot write",
        odd_generation_config,
        error=r"generation_config.json cannot be written",
        instead="repair it (here `do_sample=True`): the stock `Trainer` raises at its first save",
    ),
    Move('`save_strategy="epoch"`', saved(save_strategy="epoch", max_steps=-1, num_train_epochs=1)),
    Move(
        '`save_strategy="best"`',
        saved(save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss"),
    ),
    # a rate of 0.2 amplifies rounding
    Move("`load_best_model_at_end`, then `evaluate` and `save_model`", best(), tolerance=1e-4),
    Move("`load_best_model_at_end` with `save_only_model`", best(save_only_model=True, save_total_limit=2), tolerance=1e-4),
    Move("an `on_save` that opens the folder", opened_in_on_save),
    Move("checkpoints of a LoRA adapter, loaded by PEFT", adapter("llama_gqa_bias")),
    Move("the same of fused experts (`target_parameters`)", adapter(MIXTURE, **_EXPERTS)),
    Move("the same of an adapter with another name than `default`, which has a folder", adapter("llama_gqa_bias", adapter_name="mine")),
    Move("resuming with such an adapter", resumed(True, model=named_adapter)),
    Move("the same from a checkpoint of the stock `Trainer`", from_stock(2, model=named_adapter)),
    Move("the other way, to the stock `Trainer`, with `hotspa_stock_checkpoints=True`", to_stock(2, model=named_adapter)),
    Move("an adapter with DoRA, on the embedding, and with `modules_to_save`, from there", from_stock(2, model=adapter_with_copies)),
    Move("the same to the stock `Trainer`", to_stock(2, model=adapter_with_copies)),
    Move("the best adapter at the end, with `save_only_model`", best_adapter),
    Move("a tokenizer that only the collator has, in checkpoints and in `save_model`", tokenizer_of_the_collator),
    Move("`resume_from_checkpoint=True`", resumed(True)),
    Move("`resume_from_checkpoint` with a path", Drawn("stop", 1)),
    Move("the same without such a folder: a `ValueError`", not_found("nowhere", "Can't find a valid checkpoint at")),
    Move("`resume_from_checkpoint=True` without a checkpoint: a `ValueError`",
         not_found(True, "No valid checkpoint found in output directory")),
    Move("resuming from a checkpoint of the stock `Trainer`", Drawn("begun", True)),
    Move("the same with `True`, in the second epoch, with accumulation",
         from_stock(4, resume=True, max_steps=6, gradient_accumulation_steps=3, warmup_steps=3)),
    Move("the same with SGD and momentum",
         from_stock(2, optim="sgd", optim_args="momentum=0.9", lr_scheduler_type="cosine")),
    Move("the same with a LoRA adapter", from_stock(2, model=lora_model)),
    Move("the other way: the stock `Trainer` resumes from a checkpoint written with `hotspa_stock_checkpoints=True`",
         to_stock(2, warmup_steps=3)),
    Move("the same with SGD and momentum, and parameter groups without weight decay",
         to_stock(2, optim="sgd", optim_args="momentum=0.9", weight_decay=0.1, lr_scheduler_type="cosine")),
    Move("the same with the checkpoint of a LoRA adapter", to_stock(2, model=lora_model)),
    Move("resuming from a checkpoint of the stock `Trainer` after `save_only_model`, or without its optimizer", from_stock(2, save_only_model=True),
         ours="a warning says that optimizer and scheduler start anew"),
    Move("the same, written under DeepSpeed", from_stock(2, damage=lambda path: (path / "latest").write_text("x")),
         error="DeepSpeed", instead="start a new run with the weights that DeepSpeed's tools convert"),
)  # fmt: skip
