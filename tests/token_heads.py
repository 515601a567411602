"""Models with heads of single tokens: tiny ones, batches with labels of every kind, and what they give one row at a time."""

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BitsAndBytesConfig,
    Gemma3TextConfig,
    MistralConfig,
    ModernBertConfig,
    RobertaConfig,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)
from transformers.models.llama import LlamaModel, LlamaPreTrainedModel

from hf_hotspa.features.heads.pooling import Pooling
from tests.families import tiny_model
from tests.oracle import exact_in_double
from tests.qlora import WIDE

PAD = 3
LENGTHS = (5, 44, 9, 17, 3, 30)
MISTRAL = {
    "vocab_size": 163, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7, "max_position_embeddings": 256,
}  # fmt: skip


_ENCODER = {**MISTRAL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_key_value_heads": 4}
ENCODERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "modernbert": (ModernBertConfig, {**_ENCODER, "local_attention": 8, "norm_bias": True, "attention_bias": True}),
    "embeddinggemma": (
        Gemma3TextConfig,
        {**MISTRAL, "sliding_window": 8, "sliding_window_pattern": 2, "use_bidirectional_attention": True},
    ),
    "bert": (BertConfig, {**_ENCODER, "type_vocab_size": 2}),
    "roberta": (RobertaConfig, _ENCODER),
}
"""Families whose tokens see both sides: windows (on each side: 4 tokens and 4), positions by rotation, by table, or counted."""


def t5gemma_encoder(kind: str = "full_attention") -> Any:
    """The encoder half of a T5Gemma as a classifier, with layers of one kind."""
    shape = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    halves = [
        T5GemmaModuleConfig(
            **shape, layer_types=[kind] * 4, sliding_window=8, query_pre_attn_scalar=8, pad_token_id=PAD, dropout_rate=0.0
        )
        for _ in range(2)
    ]  # fmt: skip
    config = T5GemmaConfig(
        encoder=halves[0], decoder=halves[1], is_encoder_decoder=False, vocab_size=MISTRAL["vocab_size"], pad_token_id=PAD,
        dropout_rate=0.0, classifier_dropout_rate=0.0, num_labels=3, problem_type="single_label_classification",
    )  # fmt: skip
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").double()


def masked_lm(family: str) -> Any:
    """A tiny encoder that predicts masked tokens."""
    kind, settings = ENCODERS[family]
    return AutoModelForMaskedLM.from_config(kind(**{**settings, "pad_token_id": PAD}))


