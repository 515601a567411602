"""Moves: models, and what their configs say."""

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from tests.families import tiny_config
from tests.moves import ROWS, Drawn, Kit, Move, Seen, losing

_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 163,
}
_T5 = {
    "d_model": 32,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 163,
    "d_kv": 8,
    "decoder_start_token_id": 0,
}
_VIT = {**{name: size for name, size in _BERT.items() if name != "vocab_size"}, "image_size": 8, "patch_size": 4}
_INSTEAD = "pass a causal language model"


class _Toy(nn.Module):
    """A module of the kind that many users start with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> dict[str, Any]:
        return {"loss": self.weight.square().sum() * input_ids.float().mean()}


def _of(make: Any, rows: Any = None, loss: Any = None) -> Any:
    """Trains what `make` returns, on the rows of the kit, or on the result of `rows`; by a custom loss, if any."""

    def run(kit: Kit) -> Seen:
        torch.manual_seed(0)
        data: dict[str, Any] = (
            {} if rows is None else {"train_dataset": rows(kit.rows()), "data_collator": default_data_collator}
        )
        return kit.train(kit.trainer(losing(kit.trainer_class, loss) if loss else None, model=make(), **data))

    return run


def _encoder() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_BERT, num_key_value_heads=2, head_dim=8, sliding_window=8, use_bidirectional_attention=True
    )
    return Gemma3TextForSequenceClassification(config)


def _classes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one length, of two classes."""
    return [{"input_ids": row["input_ids"][:1] * 8, "labels": index % 2} for index, row in enumerate(rows)]


def _different(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with different tokens: of equal ones every attention is the same, and has no gradient."""
    return [row | {"input_ids": [i * t % 160 + 1 for t, i in enumerate(row["input_ids"], 1)]} for row in _classes(rows)]


def _images(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"pixel_values": torch.full((3, 8, 8), index / 20), "labels": index % 2} for index in range(len(rows))]


def _mean_square(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    inputs.pop("labels", None)
    return model(**inputs).last_hidden_state.square().mean()


def _gpt2(**dropout: float) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 163, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **dropout))


_WHOLE = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _gpt2_data_parallel(kit: Kit) -> Seen:
    strategies = {"hotspa_strategies": f"dp{kit.world_size}:64@64"}  # GPT-2 has no tensor-parallel plan
    # the stock Trainer divides by the labels of the first tokens, too, if the class is not called ...ForCausalLM
    rows = [{**row, "labels": [-100, *row["labels"][1:]]} for row in kit.rows()]
    return kit.train(kit.trainer(model=_gpt2(**_WHOLE), args=kit.arguments(**strategies), train_dataset=rows))


def _gpt2_with_its_config(kit: Kit) -> Seen:
    """The masks differ from the stock Trainer's, so only plausible losses on the same rows are compared."""
    args = kit.arguments(hotspa_strategies=f"dp{kit.world_size}:64@64")
    seen = kit.train(kit.trainer(model=_gpt2(), args=args))
    below = all(4.5 < log["loss"] < 5.7 for log in seen["logs"] if "loss" in log)
    return {"steps": [log["step"] for log in seen["logs"]], "plausible losses": below}


def _attention_dropout_off(kit: Kit) -> Seen:
    model = kit.model(attention_dropout=0.0 if kit.stock else 0.5)
    return kit.train(kit.trainer(model=model, args=kit.arguments(hotspa_attention_dropout=0.0)))


def _longrope(kit: Kit) -> Seen:
    """All rows are beyond the border, so a padded batch of the stock Trainer has their factors, too."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 5, "factor": 4.0}
    model = kit.model(rope_parameters={**rope, "short_factor": [1.0, 1.4], "long_factor": [2.0, 5.0]})
    rows = [row for row in kit.rows(3 * ROWS) if len(row["input_ids"]) > 5]
    return kit.train(kit.trainer(model=model, train_dataset=rows))


def _model_init(kit: Kit) -> Seen:
    def init() -> PreTrainedModel:
        with torch.random.fork_rng():
            return kit.model()

    return kit.train(kit.trainer(model_init=init))


def _model_init_of_another_kind(kit: Kit) -> Seen:
    return kit.train(kit.trainer(model_init=_Toy))


def _subclass(kit: Kit) -> Seen:
    model = kit.model()
    model.__class__ = type("MyModel", (type(model),), {"greeting": "hello"})
    return kit.train(kit.trainer(model=model))


class _Spare(LlamaForCausalLM):
    """Has weights that no loss reaches, in a layer and beside the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp.spare = nn.Linear(config.hidden_size, 5)
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False)


