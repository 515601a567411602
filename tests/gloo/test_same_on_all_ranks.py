"""What must not differ between ranks is an error of all of them before the first step, and names what, where and how much.

One world of three ranks tries one difference after another: rank 1 is the odd one, and no innocent rank is named.
"""

import platform
from dataclasses import replace

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_hotspa import versions
from hf_hotspa.errors import DataError, HotspaError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

ODD = 1
COMMON = {
    "learning_rate": 5e-3, "seed": 7, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "save_strategy": "no", "max_steps": 3, "hotspa_mini_batch_size": 6, "hotspa_strategies": "dp3:16@32,pp3:60@64",
    "hotspa_report": False,
}  # fmt: skip

# name of the argument -> (on rank 1, on the others); test_rank_differences.py draws from all fields
ARGUMENTS = {
    "learning_rate": (1e-4, 5e-3), "optim": ("sgd", "adamw_torch"), "logging_steps": (5, 1), "seed": (8, 7),
    "output_dir": ("elsewhere", None), "bf16": (True, False),
}  # fmt: skip


def make_rows():
    return random_rows(18, 160, longest=60, seed=3)


class Crops:
    """Rows of the scanned lengths, whose tokens are drawn anew at each reading, and on rank 1 in its own way."""

    def __init__(self, rows, rank):
        self.rows, self.reads, self.odd = rows, [0] * len(rows), rank == ODD

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads[index] += 1
        row = self.rows[index]
        if self.reads[index] == 1:  # the scan
            return row
        generator = torch.Generator().manual_seed(20 * self.reads[index] + 2 * index + self.odd)
        drawn = torch.randint(0, 160, (len(row["input_ids"]),), generator=generator).tolist()
        labels = [label if label == -100 else token for label, token in zip(row["labels"], drawn, strict=True)]
        return {"input_ids": drawn, "labels": labels}


class Stream(IterableDataset):
    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.rows)


class ChangesRate(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 2:
            optimizer.param_groups[0]["lr"] *= 2


def differing(rank, folder, name):
    """Builds a trainer of which something differs on rank 1, and trains."""
    odd = rank == ODD
    torch.manual_seed(0)
    model, rows, given, options = tiny_model("llama_gqa_bias", num_hidden_layers=3), make_rows(), {}, {}
    if name in ARGUMENTS:
        value = ARGUMENTS[name][0 if odd else 1]
        options[name] = f"{folder}/{value}" if name == "output_dir" else value
    elif name == "inv_freq" and odd:
        model.model.rotary_emb.inv_freq.mul_(1.01)
    elif name == "optimizer settings":
        given["optimizer_cls_and_kwargs"] = (torch.optim.AdamW, {"lr": 5e-3, "betas": (0.9, 0.98 if odd else 0.99)})
    elif name == "rate in training":
        given["callbacks"] = [ChangesRate()] if odd else []
    elif name == "fewer rows":
        rows = rows[:12] if odd else rows
    elif name == "length of a stream":
        rows, options["max_steps"], options["num_train_epochs"] = Stream(rows, 12 if odd else 18), -1, 1
    elif name == "evaluation rows":
        given["eval_dataset"], options["per_device_eval_batch_size"] = rows[: 4 if odd else 12], 2
    arguments = HotSPaTrainingArguments(**{"output_dir": folder, **COMMON, **options})
    trainer = HotSPaTrainer(model=model, args=arguments, train_dataset=rows, **given)
    if name == "changed later" and odd:
        trainer.args.max_steps = 2
    try:
        if name.startswith("evaluation"):
            trainer.evaluate()
        else:
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{rank}" if name == "resumed" else None)
    finally:
        trainer.close_engine()
        steps.append(trainer.state.global_step)


steps: list[int] = []

OTHERS = {
    "inv_freq": ["rank 1 differs", "buffer model.rotary_emb.inv_freq"],
    "optimizer settings": ["rank 1 differs", "optimizer_cls_and_kwargs: ", '"betas": [0.9, 0.98]'],
    "changed later": ["rank 1 differs", "max_steps: 3 on ranks 0 and 2, 2 on rank 1", "start of training"],
    "resumed": ["resume_from_checkpoint", "start of training"],
    "rate in training": ["rank 1 differs", "lr of parameter group 0", "mini-batch 3"],
    "fewer rows": ["rank 1 differs", "number of rows of train_dataset: 18 on ranks 0 and 2, 12 on rank 1"],
    "length of a stream": ["rank 1 differs", "train_dataset: a stream"],
    "evaluation rows": ["rank 1 differs", "number of rows of eval_dataset: 12 on ranks 0 and 2, 4 on rank 1"],
}


def all_differences(rank, world_size, folder):
    messages = {}
    for name in [*ARGUMENTS, *OTHERS]:
        try:
            differing(rank, folder, name)
        except HotspaError as error:
            messages[name] = str(error)
    return messages, steps


def test_a_difference_between_ranks_is_named(tmp_path):
    found = run_ranks(3, all_differences, str(tmp_path), timeout=280)
    for rank, (messages, taken) in enumerate(found):
        missing = [name for name in [*ARGUMENTS, *OTHERS] if name not in messages]
        assert not missing, f"rank {rank} went on: {missing}"
        for name in ARGUMENTS:
            assert "HSP-203" in messages[name], messages[name]
            assert "rank 1 differs from the others in the" in messages[name], messages[name]
            assert f"{name}: " in messages[name], messages[name]
        for name, fragments in OTHERS.items():
            for fragment in fragments:
                assert fragment in messages[name], f"{name}: {messages[name]}"
        assert messages == found[0][0], "the same error on all ranks"
        assert set(taken) == {0, 2}, taken  # the rate that changes in training does so after two steps
    texts = "".join(found[0][0].values())
    assert "nothing was sent" in texts


def cropped(rank, world_size, folder):
    options = {
        **COMMON,
        "hotspa_strategies": "dp2:16@32,tp2:60@64",
        "disable_tqdm": rank == 0,
        "run_name": f"rank {rank}",
    }
    rows = Crops(make_rows(), rank)
    arguments = HotSPaTrainingArguments(output_dir=folder, **options)
    trainer = HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=arguments, train_dataset=rows)
    trainer.train()
    trainer.close_engine()
    return trainer.state.log_history[-1]["train_loss"]