class TwoRewards(LlamaPreTrainedModel):
    """A user's model: helpfulness at the last token, and safety at every one, by a head of two layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.helpful = nn.Linear(config.hidden_size, 1)
        self.safe = nn.Sequential(nn.Linear(config.hidden_size, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        helpful = self.helpful(hidden)[torch.arange(len(last)), last, 0]
        safe = (self.safe(hidden).tanh() * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        loss = None if labels is None else ((helpful - labels[:, 0]) ** 2 + (safe - labels[:, 1:]).abs().sum(1)).mean()
        return {"loss": loss, "logits": torch.cat([helpful[:, None], safe], 1)}


class Embedder(LlamaPreTrainedModel):
    """A user's model: pooled hidden states, compared with directions; or, without `pooling`, all of them."""

    pooling: str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.pool = Pooling(self.pooling) if self.pooling else None
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pool is not None:
            pooled = self.pool(hidden, attention_mask)
        else:
            pooled = (hidden.tanh() * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        unit = nn.functional.normalize(pooled, dim=-1)
        return {"loss": None if labels is None else similarity(unit, labels), "logits": unit}


class MeanEmbedder(Embedder):
    pooling = "mean"


class LastEmbedder(Embedder):
    pooling = "last"


def similarity(unit: Tensor, labels: Tensor) -> Tensor:
    """A loss of all rows of a batch together."""
    return ((unit @ unit.T) ** 2).mean() + (unit[:, : labels.shape[1]] * labels).sum()


OWN = {"own": TwoRewards, "embed": Embedder, "embed mean": MeanEmbedder, "embed last": LastEmbedder}
"""Users' models by kind."""


def headed(family: str, kind: str, labels: int, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model of a family with random norms, and a head of so many labels."""
    if family == "t5gemma":
        return t5gemma_encoder().to(dtype)
    config: Any
    if family in ENCODERS:
        config = ENCODERS[family][0](**ENCODERS[family][1])
    else:
        config = MistralConfig(**MISTRAL) if family == "mistral" else copy.deepcopy(tiny_model(family, dtype).config)
    config.update({"pad_token_id": PAD, "num_labels": labels, "classifier_dropout": 0.0, **changes})
    torch.manual_seed(1)
    attention = {"attn_implementation": "eager" if family.startswith("gemma2") else "sdpa"}
    model: Any
    if kind in OWN:
        model = OWN[kind](config)
    elif kind == "tokens":
        model = AutoModelForTokenClassification.from_config(config, **attention)
    else:
        config.problem_type = kind
        model = AutoModelForSequenceClassification.from_config(config, **attention)
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_()
    return model


def adapted(family: str, kind: str, labels: int, dtype: torch.dtype, four_bit: bool = False) -> Any:
    """The same below PEFT's adapter, which trains a copy of the head; the base perhaps in 4 bits."""
    model = headed(family, kind, labels, dtype, **(WIDE if four_bit else {}))
    if four_bit:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = type(model).from_pretrained(
            None, config=model.config, state_dict=state, dtype=dtype, quantization_config=options
        )
        assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(2)
    task = "TOKEN_CLS" if kind == "tokens" else "SEQ_CLS"
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=3, target_modules=targets, init_lora_weights=False, task_type=task)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


def rows(number: int, kind: str, labels: int, seed: int = 0, vocab_size: int = 150) -> list[dict[str, Any]]:
    """Rows with labels of a kind; one ends with ids of padding that are text."""
    generator, made = torch.Generator().manual_seed(seed), list[dict[str, Any]]()
    for index in range(number):
        length = LENGTHS[index % len(LENGTHS)] + seed % 3
        ids = torch.randint(4, vocab_size, (length,), generator=generator)
        if index % 6 == 2:
            ids[-2:] = PAD
        if kind == "tokens":
            label = torch.randint(0, labels, (length,), generator=generator)
            label[torch.rand(length, generator=generator) < 0.5] = -100
        elif kind == "single_label_classification":
            label = torch.randint(0, labels, (), generator=generator)
        elif kind == "multi_label_classification":
            label = torch.randint(0, 2, (labels,), generator=generator).double()
        else:
            label = torch.randn((labels,) if labels > 1 else (), generator=generator, dtype=torch.float64)
        made.append({"input_ids": ids.tolist(), "labels": label.tolist()})
    return made


def batch_of(some: list[dict[str, Any]], left: bool = False) -> dict[str, Tensor]:
    """Rows padded to one length with ids that are text, too."""
    width = max(len(row["input_ids"]) for row in some)

    def padded(values: list[int], fill: int) -> list[int]:
        more = [fill] * (width - len(values))
        return more + values if left else values + more

    ids = torch.tensor([padded(row["input_ids"], PAD) for row in some])
    mask = torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in some])
    of_tokens = isinstance(some[0]["labels"], list) and all(len(r["labels"]) == len(r["input_ids"]) for r in some)
    labels = [padded(row["labels"], -100) if of_tokens else row["labels"] for row in some]
    made = torch.tensor(labels, dtype=torch.float64 if isinstance(labels[0], float) else None)
    return {"input_ids": ids, "attention_mask": mask, "labels": made.double() if made.is_floating_point() else made}


def reference(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Of the plain model, one row at a time, in one process: each batch's loss by the class's own function of all its outputs, the
    outputs, and the gradient of the mean of the losses."""
    model.zero_grad(set_to_none=True)
    losses, outputs = list[Tensor](), list[Tensor]()
    with exact_in_double(next(p.dtype for p in model.parameters() if p.requires_grad)):
        for batch in batches:
            made, width = list[Tensor](), batch["input_ids"].shape[1]
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                own = ids[mask == 1][None]
                out = model(input_ids=own, attention_mask=torch.ones_like(own))["logits"][0]
                if out.dim() == 2:  # of tokens
                    out = out.new_zeros(width, out.shape[1]).index_put((mask.nonzero()[:, 0],), out)
                made.append(out)
            outputs.append(torch.stack(made))
            losses.append(_loss(model, outputs[-1], batch["labels"]))
        torch.stack(losses).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [loss.detach() for loss in losses], [out.detach() for out in outputs], gradients


def _loss(model: Any, outputs: Tensor, labels: Tensor) -> Tensor:
    if isinstance(model, TwoRewards):
        return ((outputs[:, 0] - labels[:, 0]) ** 2 + (outputs[:, 1:] - labels[:, 1:]).abs().sum(1)).mean()
    if isinstance(model, Embedder):
        return similarity(outputs, labels)
    if outputs.dim() == 3:
        return model.loss_function(outputs, labels, model.config)
    return model.loss_function(logits=outputs, labels=labels, pooled_logits=outputs, config=model.config)
