"""The examples train on CPU processes; the notebook runs from top to bottom.

How they are launched from a command line: test_documented_commands.py and test_launch_files.py.
"""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_hotspa.reporting.bench_result import BenchResult
from hf_hotspa.reporting.page import all_panels
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.trainer.trainer import SwitchedMixin
from tests.families import tiny_model
from tests.harness import run_ranks

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_script(rank, world_size, script, words, log):
    """Runs a script of examples/ in this rank; what the main process prints goes to a file."""
    sys.argv = [script, *words]
    sys.path.insert(0, str(EXAMPLES))
    if rank == 0:
        sys.stdout = open(log, "w", buffering=1)  # noqa: SIM115 - closed with the process
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def command_of(script):
    """The words of the script in the first command of its docstring, and how many processes it starts."""
    found = re.search(
        rf"^    accelerate launch .*--num_processes (\d+) examples/{script} (.*)$", text_of(script), re.MULTILINE
    )
    return int(found[1]), found[2].split()


def text_of(script):
    return (EXAMPLES / script).read_text()


def strategies_of(run):
    return {phase.strategy for record in run.steps for phase in record.report.phases}


def trained(script, folder, *more):
    """By how much the figure that a script prints has changed, and its run."""
    processes, words = command_of(script)
    run_ranks(processes, run_script, script, [*words, *more, "--output_dir", str(folder)], str(folder / "log.txt"))
    said = re.search(r"([-\d.]+) -> ([-\d.]+); the (model|adapter) is in", (folder / "log.txt").read_text())
    assert (folder / {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}[said[3]]).exists()
    return float(said[2]) - float(said[1]), read_run_log(folder)


def test_the_script_that_comes_from_trl(tmp_path):
    _, run = trained("from_trl.py", tmp_path, "--max_steps", "6")
    assert strategies_of(run) == {"dp2", "tp2"}
    assert run.steps[-1].report.loss < run.steps[0].report.loss - 0.5
    # only what the assistant says carries labels, and what is longer than max_length is cut off
    assert all(0 < r.report.num_labels < 0.8 * r.report.num_tokens for r in run.steps)
    assert sum(r.report.num_truncated for r in run.steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "better"),
    [
        ("trl_sft.py", -0.5),
        ("trl_dpo.py", 0.01),
        ("trl_reward.py", 0.5),
        ("trl_grpo.py", 0.05),
        ("trl_distill.py", -0.03),
        ("train_images.py", -0.5),
        ("qlora.py", -0.5),
    ],
)
def test_a_script_gets_better(script, better, tmp_path):
    change, run = trained(script, tmp_path)
    assert change / better > 1
    # recomputation is TRL's default; for QLoRA `prepare_model_for_kbit_training` asks for it
    assert strategies_of(run) == {"dp2+rc", "tp2+rc"}


def test_a_few_long_rows_run_context_parallel(tmp_path):
    change, run = trained("long_context.py", tmp_path, "--max_steps", "4", "--hotspa_mini_batch_size", "24")
    assert change < 0
    assert strategies_of(run) == {"dp2", "cp2"}


@pytest.mark.parametrize(("script", "steps"), [("classify.py", 3), pytest.param("embed.py", 6, marks=pytest.mark.slow)])
def test_a_stock_script_with_one_import_changed_has_the_losses_of_the_stock_script(script, steps, tmp_path):
    processes, words = command_of(script)
    stock, changed = re.subn(r"^# it was: (.*)\nfrom hf_hotspa.*$", r"\1", text_of(script), flags=re.MULTILINE)
    assert changed == 1
    assert not re.search(r"^ *(from|import) hf_hotspa", stock, re.MULTILINE)
    (tmp_path / script).write_text(stock)
    logs = []
    for name, given in ((script, words), (str(tmp_path / script), words[: words.index("--hotspa_strategies")])):
        out = tmp_path / f"out{len(logs)}"
        given = [*given, "--max_steps", str(steps), "--output_dir", str(out)]
        run_ranks(processes, run_script, name, given, str(tmp_path / "log.txt"), timeout=200)
        state = json.loads((out / "trainer_state.json").read_text())
        compared = ("loss", "eval_loss", "eval_accuracy")
        logs.append([log[key] for log in state["log_history"] for key in compared if key in log])
        assert list(out.rglob("model.safetensors"))
    assert len(logs[0]) == (4 if script == "classify.py" else 3)  # the first loss, and the usual ones
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert strategies_of(read_run_log(tmp_path / "out0")) == {"dp2", "tp2"}