def test_rows_drawn_by_each_rank_are_fine(tmp_path):
    first, second = run_ranks(2, cropped, str(tmp_path))
    assert first == second


def of_other_tokens(rank, world_size):
    """Ranks of one replica are given rows of equal length and other tokens, by a loop without the Trainer."""
    engine, ids = make_engine(tiny_model("llama_gqa_bias"), "tp2:64"), [3, 4, 5, 6 + rank]
    mini_batch = replace(make_mini_batch(engine, [{"input_ids": ids, "labels": ids}]), content="")  # of no stream
    with pytest.raises(DataError) as caught:
        engine.forward_backward(mini_batch)
    engine.close()
    return str(caught.value)


def test_rows_that_differ_within_a_replica_are_named():
    first, second = run_ranks(2, of_other_tokens)
    assert first == second
    assert "strategy tp2, replica 0" in first


def other_releases(rank, world_size, folder):
    """What is said where rank 1 has another release of a library: by the Trainer's constructor, and by an engine without one."""
    arguments = HotSPaTrainingArguments(output_dir=folder, **COMMON | {"hotspa_strategies": "dp3:64"})
    real = versions.version_of
    plain, lora, messages = tiny_model("llama_gqa_bias"), tiny_lora("llama_gqa_bias"), {}
    ways = {name: lambda: HotSPaTrainer(model=plain, args=arguments) for name in (*versions.COMPARED, "Python")}
    ways |= {f"{name} of an engine": lambda: make_engine(plain, "dp3:64") for name in (*versions.COMPARED, "Python")}
    ways["peft of an engine"] = lambda: make_engine(lora, "dp3:64")
    for name, made in ways.items():
        library = name.split()[0]
        with pytest.MonkeyPatch.context() as patch:
            if rank == ODD and library == "Python":
                patch.setattr(platform, "python_version_tuple", lambda: ("9", "9", "9"))
            elif rank == ODD:
                patch.setattr(versions, "version_of", lambda name, odd=library: "9.9.9" if name == odd else real(name))
            with pytest.raises(HotspaError) as caught:
                made()
        messages[name] = str(caught.value)
    return messages


def test_another_release_on_a_rank_is_named_in_the_first_agreement(tmp_path):
    found = run_ranks(3, other_releases, str(tmp_path))
    assert found[1] == found[0] == found[2]
    assert len(found[0]) == 2 * (len(versions.COMPARED) + 1) + 1
    for name, message in found[0].items():
        assert f"rank 1 differs from the others in the version of {name.split()[0]}: " in message
        assert "9.9" in message.split("on rank 1")[0]
        assert ("set-up" if "engine" in name else "arguments of the Trainer") in message
