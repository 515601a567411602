"""`HotSPaTrainer` in a world: real text through the tokenizer, TensorBoard, saving, and the launch from a command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES, tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]


def train_and_save(rank, world_size, family, folder):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    model = tiny_model(family)
    args = HotSPaTrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, logging_steps=1, hotspa_mini_batch_size=8, disable_tqdm=True,
        hotspa_strategies="dp2:16@32,tp2:60", report_to="tensorboard", learning_rate=1e-2,
        include_num_input_tokens_seen="all", hotspa_phase_table=True,
    )  # fmt: skip
    rows = random_rows(16, model.config.vocab_size, longest=60)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    # only the main process saves: after training that is no collective
    if trainer.is_world_process_zero():
        trainer.save_model(folder)
    assert trainer.model is model
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    tokens = trainer.state.num_input_tokens_seen
    return {name: p.detach().clone() for name, p in model.named_parameters()}, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trained_model_is_everywhere_and_loads(family, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    (weights, tokens), (other, _) = run_ranks(
        2, train_and_save, family, str(tmp_path), env={"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard")}
    )
    assert tokens > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert torch.equal(parameter, other[name]), name
    assert_tensorboard(tmp_path / "tensorboard")


def assert_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/hotspa/switch_s", "train/hotspa/switch_mb", "train/hotspa/switch_share"} <= tags
    assert "train/hotspa/hidden_s" in tags
    assert {"train/hotspa/dp2tp1pp1/compute_s", "train/hotspa/dp1tp2pp1/compute_s"} <= tags
    shares = [event.value for event in events.Scalars("train/hotspa/switch_share")]
    assert len(shares) == 3
    assert all(0 < share < 1 for share in shares)


SMALL = "--max_steps 3 --logging_steps 1 --hotspa_mini_batch_size 4 --vocab_size 300 --learning_rate 1e-2"


def launch(arguments, processes=2, **env):
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes",
        str(processes), "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ]  # fmt: skip
    script = [str(ROOT / "examples" / "finetune.py"), *arguments.split()]
    return subprocess.run(
        [*(launcher if processes > 1 else [sys.executable]), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


def test_the_example_trains_from_the_command_line(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(f'{{"text": "{"def f(x): return x + 1 " * (1 + n % 17)}"}}\n' for n in range(24)))
    done = launch(
        f"{SMALL} --use_cpu --dataset {data} --tokenizer {make_tokenizer(tmp_path)} --output_dir {tmp_path / 'out'} "
        "--hotspa_strategies dp2:64@128,tp2:256 --hotspa_overlong split",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal to what was trained: True" in done.stdout
    assert "dp2tp1pp1" in done.stdout
    assert "dp1tp2pp1" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def make_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "def": 2, "return": 3, "x": 4}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_example_trains_on_the_standard_library(tmp_path):
    done = launch(
        f"--use_cpu --max_steps 2 --hotspa_mini_batch_size 4 --vocab_size 400 --output_dir {tmp_path / 'out'} "
        "--hotspa_strategies dp2:256@512,tp2:1024 --hotspa_overlong truncate",
        HF_HOME=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal to what was trained: True" in done.stdout
    assert "longest" in done.stdout  # the histogram of lengths


def test_the_wrong_launch_line_prints_the_right_one(tmp_path):
    done = launch("--use_cpu --hotspa_strategies dp4:64 --output_dir " + str(tmp_path), processes=1)
    assert done.returncode != 0
    assert "HSP-001" in done.stderr
    assert "accelerate launch --multi_gpu --num_processes 4" in done.stderr
