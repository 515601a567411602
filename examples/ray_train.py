"""`HotSPaTrainer` inside Ray Train (`pip install ray[train]`): where processes run, restarts and logs are Ray's.

    python examples/ray_train.py --workers 4 --model path/to/model --dataset my.jsonl --storage /data/runs --max_steps 100

Takes all flags of TrainingArguments. After a failure at least `--min_workers` processes resume. See docs/several-machines.md.
"""

import argparse
from pathlib import Path
from typing import Any

import ray.data
import ray.train
from datasets import Dataset
from ray.train.torch import TorchTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerCallback

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments


class ReportToRay(TrainerCallback):
    """Progress, and each checkpoint once it is whole: one process hands it over for all, and Ray copies it."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        checkpoint = ray.train.Checkpoint.from_directory(folder) if state.is_world_process_zero else None
        ray.train.report({"step": state.global_step, "log": state.log_history[-1]}, checkpoint=checkpoint)


def train(given: dict[str, Any]) -> None:
    """What each process does."""
    world = ray.train.get_context().get_world_size()
    strategies = dict(word.split("=", 1) for word in given["strategies"]).get(str(world), "auto")
    words = ["--output_dir", f"{given['storage']}/trainer", "--hotspa_strategies", strategies, *given["rest"]]
    [args] = HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses(words)
    rows = Dataset.from_list(list(ray.train.get_dataset_shard("train").iter_rows()))
    model, tokenizer = (kind.from_pretrained(given["model"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    trainer = HotSPaTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[ReportToRay()])
    saved = ray.train.get_checkpoint()  # none, or an older one, where Ray did not hear of the newest before the failure
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*")) or (saved and saved.path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"model": 0, "dataset": 0, "storage": 0, "workers": 8, "min_workers": 1, "cpus": 1}.items():
        parser.add_argument(f"--{name}", type=int if value else str, default=value, required=not value)
    parser.add_argument("--strategies", nargs="*", default=[], help="by the number of processes: 4=dp4:4096,tp4:16384")
    given, rest = parser.parse_known_args()
    ray.data.DataContext.get_current().execution_options.preserve_order = True  # each process sees the same rows
    failures = ray.train.FailureConfig(max_failures=3)
    devices = {"resources_per_worker": {"CPU": given.cpus}, "use_gpu": "--use_cpu" not in rest}
    TorchTrainer(
        train,
        train_loop_config={**vars(given), "rest": rest},
        datasets={"train": ray.data.read_json(given.dataset)},
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),  # our Trainer deals rows out, by their lengths
        scaling_config=ray.train.ScalingConfig(num_workers=(given.min_workers, given.workers), **devices),
        run_config=ray.train.RunConfig(name="hotspa", storage_path=given.storage, failure_config=failures),
    ).fit()
