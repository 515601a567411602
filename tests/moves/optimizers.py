"""Moves: optimizers and schedulers."""

from importlib import import_module
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.optimization import Adafactor

from tests.moves import Drawn, Kit, Move, Seen, on, with_arguments


def _class_and_options(kit: Kit) -> Seen:
    return kit.train(kit.trainer(optimizer_cls_and_kwargs=(torch.optim.NAdam, {"lr": 5e-3})))


def _super_and_groups(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer()
            head = {id(p) for p in self.model.get_output_embeddings().parameters()}
            for group in list(optimizer.param_groups):
                mine = [p for p in group["params"] if id(p) in head]
                group["params"] = [p for p in group["params"] if id(p) not in head]
                if mine:
                    optimizer.add_param_group({"params": mine, "lr": 1e-4})
            return optimizer

    return kit.train(kit.trainer(Own))


def _object(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-3), None)))


def _object_and_scheduler(kit: Kit) -> Seen:
    model = kit.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    return kit.train(kit.trainer(model=model, optimizers=(optimizer, scheduler)))


def _scheduler_alone(kit: Kit) -> Seen:
    model = kit.model()
    scheduler = LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda step: 0.5**step)
    return kit.train(kit.trainer(model=model, optimizers=(None, scheduler)))


def _assigned(kit: Kit) -> Seen:
    trainer = kit.trainer()
    trainer.optimizer = torch.optim.RMSprop(trainer.model.parameters(), lr=1e-3)
    return kit.train(trainer)


def _with_a_state(kit: Kit) -> Seen:
    model = kit.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (1 + number % 3)
    optimizer.step()
    optimizer.zero_grad()
    return kit.train(kit.trainer(model=model, optimizers=(optimizer, None)))


def _head_alone(kit: Kit) -> Seen:
    model = kit.model()
    optimizer = torch.optim.AdamW(model.get_output_embeddings().parameters(), lr=5e-3)
    return kit.train(kit.trainer(model=model, optimizers=(optimizer, None)))


def _tied(kit: Kit) -> Seen:
    model = kit.model(tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    return kit.train(kit.trainer(model=model, optimizers=(optimizer, None)))


def _created_before(kit: Kit) -> Seen:
    trainer = kit.trainer(args=kit.arguments(lr_scheduler_type="constant"))
    trainer.create_optimizer()
    trainer.optimizer.param_groups[0]["lr"] = 1e-3
    return kit.train(trainer)


def _both_created_before(kit: Kit) -> Seen:
    trainer = kit.trainer()
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    return kit.train(trainer)


def _own_scheduler(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, num_training_steps)
            return self.lr_scheduler

    return kit.train(kit.trainer(Own))


def _thaw(state: Any, model: Any, optimizer: Any, **_: Any) -> None:
    """Adds the embeddings to the optimizer after two steps."""
    if state.global_step == 2:
        optimizer.add_param_group({"params": list(model.get_input_embeddings().parameters()), "lr": 1e-2})


class _AsTheyAre(LRScheduler):
    """Keeps the groups' rates; torch's own schedulers do not accept groups that are added later."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _group_added_later(kit: Kit) -> Seen:
    model = kit.model()
    optimizer = torch.optim.AdamW(model.get_output_embeddings().parameters(), lr=5e-3)
    args = kit.arguments(lr_scheduler_type="constant")
    optimizers = (optimizer, _AsTheyAre(optimizer))
    return kit.train(kit.trainer(model=model, args=args, optimizers=optimizers, callbacks=[on(on_step_end=_thaw)]))


def _twice(kit: Kit) -> Seen:
    model = kit.model()
    trainer = kit.trainer(model=model, optimizers=(torch.optim.AdamW(model.parameters(), lr=2e-3), None))
    first = kit.train(trainer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)  # other weights: the engine starts again
    return {"first": first, "second": kit.train(trainer)}


def _resumed(kit: Kit) -> Seen:
    folder = str(kit.folder / "resumed")

    def trainer() -> Any:
        model = kit.model()
        args = kit.arguments(output_dir=folder, save_strategy="steps", save_steps=2)
        optimizer = torch.optim.AdamW(
            [{"params": [p], "lr": 1e-3 * (1 + number % 2)} for number, p in enumerate(model.parameters())]
        )
        return kit.trainer(model=model, args=args, optimizers=(optimizer, None))

    kit.train(trainer())
    return kit.train(trainer(), resume_from_checkpoint=f"{folder}/checkpoint-2")


def _foreign(kit: Kit) -> Seen:
    return kit.train(kit.trainer(optimizers=(torch.optim.AdamW(kit.model().parameters()), None)))


def _warms_up_itself(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(Adafactor(model.parameters(), warmup_init=True), None)))


def _whole_matrices(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(torch.optim.Adafactor(model.parameters()), None)))


class _ClipsItself(torch.optim.SGD):
    """Scales by the norm over all of its parameters; each rank sees only its own shares."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for group in self.param_groups for p in group["params"]], 1.0, torch.nn.utils.get_total_norm(gradients)
        )
        return super().step(closure)


