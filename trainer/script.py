"""The program of `hf-hotspa train` and `examples/finetune.py` in each process: a command line in, a trained model out.

Owns the choice of model and data (`ScriptArguments`), the settings for fine-tuning a model that has weights, and
loading by name (a folder, a file, the hub). `check_script` finds errors in names before any process is started.
"""

import argparse
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedConfig, set_seed

from hf_hotspa.callbacks.step_reports import ReportCallback
from hf_hotspa.costs.model_config import refuse_gguf
from hf_hotspa.data.prepare import load_source, prepare_dataset, tokenize_rows
from hf_hotspa.errors import HotspaConfigError, HotspaError, ModelError, printable
from hf_hotspa.nearest import spelled, unknown_flag
from hf_hotspa.parallel import backends
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.gain import measure_gain
from hf_hotspa.trainer.given_arguments import flag
from hf_hotspa.trainer.start import Ranks
from hf_hotspa.trainer.trainer import HotSPaTrainer

MORE = "All flags of transformers' TrainingArguments work, too: --learning_rate, --num_train_epochs, --save_steps, ..."


class FlagParser(HfArgumentParser):
    """Reads data classes. An unknown flag ends the program, with the nearest known name."""

    def __init__(self, dataclass_types: Iterable[Any], everything: bool = False, **options: object) -> None:
        kinds = list(dataclass_types)
        super().__init__(kinds, **{"epilog": MORE, "allow_abbrev": False, **options})
        inherited = {name for name in HotSPaTrainingArguments.__dataclass_fields__ if not name.startswith("hotspa_")}
        for action in self._actions:  # there are hundreds: the help shows only ours
            if not everything and action.dest in inherited - {"output_dir"}:
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2; the message may quote what was given."""
        print(printable(f"{self.prog}: {message} ({self.prog} --help)"), file=sys.stderr)
        sys.exit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: object = None
    ) -> tuple[Any, list[str]]:
        """As `ArgumentParser.parse_known_args`; flags of ours may be given without `hotspa_`."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._full(word) for word in words], namespace)

    def _full(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return f"{spelled(name, known) or name}{equals}{value}"

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Any:  # type: ignore[override]
        """As `ArgumentParser.parse_args`; an unknown flag ends the program with code 2."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            if not flags:
                self.error(_no_flag(unknown[0]))
            known = {action.dest for action in self._actions}
            self.error("; ".join(unknown_flag(word, known) for word in flags))
        return parsed


def _no_flag(word: str) -> str:
    if word.endswith(".py"):
        return f"{word} is a program: hf-hotspa run -- python {word}"
    if word.endswith((".yaml", ".yml")):
        return f"{word} is a config file, of axolotl for example: hf-hotspa run -- axolotl train {word}"
    return f"{word!r} belongs to no flag; names follow --model and --dataset"


logger = logging.getLogger(__name__)

LEARNING_RATE, LORA_LEARNING_RATE, NEW_LEARNING_RATE = 2e-5, 2e-4, 3e-4
"""For all weights, for an adapter, and for a new model."""

# the files of a model on the hub: weights in safetensors, configs, tokenizer
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_FP32 = "float32"


@dataclass
class ScriptArguments:
    """The model and the data."""

    model: str | None = flag(
        None, "The model to fine-tune: a folder or a hub name. Each process reads only its share of the weights."
    )
    dataset: str | None = flag(
        None,
        "A json, jsonl, csv, parquet or txt file, a folder of such files, a folder of save_to_disk, or a hub name.",
    )
    config: str | None = flag(None, "Instead of --model: train a new model of this config (a folder or a hub name).")
    tokenizer: str | None = flag(None, "A folder or hub name; default: the model's tokenizer.")
    dataset_split: str = flag("train", "The split, or a part of it such as 'train[:90%%]'; a file is all 'train'.")
    eval_dataset: str | None = flag(
        None, "The data to evaluate, as --dataset; after each epoch unless --eval_strategy is given."
    )
    eval_split: str | None = flag(
        None, "The split to evaluate: of --eval_dataset (default: train), or else of --dataset, such as 'train[90%%:]' "
        "or 'validation'.",
    )  # fmt: skip
    dtype: str = flag(
        "auto", "The dtype in which weights are read: float32, bfloat16, or auto (float32; for the frozen base of an "
        "adapter the dtype of its files). With --bf16, computation is in bfloat16 in any case.",
    )  # fmt: skip
    lora_r: int = flag(0, "Train a LoRA adapter of this rank instead of all weights, such as 16.")
    lora_alpha: int | None = flag(None, "The adapter's factor is lora_alpha / lora_r; default: twice the rank.")
    lora_targets: str = flag("all-linear", "Layers with an adapter, separated by commas; or 'all-linear'.")
    measure_gain: int = flag(
        0, "After training, time so many mini-batches with switching and under single strategies that fit (DDP, FSDP, "
        "tensor parallelism, a pipeline, the best as predicted), and report how much faster switching is; 0 for none.",
    )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A parsed command line."""

    script: Any
    args: HotSPaTrainingArguments


def parser_of(kind: type[ScriptArguments] = ScriptArguments, everything: bool = False, **options: object) -> FlagParser:
    """The parser of `kind` and `HotSPaTrainingArguments`; with `everything`, its help lists `TrainingArguments`, too."""
    return FlagParser((kind, HotSPaTrainingArguments), everything, **options)


def fine_tuning_defaults(given: Namespace) -> dict[str, Any]:
    """The defaults for flags that the command line (`given`) does not set: TRL's settings for fine-tuning."""
    name = Path(str(given.model or given.config)).name
    rate = LORA_LEARNING_RATE if given.lora_r else NEW_LEARNING_RATE if given.model is None else LEARNING_RATE
    defaults = {"learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 10}
    defaults["output_dir"] = str(Path("out", name))
    if given.eval_dataset or given.eval_split:
        defaults["eval_strategy"] = "epoch"
    if not given.use_cpu and not given.fp16 and backends.gpu_has_bf16():
        defaults["bf16"] = True
    return defaults


def parse(
    parser: FlagParser, words: Sequence[str], defaults: Callable[[Namespace], dict[str, Any]] = fine_tuning_defaults
) -> Settings:
    """Reads a command line in a process that trains. Raises `HotspaConfigError` if a flag does not fit."""
    read(parser, words, defaults)
    script, args = parser.parse_args_into_dataclasses(list(words), look_for_args_file=False)
    if args.use_cpu:  # else DeepSpeed, if installed, warns in each process that it finds no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return Settings(script, args)


def read(
    parser: FlagParser, words: Sequence[str], defaults: Callable[[Namespace], dict[str, Any]] = fine_tuning_defaults
) -> Namespace:
    """The flags, read without a process group, before any process is started."""
    given: Namespace = parser.parse_args(list(words))
    parser.set_defaults(**defaults(given))
    return parser.parse_args(list(words))


# -- names ------------------------------------------------------------------------------------------------------------


def check_script(script: Any, skips_empty: bool) -> None:
    """Opens everything that the command line names, and one row of the data, to report errors once and early. `script`:
    has the fields of `ScriptArguments`. `skips_empty`: whether rows without a token are left out (`hotspa_empty_rows`).
    Raises `HotspaError` if there is no such model, tokenizer, file or split, or its rows have no known column."""
    if script.model is None and script.config is None:
        fix = "give a folder or a hub name, such as --model Qwen/Qwen3-0.6B"
        raise HotspaConfigError("--model is missing", fix=fix)
    if script.model is not None and script.config is not None:
        fix = "--config is for a new model: give one of them"
        raise HotspaConfigError("both --model and --config are given", fix=fix)
    if script.dataset is None:
        raise HotspaConfigError("--dataset is missing", fix="give a file, a folder or a hub name: --dataset my.jsonl")
    if script.lora_r:
        _peft()
    if script.dtype != "auto" and not isinstance(getattr(torch, script.dtype, None), torch.dtype):
        raise HotspaConfigError(f"--dtype is {script.dtype!r}", fix="use float32, bfloat16 or auto")
    refuse_gguf(str(script.model or script.config))
    _open_config(_folder(script.model) or script.model if script.model is not None else script.config)
    for dataset in (_rows(script), _evaluated_rows(script)):
        if dataset is not None and "input_ids" not in dataset.column_names:
            tokenize_rows([dataset[0]] if len(dataset) else [{}], _tokenizer(script), skips_empty)


def look_together(settings: Settings) -> None:
    """`check_script` in the running processes: an error of one, on a node without the file or a cache of the hub, is
    raised by all. Collective. Raises `HotspaError` on every process."""
    script, args = settings.script, settings.args
    check = lambda: check_script(script, args.hotspa_skips_empty)  # noqa: E731
    Ranks(args).agreement().run("what the command line names", check)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise HotspaConfigError("--lora_r needs PEFT", fix="pip install peft") from None
    return peft


def _rows(script: Any) -> Any:
    return load_source(script.dataset, script.dataset_split)


def _evaluated_rows(script: Any) -> Any:
    if script.eval_dataset is None and script.eval_split is None:
        return None
    return load_source(script.eval_dataset or script.dataset, script.eval_split or "train")


def _folder(name: str) -> Path | None:
    """The folder of a model, downloaded if it is a hub name; None if the hub has no safetensors of it."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name!r}", fix="--model takes the folder of a saved model, or a hub name")
    from huggingface_hub import snapshot_download

    try:
        downloaded = Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the hub client raises many kinds of errors
        raise _not_there("the model", name, error) from error
    return downloaded if any(downloaded.glob("*.safetensors")) else None


def _not_there(what: str, name: str, error: Exception) -> ModelError:
    lines = str(error).strip().splitlines() or [""]
    return ModelError(
        f"{what} {name!r} is not a folder here, and the hub did not provide it",
        why=f"{type(error).__name__}: {lines[0]:.200}",
        fix=f"check the name; without a network, first download it: hf download {name}; for one that asks you to agree to "
        "its terms, run hf auth login",
    )


def _open_config(path: Path | str | None, **options: object) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise _not_there("the config of", str(path), error) from error
    return config


def _tokenizer(script: Any) -> Any:
    name = script.tokenizer or script.model or script.config
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _not_there("the tokenizer of", name, error) from error


# -- training ---------------------------------------------------------------------------------------------------------


def load_data(script: object, args: HotSPaTrainingArguments) -> tuple[Any, Any, Any]:
    """The tokenizer, the rows to train, and the rows to evaluate (None without).

    The main process of each node makes the caches, the others read them. Collective; all raise an error of one.
    """

    def load() -> tuple[Any, Any, Any]:
        with args.main_process_first(desc="tokenising"):
            tokenizer, sets = _tokenizer(script), (_rows(script), _evaluated_rows(script))
            prepare = partial(prepare_dataset, tokenizer=tokenizer, skips_empty=args.hotspa_skips_empty)
            trained, evaluated = (None if rows is None else prepare(rows) for rows in sets)
            return tokenizer, trained, evaluated

    return Ranks(args).agreement().run("reading the data", load)


def make_model(script: object, args: HotSPaTrainingArguments) -> Any:
    """The model: a config if each process reads its share of the weights, else a model with weights, equal on all
    processes. Collective; all raise an error of one."""
    return Ranks(args).agreement().run("making the model", lambda: _model(script, args))


def _model(script: Any, args: HotSPaTrainingArguments) -> Any:
    set_seed(args.seed)
    frozen = bool(script.lora_r)
    dtype: Any = getattr(torch, _FP32 if script.dtype == "auto" else script.dtype)
    if script.model is None:
        return _with_adapter(AutoModelForCausalLM.from_config(_open_config(script.config), dtype=dtype), script, args)
    with args.main_process_first(desc="downloading"):
        folder = _folder(script.model)
    if folder is not None and not frozen:
        args.hotspa_model_path = str(folder)
        return _open_config(folder, dtype=dtype)
    if frozen and script.dtype == "auto":
        dtype = "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder or script.model, dtype=dtype)
    except HotspaError:
        raise
    except (OSError, ValueError) as error:
        raise _not_there("the model", script.model, error) from error
    return _with_adapter(model, script, args)


def _with_adapter(model: Any, script: Any, args: HotSPaTrainingArguments) -> Any:
    if not script.lora_r:
        return model
    peft = _peft()
    targets = script.lora_targets
    config = peft.LoraConfig(
        r=script.lora_r,
        lora_alpha=2 * script.lora_r if script.lora_alpha is None else script.lora_alpha,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        task_type="CAUSAL_LM",
    )
    set_seed(args.seed)
    return peft.get_peft_model(model, config)


def run(settings: Settings) -> None:
    """Trains and saves; in each process. Raises `HotspaError` on every process."""
    script, args = settings.script, settings.args
    look_together(settings)
    tokenizer, rows, evaluated = load_data(script, args)
    data = {"train_dataset": rows, "eval_dataset": evaluated, "processing_class": tokenizer}
    trainer = HotSPaTrainer(model=make_model(script, args), args=args, **data)
    finish(trainer, train(trainer, script), script)


def finish(trainer: HotSPaTrainer, trained: bool, script: Any) -> None:
    """Closes the engine of a trainer, and then measures the gain of switching, if asked for."""
    trainer.close_engine()
    if trained and script.measure_gain:
        measure_gain(trainer, script.measure_gain)


def train(trainer: HotSPaTrainer, script: Any) -> bool:
    """Trains, saves into `output_dir` and prints the result; False if a signal ended the training."""
    for callback in trainer.callback_handler.every:
        if isinstance(callback, ReportCallback):
            callback.gain_follows = bool(script.measure_gain)
    trainer.train()
    if trainer.preempted:  # by a signal: the checkpoint is written, and time is short
        return False
    folder = str(trainer.args.output_dir)
    trainer.save_model(folder)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        shown = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in " if losses else ""
        saved = f"{shown}{trainer.state.global_step} steps; saved to {Path(folder).resolve()}"
        print(printable(saved), flush=True)
    return True