SHORT = (
    "trl_sft.py", "chat_lora.py", "qlora.py", "long_context.py", "trl_dpo.py", "trl_reward.py", "trl_grpo.py", "trl_distill.py",
    "train_images.py", "classify.py", "embed.py", "bare_loop.py", "slurm.sh",
)  # fmt: skip


def test_examples_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    assert {name: len(text_of(name).splitlines()) for name in SHORT if len(text_of(name).splitlines()) >= 60} == {}
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")]
    assert [name for name in files if f"`{name}`" not in listed] == []


def test_the_plugin_of_axolotl_gives_its_trainer_over_a_switched_model(monkeypatch, tmp_path):
    base, trainers = ModuleType("axolotl.integrations.base"), ModuleType("axolotl.core.trainers")
    saved = []

    class AxolotlTrainer(Trainer):  # what Axolotl's has, too: it was rejected while ours stood in front of it
        def _save_checkpoint(self, model, trial, **kwargs):
            saved.append(self.state.global_step)
            return super()._save_checkpoint(model, trial, **kwargs)

        def _save(self, output_dir=None, state_dict=None):
            self.model.save_pretrained(output_dir)

    base.BasePlugin, trainers.AxolotlTrainer = object, AxolotlTrainer
    for name in ("axolotl", "axolotl.integrations", "axolotl.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, trainers.__name__, trainers)
    plugin = runpy.run_path(str(EXAMPLES / "axolotl_plugin.py"))["HotSPaPlugin"]()
    made = plugin.get_trainer_cls(SimpleNamespace(rl=None))
    assert issubclass(made, trainers.AxolotlTrainer)
    assert issubclass(made, SwitchedMixin)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    model = tiny_model("llama_gqa_bias")
    trainer = made(model=model, args=args, train_dataset=rows)
    trainer.train()
    assert saved == [1, 2]
    again = type(model).from_pretrained(tmp_path / "checkpoint-2")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert plugin.get_trainer_cls(SimpleNamespace(rl="dpo")) is None


def executed(notebook, folder, timeout, **environment):
    """The cells of code of a notebook that has run in a folder."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(notebook, as_version=4)
    nbformat.validate(book)
    client = NotebookClient(book, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", ["notebook.ipynb", "two_gpus.ipynb"])
def test_the_notebook_is_kept_without_outputs(name):
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_for_two_gpus_runs_on_two_processes(tmp_path):
    small = "--longest 128 --tokens 256 --steps 2 --rounds 1"
    executed(EXAMPLES / "two_gpus.ipynb", tmp_path, 800, HOTSPA_INSTALLED="1", HOTSPA_BENCH_FLAGS=small)
    result = BenchResult.load(tmp_path / "out" / "two_gpus" / "bench.json")
    assert result.exact
    assert not result.ended
    assert [file.name for file in result.files] == ["chat", "commoncrawl", "github"]
    assert all(result_of_side.rounds for file in result.files for result_of_side in file.sides.values())
    assert all(file.loss_difference < 1e-5 for file in result.files)
    assert result.exact_sentence in (tmp_path / "out" / "two_gpus" / "bench.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    for name in ("from_trl.py", "chats.jsonl"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    cells = executed(EXAMPLES / "notebook.ipynb", tmp_path, 400, HF_HOTSPA_CACHE=str(tmp_path / "cache"))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "hotspa_strategies=" in text  # of the plan
    assert "the saved model is the trained one: True" in text
    assert re.search(r"loss [\d.]+ -> [\d.]+", text)
    pictures = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    frames = [html for html in pictures if html.startswith("<iframe")]
    assert len(frames) == 3
    assert all("&lt;svg" in html for html in frames)
    assert any("panel-loss" in html for html in frames)
    empty = {p.name for p in all_panels(read_run_log(tmp_path / "out" / "two_processes")) if not p.points}
    assert empty <= {"prediction", "race"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chats_of_ones_own_need_no_model_and_no_tokenizer(tmp_path):
    words = (
        f"--use_cpu --max_steps 2 --hotspa_mini_batch_size 4 --vocab_size 400 --hotspa_overlong split --dataset "
        f"{EXAMPLES / 'chats.jsonl'} --output_dir {tmp_path / 'out'} --hotspa_strategies dp2:256,tp2:1024"
    )
    env = {"HF_HOME": str(tmp_path / "cache")}
    run_ranks(2, run_script, "demo.py", words.split(), str(tmp_path / "log.txt"), env=env)
    assert "equal to what was trained: True" in (tmp_path / "log.txt").read_text()
    run = read_run_log(tmp_path / "out")
    assert all(0 < record.report.num_labels < record.report.num_tokens for record in run.steps)