def _clips_itself(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(_ClipsItself(model.parameters(), lr=0.1), None)))


class _KeepsParameters(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=lr)


def _keeps_parameters(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(_KeepsParameters(model.parameters(), lr=0.1), None)))


def _adamw_8bit() -> Any:
    return import_module("bitsandbytes.optim").AdamW8bit


def _in_8_bits(kit: Kit) -> Seen:
    model = kit.model()
    return kit.train(kit.trainer(model=model, optimizers=(_adamw_8bit()(model.parameters(), lr=2e-3), None)))


def _in_4_bits(kit: Kit) -> Seen:
    with torch.compiler.set_stance("force_eager"):  # the same numbers, without seconds for every size of a share
        return with_arguments(optim="adamw_torch_4bit")(kit)


def _derived_8_bits(kit: Kit) -> Seen:
    model, own = kit.model(), type("OwnAdamW", (_adamw_8bit(),), {})
    return kit.train(kit.trainer(model=model, optimizers=(own(model.parameters(), lr=2e-3), None)))


def _returned_only(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        def create_optimizer(self, model: Any = None) -> Any:
            return torch.optim.AdamW(self.model.parameters())

    return kit.train(kit.trainer(Own))


_OWN = "build it on `model.parameters()` of the model that is trained"
_TRANSPOSED = "to 1e-3: weights that are transposed in the master store have other blocks"
_ELEMENTWISE = "an elementwise optimizer, such as AdamW"

MOVES: tuple[Move, ...] = (
    Move('`optim="sgd"` with momentum', with_arguments(optim="sgd", optim_args="momentum=0.9")),
    Move('`optim="adamw_8bit"` (bitsandbytes)', with_arguments(optim="adamw_8bit"), tolerance=1e-3, ours=_TRANSPOSED),
    Move('`optim="paged_adamw_32bit"`', with_arguments(optim="paged_adamw_32bit")),
    Move('`optim="adamw_torch_4bit"` (torchao)', _in_4_bits, tolerance=1e-3, ours=_TRANSPOSED),
    Move("`optimizers=(bnb.optim.AdamW8bit(model.parameters()), None)`", _in_8_bits, tolerance=1e-3, ours=_TRANSPOSED),
    Move(
        "a custom class that derives from an 8-bit optimizer", _derived_8_bits, left=True, error="OwnAdamW",
        instead="the library's class as it is",
        tolerance=1e-3,  # bitsandbytes keeps, by number, what earlier runs of a process told it of a parameter
    ),
    Move("`optimizer_cls_and_kwargs`", _class_and_options),
    Move("`create_optimizer` overridden: custom parameter groups", Drawn("override", "groups")),
    Move("`create_optimizer` overridden: calls `super()` and regroups", _super_and_groups),
    Move("`optimizers=(AdamW(model.parameters()), None)`", _object),
    Move("`optimizers=(optimizer, scheduler)`", _object_and_scheduler),
    Move("`optimizers=(None, scheduler)`", _scheduler_alone, ours="the scheduler moves its own optimizer, not the Trainer's"),
    Move("`trainer.optimizer = RMSprop(...)` before `train()`", _assigned),
    Move("an optimizer that has a state already", _with_a_state),
    Move("an optimizer on the head alone", _head_alone),
    Move("an optimizer on tied embeddings", _tied),
    Move("`create_optimizer()` before `train()`, groups changed", _created_before),
    Move("`create_optimizer_and_scheduler()` before `train()`", _both_created_before),
    Move("`create_scheduler` overridden", _own_scheduler),
    Move("a callback adds a parameter group", _group_added_later),
    Move("`train()` twice with a custom optimizer, and other weights", _twice),
    Move("resuming with a custom optimizer", _resumed),
    Move("an optimizer on another model's parameters", _foreign, left=True, error="are not the model's", instead=_OWN),
    Move(
        "transformers' `Adafactor` with `warmup_init`", _warms_up_itself, error="Adafactor is not elementwise",
        instead=_ELEMENTWISE,
    ),
    Move("an optimizer of complete matrices (`Adafactor`)", _whole_matrices, left=True, error="Adafactor", instead=_ELEMENTWISE),
    Move(
        "an optimizer that looks at all gradients at once", _clips_itself, left=True, error="_ClipsItself is not elementwise",
        instead="`max_grad_norm` clips; " + _ELEMENTWISE,
    ),
    Move(
        "an optimizer that keeps extra references to parameters", _keeps_parameters, left=True, error="outside of its parameter groups",
        instead="keep them in `param_groups`",
    ),
    Move(
        "`create_optimizer` that returns an optimizer and does not set it", _returned_only, error="sets no optimizer",
        instead="set `self.optimizer`, which the stock Trainer needs, too",
    ),
    Move(
        '`optim="adafactor"`', with_arguments(optim="adafactor"), left=True, error="'adafactor' cannot be honoured",
        instead=_ELEMENTWISE,
    ),
)  # fmt: skip