def _never_reached(kit: Kit) -> Seen:
    """A run and its resumption, under several mixes: the resumed run has no optimizer state for these weights."""
    mixes = [None] if kit.world_size == 1 else [None, "pp2:16@32,dp2+z3:64@64"]
    seen: dict[str, Any] = {}
    for number, mix in enumerate(mixes):
        own = {"weight_decay": 0.3, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        own |= {"hotspa_strategies": mix} if mix is not None else {}
        folder = str(kit.folder / f"out{number}")
        for steps in (2, 4):
            torch.manual_seed(0)
            trainer = kit.trainer(
                model=_Spare(tiny_config("llama_gqa_bias")), args=kit.arguments(**own, output_dir=folder)
            )
            trainer.args.max_steps = steps
            seen[f"{mix}, {steps}"] = kit.train(trainer, resume_from_checkpoint=steps > 2)
            states = trainer.optimizer.state_dict()["state"]
            seen[f"{mix}, {steps} states"] = len(states)
            kit.close()
    return {
        name: {k: v for k, v in of.items() if k != "logs"} if isinstance(of, dict) else of for name, of in seen.items()
    }


def _padding_named_later(kit: Kit) -> Seen:
    model = kit.model()
    model.config.pad_token_id = 7  # of which the rows have some
    return kit.train(kit.trainer(model=model))


def _changed(module: str, name: str, value: Any) -> Any:
    def run(kit: Kit) -> Seen:
        model = kit.model()
        setattr(model.get_submodule(module), name, value)
        return kit.train(kit.trainer(model=model))

    return run


MOVES: tuple[Move, ...] = (
    Move(
        "GPT-2 without dropout, the first label of a row masked", _gpt2_data_parallel,
        ours="if it is not masked, the stock loss is slightly smaller: `Trainer` divides by these labels, too, which predict nothing",
    ),
    Move(
        "GPT-2 with the dropout of its config", _gpt2_with_its_config,
        ours="the masks [differ](exactness.md#dropout), and are the same under every strategy",
    ),
    Move("attention dropout turned off for a run (`hotspa_attention_dropout=0`)", _attention_dropout_off),
    Move(
        "LongRoPE (Phi-3.5, Phi-4-mini), rows on one side of `original_max_position_embeddings`", _longrope,
        ours="each row has the factors for its length; a padded batch of the stock Trainer has the factors of its longest row",
    ),
    Move("a `model_init`", _model_init, ours="its random numbers do not change the order of the rows"),
    Move("layers frozen with `requires_grad_(False)`", Drawn("frozen", 1)),
    Move("a subclass of a causal language model", _subclass),
    Move("trained weights that no loss reaches", _never_reached, ours="no decay, no momentum, no state in checkpoints, as with torch"),
    Move("`model.config.pad_token_id` set after the model was made", _padding_named_later),
    Move(
        "another activation in a layer of the object", _changed("model.layers.0.mlp", "act_fn", nn.ReLU()),
        left=True, error=r"layers.0.mlp.act_fn' is a ReLU, and a SiLU", instead="set `hidden_act` in the config, or subclass the model",
    ),
    Move(
        "another number in a module of the object (`variance_epsilon`, `scaling`, `top_k`, ...)", _changed("model.norm", "variance_epsilon", 0.5),
        left=True, error=r"'model.norm' has variance_epsilon=0.5, and 1e-0", instead="set it in the config, or subclass the model",
    ),
    Move("a custom `nn.Module`", _of(_Toy), left=True, error="is a _Toy, not a transformers", instead=_INSTEAD),
    Move(
        "a `model_init` that returns such a module", _model_init_of_another_kind,
        left=True, error="is a _Toy, not a transformers", instead=_INSTEAD,
    ),
    Move(
        "`LlamaForSequenceClassification`", _of(lambda: LlamaForSequenceClassification(tiny_config("llama_gqa_bias", pad_token_id=0)), _classes),
    ),
    Move(
        "a base model without a head (`LlamaModel`)", _of(lambda: LlamaModel(tiny_config("llama_gqa_bias")), _classes, _mean_square),
    ),
    Move(
        "`Gemma3TextForSequenceClassification` that sees both ways", _of(_encoder, _different),
    ),
    Move(
        "a masked language model", _of(lambda: BertForMaskedLM(BertConfig(**_BERT))),
        left=True, error="BertForMaskedLM is not a causal", instead=_INSTEAD,
    ),
    Move(
        "`BertLMHeadModel` that sees both ways", _of(lambda: BertLMHeadModel(BertConfig(**_BERT))),
        left=True, error="BertSelfAttention of BertLMHeadModel is attention that is not causal", instead=_INSTEAD,
    ),
    Move(
        "T5: an encoder and a decoder",
        _of(lambda: T5ForConditionalGeneration(T5Config(**_T5))), left=True, error="has an encoder and a decoder", instead=_INSTEAD,
    ),
    Move(
        "a model of images",
        _of(lambda: ViTForImageClassification(ViTConfig(**_VIT)), _images), left=True, error="ViTForImageClassification is not a causal", instead=_INSTEAD,
    ),
    Move(
        "a model loaded in float16", _of(lambda: _gpt2(**_WHOLE).half()),
        error="loaded in float16", instead="load it in fp32, or in bf16 with `bf16=True`",
    ),
)  # fmt: skip
