"""Two nodes that do not see the same files, or not the same time: it works, or one error on all ranks before the first step."""

import shutil
import subprocess

import pytest

from hf_hotspa.checkpoint.format.folder import checkpoints
from tests.node_trials import flags, make_inputs, script
from tests.nodes import Nodes, job

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

LATE = "import time\nfirst, exact = time.time, time.time_ns\ntime.time = lambda: first() + 420\ntime.time_ns = lambda: exact() + 420 * 10**9\n"
FIRST_STEP = "'loss':"


class Environments(Nodes):
    """Nodes with variables of their own."""

    def __init__(self, *more):
        super().__init__()
        self.more = more

    def environment(self, node):
        return {**super().environment(node), **(self.more[node] if self.more else {})}


def run(nodes, folder, words):
    with job(nodes, "accelerate", folder, script("accelerate", words)) as running:
        return running.code(200), running.said()


def of_five_steps(folder, **changes):
    return flags(make_inputs(folder), folder / "out", 4, max_steps=5, save_steps=5, **{"ddp_timeout": 120, **changes})


def on_second(nodes, command):
    """What only the second node sees."""
    if not nodes.real:
        pytest.skip("needs mount namespaces")
    subprocess.run(nodes.on(1, ["sh", "-ec", command]), check=True)


def test_a_folder_for_checkpoints_that_nodes_do_not_share_is_refused(tmp_path):
    words = of_five_steps(tmp_path)
    with Nodes() as nodes:
        on_second(nodes, f"mkdir {tmp_path}/out; mount -t tmpfs none {tmp_path}/out")
        code, said = run(nodes, tmp_path, words)
    assert code
    assert said.count("is not seen by rank 2, 3 (2, 3: all ranks of node node-b)") == 2  # each node says it once
    assert FIRST_STEP not in said
    assert not checkpoints(tmp_path / "out")


def test_without_checkpoints_it_may_be_a_folder_of_each_node(tmp_path):
    words = of_five_steps(tmp_path, save_strategy="no")
    with Nodes() as nodes:
        on_second(nodes, f"mkdir {tmp_path}/out; mount -t tmpfs none {tmp_path}/out")
        code, said = run(nodes, tmp_path, words)
    assert code == 0, said[-3000:]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_other_rows_are_refused(tmp_path):
    words = of_five_steps(tmp_path)
    with Nodes() as nodes:
        on_second(nodes, f"cd {tmp_path}; head -20 texts.jsonl > other.jsonl; mount --bind other.jsonl texts.jsonl")
        code, said = run(nodes, tmp_path, words)
    assert code
    assert said.count("ranks differ in the number of batches: 6 on ranks 0 and 1, 5 on ranks 2 and 3") == 2
    assert FIRST_STEP not in said


def test_a_model_in_the_hub_cache_of_one_node_is_refused(tmp_path):
    words = of_five_steps(tmp_path)
    folder = tmp_path / "hub-0" / "hub" / "models--tiny--model"
    shutil.copytree(tmp_path / "tokenizer", folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    words[words.index("--model") + 1] = "tiny/model"
    with Environments(*({"HF_HOME": str(tmp_path / f"hub-{node}")} for node in (0, 1))) as nodes:
        code, said = run(nodes, tmp_path, words)
    assert code
    assert said.count("the model 'tiny/model' is not a folder here, and the hub did not provide it") == 2
    assert FIRST_STEP not in said


def test_caches_and_clocks_of_their_own(tmp_path):
    """Data and calibrations are cached by each node, and the clock of one is seven minutes fast."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE)
    own = [
        {"HF_HOME": str(tmp_path / f"hub-{node}"), "HF_HOTSPA_CACHE": str(tmp_path / f"cache-{node}")}
        for node in (0, 1)
    ]
    own[1]["PYTHONPATH"] = str(tmp_path / "late")
    with Environments(*own) as nodes:
        code, said = run(nodes, tmp_path, of_five_steps(tmp_path))
    assert code == 0, said[-3000:]
    assert [folder.name for folder in checkpoints(tmp_path / "out")] == ["checkpoint-5"]


def test_calibrations_that_differ(tmp_path):
    """Under `auto` the cache of the first node counts; files that are named must be the same."""
    own = [{"HF_HOTSPA_CACHE": str(tmp_path / f"cache-{node}")} for node in (0, 1)]
    words = flags(make_inputs(tmp_path), tmp_path / "out", 0, max_steps=2, save_strategy="no", ddp_timeout=120)
    words += ["--hotspa_strategies", "auto"]
    with Environments(*own) as nodes:
        code, said = run(nodes, tmp_path, words)
        assert code == 0, said[-3000:]
        [measured] = (tmp_path / "cache-0").glob("calibration/*.json")
        assert not list((tmp_path / "cache-1").glob("calibration/*.json"))  # what is measured is of all ranks
        first = measured.read_text()
        slower = first.replace('"seconds": ', '"seconds": 1')
        other = tmp_path / "cache-1" / "calibration" / measured.name
        other.parent.mkdir(parents=True)
        other.write_text(slower)
        code, said = run(nodes, tmp_path, words)
        assert code == 0, said[-3000:]
        assert (measured.read_text(), other.read_text()) == (first, slower)
        assert f"calibration: read {measured}" in said
        assert "calibration: wrote" not in said
        on_second(nodes, f"mount --bind {other} {measured}")
        code, said = run(nodes, tmp_path, [*words, "--hotspa_calibration", str(measured)])
    assert code
    assert said.count("ranks differ in the calibration") == 2
    assert FIRST_STEP not in said
