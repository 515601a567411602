"""What `hf-hotspa train` and `examples/finetune.py` run in each process: a command line in, a trained model out.

Owns what is trained on what (`ScriptArguments`), the settings for fine-tuning a model that has its weights, and the way
from a name (a folder, a file, the hub) to a model and its rows. What is wrong with a name is found by `look` before any
process is started.

Whether switching paid, measured: the same mini-batches with switching and under single strategies, in turn.

`measure_gain` runs after training, on an engine of its own that knows the strategies of all sides. It runs forward and
backward passes and makes no update, so nothing of the trainer changes: not its weights, its optimizer, its choice of
strategies or any random generator. Sides take turns in another order for each mini-batch, after one that is not timed. All
single strategies run the first mini-batches; those that are clearly slower than another are left out of the others.
"""

import argparse
import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedConfig, set_seed

from hf_hotspa.callbacks.step_reports import ReportCallback
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator, is_stream, without_padded_from
from hf_hotspa.data.prepare import load_source, prepare_dataset, tokenize_rows
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaConfigError, HotspaError, ModelError, UnsupportedError
from hf_hotspa.parallel.adapters import bare_model
from hf_hotspa.reporting.measured import MeasuredGain, known_as
from hf_hotspa.rows.features import RowRules
from hf_hotspa.search.single import Singles
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched.calls import facts_of, pairs_in
from hf_hotspa.switched.model_object import as_built
from hf_hotspa.switched.passes import FLAT_COLUMNS, ROW_COLUMNS, Document, Documents, Exchange, read_batch
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, given_buckets
from hf_hotspa.trainer.auto import engine_options
from hf_hotspa.trainer.given_arguments import flag, unknown_flag
from hf_hotspa.trainer.start import Ranks
from hf_hotspa.trainer.trainer import HotSPaTrainer

if TYPE_CHECKING:
    from hf_hotspa.trainer.trainer import SwitchedMixin

SWITCHING = "switching"
_ALL_SIDES, _SLOWER = 2, 1.2
"""After so many mini-batches single strategies are left out that took so many times as long as the fastest of them."""


