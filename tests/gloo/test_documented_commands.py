"""Every command that README.md and docs/ show is run, or its block says visibly that it needs GPUs.

Commands of `hf-hotspa` that measure nothing run as they are, in a folder that holds what they name. The others are made
short by arguments (`made_short`), and are slow tests. A command that is neither fails here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hotspa.cli import main
from hf_hotspa.reporting.page import all_panels
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.calibrations import made_calibration
from tests.contract.commands import PAGES, ROOT, TUTORIAL, Command, all_commands, commands_of
from tests.contract.outputs import SHOWN, is_plan, pages
from tests.families import tiny_config, tiny_model
from tests.gloo.test_trainer_world import make_tokenizer
from tests.oracle import random_rows
from tests.run_logs import write_run

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
COMPARED = {
    command.text
    for page in pages()
    for commands, _ in SHOWN.findall(page.read_text())
    for command in commands_of(f"```sh\n{commands}```", "")
    if is_plan(command.text)
}
"""Plans that tests/contract/test_outputs.py runs, and compares with what the page shows."""
COMMANDS = sorted({c.text for c in all_commands() if not c.needs_gpus and c.page != TUTORIAL})
DIRECT = re.compile(r"hf-hotspa (plan|estimate|formulas|lengths|hardware|report|compare|inspect|verify|export)\b")
# What stands in the pages -> what stands for it here: names of files that a small run gives, and sizes that it has.
STAND_INS = {
    "path/to/model": "model",
    "out/checkpoint-500": "out/checkpoint-1",
    "--nodes 1x8 --calibration": "--nodes 1x2 --calibration",
    "--lengths chat --longest 4096": "--lengths chat --longest 256",
}

VENV = ROOT / ".venv"
_TRAIN = "--max_steps 2 --hotspa_mini_batch_size 4 --vocab_size 400"
_STRATEGIES = " --hotspa_strategies dp4:512@1024,dp2tp2:1024 --hotspa_overlong truncate"


def made_short(command: str, folder: Path) -> str | None:
    """The command as it is run: with less to do, and with its files in a folder. None for one that nobody knows."""
    out = f"--output_dir {folder / 'trained'}"
    if command in (
        "pip install .",
        "pip install '.[train]'",
    ):  # what it does to a stranger's environment: test_packaging.py
        clone, options = folder / "clone", "--quiet --no-deps --no-build-isolation --no-index"
        return f"git clone --quiet {ROOT} {clone} && python -m pip install {options} --target {folder / 'site'} {clone}"
    if re.fullmatch(r"make train( EXTRA_TRAIN_ARGS=\"--dataset my.jsonl\")?", command):
        extra = f"--dataset {folder / 'my.jsonl'} " if "my.jsonl" in command else ""
        return f'make -o .venv/.hf_hotspa-installed train EXTRA_TRAIN_ARGS="{extra}{_TRAIN} {out}"'
    if command in ("make test", "make test-slow", "make test-oldest"):
        return f'make -o .venv/.hf_hotspa-installed {command.split()[1]} PYTEST_ARGS="--collect-only -q" OLDEST_ARGS=--list'
    if command == "make dist":  # installs from a registry; the wheel is built and imported in test_packaging.py
        return "make -n -o .venv/.hf_hotspa-installed dist"
    if command in ("make lint", "make docs"):
        site = f' DOCS_ARGS="--site-dir {folder / "site"}"' if command == "make docs" else ""
        return f"make -o .venv/.hf_hotspa-installed {command.split()[1]}{site}"
    if launched := re.match(r"(accelerate launch|torchrun) .*\bexamples/(\w+)\.py --use_cpu", command):
        return f"{command} {_TRAIN + _STRATEGIES if launched[2] == 'demo' else '--max_steps 2'} {out}"
    if command == "hf-hotspa train --model path/to/model --dataset my.jsonl --use_cpu --processes 2":
        flags = (
            "--max_steps 2 --hotspa_mini_batch_size 4 --hotspa_strategies dp2:64@128,tp2:256 --hotspa_overlong truncate"
        )
        return f"cd {folder} && {command.replace('path/to/model', 'model')} {flags} {out}"
    if command == "hf-hotspa calibrate --model config.json --output calibration.json":
        return f"cd {folder} && {command.replace('calibration.json', 'measured.json')} --processes 2"
    return None


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the commands name: runs, a checkpoint, a config, a calibration, rows."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("out-static", "out-hot"):
        write_run(folder / name)
    model = tiny_model(FAMILY)
    args = HotSPaTrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, hotspa_strategies="dp1:60", max_steps=1, save_steps=1,
        hotspa_mini_batch_size=2, disable_tqdm=True, report_to="none",
    )  # fmt: skip
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=random_rows(4, model.config.vocab_size, longest=60))
    trainer.train()
    trainer.close_engine()
    model.save_pretrained(folder / "model")
    make_tokenizer(folder).rename(folder / "tokenizer-files")
    for file in (folder / "tokenizer-files").iterdir():
        file.rename(folder / "model" / file.name)
    (folder / "config.json").write_text(tiny_config(FAMILY).to_json_string())
    (folder / "my.jsonl").write_text("".join(f'{{"text": "{"a row of words " * (1 + n % 9)}"}}\n' for n in range(24)))
    from hf_hotspa.costs.terms import Cost

    costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)}
    made_calibration(model, 2, costs).save(folder / "calibration.json")
    return folder


@pytest.mark.parametrize("command", [c for c in COMMANDS if DIRECT.match(c) and c not in COMPARED])
def test_a_command_that_measures_nothing(command, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    for shown, used in STAND_INS.items():
        command = command.replace(shown, used)
    command, _, file = command.partition(" > ")
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert out.strip()
    if file:
        Path(file).write_text(out)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [c for c in COMMANDS if not DIRECT.match(c)])
def test_a_command_made_short(command, workplace):
    line = made_short(command, workplace)
    assert line is not None, f"say in made_short how {command!r} is run, or mark its block '# needs GPUs'"
    for left in ("trained", "clone"):  # by the command before
        shutil.rmtree(workplace / left, ignore_errors=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOTSPA_CACHE": str(workplace / "cache"), "HF_HOME": str(workplace / "cache")}
    done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if "max_steps 2" in line:
        run = read_run_log(workplace / "trained")
        assert len(run.steps) == 2
        assert run.facts.world_size == (2 if re.search(r"processes 2\b", line) else 4)
    if command == "make train":  # with the strategies and flags of the Makefile
        assert done.stdout.startswith("starting 4 processes of examples/demo.py")
        assert "equal to what was trained: True" in done.stdout
        assert all(panel.points for panel in all_panels(run))  # a race, if there was none, has no panel


def test_every_command_is_known(tmp_path):
    unknown = [c for c in COMMANDS if not DIRECT.match(c) and made_short(c, tmp_path) is None]
    assert unknown == [], "say in made_short how they are run, or begin their block with the line '# needs GPUs'"
    assert {c.page for c in all_commands()} >= {
        "README.md",
        "docs/index.md",
        "docs/launching.md",
        "docs/checkpoints.md",
    }


def test_what_needs_gpus_says_so_and_could_not_run_here():
    marked = {c.text for c in all_commands() if c.needs_gpus}
    assert marked
    ours = re.compile(r"\bmake |hf-hotspa (?!train |run )")
    assert all("--use_cpu" not in text and not ours.search(text) for text in marked)
    assert marked.isdisjoint(COMMANDS)


def test_the_readme_goes_from_a_clone_to_own_data_in_two_commands():
    first = [c.text for c in commands_of(PAGES[0].read_text(), "README.md")][:3]
    assert first == ["make train", "make test", 'make train EXTRA_TRAIN_ARGS="--dataset my.jsonl"']


def test_commands_are_read_as_a_shell_reads_them():
    text = "\n".join(
        ["```sh", "make train   # minutes", "", "hf-hotspa plan \\", "    --model x", "```", "```python", "make x", "```",
         "~~~", "```bash", "# needs GPUs", "a b", "```"]
    )  # fmt: skip
    found = list(commands_of(text, "p"))
    assert found == [
        Command("p", "make train", False),
        Command("p", "hf-hotspa plan --model x", False),
        Command("p", "a b", True),
    ]
    with pytest.raises(ValueError, match="not closed"):
        list(commands_of("```sh\nmake", "p"))
