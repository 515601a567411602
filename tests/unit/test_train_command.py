"""`hf-hotspa train`: flags, defaults, processes, names that are wrong. A run: tests/gloo/test_trainer_world.py."""

import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import HfArgumentParser, PreTrainedTokenizerFast

from hf_hotspa.cli import main
from hf_hotspa.commands import own_launcher
from hf_hotspa.commands import train as train_command
from hf_hotspa.commands.train import number_of_processes
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.trainer import given_arguments
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.script import ScriptArguments, parse, parser_of, read
from tests.families import tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, rows that can be trained, and rows that cannot."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    found = tmp_path_factory.mktemp("train")
    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        found / "model"
    )
    tiny_model("llama_gqa_bias").save_pretrained(found / "model")
    (found / "good.jsonl").write_text('{"text": "a b a"}\n' * 4)
    (found / "odd.jsonl").write_text('{"story": "a b a"}\n' * 4)
    (found / "empty").mkdir()
    return found


@pytest.fixture
def started(monkeypatch):
    """What would be started, instead of starting it."""
    lines = []

    def execve(path, line, environment):
        lines.append((line, environment))
        raise SystemExit(0)

    monkeypatch.setattr(train_command.os, "execve", execve)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lines


def test_processes_are_started_by_the_launcher_of_torch(folder, started):
    words = ["--model", f"{folder}/model", "--dataset", f"{folder}/good.jsonl", "--use_cpu", "--max_steps", "2"]
    with pytest.raises(SystemExit):
        main(["train", *words, "--processes", "3"])
    [(line, environment)] = started
    assert line == [sys.executable, "-m", "hf_hotspa.commands.own_launcher", "--rdzv-backend", "loopback",
                    "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", "3", "-m", "hf_hotspa.cli", "train", *words]  # fmt: skip
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    with pytest.raises(SystemExit):
        main(["train", *words, "--gpus", "2", "--verbose"])
    assert started[1][0][8:] == ["2", *line[9:], "--log_level", "info"]


def test_the_processes_of_a_launcher_start_no_others(folder, started, monkeypatch):
    ran = []
    monkeypatch.setattr(train_command, "run", lambda settings: ran.append(settings))
    monkeypatch.setattr(train_command, "parse", read)
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--model", "m", "--dataset", "d", "--use_cpu"]
    assert main(["train", *words]) == 0
    assert main(["train", *words, "--processes", "2"]) == 0
    assert [found.model for found in ran] == ["m", "m"]
    assert not started
    with pytest.raises(HotspaConfigError, match="--processes 3, and the launcher started 2"):
        main(["train", *words, "--processes", "3"])


def given(**flags):
    return SimpleNamespace(**{"use_cpu": False, "hotspa_strategies": "auto"} | flags)


def test_how_many_processes():
    assert number_of_processes(None, given(), 8) == 8
    assert number_of_processes(2, given(), 8) == 2
    assert number_of_processes(None, given(hotspa_strategies="dp4:64,dp2tp2:128"), 8) == 4
    assert number_of_processes(None, given(hotspa_strategies="dp4:64,dp2tp2:128", use_cpu=True), 0) == 4
    assert number_of_processes(7, given(use_cpu=True), 0) == 7
    assert 1 <= number_of_processes(None, given(use_cpu=True), 0) <= 4
    with pytest.raises(HotspaConfigError, match=r"no GPU.*add --use_cpu"):
        number_of_processes(4, given(), 0)
    with pytest.raises(HotspaConfigError, match="9 processes on 8 GPUs"):
        number_of_processes(9, given(), 8)
    with pytest.raises(HotspaConfigError, match="--processes 2, and --hotspa_strategies need 4"):
        number_of_processes(2, given(hotspa_strategies="dp4:64"), 0)


