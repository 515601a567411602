"""`HotSPaTrainer` in a world: real text through the tokenizer, TensorBoard, saving, and the launch from a command line."""

import contextlib
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_hotspa.cli import main
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import FAMILIES, tiny_model
from tests.gloo.test_examples_run import run_script
from tests.harness import run_ranks
from tests.oracle import random_rows

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]


def train_and_save(rank, world_size, family, folder):
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


# the others are variations: of the biases, and of the norms
QUICK = ("llama_uneven", "phi3_fused")


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
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
    assert {"train/loss", "train/hotspa/switch_share"} <= tags
    assert {f"train/hotspa_debug/{name}" for name in ("switch_s", "switch_mb", "hidden_s", "load_return_s")} <= tags
    assert {f"train/hotspa_debug/{strategy}/compute_s" for strategy in ("dp2", "tp2")} <= tags
    shares = [event.value for event in events.Scalars("train/hotspa/switch_share")]
    phases = [event.value for event in events.Scalars("train/hotspa_debug/phases")]
    assert len(shares) == 3
    assert max(phases) == 2
    # a mini-batch whose rows all lie in one bucket runs under one strategy: nothing of it is switching
    assert all((share > 0) == (count > 1) and share < 1 for share, count in zip(shares, phases, strict=True))


SMALL = "--max_steps 3 --logging_steps 1 --hotspa_mini_batch_size 4 --vocab_size 300 --learning_rate 1e-2"


def launch(arguments, processes=2, **env):
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes",
        str(processes), "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ]  # fmt: skip
    script = [str(ROOT / "examples" / "demo.py"), *arguments.split()]
    return subprocess.run(
        [*(launcher if processes > 1 else [sys.executable]), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


TRAIN = "train --use_cpu --max_steps 2 --hotspa_mini_batch_size 4 --hotspa_strategies dp2:64@128,tp2:256"


def run_command(line, *launcher, **env):
    """`hf-hotspa`, or a launcher that runs its module."""
    return subprocess.run(
        [sys.executable, "-m", *launcher, "hf_hotspa.cli", *line.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


@pytest.fixture
def model_and_rows(tmp_path):
    """The flags that name a model folder and a file of texts."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(f'{{"text": "{"def f(x): return x + 1 " * (1 + n % 17)}"}}\n' for n in range(24)))
    model = make_tokenizer(tmp_path)
    tiny_model("llama_gqa_bias").save_pretrained(model)
    return (
        f"--model {model} --dataset {data} --dataset_split train[:20] --eval_split train[20:] --hotspa_overlong split"
    )


def command_of_ranks(rank, world_size, arguments, log):
    with open(log if rank == 0 else os.devnull, "w") as out, contextlib.redirect_stdout(out):
        return main(arguments)


@pytest.mark.parametrize("starts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hf_hotspa_train_leaves_a_model(tmp_path, model_and_rows, starts):
    """In ranks that have imported torch already, or in processes that it starts."""
    out, log = tmp_path / "out", tmp_path / "log.txt"
    line = f"{TRAIN} {model_and_rows} --output_dir {out} --eval_strategy steps --eval_steps 2"
    if starts:
        done = run_command(line)
        assert done.returncode == 0, done.stderr[-3000:]
        text = done.stdout
    else:
        assert run_ranks(2, command_of_ranks, line.split(), str(log), init=False) == [0, 0]
        text = log.read_text()
    assert "2 steps; saved to" in text
    assert "'eval_loss'" in text
    run = read_run_log(out)
    assert run.facts.world_size == 2
    assert {phase.strategy for record in run.steps for phase in record.report.phases} == {"dp2", "tp2"}
    trained, before = (
        AutoModelForCausalLM.from_pretrained(out),
        AutoModelForCausalLM.from_pretrained(tmp_path / "tokenizer"),
    )
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no "
     "--main_process_port 0 -m", "torch.distributed.run --standalone --nproc_per_node 2 -m"],
)  # fmt: skip
def test_hf_hotspa_train_runs_on_the_processes_of_a_launcher(launcher, tmp_path, model_and_rows):
    out = tmp_path / "out"
    done = run_command(f"{TRAIN} {model_and_rows} --output_dir {out} --lora_r 4 --dtype float32", *launcher.split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_run_log(out).facts.world_size == 2
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_hf_hotspa_train_in_one_process(tmp_path, model_and_rows):
    out, flags = tmp_path / "out", TRAIN.replace("dp2:64@128,tp2:256", "dp1:256")
    done = run_command(f"{flags} {model_and_rows} --output_dir {out}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "model.safetensors").exists()


def make_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "def": 2, "return": 3, "x": 4}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_example_trains_on_the_standard_library(tmp_path, launched):
    """By `accelerate launch`, or in ranks that have imported torch already; with the settings of `make train`."""
    arguments = f"--use_cpu --max_steps 2 --hotspa_mini_batch_size 8 --measure_gain 2 --output_dir {tmp_path / 'out'}"
    environment = {"HF_HOME": str(tmp_path / "cache")}
    if launched:
        done = launch(arguments, processes=4, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        text = done.stdout
    else:
        log = tmp_path / "log.txt"
        run_ranks(4, run_script, "demo.py", arguments.split(), str(log), env=environment)
        text = log.read_text()
    assert text.startswith("[  0 s] importing torch")  # before anything that takes time
    assert "equal to what was trained: True" in text
    assert "longest" in text  # the histogram of lengths
    run, last = read_run_log(tmp_path / "out"), text.splitlines()[-10:]
    assert len(run.gain.switching) == 2
    assert run.gain.sentence in last
    # one verdict, measured; the terminal, the record and the page have the same words and numbers
    page = unescape((tmp_path / "out" / "hotspa_report" / "report.html").read_text())
    claims = re.compile(r"(?:Switching pays|Switching does not pay|Whether switching pays is not)[^\n<]*")
    said = "\n".join(last)  # the plan before training is predicted
    assert claims.findall(said) == claims.findall(page) == [run.gain.sentence]
    assert "(predicted)" not in said + page
    assert all(sentence in page for sentence in run.gain.sentences)
    known = ["DDP (dp4): does not fit in 144 MiB", "FSDP / ZeRO-3 (dp4+rc+z3)", "tp4", "pp4", "cp4"]
    for named in known:
        assert named in text
        assert named in page
    assert not re.search(r"(?<![a-z])(?:[dctp]p\d+)*[dctp]p1(?!\d)", text + str(run.gain.to_dict()))
    begun, before, after = (last[last.index(line) + i] for line in last if "how it continues" in line for i in range(3))
    assert "'def " in begun
    assert (before[:9], after[:9]) == ("  before ", "  after  ")
    assert before[9:] != after[9:]
    assert f"The run in one page: {tmp_path / 'out' / 'hotspa_report' / 'report.html'}" in last
    assert last[-1].endswith("hf-hotspa train --model Qwen/Qwen3-0.6B --dataset my.jsonl --use_cpu")
