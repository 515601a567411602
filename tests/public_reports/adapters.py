"""Public reports about TRL's trainers, adapters of PEFT, and their checkpoints."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import trl_runs
from tests.moves import STRATEGIES, Kit, Move, Seen, losing
from tests.moves.checkpoints import everyone, flat, folders, loaded
from tests.public_reports.runs import BY_STEPS, EACH, LORA, run

SINGLE = torch.float32
SMALL_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
RL: dict[str, Any] = dict(trl_runs.RL)
OF_GROUPS: dict[str, Any] = {**RL, "max_steps": 3}


def of_trl(
    kit: Kit,
    kind: str,
    data: Any,
    model: Any = None,
    cls: Callable[[Any], Any] | None = None,
    given: Any = None,
    **fields: Any,
) -> Any:
    """TRL's trainer of a kind, or ours. `given` is for the constructor; `cls` makes the user's subclass."""
    own = {"callbacks": [kit.counter], **(given or {})} | ({} if isinstance(data, str) else {"train_dataset": data})
    case = trl_runs.Case(kind, ("", ""), data, {"max_steps": 3, **fields}, dtype=SINGLE, given=lambda: own, model=model)
    case.change = cls or case.change
    trainer = trl_runs.made(case, str(kit.folder / "out"), None if kit.stock else STRATEGIES[kit.world_size])
    kit.trainers.append(trainer)
    return trainer


def trained(trainer: Any, resume: Any = None) -> Seen:
    """Trains, and returns what was logged, without times, and the weights."""
    trainer.train(resume_from_checkpoint=resume)
    logs = [counted(log) for log in trainer.state.log_history]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"logs": logs, "weights": {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}}


def counted(log: dict[str, Any]) -> dict[str, Any]:
    """A log without times; rewards of the first step are differences of equal sums."""
    kept = {name: value for name, value in log.items() if not any(part in name for part in trl_runs.NOT_COMPARED)}
    return {name: 0.0 if abs(value) <= 1e-6 else value for name, value in kept.items()}


def adapter_of_sft(kit: Kit) -> Seen:
    lora = LoraConfig(**SMALL_LORA, init_lora_weights="gaussian")
    first = of_trl(kit, "SFT", "text", given={"peft_config": lora})
    seen = trained(first)
    first.save_model(str(kit.folder / "sft"))
    everyone(kit)
    model = PeftModel.from_pretrained(trl_runs.small(dtype=SINGLE), str(kit.folder / "sft"), is_trainable=True)
    return {"first": seen, "second": trained(of_trl(kit, "GRPO", "prompts", model, **OF_GROUPS))}


def rewards_by_progress(kit: Kit) -> Seen:
    def later(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step < trainer_state.max_steps / 3:
            return [0.0] * len(completion_ids)
        return trl_runs.reward(completion_ids)

    return trained(of_trl(kit, "GRPO", "prompts", given={"reward_funcs": later}, **OF_GROUPS))


def grpo_lora_resumed(kit: Kit) -> Seen:
    for place in (None, str(kit.folder / "out" / "checkpoint-2")):
        lora = LoraConfig(**SMALL_LORA, init_lora_weights=False)
        fields: dict[str, Any] = {**RL, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        trainer = of_trl(kit, "GRPO", "prompts", given={"peft_config": lora}, **fields)
        seen = trained(trainer, place)
        everyone(kit)
    return seen


def without_undesirable(kit: Kit) -> Seen:
    rows = Dataset.from_list([{**trl_runs.ROWS["judged"](i), "label": i % 13 != 0} for i in range(40)])
    given = {"ref_model": trl_runs.small(dtype=SINGLE, seed=1)}
    return trained(of_trl(kit, "KTO", rows, given=given, max_steps=5))


def own_reference(kit: Kit) -> Seen:
    reference = trl_runs.small(dtype=SINGLE, seed=1)
    lora = LoraConfig(**SMALL_LORA, init_lora_weights=False)
    return trained(of_trl(kit, "DPO", "pairs", given={"peft_config": lora, "ref_model": reference}))


def weighted(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """The mean loss of each row times the row's weight."""
    weight, labels = inputs.pop("weight"), inputs.pop("labels")
    outputs = model(**inputs)
    after = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2).float(), after, reduction="none")
    rows = each.sum(-1) / (after != -100).sum(-1)
    return (rows * weight).sum() / weight.abs().sum(), outputs


def weighted_rows(kit: Kit) -> Seen:
    collator_class: Any = __import__("trl.trainer.sft_trainer", fromlist=["x"]).DataCollatorForLanguageModeling
    pads = collator_class(pad_token_id=257)

    def collate(rows: Any) -> Any:
        return {**pads(rows), "weight": torch.tensor([row["weight"] for row in rows])}

    rows = Dataset.from_list([{**trl_runs.ROWS["text"](i), "weight": 1.0 - i % 5 * 0.25} for i in range(40)])
    options: dict[str, Any] = {"given": {"data_collator": collate}, "remove_unused_columns": False}
    return trained(of_trl(kit, "SFT", rows, cls=lambda base: losing(base, weighted), **options))


