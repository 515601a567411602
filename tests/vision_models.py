"""Tiny models that read images, the processors of their families, rows with images, and what these give one row at a time.

A row is `{"text", "images"}`: words and placeholders, and the pictures that stand there. The family's own processor makes a
batch of rows (`batch_of_images`): torchvision is not needed, the image processors are those on Pillow. Every family has the
same vocabulary, whose last words are the special tokens; its image token is the last one.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from tests.oracle import exact_in_double

VOCABULARY = 163
IMAGE = VOCABULARY - 1
PAD = 0
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 14}
_FIXED = {**_TOWER, "image_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2}  # of images of one size
_MERGED = {**_TOWER, "num_heads": 2, "out_hidden_size": 32}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 161, "vision_start_token_id": 160, "vision_end_token_id": 159}
_SQUARE = {"height": 28, "width": 28}


def _qwen3_vl() -> PreTrainedModel:
    tower = {**_MERGED, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = hf.Qwen3VLConfig(text_config=TEXT | _ROPE, vision_config=tower, **_QWEN_IDS)
    return hf.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe() -> PreTrainedModel:
    tower = {**_MERGED, "depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    config = hf.Qwen3VLMoeConfig(text_config=TEXT | _ROPE | experts, vision_config=tower, **_QWEN_IDS)
    return hf.Qwen3VLMoeForConditionalGeneration(config)


def _qwen2_5_vl() -> PreTrainedModel:
    tower = {**_MERGED, "depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    config = hf.Qwen2_5_VLConfig(text_config=text | _ROPE, vision_config=tower, **_QWEN_IDS)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def _gemma3() -> PreTrainedModel:
    tokens = {"boi_token_index": 160, "eoi_token_index": 161, "image_token_index": IMAGE}
    tower = _FIXED | {"vision_use_head": False}
    config = hf.Gemma3Config(text_config=TEXT | WINDOWS, vision_config=tower, mm_tokens_per_image=4, **tokens)
    return hf.Gemma3ForConditionalGeneration(config)


def _gemma4() -> PreTrainedModel:
    """Without embeddings of layers; images see both ways in sliding layers only."""
    tokens = {
        "boi_token_id": 160,
        "eoi_token_id": 161,
        "image_token_id": IMAGE,
        "video_token_id": 159,
        "audio_token_id": 158,
    }
    tower = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    }  # fmt: skip
    text = (
        TEXT
        | WINDOWS
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY}
    )
    both = {"use_bidirectional_attention": "vision"}
    config = hf.Gemma4Config(text_config=text | both, vision_config=tower, audio_config=None, **tokens)
    return hf.Gemma4ForConditionalGeneration(config)


def _mistral3() -> PreTrainedModel:
    tower = {**_FIXED, "model_type": "pixtral", "image_size": 112}
    config = hf.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config=tower, image_token_index=IMAGE
    )
    return hf.Mistral3ForConditionalGeneration(config)


def _shuffled(kind: str) -> PreTrainedModel:
    """SmolVLM or Idefics3: the batch is [rows, most images of a row, ...], padded."""
    tower = {**_FIXED, "num_hidden_layers": 1}
    text = {**TEXT, "model_type": "llama", "pad_token_id": PAD}
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=tower, scale_factor=2, image_token_id=IMAGE)
    return getattr(hf, f"{kind}ForConditionalGeneration")(config)


def _llava() -> PreTrainedModel:
    tower = {**_FIXED, "model_type": "clip_vision_model", "projection_dim": 16}
    text = {**TEXT, "model_type": "llama"}
    config = hf.LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE, image_seq_length=4)
    return hf.LlavaForConditionalGeneration(config)


_PINPOINTS = [[28, 28], [56, 28], [56, 56]]


def _llava_onevision() -> PreTrainedModel:
    tower = {**_FIXED, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**TEXT, "model_type": "qwen2"}
    tokens = {"image_token_index": IMAGE, "video_token_index": 161, "image_grid_pinpoints": _PINPOINTS}
    return hf.LlavaOnevisionForConditionalGeneration(
        hf.LlavaOnevisionConfig(text_config=text, vision_config=tower, **tokens)
    )


def _internvl() -> PreTrainedModel:
    tower = {**_FIXED, "image_size": [28, 28], "patch_size": [14, 14]}
    text = {**TEXT, "model_type": "qwen2"}
    config = hf.InternVLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, image_seq_length=1)
    return hf.InternVLForConditionalGeneration(config)


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Words "w4", "w5", ...; the special tokens are the last ones, the first given has the last id."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words += [f"w{i}" for i in range(len(words), VOCABULARY - len(special))] + [*reversed(special.values())]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        padding_side="right", extra_special_tokens=special,
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": [*special.values()]})
    return made


_QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}  # fmt: skip


def _qwen_processor(kind: str) -> ProcessorMixin:
    size = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    images = hf.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, size=size)
    return getattr(hf, f"{kind}Processor")(
        image_processor=images, tokenizer=_tokenizer(**_QWEN_TOKENS), video_processor=None
    )


def _gemma3_processor() -> ProcessorMixin:
    images = hf.Gemma3ImageProcessorPil(size=_SQUARE, image_seq_length=4)
    names = {"image_token": "<image_soft_token>", "eoi_token": "<end_of_image>", "boi_token": "<start_of_image>"}
    return hf.Gemma3Processor(image_processor=images, tokenizer=_tokenizer(**names), image_seq_length=4)


def _gemma4_processor() -> ProcessorMixin:
    names = {
        "image_token": "<|image|>", "eoi_token": "<image|>", "boi_token": "<|image>", "video_token": "<|video|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    module: Any = import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    module._SUPPORTED_SOFT_TOKENS = (*module._SUPPORTED_SOFT_TOKENS, 5)
    images = hf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=5)
    return hf.Gemma4Processor(None, images, _tokenizer(**names), None)


def _pixtral_processor() -> ProcessorMixin:
    # the processor asks for torchvision's image processor, of which it calls a function that Pillow's module has too
    folder = "transformers.models.pixtral."
    sys.modules.setdefault(f"{folder}image_processing_pixtral", import_module(f"{folder}image_processing_pil_pixtral"))
    images = hf.PixtralImageProcessorPil(patch_size={"height": 14, "width": 14}, size={"longest_edge": 112})
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    made = import_module(f"{folder}processing_pixtral").PixtralProcessor
    return made(
        image_processor=images, tokenizer=_tokenizer(**names), patch_size=14, spatial_merge_size=2, image_token="[IMG]"
    )


def _idefics3_processor() -> ProcessorMixin:
    """SmolVLM's own needs one more package for the times of videos; its first models came with this one."""
    edge = {"longest_edge": 28}
    images = hf.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    names = {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    }  # fmt: skip
    return hf.Idefics3Processor(image_processor=images, tokenizer=_tokenizer(**names), image_seq_len=1)