@dataclass(frozen=True)
class Side:
    """One way to run a mini-batch.

    Args:
        buckets: What it runs under.
        choose: Chooses among them for the lengths of a mini-batch; None where they stay the same.
    """

    name: str
    buckets: tuple[Bucket, ...]
    choose: Callable[[Sequence[int]], tuple[Bucket, ...]] | None = None

    def of(self, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets of a mini-batch."""
        return self.buckets if self.choose is None else self.choose(lengths)


def measure_gain(trainer: "SwitchedMixin", steps: int = 5) -> MeasuredGain | None:
    """Measures how much faster switching is than single strategies: the best one that fits as predicted, and what people
    run (DDP, FSDP, tensor parallelism, a pipeline) where it fits. Collective.

    The engine of the trainer may be closed, and should be where memory is short: this makes one beside it.

    Args:
        trainer: One that has trained.
        steps: Mini-batches that are timed, the first of the run. Without a time model single strategies are those of the
            list that hold every row.

    Returns:
        What was measured, which is printed, and told to callbacks (`on_gain_measured`); None where the run has one strategy.

    Raises:
        HotspaError: on every rank: `auto` has not chosen strategies, the data set is a stream, or no single strategy fits.
    """
    if steps < 1:
        raise HotspaConfigError(
            f"the gain of switching is to be measured on {steps} mini-batches", fix="use at least 1"
        )
    if is_stream(trainer.train_dataset):
        raise UnsupportedError(
            "the gain of switching cannot be measured on a stream",
            why="every side needs the same rows, and a stream gives them once",
            fix="use a data set with random access",
        )
    hot = _switching(trainer)
    if len(hot.buckets) < 2:
        return None
    rivals, left_out = _singles(trainer, hot).rivals(trainer.args.world_size)
    sides = [hot, *(Side(str(bucket.strategy), (bucket,)) for bucket in rivals)]
    if len(sides) < 2:
        raise HotspaConfigError(
            "no single strategy is known to hold every row, so there is nothing to compare with",
            fix="hotspa_calibration=measure finds out which of them fit",
        )
    if trainer._hotspa_model is not None:
        trainer._hotspa_model.refresh()
    with as_built(bare_model(trainer.model)[0]):
        engine = _engine(trainer, sides)
    seconds, differences = _take_turns(engine, sides, _first_mini_batches(trainer, engine, hot, steps), steps, trainer)
    engine.close()
    singles = {side.name: tuple(seconds[side.name]) for side in sides[1:]}
    measured = MeasuredGain(tuple(seconds[hot.name]), singles, max(differences), left_out)
    if trainer.is_world_process_zero():
        tqdm.write(str(measured))
    trainer.callback_handler.dispatch("on_gain_measured", trainer.args, trainer.state, trainer.control, gain=measured)
    return measured


def _first_mini_batches(trainer: "SwitchedMixin", engine: HotSPaEngine, hot: Side, steps: int) -> list[Documents]:
    """The rows of the first mini-batches of the run; fewer than `steps` where an epoch has fewer. Collective."""
    longest, shape = max(bucket.longest for bucket in hot.buckets), engine.description.shape
    loader, rules = trainer.get_train_dataloader(), RowRules(columns=_columns(trainer))
    trainer._hotspa_rows.take_longest(longest)
    accumulation: int = vars(trainer.args)["gradient_accumulation_steps"]
    exchange, mini_batches, state = Exchange(engine.agreement, engine.world_size), list[Documents](), random_state()

    names = (*ROW_COLUMNS, *FLAT_COLUMNS, *rules.columns)

    def read() -> list[list[Document]]:
        batches = map(without_padded_from, islice(loader, steps * accumulation))
        known = ({name: batch[name] for name in names if name in batch} for batch in batches)
        return [read_batch(batch, shape.vocab_size, longest, engine.rank, rules) for batch in known]

    try:  # a loader draws a seed for its workers
        parts = engine.agreement.run("gain", read, lambda parts: {"number of batches": str(len(parts))})
    finally:
        set_random_state(state, "the first mini-batches")
    for first in range(0, len(parts), accumulation):
        documents = Documents()
        for mine in parts[first : first + accumulation]:
            facts = exchange.facts(facts_of(mine, None))
            documents.add([pairs_in(of_rank) for of_rank in facts], mine, engine.rank)
        mini_batches.append(documents)
    return mini_batches


def _columns(trainer: "SwitchedMixin") -> tuple[str, ...]:
    return trainer._hotspa_loss.columns if trainer._hotspa_loss is not None else ()


def _take_turns(
    engine: HotSPaEngine, sides: Sequence[Side], batches: Sequence[Documents], steps: int, trainer: Any
) -> tuple[dict[str, list[float]], list[float]]:
    """Runs the mini-batches under each side, after one that is not timed. Collective.

    Args:
        sides: Switching first.
        batches: The mini-batches; they come again where there are fewer than `steps`.

    Returns:
        The seconds of each side by its name, and how far the losses of the sides of each mini-batch differ.
    """
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    differences, verbose = [], trainer.is_world_process_zero()
    shape = engine.description.shape
    rules = RowRules(columns=_columns(trainer))
    collator = PackedBucketCollator(engine.buckets, rank=engine.rank, vocab_size=shape.vocab_size, rules=rules)
    exchange = Exchange(engine.agreement, engine.world_size)

    def made(documents: Documents, side: Side) -> MiniBatch:
        plan = documents.plan(range(len(documents)), side.of(documents.lengths), shape.quadratic_cost, None)
        return documents.mini_batch(plan, collator, exchange)

    for number in range(-1, steps):
        documents = batches[max(number, 0) % len(batches)]
        if number == _ALL_SIDES:
            least = min(sum(seconds[side.name]) for side in sides[1:])
            sides = [side for side in sides if side is sides[0] or sum(seconds[side.name]) <= _SLOWER * least]
        if verbose:
            shown = f"mini-batch {number + 1} of {steps}" if number >= 0 else "a first mini-batch, not timed,"
            tqdm.write(f"measuring {shown} under {', '.join(known_as(side.name) for side in sides)}")
        losses = []
        for turn in range(len(sides)):
            side = sides[(number + turn) % len(sides)]
            mini_batch = made(documents, side)
            engine.agreement.barrier()
            begin = time.perf_counter()
            losses.append(engine.forward_backward(mini_batch).loss)
            took = float(engine.agreement.gather([time.perf_counter() - begin]).max())
            if number >= 0:
                seconds[side.name].append(took)
        differences.append((max(losses) - min(losses)) / max(map(abs, losses)) if any(losses) else 0.0)
    return seconds, differences


def _switching(trainer: "SwitchedMixin") -> Side:
    """The strategies of the run; under `auto` each mini-batch chooses as the next one of the run would."""
    auto = trainer._hotspa_watchers.auto
    if not trainer.args.hotspa_auto:
        return Side(SWITCHING, given_buckets(trainer.args, trainer.model))
    if auto is None or auto.chooser is None:
        raise HotspaConfigError("nothing was trained, so no strategies were chosen", fix="call train() first")
    chooser = auto.chooser
    return Side(
        SWITCHING, auto.pool, lambda lengths: chooser.choose(chooser.num_trained, lengths, chooser.previous).buckets
    )


def _singles(trainer: "SwitchedMixin", hot: Side) -> Singles:
    """The single strategies that fit: as a time model and a memory model have it, or those of the list."""
    predictions = trainer._hotspa_watchers.auto or trainer._hotspa_watchers.predictions
    singles = predictions.singles() if predictions is not None else Singles()
    if singles.fitting:
        return singles
    longest = max(bucket.longest for bucket in hot.buckets)
    own = (replace(bucket, low=0, longest=longest) for bucket in hot.buckets if bucket.capacity >= longest)
    return Singles(tuple(own), singles.refused, "without a calibration nobody knows whether it fits")


def _engine(trainer: "SwitchedMixin", sides: Sequence[Side]) -> HotSPaEngine:
    """An engine that knows the strategies of all sides; they share its weights and its memory."""
    strategies = dict.fromkeys(bucket.strategy for side in sides for bucket in side.buckets)
    buckets = [
        Bucket(s, s.cp, s.cp) for s in strategies
    ]  # mini-batches come with buckets of their own; cp needs a token a rank
    weights = None if has_weights(trainer.model) else trainer._hotspa_source.folder
    measured = trainer.engine.description.vector.measured if trainer.engine is not None else None
    auto = trainer._hotspa_watchers.auto
    options = engine_options(trainer.args, trainer._hotspa_loss, measured, auto.time if auto is not None else None)
    return HotSPaEngine(trainer.model, buckets, options, weights=weights, device=trainer.args.device)


# -- the command ------------------------------------------------------------------------------------------------------


MORE = "All flags of transformers' TrainingArguments work, too: --learning_rate, --num_train_epochs, --save_steps, ..."


class FlagParser(HfArgumentParser):
    """Reads data classes. A flag that none of them has ends the program, with the name that was meant."""

    def __init__(self, dataclass_types: Iterable[Any], everything: bool = False, **options: Any) -> None:
        kinds = list(dataclass_types)
        super().__init__(kinds, **{"epilog": MORE, **options})
        inherited = {name for name in HotSPaTrainingArguments.__dataclass_fields__ if not name.startswith("hotspa_")}
        for action in self._actions:  # hundreds: the help is about what is ours
            if not everything and action.dest in inherited - {"output_dir"}:
                action.help = argparse.SUPPRESS

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As `ArgumentParser.parse_args`; what is not known ends the program with code 2."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            if not flags:
                self.error(f"{unknown[0]!r} belongs to no flag; names follow --model and --dataset")
            known = {action.dest for action in self._actions}
            self.error("; ".join(unknown_flag(word, known) for word in flags))
        return parsed


logger = logging.getLogger(__name__)

LEARNING_RATE, LORA_LEARNING_RATE, NEW_LEARNING_RATE = 2e-5, 2e-4, 3e-4
"""Of all weights, of an adapter, and of a new model."""

# the files of a model on the hub: weights in safetensors once, configs, tokenizer
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_FP32 = "float32"


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model: str | None = flag(
        None, "The model to fine-tune: a folder or a hub name. Each process reads only its share of the weights."
    )
    dataset: str | None = flag(
        None,
        "A json, jsonl, csv, parquet or txt file, a folder of such files, a folder of save_to_disk, or a hub name.",
    )
    config: str | None = flag(None, "Instead of --model: train a new model of this config (a folder or a hub name).")
    tokenizer: str | None = flag(None, "A folder or hub name; default: that of the model.")
    dataset_split: str = flag("train", "The split, or a part of it such as 'train[:90%%]'; a file is all 'train'.")
    eval_dataset: str | None = flag(
        None, "What is evaluated, as --dataset; after each epoch where --eval_strategy says nothing else."
    )
    eval_split: str | None = flag(
        None,
        "The split that is evaluated: of --eval_dataset (default: train), or else of --dataset, such as "
        "'train[90%%:]' or 'validation'.",
    )
    dtype: str = flag(
        "auto",
        "The dtype in which weights are read: float32, bfloat16, or auto (float32; for the frozen base of an "
        "adapter that of its files). With --bf16, computation is in bfloat16 all the same.",
    )
    lora_r: int = flag(0, "Train a LoRA adapter of this rank instead of all weights, such as 16.")
    lora_alpha: int | None = flag(None, "The adapter's factor is lora_alpha / lora_r; default: twice the rank.")
    lora_targets: str = flag("all-linear", "Layers with an adapter, separated by commas; or 'all-linear'.")
    measure_gain: int = flag(
        0,
        "After training, time so many mini-batches with switching and under single strategies that fit (DDP, FSDP, "
        "tensor parallelism, a pipeline, the best as predicted), and say how much faster switching is; 0 for none.",
    )


@dataclass(frozen=True)
class Settings:
    """A command line, read."""

    script: Any
    args: HotSPaTrainingArguments


def parser_of(kind: type[ScriptArguments] = ScriptArguments, everything: bool = False, **options: Any) -> FlagParser:
    """The parser of `kind` and `HotSPaTrainingArguments`; options as for an `ArgumentParser`.

    Args:
        everything: Whether its help lists the flags of `TrainingArguments`, too.
    """
    return FlagParser((kind, HotSPaTrainingArguments), everything, **options)


def fine_tuning_defaults(given: Namespace) -> dict[str, Any]:
    """What holds where the command line says nothing: TRL's settings for fine-tuning, where the Trainer's are others.

    Args:
        given: The command line over the Trainer's defaults.
    """
    name = Path(str(given.model or given.config)).name
    rate = LORA_LEARNING_RATE if given.lora_r else NEW_LEARNING_RATE if given.model is None else LEARNING_RATE
    defaults = {"learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 10}
    defaults["output_dir"] = str(Path("out", name))
    if given.eval_dataset or given.eval_split:
        defaults["eval_strategy"] = "epoch"
    if not given.use_cpu and not given.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        defaults["bf16"] = True
    return defaults


def parse(
    parser: FlagParser, words: Sequence[str], defaults: Callable[[Namespace], dict[str, Any]] = fine_tuning_defaults
) -> Settings:
    """Reads a command line in a process that trains.

    Raises:
        HotspaConfigError: a flag does not fit.
    """
    read(parser, words, defaults)
    script, args = parser.parse_args_into_dataclasses(list(words), look_for_args_file=False)
    if args.use_cpu:  # else DeepSpeed, where it is installed, warns in each process that it finds no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return Settings(script, args)


def read(
    parser: FlagParser, words: Sequence[str], defaults: Callable[[Namespace], dict[str, Any]] = fine_tuning_defaults
) -> Namespace:
    """The flags as they are, without a process group: what can be known before any process is started."""
    given: Namespace = parser.parse_args(list(words))
    parser.set_defaults(**defaults(given))
    return parser.parse_args(list(words))


# -- names ------------------------------------------------------------------------------------------------------------


def look(script: Any, skips_empty: bool) -> None:
    """Opens what the command line names, and one row of it, so that what is wrong is said once and early.

    Args:
        script: Has the fields of `ScriptArguments`.
        skips_empty: Whether rows without a token are left out (`hotspa_empty_rows`).

    Raises:
        HotspaError: there is no such model, tokenizer, file or split, or its rows have no column that is known.
    """
    if script.model is None and script.config is None:
        raise HotspaConfigError(
            "--model is missing", fix="give a folder or a hub name, such as --model Qwen/Qwen3-0.6B"
        )
    if script.model is not None and script.config is not None:
        raise HotspaConfigError(
            "both --model and --config are given", fix="--config is for a new model: give one of them"
        )
    if script.dataset is None:
        raise HotspaConfigError("--dataset is missing", fix="give a file, a folder or a hub name: --dataset my.jsonl")
    if script.lora_r:
        _peft()
    if script.dtype != "auto" and not isinstance(getattr(torch, script.dtype, None), torch.dtype):
        raise HotspaConfigError(f"--dtype is {script.dtype!r}", fix="use float32, bfloat16 or auto")
    _open_config(_folder(script.model) or script.model if script.model is not None else script.config)
    for dataset in (_rows(script), _evaluated_rows(script)):
        if dataset is not None and "input_ids" not in dataset.column_names:
            tokenize_rows([dataset[0]] if len(dataset) else [{}], _tokenizer(script), skips_empty)


def look_together(settings: Settings) -> None:
    """`look`, where processes run: what one of them does not find, on a node without the file or a cache of the hub, all of them
    say. Collective.

    Raises:
        HotspaError: on every process.
    """
    script, args = settings.script, settings.args
    agreement = Ranks(args).agreement()
    agreement.run("what the command line names", lambda: look(script, args.hotspa_skips_empty))


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise HotspaConfigError("--lora_r needs PEFT", fix="pip install peft") from None
    return peft


def _rows(script: Any) -> Any:
    return load_source(script.dataset, script.dataset_split)


def _evaluated_rows(script: Any) -> Any:
    """What is evaluated, or None."""
    if script.eval_dataset is None and script.eval_split is None:
        return None
    return load_source(script.eval_dataset or script.dataset, script.eval_split or "train")


def _folder(name: str) -> Path | None:
    """The folder of a model, downloaded where it is a hub name; None where the hub has no safetensors of it."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name!r}", fix="--model takes the folder of a saved model, or a hub name")
    from huggingface_hub import snapshot_download

    try:
        downloaded = Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the hub client has many ways to say no
        raise _not_there("the model", name, error) from error
    return downloaded if any(downloaded.glob("*.safetensors")) else None


