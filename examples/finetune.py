"""Fine-tunes a causal language model with hot-switched strategies: what `hf-hotspa train` runs, as a script to change.

    accelerate launch --multi_gpu --num_processes 8 examples/finetune.py --model Qwen/Qwen3-0.6B --dataset chats.jsonl

`--dataset` takes a local json, jsonl, parquet, csv or text file, a saved `datasets` folder or a hub name, with one of
the columns of docs/data.md. All flags of TrainingArguments work. `hf-hotspa train` starts the processes itself; a small
demonstration that needs neither a model nor data is `demo.py`.
"""

import sys

from hf_hotspa import HotSPaTrainer
from hf_hotspa.trainer import script


def main() -> None:
    """Trains, saves, and measures what switching gained where `--measure_gain` asks for it."""
    settings = script.parse(script.parser_of(), sys.argv[1:])
    script.look_together(settings)
    tokenizer, rows, evaluated = script.load_data(settings.script, settings.args)
    trainer = HotSPaTrainer(
        model=script.make_model(settings.script, settings.args),
        args=settings.args,
        train_dataset=rows,
        eval_dataset=evaluated,
        processing_class=tokenizer,
    )
    script.finish(trainer, script.train(trainer, settings.script), settings.script)


if __name__ == "__main__":
    main()