def _llava_processor() -> ProcessorMixin:
    names = {"image_token": "<image>"}
    return hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessorPil(size=_SQUARE, crop_size=_SQUARE), tokenizer=_tokenizer(**names),
        patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1, **names,
    )  # fmt: skip


def _llava_onevision_processor() -> ProcessorMixin:
    names = {"image_token": "<image>", "video_token": "<video>"}
    images = hf.LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=_PINPOINTS)
    return hf.LlavaOnevisionProcessor(
        image_processor=images, tokenizer=_tokenizer(**names), video_processor=None, num_image_tokens=4,
        vision_feature_select_strategy="full", **names,
    )  # fmt: skip


def _internvl_processor() -> ProcessorMixin:
    images = hf.GotOcr2ImageProcessorPil(size=_SQUARE, min_patches=1, max_patches=4, crop_to_patches=True)
    names = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
        "video_token": "<video>",
    }  # fmt: skip
    return hf.InternVLProcessor(
        image_processor=images, tokenizer=_tokenizer(**names), video_processor=None, image_seq_length=1
    )


@dataclass(frozen=True)
class VisionFamily:
    """How a family's tiny model and processor are made, and what a text says where an image stands."""

    model: Callable[[], PreTrainedModel]
    processor: Callable[[], ProcessorMixin]
    placeholder: str


_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION_FAMILIES = {
    "qwen3_vl": VisionFamily(_qwen3_vl, lambda: _qwen_processor("Qwen3VL"), _QWEN_PLACE),
    "qwen2_5_vl": VisionFamily(_qwen2_5_vl, lambda: _qwen_processor("Qwen2_5_VL"), _QWEN_PLACE),
    "gemma3": VisionFamily(_gemma3, _gemma3_processor, "<start_of_image>"),
    "gemma4": VisionFamily(_gemma4, _gemma4_processor, "<|image|>"),
    "mistral3": VisionFamily(_mistral3, _pixtral_processor, "[IMG]"),
    "smolvlm": VisionFamily(lambda: _shuffled("SmolVLM"), _idefics3_processor, "<image>"),
    "idefics3": VisionFamily(lambda: _shuffled("Idefics3"), _idefics3_processor, "<image>"),
    "qwen3_vl_moe": VisionFamily(_qwen3_vl_moe, lambda: _qwen_processor("Qwen3VL"), _QWEN_PLACE),
    "llava": VisionFamily(_llava, _llava_processor, "<image>"),
    "llava_onevision": VisionFamily(_llava_onevision, _llava_onevision_processor, "<image>"),
    "internvl": VisionFamily(_internvl, _internvl_processor, "<IMG_CONTEXT>"),
}