def _not_there(what: str, name: str, error: Exception) -> ModelError:
    """What to raise for a name that nobody has."""
    said = str(error).strip().splitlines() or [""]
    return ModelError(
        f"{what} {name!r} is no folder here, and the hub did not give it",
        why=f"{type(error).__name__}: {said[0]:.200}",
        fix=f"check the name; without a network, first download it: hf download {name}; for one that asks you to agree to "
        "its terms, run hf auth login",
    )


def _open_config(path: Path | str | None, **options: Any) -> PreTrainedConfig:
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


def load_data(script: Any, args: HotSPaTrainingArguments) -> tuple[Any, Any, Any]:
    """The tokenizer, the rows that are trained, and those that are evaluated (None without).

    The main process of each node makes the caches, the others read them. Collective; an error of one process is raised by all.
    """

    def load() -> tuple[Any, Any, Any]:
        with args.main_process_first(desc="tokenising"):
            tokenizer = _tokenizer(script)
            evaluated, skips = _evaluated_rows(script), args.hotspa_skips_empty
            return (
                tokenizer,
                prepare_dataset(_rows(script), tokenizer, skips_empty=skips),
                prepare_dataset(evaluated, tokenizer, skips_empty=skips) if evaluated is not None else None,
            )

    return Ranks(args).agreement().run("reading the data", load)


