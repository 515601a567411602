"""The demonstration that `make train` runs: two minutes on CPU processes, without a model, a download or a data set.

A small new Llama learns to write functions of Python's standard library: most of them are short, a few are long, and each
process may use 144 MiB, which does not hold the long ones under data parallelism. At the end some mini-batches run again,
with switching and under single strategies that fit into that memory, and what switching gained is printed, and how the model
continues the beginning of a row, before and after.

    accelerate launch --multi_gpu --num_processes 4 examples/demo.py --use_cpu
    accelerate launch --multi_gpu --num_processes 4 examples/demo.py --use_cpu --dataset my.jsonl

The second line trains the small model on your own rows (docs/data.md has the columns). These settings are for this
model and two minutes only: for a model that has its weights see `finetune.py`, or `hf-hotspa train`.
"""

import os
import sys
import time
from argparse import Namespace
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_hotspa  # noqa: F401  # first: lines that libraries log at every start do not appear

BEGIN = time.monotonic()


def say(text: str) -> None:
    """A line of progress, from one process."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[{time.monotonic() - BEGIN:3.0f} s] {text}", flush=True)


say("importing torch and transformers ...")

import torch  # noqa: E402  # after the first line, as it takes seconds
from stdlib_corpus import CHAT_TEMPLATE, build_corpus, build_tokenizer, print_length_histogram  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed  # noqa: E402

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments  # noqa: E402
from hf_hotspa.calibrate.model_calibration import Procedure, calibrate  # noqa: E402
from hf_hotspa.data.prepare import load_source, prepare_dataset  # noqa: E402
from hf_hotspa.rows.scan import scan_dataset  # noqa: E402
from hf_hotspa.trainer import script as own  # noqa: E402

POSITIONS = 2048  # of the model: longer rows are split
VOCABULARY = 8192
SETTINGS = {  # anything given on the command line wins
    "output_dir": "out/demo",
    "max_steps": 20,
    "hotspa_mini_batch_size": 64,
    "hotspa_memory_limit_mb": 144,
    "hotspa_overlong": "split",
    "learning_rate": 8e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "logging_steps": 2,
    "measure_gain": 10,
}
# Strategies for 4 processes with that memory, and a calibration that says which single ones fit: two minutes less to wait.
# To have this machine measured, and strategies chosen: --hotspa_strategies auto --hotspa_calibration measure.
FOUR_PROCESSES = {
    "hotspa_strategies": "dp4:768,dp2tp2:1344,tp4:2048@2240",
    "hotspa_calibration": str(Path(__file__).with_name("demo_calibration.json")),
}


@dataclass
class DemoArguments(own.ScriptArguments):
    """What is trained on what."""

    dataset: str | None = field(default="stdlib", metadata={"help": "As for hf-hotspa train, or 'stdlib' (see above)."})
    vocab_size: int = field(default=VOCABULARY, metadata={"help": "Vocabulary of the tokenizer that is made here."})


def defaults(given: Namespace) -> dict[str, Any]:
    """The settings of this demonstration; the calibration is of its model on 4 processes."""
    measured = os.environ.get("WORLD_SIZE") == "4" and given.vocab_size == VOCABULARY and given.tokenizer is None
    return SETTINGS | FOUR_PROCESSES if measured else SETTINGS


def load_data(script: DemoArguments, args: HotSPaTrainingArguments) -> tuple[Any, Any]:
    """The tokenizer and a data set with `input_ids`; the main process makes the caches, the others read them."""
    with args.main_process_first(desc="tokenising"):
        if script.tokenizer is None:
            tokenizer = build_tokenizer(script.vocab_size)
            tokenizer.chat_template = CHAT_TEMPLATE  # for `messages`
        else:
            tokenizer = AutoTokenizer.from_pretrained(script.tokenizer)
        stdlib = script.dataset == "stdlib"
        rows = build_corpus(by_function=True) if stdlib else load_source(script.dataset, script.dataset_split)
        return tokenizer, prepare_dataset(rows, tokenizer, skips_empty=args.hotspa_skips_empty)


def small_model(args: HotSPaTrainingArguments, tokenizer: Any) -> Any:
    """A new model, equal on every rank, because every rank uses the same seed."""
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.1,  # from the usual 0.02 it learns in 20 steps which tokens there are, and no more
        max_position_embeddings=max((b.longest for b in args.hotspa_buckets), default=args.hotspa_longest or POSITIONS),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def measure_machine(model: Any, args: HotSPaTrainingArguments) -> None:
    """Measures in little time, with short packs and once only, where `auto` would; the Trainer finds what is kept."""
    if args.hotspa_auto and args.hotspa_calibration is None:
        say("measuring this machine (the next run reads what was found) ...")
        calibrate(model.config, device=args.device, procedure=Procedure(rounds=1, pack_tokens=512))


def written(model: Any, tokenizer: Any, begun: list[int], seed: int) -> str:
    """How a model continues tokens, as text in one line; neither the model nor the random generator changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = deepcopy(model).generate(
            torch.tensor([begun]), max_new_tokens=30, do_sample=True, top_k=20, pad_token_id=tokenizer.pad_token_id
        )
    return repr(tokenizer.decode(tokens[0, len(begun) :]))


def next_lines() -> str:
    """What to run next."""
    cpu = "" if torch.cuda.is_available() else " --use_cpu"
    command = Path(sys.executable).with_name("hf-hotspa")
    shown = Path(os.path.relpath(command)) if command.is_relative_to(Path.cwd()) else command
    return "\n".join(
        [
            "Next, the same with your own rows (a column text or messages, or prompt and completion), and a model of yours:",
            '  make train EXTRA_TRAIN_ARGS="--dataset my.jsonl"',
            f"  {shown} train --model Qwen/Qwen3-0.6B --dataset my.jsonl{cpu}",
        ]
    )


def main() -> None:
    """Trains, saves, checks that the saved model loads, measures what switching gained, and shows what was learned."""
    settings = own.parse(own.parser_of(DemoArguments), sys.argv[1:], defaults)
    script, args = settings.script, settings.args
    say("making a tokenizer and rows ...")
    tokenizer, dataset = load_data(script, args)
    model, begun, samples = small_model(args, tokenizer), dataset[0]["input_ids"][:8], list[str]()
    if args.process_index == 0:
        samples.append(written(model, tokenizer, begun, args.seed))
        parameters = sum(p.numel() for p in model.parameters())
        say(f"a new Llama of {parameters / 1e6:.1f}M parameters; lengths of the {len(dataset)} rows in tokens:")
        print_length_histogram(scan_dataset(dataset, disable_progress=True).lengths.tolist())
    measure_machine(model, args)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    say("training ...")
    trained = own.train(trainer, script)
    if trained and trainer.is_world_process_zero():
        loaded = AutoModelForCausalLM.from_pretrained(args.output_dir, dtype=trainer.model.dtype)
        pairs = zip(loaded.parameters(), trainer.model.parameters(), strict=True)
        say(f"it loads with from_pretrained, equal to what was trained: {all(torch.equal(a, b) for a, b in pairs)}")
        samples.append(written(loaded, tokenizer, begun, args.seed))
    own.finish(trainer, trained, script)
    if trained:
        shown = zip(("before", "after"), samples, strict=False)  # of the main process, which is the one that speaks
        say(
            "\n".join(
                [f"how it continues {tokenizer.decode(begun)!r}", *(f"  {when:6} {text}" for when, text in shown)]
            )
        )
        say(next_lines())


if __name__ == "__main__":
    main()