Kind = tuple[int, Sequence[tuple[int, int]]]
"""Of a row: how many words, and the sizes (height, width) of its images in pixels, multiples of 28 up to 112."""

KINDS: tuple[Sequence[Kind], ...] = (
    ((4, [(56, 28)]), (60, [(56, 28), (28, 56), (56, 84)]), (7, [])),
    ((9, []), (3, [(28, 28), (56, 56)]), (40, [(84, 28)])),
)
"""Rows of even and of odd ranks: with none, one and several images, of which some stand side by side."""


def vision_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The same on every rank; norms, and what begins as zeros, are drawn, so that they show. Attention and experts are
    eager: exact in fp64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VISION_FAMILIES[family].model().to(dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.normal_()
            elif not parameter.any():  # biases; Gemma 3's projector, without which its tower has no gradient
                parameter.data.normal_(std=0.1)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


@cache
def vision_processor(family: str) -> ProcessorMixin:
    """The family's processor, with a tokenizer of words."""
    own = ProcessorMixin.check_argument_for_proper_class

    def check(self: ProcessorMixin, name: str, argument: Any) -> Any:
        return None if argument is None else own(self, name, argument)  # no video processor without torchvision

    with patch.object(ProcessorMixin, "check_argument_for_proper_class", check):
        return VISION_FAMILIES[family].processor()


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_rows(family: str, kinds: Sequence[Kind], seed: int = 0) -> list[dict[str, Any]]:
    """Rows `{"text", "images"}`: a part of the words, the images with two words behind each but the second, the other words."""
    rows, place = [], VISION_FAMILIES[family].placeholder
    for index, (words, sizes) in enumerate(kinds):
        rng = random.Random(1000 * seed + index)
        text = [f"w{rng.randrange(4, 150)}" for _ in range(words)]
        at = rng.randrange(1, words)
        between = [place if n == 1 else f"{place} w{7 + n} w{9 + seed}" for n in range(len(sizes))]
        images = [picture(*size, 1_000_000 * seed + 1000 * index + n) for n, size in enumerate(sizes)]
        rows.append({"text": " ".join([*text[:at], *between, *text[at:]]), "images": images})
    return rows


def batch_of_images(
    family: str, rows: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """What the family's processor gives for the rows, padded on the right, and labels [B, L]: every token behind the third,
    image tokens too, as TRL's collator gives them. Pixels are of `dtype`."""
    images = [row["images"] for row in rows]
    given = vision_processor(family)(
        text=[row["text"] for row in rows], images=images if any(images) else None, padding=True, padding_side="right",
        return_tensors="pt",
    )  # fmt: skip
    batch = dict(given)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :3] = -100
    return {**batch, "labels": labels}


def rows_with_images(family: str, rank: int, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of `KINDS` of a rank."""
    return image_rows(family, KINDS[rank % len(KINDS)], seed=100 * seed + rank)


def vision_reference(
    model: PreTrainedModel, family: str, rows_by_rank: Sequence[Sequence[dict[str, Any]]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank's loss, the mean over its labels, and the gradients of the mean over ranks, of ALL parameters: by the plain
    model, one row at a time. The model is left without gradients and without what a forward keeps on it."""
    model.zero_grad(set_to_none=True)
    losses = []
    for rows in rows_by_rank:
        batches = [batch_of_images(family, [row], model.dtype) for row in rows]
        num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            labels = batch.pop("labels")[0, 1:]
            with exact_in_double(model.dtype):
                logits = model(**batch, use_cache=False).logits[0, :-1]
                loss = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / num_labels
                if loss.requires_grad:  # of text, with a frozen language model, it does not
                    (loss / len(rows_by_rank)).backward()
            total += loss.item()
        losses.append(total)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    model.zero_grad(set_to_none=True)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    return losses, gradients