def make_model(script: Any, args: HotSPaTrainingArguments) -> Any:
    """The model: a config where each process reads its share of the weights, and else one with weights, equal on all. Collective;
    an error of one process is raised by all."""
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
    """The model with an adapter, if one is asked for."""
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
    """Trains and saves; in each process.

    Raises:
        HotspaError: on every process.
    """
    script, args = settings.script, settings.args
    look_together(settings)
    tokenizer, rows, evaluated = load_data(script, args)
    trainer = HotSPaTrainer(
        model=make_model(script, args),
        args=args,
        train_dataset=rows,
        eval_dataset=evaluated,
        processing_class=tokenizer,
    )
    finish(trainer, train(trainer, script), script)


def finish(trainer: HotSPaTrainer, trained: bool, script: Any) -> None:
    """Closes the engine of a trainer, and then measures what switching gained, where that is asked for."""
    trainer.close_engine()
    if trained and script.measure_gain:
        measure_gain(trainer, script.measure_gain)


def train(trainer: HotSPaTrainer, script: Any) -> bool:
    """Trains, saves into `output_dir` and says how it went; False where a signal has ended it before."""
    for callback in trainer.callback_handler.every:
        if isinstance(callback, ReportCallback):
            callback.gain_follows = bool(script.measure_gain)
    trainer.train()
    if trainer.preempted:  # by SIGTERM: the checkpoint is what counts, and time is short
        return False
    folder = str(trainer.args.output_dir)
    trainer.save_model(folder)
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        shown = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in " if losses else ""
        print(f"{shown}{trainer.state.global_step} steps; saved to {Path(folder).resolve()}", flush=True)
    return True
