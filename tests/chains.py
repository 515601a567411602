"""Tiny embedders and rankers of sentence-transformers, and rows for them."""

import copy
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.families import tiny_model
from tests.token_heads import ENCODERS

PAD = 3
LENGTHS = (5, 31, 9, 17, 3, 24)


def saved(folder: str, family: str, side: str = "right", labels: int = 0) -> str:
    """Writes a tiny base, or a classifier, and its tokenizer; returns their folder."""
    kind, settings = ENCODERS.get(family, (None, {}))
    config = copy.deepcopy(tiny_model(family, torch.float64).config) if kind is None else kind(**settings)
    config.update({"pad_token_id": PAD, **({"num_labels": labels} if labels else {})})
    torch.manual_seed(1)
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(150) if i != PAD} | {"[PAD]": PAD}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side=side).save_pretrained(folder)
    return folder


def embedder(folder: str, pooling: str) -> Any:
    """A base, pooling, and unit length, in fp64."""
    base = Transformer(folder, model_kwargs={"dtype": torch.float64})
    return SentenceTransformer(
        modules=[base, Pooling(base.get_embedding_dimension(), pooling_mode=pooling), Normalize()], device="cpu"
    ).double()


def ranker(folder: str) -> Any:
    """A classifier of pairs, in fp64."""
    return CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float64}).double()


def texts(number: int, columns: tuple[str, ...], label: bool = False) -> Dataset:
    """Rows of random words of several lengths."""
    generator = torch.Generator().manual_seed(5)

    def text(index: int) -> str:
        length = LENGTHS[index % len(LENGTHS)]
        return " ".join(f"w{i}" for i in torch.randint(4, 150, (length,), generator=generator).tolist())

    table: dict[str, Any] = {name: [text(row + place) for row in range(number)] for place, name in enumerate(columns)}
    if label:
        table["label"] = [float(value) for value in torch.randint(0, 2, (number,), generator=generator)]
    return Dataset.from_dict(table)


def trained(trainer: Any, **how: object) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after training, and the losses of the log."""
    trainer.train(**how)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return weights, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
