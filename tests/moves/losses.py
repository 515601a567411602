"""Moves: losses."""

from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama import LlamaForCausalLM

from tests.families import tiny_config
from tests.moves import Drawn, Kit, Move, Seen, losing, padded


def log_probs(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Log-probabilities of the counted labels, [labels that count], and the mask of their positions; shifted, as a user writes it."""
    log_p = functional.log_softmax(logits[:, :-1].float(), -1)
    targets = labels[:, 1:]
    counts = targets != -100
    return log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0][counts], counts


def focal(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    log_p, _ = log_probs(outputs.logits, labels)
    return -((1 - log_p.exp()) ** 2 * log_p).sum() / num_items_in_batch


def _focal_of_tokens(tokens: Any) -> Any:
    return -((1 - tokens.log_probs.exp()) ** 2 * tokens.log_probs).sum()


def _dft(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    log_p, _ = log_probs(outputs.logits, labels)
    return -(log_p.detach().exp() * log_p).sum() / num_items_in_batch


def _dft_of_tokens(tokens: Any) -> Any:
    return -(tokens.log_probs.detach().exp() * tokens.log_probs).sum()


def _evaluated(kit: Kit, cls: Any = None, args: dict[str, Any] | None = None, **kwargs: Any) -> Seen:
    """Trains with evaluations on one batch, so that in both its mean is the mean of the complete set."""
    rows = kwargs.pop("train_dataset", None) or kit.rows()
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": len(rows), **(args or {})}
    trainer = kit.trainer(cls, args=kit.arguments(**changes), train_dataset=rows, eval_dataset=rows, **kwargs)
    return kit.train(trainer)


def _function(function: Any, **args: Any) -> Any:
    def run(kit: Kit) -> Seen:
        return _evaluated(kit, args=args, compute_loss_func=function)

    return run


def _by_token(function: Any, hook: Any) -> Any:
    """The stock trainer with a `compute_loss_func`, ours with the token hook."""

    def run(kit: Kit) -> Seen:
        return _evaluated(kit, **({"compute_loss_func": function} if kit.stock else {"token_loss": hook}))

    return run


def _with_weights(examples: list[Any]) -> dict[str, Any]:
    batch = padded(examples)
    longest = batch["input_ids"].shape[1]
    batch["weights"] = torch.tensor([e["weights"] + [0.0] * (longest - len(e["weights"])) for e in examples])
    return batch


def _weights_of_tokens(kit: Kit) -> Seen:
    rows = kit.rows()
    generator = torch.Generator().manual_seed(4)
    for row in rows:
        row["weights"] = torch.rand(len(row["input_ids"]), generator=generator).tolist()
    if not kit.stock:

        def token_loss(tokens: Any) -> Any:
            return -(tokens.columns["weights"] * tokens.log_probs).sum()

        return kit.train(kit.trainer(train_dataset=rows, token_loss=token_loss, loss_columns=["weights"]))
    return _by_column(kit, rows, data_collator=_with_weights)


def _by_column(kit: Kit, rows: Any, **given: Any) -> Seen:
    args = kit.arguments(remove_unused_columns=False)
    return kit.train(kit.trainer(losing(kit.trainer_class, _weighted), args=args, train_dataset=rows, **given))


def _weighted(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    weights = inputs.pop("weights")
    outputs = model(**inputs)
    log_p, counts = log_probs(outputs.logits, inputs["labels"])
    return -(weights[:, 1:][counts] * log_p).sum() / items * trainer.accelerator.num_processes, outputs


def _column_of_an_override(kit: Kit) -> Seen:
    rows = kit.rows()
    for row in rows:
        row["weights"] = [(i * 7 % 5) / 5 for i in row["input_ids"]]
    given = {"data_collator": _with_weights} if kit.stock else {"loss_columns": ["weights"]}
    return _by_column(kit, rows, **given)


def _distilled(kit: Kit) -> Seen:
    teacher = kit.model(seed=9).eval()

    def loss(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
        outputs = model(**inputs, num_items_in_batch=items)
        counts = inputs["labels"][:, 1:] != -100
        with torch.no_grad():
            of_teacher = teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        mine, wanted = (functional.log_softmax(x[:, :-1][counts], -1) for x in (outputs.logits, of_teacher))
        return outputs.loss + 0.5 * functional.kl_div(mine, wanted, reduction="sum", log_target=True) / items

    return kit.train(kit.trainer(losing(kit.trainer_class, loss)))


def _other_tokens(kit: Kit, masks: bool = True) -> Seen:
    def loss(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
        other = model(input_ids=inputs["input_ids"].flip(1)).logits
        squares = (model(**inputs).logits - other).square()
        return (squares * inputs["attention_mask"][..., None] if masks else squares).sum() / items

    return kit.train(kit.trainer(losing(kit.trainer_class, loss)))


def _mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _contrast(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    log_p, counts = log_probs(outputs.logits, labels)
    of_row = torch.zeros(len(labels)).index_add(0, counts.nonzero()[:, 0], log_p)
    return (-log_p.sum() + (of_row[:, None] - of_row).square().sum()) / num_items_in_batch


def _function_of_the_model(kit: Kit) -> Seen:
    model = kit.model()

    def focal(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        log_p, counts = log_probs(logits, labels)
        return -((1 - log_p.exp()) ** 2 * log_p).sum() / (
            counts.sum() if num_items_in_batch is None else num_items_in_batch
        )

    model.loss_function = focal
    return kit.train(kit.trainer(model=model))


def _in_forward(change: Any) -> Any:
    """A subclass whose forward changes the loss that it returns."""

    class Changed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if out.loss is not None:
                out.loss = change(out)
            return out

    def run(kit: Kit) -> Seen:
        torch.manual_seed(0)
        model = Changed(tiny_config("llama_gqa_bias"))
        return kit.train(kit.trainer(model=model, args=kit.arguments(remove_unused_columns=False)))

    return run


def _scaled_logits(kit: Kit) -> Seen:
    class TemperedForCausalLM(LlamaForCausalLM):
        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            labels: Any = None,
            num_items_in_batch: Any = None,
            **kwargs: Any,
        ) -> Any:
            out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            out.logits = out.logits / 2
            if labels is not None:
                out.loss = self.loss_function(
                    out.logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
                )
            return out

    torch.manual_seed(0)
    return kit.train(kit.trainer(model=TemperedForCausalLM(tiny_config("llama_gqa_bias"))))


def _neighbours(kit: Kit) -> Seen:
    def smooth(tokens: Any) -> Any:
        return (tokens.log_probs[1:] - tokens.log_probs[:-1]).square().sum() - tokens.log_probs.sum()

    return kit.train(kit.trainer(token_loss=smooth))


def _split(kit: Kit) -> Seen:
    return kit.train(kit.trainer(args=kit.arguments(hotspa_overlong="split"), compute_loss_func=focal))


def _smoothed_hook(kit: Kit) -> Seen:
    return kit.train(kit.trainer(args=kit.arguments(label_smoothing_factor=0.1), token_loss=_focal_of_tokens))


MOVES: tuple[Move, ...] = (
    Move("focal loss as `compute_loss_func`", Drawn("loss", "focal")),
    Move("focal loss, token by token", _by_token(focal, _focal_of_tokens), ours="`token_loss=f`, on any slice of a pack"),
    Move('TRL\'s `loss_type="dft"`', _by_token(_dft, _dft_of_tokens), ours="three lines as a `token_loss`"),
    Move("token weights in a column", _weights_of_tokens, ours="`token_loss` with `loss_columns=[\"weights\"]`"),
    Move("`compute_loss_func` beside `label_smoothing_factor`, which it replaces", _function(focal, label_smoothing_factor=0.1)),
    Move("a `compute_loss` override", Drawn("loss", "margin")),
    Move("a `compute_loss` override that scales `super().compute_loss`", Drawn("loss", "scaled")),
    Move("a `compute_loss` override that reads a column", _column_of_an_override, ours="without a custom collator it is named in `loss_columns`"),
    Move("a `compute_loss` override that distils another model", _distilled),
    Move("`model.loss_function = f`", _function_of_the_model),
    Move("a `forward` that changes the logits", _scaled_logits),
    Move(
        "a `compute_loss` override that calls the model with other tokens", _other_tokens,
    ),
    Move(
        "a loss of logits at padding", lambda kit: _other_tokens(kit, masks=False),
        error="gradients by logits at padding", instead="leave out the positions where `attention_mask` is 0",
    ),
    Move(
        "a `compute_loss_func` without `num_items_in_batch`", _function(_mean),
    ),
    Move(
        "a loss that compares the sequences of a batch", _function(_contrast),
    ),
    Move(
        "a loss scaled in the model's `forward`", _in_forward(lambda out: 0.5 * out.loss),
        left=True, error="the loss that Changed returns", instead="pass it as `token_loss` or `compute_loss_func`",
    ),
    Move(
        "a z-loss in the model's `forward`", _in_forward(lambda out: out.loss + 1e-4 * out.logits.logsumexp(-1).square().mean()),
        left=True, error="the loss that Changed returns", instead="pass the complete loss as `compute_loss_func`",
    ),
    Move(
        "a `token_loss` that looks at neighbouring tokens", _neighbours,
        error="not the sum of its values on slices", instead="`compute_loss_func` gets the complete batch",
    ),
    Move(
        "`compute_loss_func` where long rows would be split", _split,
    ),
    Move(
        "`token_loss` beside `label_smoothing_factor`", _smoothed_hook, error="label_smoothing_factor is 0.1",
        instead="leave it at 0",
    ),
)  # fmt: skip
