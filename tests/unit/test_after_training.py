"""After `train()` the model is an ordinary model again, for whatever a script does next, in one process."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.lora import tiny_lora
from tests.moves import padded
from tests.oracle import random_rows
from tests.trl_runs import COMMON, rows, small, tokenizer

IDS = torch.arange(3, 30)[None]
ROWS = [row for row in random_rows(30, 163, longest=60, seed=3, masked=False) if len(row["input_ids"]) > 3][:12]
for row in ROWS:  # the stock Trainer counts the first one, too
    row["labels"][0] = -100
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "learning_rate": 5e-3, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "save_strategy": "no", "per_device_train_batch_size": 4,
}  # fmt: skip


def trainer_of(folder: Any, model: Any, **changes: Any) -> Any:
    own = {"hotspa_strategies": "dp1:64@128", "hotspa_report": False}
    args = HotSPaTrainingArguments(output_dir=str(folder), **{**SETTINGS, **own, **changes})
    return HotSPaTrainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:6])


def parts(model: Any) -> dict[str, Any]:
    """What hangs on an object: classes, attributes and hooks of its modules, classes of its parameters."""
    of_modules = {
        name: (
            type(module),
            set(vars(module)) - {"_is_accelerate_prepared"},
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    }
    return of_modules | {f"{name}, a parameter": type(p) for name, p in model.named_parameters()}


def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(IDS).logits.detach()
    return out


def gradients(model: Any) -> torch.Tensor:
    model.zero_grad()
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def hidden_states(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(IDS, output_hidden_states=True).hidden_states[-1].detach()
    return out


def copied(model: Any) -> torch.Tensor:
    return logits(copy.deepcopy(model)) + logits(pickle.loads(pickle.dumps(model)))


def own_loop(model: Any) -> torch.Tensor:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    gradients(model)
    optimizer.step()
    return logits(model)


def stock_trainer(model: Any, folder: Any = "") -> torch.Tensor:
    Trainer(model, TrainingArguments(str(folder), **SETTINGS), data_collator=padded, train_dataset=ROWS).train()
    return logits(model)


def resized(model: Any) -> torch.Tensor:
    model.resize_token_embeddings(150)
    return logits(model)


def merged_and_back(model: Any) -> torch.Tensor:
    model.merge_adapter()
    out = logits(model)
    model.unmerge_adapter()
    return out


def rescaled(model: Any) -> torch.Tensor:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.4)
    return logits(model)


def unloaded(model: Any) -> torch.Tensor:
    return logits(model.merge_and_unload())


USES = {
    "plain": (tiny_model, (logits, gradients, copied, hidden_states, own_loop, stock_trainer, resized)),
    "lora": (tiny_lora, (gradients, merged_and_back, rescaled, own_loop, unloaded)),
}


@pytest.mark.parametrize("kind", USES)
def test_the_trained_object_is_an_ordinary_model(kind: str, tmp_path: Any) -> None:
    make, uses = USES[kind]
    trainer = trainer_of(tmp_path / "ours", make("llama_gqa_bias"))
    if kind == "lora":
        trainer.model.enable_input_require_grads()
    before = parts(trainer.model)
    trainer.train()
    assert parts(trainer.model) == before
    model, like = trainer.model, make("llama_gqa_bias")
    like.load_state_dict(model.state_dict())
    for use in uses:
        call = partial(use, folder=tmp_path / "stock") if use is stock_trainer else use
        assert torch.allclose(call(model), call(like), atol=1e-5), use.__name__
    trainer.close_engine()


def quantized(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, given, out: out * 0.5)


def wrapped(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def all_frozen(model: Any) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantized, "are quantized"),
        (hooked, "'lm_head' has forward hooks"),
        (wrapped, "forward of the model was replaced"),
        (all_frozen, "requires_grad is False for all parameters"),
    ],
)
def test_changes_that_no_engine_can_take_over_are_named(change: Any, words: str, tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, tiny_model("llama_gqa_bias"))
    trainer.train()
    change(trainer.model)
    if change is all_frozen:
        trainer.evaluate()
    with pytest.raises(HotspaError, match=words):
        trainer.train() if change is all_frozen else trainer.evaluate()
    assert logits(trainer.model).isfinite().all()  # the object itself is whole


def test_a_model_of_a_folder_has_no_weights_until_they_are_asked_for(tmp_path: Any) -> None:
    tiny_model("llama_gqa_bias").save_pretrained(tmp_path / "model")
    trainer = trainer_of(tmp_path, str(tmp_path / "model"))
    trainer.train()
    with pytest.raises(HotspaError, match="trainer.model has no weights"):
        trainer.model(IDS)
    trainer.materialize()
    assert "forward" not in vars(trainer.model)
    gradients(trainer.model)
    trainer.close_engine()


def test_an_error_in_training_leaves_the_weights_of_the_last_step(tmp_path: Any) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

    whole, trainer = (trainer_of(tmp_path, tiny_model("llama_gqa_bias"), max_steps=n) for n in (1, 2))
    whole.args.lr_scheduler_type = trainer.args.lr_scheduler_type = "constant"
    whole.train()
    trainer.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert torch.equal(logits(trainer.model), logits(whole.model))
    gradients(trainer.model)


def test_the_object_of_trl_is_as_trl_leaves_it(tmp_path: Any) -> None:
    import trl
    from peft import LoraConfig

    import hf_hotspa.trl

    seen = []
    for lib, own in ((trl, {}), (hf_hotspa.trl, {"hotspa_strategies": "dp1:128@256", "hotspa_report": False})):
        args = lib.SFTConfig(
            str(tmp_path / lib.__name__), **{**COMMON, "max_steps": 1, "gradient_checkpointing": True, **own}
        )
        trainer = lib.SFTTrainer(
            small(dtype=torch.float32), args, train_dataset=rows("completions", str(tmp_path / "rows"), 8),
            processing_class=tokenizer(), peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
        seen.append(parts(trainer.model))
        assert gradients(trainer.model).norm() > 0
    assert {name: seen[1].get(name) for name, of in seen[0].items() if seen[1].get(name) != of} == {}
    assert seen[1].keys() == seen[0].keys()