class Rewards:
    """A reward as an object with a state."""

    __name__ = "rewards"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completion_ids: Any, **_: Any) -> list[float]:
        self.calls += 1
        return [score * self.calls for score in trl_runs.reward(completion_ids)]


def reward_object(kit: Kit) -> Seen:
    rewards = Rewards()
    options: dict[str, Any] = {**OF_GROUPS, "per_device_train_batch_size": 4 // kit.world_size}
    return {
        **trained(of_trl(kit, "GRPO", "prompts", given={"reward_funcs": [rewards]}, **options)),
        "calls": rewards.calls,
    }


def only_models_saved(kit: Kit) -> Seen:
    options: dict[str, Any] = {
        "num_iterations": 2,
        "beta": 0.02,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    }
    reference = trl_runs.saved(trl_runs.small(dtype=SINGLE, seed=1), str(kit.folder / "reference"))
    model = trl_runs.small(dtype=SINGLE)
    model.config._name_or_path = reference
    fields: dict[str, Any] = {
        **RL,
        "max_steps": 4,
        **options,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
    }
    seen = trained(of_trl(kit, "GRPO", "prompts", model, **fields))
    everyone(kit)
    return {**seen, "folders": folders(kit), "loaded": loaded(kit.folder / "out" / "checkpoint-4")}


def held_out(kit: Kit) -> Seen:
    trainer = of_trl(kit, "DPO", "pairs", given={"ref_model": trl_runs.small(dtype=SINGLE, seed=1)})
    seen = trained(trainer)
    rows = Dataset.from_list([trl_runs.ROWS["pairs"](i) for i in range(50, 61)])
    return {**seen, "evaluated": counted(trainer.evaluate(eval_dataset=rows))}


def references_of_evaluation(kit: Kit) -> Seen:
    rows = trl_runs.rows("pairs", str(kit.folder), 11, first=50)
    given = {"eval_dataset": rows, "ref_model": trl_runs.small(dtype=SINGLE, seed=1)}
    return trained(of_trl(kit, "DPO", "pairs", given=given, precompute_ref_log_probs=True, **BY_STEPS))


def formatted(kit: Kit) -> Seen:
    def text(row: Any) -> str:
        parts = [row["instruction"], *([row["input"]] if row["input"] else []), row["output"]]
        return "\n".join(parts)

    rows = [
        {"instruction": trl_runs.question(i), "input": "x" * (i % 3), "output": trl_runs.answer(i)} for i in range(40)
    ]
    return trained(of_trl(kit, "SFT", Dataset.from_list(rows), given={"formatting_func": text}))


def one_adapter_after_the_other(kit: Kit) -> Seen:
    model = LORA()
    model.add_adapter("second", LoraConfig(**SMALL_LORA, init_lora_weights="gaussian"))
    found: dict[str, Any] = {}
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        found[f"{name} {len(found)}"] = kit.train(kit.trainer(model=model))
    return found


def patterns(kit: Kit) -> Seen:
    more: dict[str, Any] = {
        "rank_pattern": {"q_proj": 5, "layers.0.mlp.down_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 9},
    }
    return run(kit, given={"model": LORA(target_modules=["q_proj", "down_proj"], **more)})


def last_layer(kit: Kit) -> Seen:
    return run(kit, given={"model": LORA(target_modules=["q_proj", "v_proj"], layers_to_transform=[1])})


def converted(kit: Kit) -> Seen:
    options: dict[str, Any] = {"init_lora_weights": "pissa", "use_rslora": True}
    model = get_peft_model(kit.model(), LoraConfig(**SMALL_LORA, **options))
    model.save_pretrained(kit.folder / "begin")
    everyone(kit)
    trainer = kit.trainer(model=model)
    seen = kit.train(trainer)
    place = kit.folder / f"converted-{trainer.args.process_index}"
    trainer.model.save_pretrained(place, path_initial_model_for_weight_conversion=str(kit.folder / "begin"))
    # signs of singular vectors are the library's
    factors = load_file(place / "adapter_model.safetensors")
    products = {
        name.removesuffix(".lora_A.weight"): factors[name.replace("lora_A", "lora_B")] @ factor
        for name, factor in factors.items()
        if "lora_A" in name
    }
    return {"logs": seen["logs"], "products": products}


def embeddings_resized(kit: Kit) -> Seen:
    folder = trl_runs.saved(kit.model(), str(kit.folder / "base"))
    everyone(kit)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(170, mean_resizing=False)
    adapted = get_peft_model(model, LoraConfig(**SMALL_LORA, init_lora_weights="gaussian"))
    seen = run(kit, given={"model": adapted}, save_strategy="steps", save_steps=4)
    return {**seen, "saved": load_file(kit.folder / "out" / "checkpoint-4" / "adapter_model.safetensors")}


def accumulated_otherwise(kit: Kit) -> Seen:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    rows = kit.rows(18)
    run(kit, rows=rows, per_device_train_batch_size=2, gradient_accumulation_steps=3, **options)
    given = {"model": kit.model(seed=5)}
    return run(kit, rows=rows, given=given, resume="checkpoint-2", per_device_train_batch_size=6, **options)


def last_checkpoint(kit: Kit) -> Seen:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": -1, "num_train_epochs": 1}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    run(kit, **options)
    return run(kit, given={"model": kit.model(seed=5)}, resume="checkpoint-2", **options)


def best_adapter(kit: Kit) -> Seen:
    return run(kit, given={"model": LORA()}, load_best_model_at_end=True, learning_rate=1.0, adam_epsilon=0.1, **EACH)


def merged_after_training(kit: Kit) -> Seen:
    trainer = of_trl(kit, "SFT", "text", given={"peft_config": LoraConfig(**SMALL_LORA, init_lora_weights="gaussian")})
    seen = trained(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    place = kit.folder / "merged"
    if trainer.is_world_process_zero():
        model.save_pretrained(place)
    everyone(kit)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 20)[None]).logits
    return {**seen, "merged": loaded(place), "logits": logits, "flat": flat(model)}


REPORTS: tuple[tuple[str, Move], ...] = (
    ("trl 3684", Move("GRPO continues the adapter that SFT trained (`PeftModel.from_pretrained(..., is_trainable=True)`)", adapter_of_sft, tolerance=1e-4)),
    ("trl 3668", Move("GRPO whose reward looks at `trainer_state`: none in the first third", rewards_by_progress, tolerance=1e-4)),
    ("trl 3252", Move("GRPO with a `peft_config`, resumed from the path of its checkpoint", grpo_lora_resumed, tolerance=1e-4)),
    ("trl 1447", Move("KTO with batches that hold no undesirable answer", without_undesirable, tolerance=1e-4)),
    ("trl 1365", Move("DPO with a `peft_config` and another model as `ref_model`", own_reference, tolerance=1e-4)),
    ("trl 5761", Move("SFT with a weight for each row, in a `compute_loss` of a subclass", weighted_rows, tolerance=1e-4)),
    ("trl 2961", Move("GRPO with a reward that is an object, and groups spread over the processes", reward_object, tolerance=1e-4)),
    ("trl 4086", Move(
        "GRPO with more `steps_per_generation` than `gradient_accumulation_steps`",
        lambda kit: trained(of_trl(
            kit, "GRPO", "prompts", **{**OF_GROUPS, "max_steps": 4}, steps_per_generation=4, gradient_accumulation_steps=2,
            per_device_train_batch_size=2)), tolerance=1e-4)),
    ("trl 2953", Move("GRPO with `num_iterations=2`, `beta` and `save_only_model=True`; the files load", only_models_saved, tolerance=1e-4)),
    ("trl 6115", Move("`evaluate` of DPO with rows that TRL has not prepared", held_out, tolerance=1e-4)),
    ("trl 1107", Move("DPO with `precompute_ref_log_probs=True`, evaluated", references_of_evaluation, tolerance=1e-4)),
    ("trl 439", Move("SFT with a `formatting_func` over columns of instructions", formatted, tolerance=1e-4)),
    ("trl 599", Move("SFT with a `peft_config`, then `merge_and_unload`, a forward pass and `save_pretrained`", merged_after_training, tolerance=1e-4)),
    ("peft 1303", Move(
        "two adapters on one model, trained one after the other by `set_adapter`, each by its trainer", one_adapter_after_the_other)),
    ("peft 2194", Move("LoRA with `rank_pattern` and `alpha_pattern`", patterns)),
    ("peft 2155", Move("LoRA with `layers_to_transform`", last_layer)),
    ("peft 1929", Move("PiSSA with `use_rslora`, saved as LoRA (`path_initial_model_for_weight_conversion`)", converted, tolerance=1e-3)),
    ("trl 1287", Move(
        "LoRA on a model with resized embeddings, which are saved with the adapter", embeddings_resized,
        left=True, error="has 170 embeddings", instead="save the resized model first, and load it from its folder")),
    ("transformers 43708", Move("resumed with larger batches and less accumulation, of as many rows a step", accumulated_otherwise)),
    ("transformers 38939", Move("resumed in an epoch whose last step accumulates fewer batches: its checkpoint is written", last_checkpoint)),
    ("transformers 24096", Move("`load_best_model_at_end` with a LoRA adapter", best_adapter)),
)  # fmt: skip
"""Repository and number, and the move."""
