"""`docs/adding.md`: its examples run and do what the page says, and its tables name the files that the code has."""

import re
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
    assert len(PAGE.split()) <= 1200
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
    reading = {str(p.relative_to(ROOT)) for p in PRODUCT if re.search(rf"\.{name}\b", p.read_text())}
    assert {*reading, *binding} == set(files_of(title))
    assert len(files_of(title)) <= 8


def test_a_flag_is_two_files():
    assert len(files_of("A flag")) == 2
    names = example("A flag")
    with pytest.raises(HotspaConfigError, match="hotspa_loss_chunk is 0.*leave it out for what 256 MiB hold"):
        names["Arguments"](output_dir="out", use_cpu=True, hotspa_loss_chunk=0)
    [args] = HfArgumentParser(names["Arguments"]).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--hotspa_loss_chunk", "7"]
    )
    assert names["engine_options"](args).loss_chunk_tokens == 7


def test_an_option_of_a_strategy():
    example("An option of a strategy")


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
    assert torch.allclose(moved[moved > 0], torch.tensor(1e-3), atol=1e-6), (
        "signs of gradients, times the learning rate"
    )
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


def test_a_degree():
    example("A degree")
