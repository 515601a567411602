"""`docs/adding.md`: its examples run and do what the page says, and its tables name the files that the code has."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.model import tensor_plan
from hf_hotspa.trainer.optimizers import check_elementwise
from tests.families import tiny_model
from tests.oracle import random_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PRODUCT = [path for folder in ("hf_hotspa", "trainer", "callbacks") for path in (ROOT / folder).rglob("*.py")]


def example(title, **names):
    """What the example of a section defines."""
    [code] = re.findall(r"^```python\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)
    names["__name__"] = __name__  # dataclasses look their module up
    exec(compile(code, f"docs/adding.md, {title}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_page_is_short_and_names_files_that_are_there():
    assert len(re.sub(r"^```python\n.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL).split()) <= 1200
    named = set(re.findall(r"`((?:hf_hotspa|trainer|docs|tests)/[\w/.]+?\.\w+)`", PAGE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def files_of(title):
    return re.findall(r"^\| `([\w/.]+)` \|", SECTIONS[title], re.MULTILINE)


@pytest.mark.parametrize(
    ("title", "name", "binding"),
    [("An option of a strategy", "rc", []), ("A degree", "ep", ["hf_hotspa/model/replica.py"])],
)
def test_the_files_that_read_an_option_or_a_degree_are_those_of_the_page(title, name, binding):
    files = {str(p.relative_to(ROOT)) for p in PRODUCT if re.search(rf"\.{name}\b", p.read_text())}
    reading = {f for f in files if not f.startswith("hf_hotspa/features/pipedream/")}  # it names what it allows
    assert {*reading, *binding} == set(files_of(title))
    assert len(files_of(title)) <= 8


LIST = re.compile(r"^FEATURES = \((.*?),?\n?\)", re.MULTILINE | re.DOTALL)
USED = """
import json
from functools import partial
from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.errors import StrategyError
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.oracle import random_rows

setup = Setup.read("llama2-7b", "1x8", "a100-80g")
plain, pausing = Strategy.parse("tp8"), Strategy.parse("tp8+pause5")
assert (str(pausing), pausing.option("pause"), plain.option("pause")) == ("tp8+pause5", 5, 0)
try:
    Strategy.parse("tp8+pause")
except StrategyError as error:
    assert "pause" in str(error)
packs = [((4096, 4096), (4096,))]
seconds = {s: setup.cost.time.phase_seconds(s, packs) for s in (plain, pausing)}
assert abs(seconds[pausing] - seconds[plain] - 2 * 5e-3) < 1e-9, seconds

def train(strategy):
    args = HotSPaTrainingArguments(output_dir=strategy, use_cpu=True, report_to="none", max_steps=2, logging_steps=1,
        per_device_train_batch_size=4, hotspa_strategies=f"{strategy}:64@64", save_strategy="no")
    trainer = HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=random_rows(8, 160, longest=60))
    trainer.train()
    phase = trainer.last_report.phases[0]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    trainer.close_engine()
    return phase, logged

phase, logged = train("dp1+pause5")
same, of_plain = train("dp1")
assert phase.counted["pauses"] == phase.num_packs > 1, phase
assert same.counted["pauses"] == 0
assert [row["loss"] for row in logged] == [row["loss"] for row in of_plain]
assert logged[-1]["hotspa/pauses"] > 0 and "hotspa/pauses" not in of_plain[-1]
print("all of it works")
"""


# An installation for development maps the package to this repository, also in processes that tests start.
OF_THE_COPY = """
import sys
for name, module in [*sys.modules.items()]:
    if name.startswith("__editable___hf_hotspa"):
        module.MAPPING.clear()
"""


def copied(folder):
    """A copy of the package's sources, and of what tests need."""
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
        elif path.name in ("hf_hotspa", "trainer", "callbacks", "tests", "docs", "examples", "benchmarks"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text(OF_THE_COPY)
    return folder


def run_in(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=1800)


def test_a_feature_is_its_folder_and_one_line(tmp_path):
    root = copied(tmp_path)
    for code in re.findall(r"^```python\n(.*?)^```", SECTIONS["A feature"], re.MULTILINE | re.DOTALL):
        [file] = re.findall(r"^# (\S+)$", code.splitlines()[0])
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(code)
    seam = root / "hf_hotspa" / "seam.py"
    seam.write_text(LIST.sub(r'FEATURES = (\1,\n    "pause",\n)', seam.read_text()))
    done = run_in(root, "-c", USED)
    assert done.stdout.endswith("all of it works\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_a_feature_is_removed_with_its_folder_and_one_line(tmp_path):
    """Everything else passes without PipeDream: all contract and unit tests but its own."""
    root = copied(tmp_path)
    shutil.rmtree(root / "hf_hotspa" / "features" / "pipedream")
    seam = root / "hf_hotspa" / "seam.py"
    seam.write_text(seam.read_text().replace('    "pipedream",\n', ""))
    for path in (root / "tests").rglob("test_pipedream*.py"):
        path.unlink()
    assert run_in(root, "-m", "tests.contract.features").returncode == 0  # the page of features is made anew
    has_one_user = "tests/contract/test_features.py::test_a_hook_has_more_than_one_user"  # the hook `runner` then
    options = f"-q -n 2 -p no:cacheprovider --deselect {has_one_user} tests/unit tests/contract"
    done = run_in(root, "-m", "pytest", "-m", "not slow and not gpu", *options.split())
    assert done.returncode == 0, done.stdout[-5000:]


def test_a_flag_is_two_files():
    assert len(files_of("A flag")) == 2
    names = example("A flag")
    with pytest.raises(HotspaConfigError, match="hotspa_loss_chunk is 0.*leave it out for what 256 MiB hold"):
        names["Arguments"](output_dir="out", use_cpu=True, hotspa_loss_chunk=0)
    [args] = HfArgumentParser(names["Arguments"]).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--hotspa_loss_chunk", "7"]
    )
    assert names["engine_options"](args).loss_chunk_tokens == 7


@pytest.mark.parametrize("title", ["An option of a strategy", "A degree"])
def test_examples_of_strategies(title):
    example(title)


def test_an_optimizer_and_a_loss():
    names = example("An optimizer")

    class OfNorms(names["SignSGD"]):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad / parameter.grad.norm())

    with pytest.raises(UnsupportedError, match="OfNorms"):
        check_elementwise(OfNorms, {})
    trainer_of = example("A loss", SignSGD=names["SignSGD"])["trainer_of"]
    model = tiny_model("llama_gqa_bias")
    rows = [{**row, "weights": [0.5] * len(row["input_ids"])} for row in random_rows(8, 160, longest=60)]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = trainer_of(model, rows)
    trainer.train()
    halved = trainer.last_report.loss
    moved = torch.cat([(p.detach() - before[name]).flatten().abs() for name, p in trainer.model.named_parameters()])
    assert moved.max() > 0
    assert torch.allclose(
        moved[moved > 0], torch.tensor(1e-3), atol=1e-6
    )  # signs of gradients, times the learning rate
    trainer.close_engine()
    for row in rows:
        row["weights"] = [1.0] * len(row["input_ids"])
    trainer = trainer_of(tiny_model("llama_gqa_bias"), rows)
    trainer.train()
    assert trainer.last_report.loss == pytest.approx(2 * halved, rel=1e-6)
    trainer.close_engine()


def test_a_quirk_of_a_family(monkeypatch):
    monkeypatch.setattr(tensor_plan, "_OF_LAYERS", dict(tensor_plan._OF_LAYERS))
    example("A family's quirk")