def test_what_is_wrong_with_arguments_is_said_before_a_gpu_is_looked_for(folder, started, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ["train", "--model", f"{folder}/model", "--dataset", f"{folder}/good.jsonl"]
    for more, said in {
        ("--learning_rate", "nan"): "learning_rate is nan", ("--hotspa_strategies", "dpx:64"): "'dpx' is not a strategy",
        ("--dataset", "none.jsonl"): "none.jsonl", ("--hotspa_eval_strategy", "short"): "hotspa_eval_strategy is 'short'",
        (): "this machine has no GPU",
    }.items():  # fmt: skip
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--processes", "0"])
    assert "argument --processes: '0' is not a whole number of at least 1" in capsys.readouterr().err


def settings(*words, **options):
    return read(parser_of(), ["--model", "hub/Some-Model", "--dataset", "d", *words], **options)


def test_defaults_are_for_a_model_that_has_its_weights(monkeypatch):
    found = settings()
    assert (found.learning_rate, found.max_steps, found.hotspa_overlong) == (2e-5, -1, "error")
    assert (found.lr_scheduler_type, found.warmup_steps, found.logging_steps) == ("cosine", 0.03, 10)
    assert found.output_dir == "out/Some-Model"
    assert (found.eval_strategy, found.num_train_epochs, found.per_device_train_batch_size) == ("no", 3.0, 8)
    assert not found.bf16
    assert settings("--lora_r", "16").learning_rate == 2e-4
    assert settings("--eval_split", "validation").eval_strategy == "epoch"
    assert settings("--learning-rate", "1e-3").learning_rate == 1e-3
    assert settings("--learning_rate=1e-3", "--output_dir", "x").output_dir == "x"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert settings().bf16
    assert not settings("--use_cpu").bf16
    assert not settings("--bf16", "False").bf16


def test_the_settings_of_the_demonstration_belong_to_it_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("demo")
    found = read(demo.own.parser_of(demo.DemoArguments), [], demo.defaults)
    assert (found.learning_rate, found.max_steps, found.hotspa_overlong, found.measure_gain) == (8e-3, 20, "split", 10)
    real = read(parser_of(), ["--model", "m", "--dataset", "d"])
    assert (real.learning_rate, real.max_steps, real.hotspa_overlong, real.measure_gain) == (2e-5, -1, "error", 0)
    finetune = (EXAMPLES / "finetune.py").read_text()
    assert "script.parse(script.parser_of(), sys.argv[1:])" in finetune
    assert "demo" not in finetune.replace("demonstration", "").replace("`demo.py`", "")


WRONG = {
    "a misspelt flag": (["--learning_rat_e", "1"], "there is no flag --learning_rat_e; did you mean --learning_rate?"),
    "one of ours": (["--hotspa-stategies", "a"], "no flag --hotspa-stategies; did you mean --hotspa_strategies?"),
    "with its value": (["--hotspa_overlnog=split"], "no flag --hotspa_overlnog; did you mean --hotspa_overlong?"),
    "like nothing": (["--qqqq"], "there is no flag --qqqq (hf"),
    "no flag at all": (["my.jsonl"], "'my.jsonl' belongs to no flag"),
    "no number": (["--max_steps", "many"], "argument --max_steps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_flag_ends_it_with_the_nearest(case, capsys):
    words, said = WRONG[case]
    with pytest.raises(SystemExit) as left:
        parser_of(prog="hf-hotspa train").parse_args(["--model", "m", "--dataset", "d", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_scripts_with_a_parser_of_their_own_are_told_the_nearest(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(given_arguments, "_warned", set())
    words = [
        "--hotspa_stategies",
        "dp1:8",
        "--hotspa_overlong=split",
        "--hotspa_mini_batch",
        "4",
        "--hotspa_zzzzzzzz",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    base = ["--output_dir", str(tmp_path), "--use_cpu"]
    for _ in range(2):
        HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses(
            [*base, *words], return_remaining_strings=True
        )
    said = [record.message for record in caplog.records if record.name == given_arguments.__name__]
    assert said == ["there is no flag --hotspa_stategies; did you mean --hotspa_strategies?"]
    with pytest.raises(ValueError, match="hotspa_stategies"):  # of transformers, after it
        HfArgumentParser(HotSPaTrainingArguments).parse_args_into_dataclasses([*base, *words])
    monkeypatch.setattr(given_arguments, "_warned", set())
    monkeypatch.setenv("RANK", "1")
    given_arguments.warn_of_misspelt(HotSPaTrainingArguments.__dataclass_fields__)
    assert given_arguments._warned == set()


NAMES = {
    "no model": ("--dataset good.jsonl", "--model is missing", "Qwen/Qwen3-0.6B"),
    "no data": ("--model model", "--dataset is missing", "my.jsonl"),
    "no file": ("--model model --dataset none.jsonl", "there is no file or directory none.jsonl", "check the path"),
    "no column": ("--model model --dataset odd.jsonl", "columns ['story']", "'text'"),
    "no split": ("--model model --dataset good.jsonl --eval_split nosuch", "nosuch", "HSP-301"),
    "no folder": ("--model ./none --dataset good.jsonl", "there is no folder './none'", "hub name"),
    "no model in it": ("--model empty --dataset good.jsonl", "'empty'", "Fix"),
    "not in the cache": ("--model some/model --dataset good.jsonl", "'some/model'", "hf download some/model"),
    "two models": ("--model model --config model --dataset good.jsonl", "both --model and --config", "one of them"),
    "no dtype": ("--model model --dataset good.jsonl --dtype fp23", "--dtype is 'fp23'", "bfloat16"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_wrong_name_is_one_line_with_a_fix(case, folder, started, monkeypatch, capsys):
    words, what, fix = NAMES[case]
    monkeypatch.chdir(folder)
    assert main(["train", *words.split(), "--use_cpu", "--processes", "2"]) == 2
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("hf-hotspa train: ")]
    assert what in line
    assert fix in line
    assert "Fix:" in line
    assert "Traceback" not in said
    assert not started


def _failed(tmp_path, *processes):
    failures = {}
    for rank, (exitcode, said, at) in enumerate(processes):
        path = tmp_path / str(rank)
        if said is not None:
            path.write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": str(at)}}}))
        failures[rank] = ProcessFailure(local_rank=rank, pid=9, exitcode=exitcode, error_file=str(path))
    return ChildFailedError("script.py", failures)


def test_a_failed_start_ends_with_what_the_first_process_said(tmp_path, monkeypatch, capsys):
    def run(settings):
        assert settings.nproc_per_node == "2"
        raise _failed(tmp_path, (-15, "the same error", 5), (1, "HSP-001 Launch: it does not fit\n  Fix: start 4", 2))

    monkeypatch.setattr(own_launcher, "run", run)
    assert own_launcher.main(["--standalone", "--nproc-per-node", "2", "script.py"]) == 1
    assert capsys.readouterr().err == "HSP-001 Launch: it does not fit\n  Fix: start 4\n"


def test_a_process_that_could_say_nothing(tmp_path):
    assert own_launcher.message_of(_failed(tmp_path, (-9, None, 0))).startswith("process 0 was ended by SIGKILL: often")
    assert own_launcher.message_of(_failed(tmp_path, (-11, None, 0))) == "process 0 was ended by SIGSEGV"
    assert "process 0 ended with exit code 3" in own_launcher.message_of(_failed(tmp_path, (3, None, 0)))


def test_a_signal_ends_the_launcher_without_a_traceback(monkeypatch, capsys):
    def run(settings):
        raise SignalException("signal", signal.SIGINT)

    monkeypatch.setattr(own_launcher, "run", run)
    assert own_launcher.main(["script.py"]) == 130
    assert capsys.readouterr().err == ""


def test_help_is_short_and_names_what_exists(capsys):
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 80
    known = {action.dest for action in parser_of()._actions} | {"processes", "help-all", "verbose"}
    assert set(re.findall(r"--([\w-]+)", said)) <= known
    for name in ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "model", "dataset", "lora_r"):
        assert f"--{name}" in said


def test_all_flags_are_listed_on_demand(capsys):
    assert main(["train", "--help-all"]) == 0
    said = capsys.readouterr().out
    for name in (*ScriptArguments.__dataclass_fields__, "adam_beta1", "hotspa_strategies"):
        assert f"--{name}" in said


def test_the_version_is_that_of_what_is_installed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("hf-hotspa ")
    assert f"torch {torch.__version__}" in said


def test_deepspeed_is_told_that_there_is_only_the_cpu(tmp_path, monkeypatch):
    """Where it is installed, it would warn in each process that it finds no accelerator."""
    monkeypatch.setenv("DS_ACCELERATOR", "")  # put back afterwards
    monkeypatch.delenv("DS_ACCELERATOR")
    parse(parser_of(), ["--model", "m", "--dataset", "d", "--output_dir", str(tmp_path), "--use_cpu"])
    assert os.environ["DS_ACCELERATOR"] == "cpu"
