"""Pictures and words with TRL, in any layout: a script of TRL in which one import was changed. Needs pillow. On two
CPU processes, in seconds, with a small new model that learns to name colors:

    accelerate launch --multi_gpu --num_processes 2 examples/train_images.py --use_cpu --bf16 False --hotspa_strategies dp2:32@64,tp2:64

Your own: `--model_name_or_path google/gemma-3-4b-it --dataset_name my/rows`, with "images". All fields of SFTConfig are flags.
"""

import transformers as hf
from datasets import Dataset, Features, Image, Sequence, Value, load_dataset
from from_trl import small_tokenizer
from PIL.Image import new
from trl import ModelConfig, ScriptArguments, TrlParser

from hf_hotspa.trl import SFTConfig, SFTTrainer  # from trl import SFTConfig, SFTTrainer

DEFAULTS = {"learning_rate": 3e-3, "max_steps": 20, "output_dir": "out/images", "logging_steps": 2, "logging_first_step": True, "max_length": None}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def small_model() -> tuple[hf.PreTrainedModel, hf.ProcessorMixin]:
    """A new Gemma 3 for images of 56 x 56 pixels, and its processor."""
    tokenizer, names = small_tokenizer(), {"boi_token": "<image>", "eoi_token": "</image>", "image_token": "<patch>"}
    tokenizer.add_special_tokens({"extra_special_tokens": [*names.values()]})
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    vars(tokenizer).update(names | {f"{name}_id": number for name, number in ids.items()})
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer), "pad_token_id": 0}
    tower = {**SIZES, "image_size": 56, "patch_size": 14}
    indices = {f"{name}_index": number for name, number in ids.items()}
    hf.set_seed(0)
    config = hf.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **indices)
    images = hf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, image_seq_length=4)
    return hf.Gemma3ForConditionalGeneration(config), hf.Gemma3Processor(images, tokenizer, image_seq_length=4)


def colors() -> Dataset:
    """Rows of one to three pictures of one color each, and their names."""
    words = ["red", "green", "blue", "white", "black", "gray"]
    chosen = [[words[(n * 5 + k) % 6] for k in range(1 + n % 3)] for n in range(96)]
    rows = {"images": [[new("RGB", (40, 30), name) for name in names] for names in chosen]}
    rows |= {"prompt": ["<image>" * len(names) + ":" for names in chosen], "completion": [*map(" ".join, chosen)]}
    kinds = {"images": Sequence(Image()), "prompt": Value("string"), "completion": Value("string")}
    return Dataset.from_dict(rows, Features(kinds))


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    script, training, model = parser.parse_args_into_dataclasses()
    name = model.model_name_or_path
    made, processor = (name, hf.AutoProcessor.from_pretrained(name)) if name else small_model()
    rows = load_dataset(script.dataset_name, split=script.dataset_train_split) if script.dataset_name else colors()
    trainer = SFTTrainer(made, training, train_dataset=rows, processing_class=processor)
    trainer.train()
    trainer.save_model(training.output_dir)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trainer.accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the model is in {training.output_dir}")
